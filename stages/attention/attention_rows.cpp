// Attention on processors: single tokens, windows of drafts, prompts.
//
// For each head, a row's result is a function of its query and of the sequence of its visible cells: K, V and mask of
// each, in the order of cells. Neither other rows nor gaps, padding, the cache's length or the number of threads change
// a bit of it. A softmax goes over a segment of visible cells; segments are merged in their order. Whoever computes a
// number computes it by the same operations: roundings are spelled out, and the compiler may not merge any
// (-ffp-contract=off).
//
// Threads take units of rows and heads; if there are few, they take ranges of a unit's segments and keep a part for
// each segment, and these are merged when all are there.

#include "attention_rows.h"

#include "vectors.h"

#include "ops.h"

#if defined(ATTENTION_HAS_VECTORS)

#include "operation.h"
#include "parts.h"
#include "sizes.h"
#include "unit.h"

#include "ggml-cpu-impl.h"
#include "ggml-impl.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>

namespace {

// Another number for each change that changes bits.
constexpr int OPERATIONS_VERSION = 1;

// For comparisons, and a way out.
bool is_left_to_ggml() {
    const char * wanted = std::getenv("SPANMESH_ATTENTION");
    return wanted != nullptr && std::strcmp(wanted, "ggml") == 0;
}

std::atomic<bool> is_enabled_now{!is_left_to_ggml()};

// Memory of a thread, kept for its next operation.
class Scratch {
public:
    ~Scratch() { release(); }

    float * room_for(size_t num_floats) {
        if (num_floats * sizeof(float) > num_bytes_) {
            release();
            num_bytes_ = num_floats * sizeof(float);
            memory_ = ggml_aligned_malloc(num_bytes_);
            GGML_ASSERT(memory_ != nullptr);
        }
        return (float *) memory_;
    }

private:
    void release() {
        if (memory_ != nullptr) {
            ggml_aligned_free(memory_, num_bytes_);
        }
    }

    void * memory_ = nullptr;
    size_t num_bytes_ = 0;
};

thread_local Scratch own_scratch;
thread_local Scratch parts_scratch;  // of the first thread, for all

constexpr int64_t TASKS_PER_THREAD = 4;  // threads that are held up leave tasks to others

// One thread's share of an operation.
class Share {
public:
    Share(const ggml_compute_params * params, const Operation & operation)
        : params_(params),
          operation_(operation),
          num_values_((int) operation.padded_value),
          part_floats_(Part::num_floats(num_values_)),
          num_queries_(operation.num_streams * operation.num_rows * operation.num_heads),
          num_segments_(operation.num_segments),
          num_ranges_(choose_num_ranges()),
          range_segments_(divide_up(num_segments_, num_ranges_)) {
        const size_t unit_floats = padded(Unit::num_floats(operation));
        scratch_ = own_scratch.room_for(unit_floats + 2 * MOST_QUERIES * part_floats_);
        own_parts_ = scratch_ + unit_floats;
    }

    void compute() {
        begin_together();
        const int64_t num_tasks = operation_.num_units() * num_ranges_;
        for (int64_t task = params_->ith; task < num_tasks; task = next_task(task)) {
            Unit unit(operation_, task / num_ranges_, scratch_);
            if (num_ranges_ == 1) {
                compute_unit(unit);
            } else {
                compute_range(unit, task % num_ranges_);
            }
        }
        if (num_ranges_ > 1) {
            ggml_barrier(params_->threadpool);
            merge_kept_parts();
        }
    }

private:
    // All threads choose alike.
    int64_t choose_num_ranges() const {
        const int64_t num_units = operation_.num_units(), wanted = TASKS_PER_THREAD * params_->nth;
        if (params_->nth == 1 || num_units >= wanted || !operation_.may_keep_parts()) {
            return 1;
        }
        return std::max<int64_t>(1, std::min(num_segments_, divide_up(wanted, num_units)));
    }

    // Sets the count of tasks, and memory for parts, before any thread uses them.
    void begin_together() {
        if (params_->nth == 1) {
            return;
        }
        if (params_->ith == 0) {
            ggml_threadpool_chunk_set(params_->threadpool, params_->nth);
            if (num_ranges_ > 1) {
                kept_parts_ = parts_scratch.room_for(num_queries_ * num_segments_ * part_floats_);
                memcpy(params_->wdata, &kept_parts_, sizeof kept_parts_);
            }
        }
        ggml_barrier(params_->threadpool);
        if (num_ranges_ > 1) {
            memcpy(&kept_parts_, params_->wdata, sizeof kept_parts_);
        }
    }

    int64_t next_task(int64_t task) const {
        return params_->nth == 1 ? task + 1 : ggml_threadpool_chunk_add(params_->threadpool, 1);
    }

    Part kept_part(int64_t query, int64_t segment) const {
        return {kept_parts_ + (query * num_segments_ + segment) * part_floats_};
    }

    void merge_if_any(Part total, Part part) const {
        if (part.has_cells()) {
            merge(total, part, num_values_);
        }
    }

    void compute_unit(Unit & unit) const {
        Part parts[MOST_QUERIES], totals[MOST_QUERIES];
        for (int query = 0; query < unit.num_queries(); ++query) {
            parts[query] = {own_parts_ + 2 * query * part_floats_};
            totals[query] = {own_parts_ + (2 * query + 1) * part_floats_};
            totals[query].clear(num_values_);
        }
        while (unit.compute_segment(parts)) {
            for (int query = 0; query < unit.num_queries(); ++query) {
                merge_if_any(totals[query], parts[query]);
            }
        }
        for (int query = 0; query < unit.num_queries(); ++query) {
            unit.write(query, totals[query]);
        }
    }

    void compute_range(Unit & unit, int64_t range) const {
        const int64_t begin = range * range_segments_, end = std::min(begin + range_segments_, num_segments_);
        unit.skip_segments(std::min(begin, num_segments_));
        for (int64_t segment = begin; segment < end; ++segment) {
            Part parts[MOST_QUERIES];
            for (int query = 0; query < unit.num_queries(); ++query) {
                parts[query] = kept_part(unit.place_of(query), segment);
            }
            if (!unit.compute_segment(parts)) {
                for (int query = 0; query < unit.num_queries(); ++query) {
                    parts[query].clear(0);
                }
            }
        }
    }

    void merge_kept_parts() const {
        const Part total = {own_parts_};
        for (int64_t query = params_->ith; query < num_queries_; query += params_->nth) {
            total.clear(num_values_);
            for (int64_t segment = 0; segment < num_segments_; ++segment) {
                merge_if_any(total, kept_part(query, segment));
            }
            const int64_t head = query % operation_.num_heads, place = query / operation_.num_heads;
            operation_.write(place / operation_.num_rows, head, place % operation_.num_rows, total);
        }
    }

    const ggml_compute_params * const params_;
    const Operation & operation_;
    const int num_values_;
    const size_t part_floats_;
    const int64_t num_queries_, num_segments_, num_ranges_, range_segments_;
    float * scratch_, * own_parts_, * kept_parts_ = nullptr;
};

}  // namespace

void attention_rows(const ggml_compute_params * params, ggml_tensor * result) {
    if (!is_enabled_now.load(std::memory_order_relaxed) || params->use_ref || !Operation::is_taken(result)) {
        ggml_compute_forward_flash_attn_ext(params, result);
        return;
    }
    const Operation operation(result, params->nth);
    Share(params, operation).compute();
}

int attention_rows_version(void) {
    return is_enabled_now.load(std::memory_order_relaxed) ? 100 * OPERATIONS_VERSION + WIDTH : 0;
}

void attention_rows_enable(int is_enabled) { is_enabled_now.store(is_enabled != 0, std::memory_order_relaxed); }

#else  // Sums of single numbers would be slower than ggml's kernel.

void attention_rows(const ggml_compute_params * params, ggml_tensor * result) {
    ggml_compute_forward_flash_attn_ext(params, result);
}

int attention_rows_version(void) { return 0; }

void attention_rows_enable(int) {}

#endif
