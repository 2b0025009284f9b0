// Switch of llamafile's matrix products, which take blocks of rows and columns at once: ggml-cpu.c calls this in their
// place, with all threads of an operation. False leaves the product to ggml, as in a build without them.
#include "tiled_products.h"

#include <atomic>

#include "llamafile/sgemm.h"

namespace {

std::atomic<bool> is_enabled_now{false};

}  // namespace

extern "C" bool tiled_products(const ggml_compute_params * params, int64_t num_rows, int64_t num_columns, int64_t depth,
                               const void * left, int64_t left_stride, const void * right, int64_t right_stride,
                               void * result, int64_t result_stride, int left_type, int right_type, int result_type) {
    return is_enabled_now.load(std::memory_order_relaxed) &&
           llamafile_sgemm(params, num_rows, num_columns, depth, left, left_stride, right, right_stride, result,
                           result_stride, left_type, right_type, result_type);
}

void tiled_products_enable(int is_enabled) { is_enabled_now.store(is_enabled != 0, std::memory_order_relaxed); }

int tiled_products_is_enabled(void) { return is_enabled_now.load(std::memory_order_relaxed); }
