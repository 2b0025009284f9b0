// Rows of K or V in the cache: of one stream and KV head, a row for each cell.
#pragma once

#include "row_groups.h"
#include "sizes.h"
#include "vectors.h"

#include "ggml-cpu-impl.h"
#include "ggml-impl.h"
#include "ggml.h"
#include "simd-mappings.h"
#define GGML_COMMON_DECL_CPP
#include "ggml-common.h"

namespace {

struct CachedRows {
    const char * data;
    size_t stride_bytes, head_bytes;  // from a cell and from a KV head to the next
    int64_t num_cells;
    ggml_type type;
    int size;          // numbers of a row
    int padded_size;   // of a row that has been made float
    int row_bytes;

    CachedRows(const ggml_tensor * tensor, int64_t kv_head, int64_t stream)
        : data((const char *) tensor->data + kv_head * tensor->nb[2] + stream * tensor->nb[3]),
          stride_bytes(tensor->nb[1]),
          head_bytes(tensor->nb[2]),
          num_cells(tensor->ne[1]),
          type(tensor->type),
          size((int) tensor->ne[0]),
          padded_size((int) padded(tensor->ne[0])),
          row_bytes((int) ggml_row_size(tensor->type, tensor->ne[0])) {}

    // Rows of a head behind this one.
    CachedRows of_head(int kv_head) const {
        CachedRows rows = *this;
        rows.data += kv_head * head_bytes;
        return rows;
    }

    const char * row(int64_t cell) const { return data + (size_t) cell * stride_bytes; }

    // Whether vectors can read a row where it is.
    bool is_readable() const {
        const bool is_plain = type == GGML_TYPE_F16 || type == GGML_TYPE_BF16 || type == GGML_TYPE_F32;
        return is_plain && size == padded_size;
    }
};

inline bool can_be_made_float(ggml_type type) {
    return type == GGML_TYPE_F32 || ggml_get_type_traits(type)->to_float != nullptr;
}

// Into the second cache: the first one's waits for memory are too few for so many rows.
inline void prefetch(const CachedRows & rows, int64_t cell) {
#if defined(__GNUC__)
    const char * row = rows.row(cell);
    for (int offset = 0; offset < rows.row_bytes; offset += 64) {
        __builtin_prefetch(row + offset, 0, 2);
    }
#endif
}

inline void prefetch(const CachedRows & rows, const int32_t * cells, Run of) {
    for (int place = of.begin; place < of.end; ++place) {
        prefetch(rows, cells[place]);
    }
}

inline float one_float(float number) { return number; }
inline float one_float(ggml_fp16_t number) { return GGML_CPU_FP16_TO_FP32(number); }
inline float one_float(ggml_bf16_t number) { return ggml_bf16_to_fp32(number); }

template <class Number>
inline void plain_to_floats(const Number * row, int size, float * floats) {
    int place = 0;
    for (; place + WIDTH <= size; place += WIDTH) {
        store(floats + place, load(row + place));
    }
    for (; place < size; ++place) {
        floats[place] = one_float(row[place]);
    }
}

inline void q8_0_to_floats(const block_q8_0 * blocks, int size, float * floats) {
    for (int block = 0; block < size / QK8_0; ++block) {
        const Floats scale = all_of(GGML_CPU_FP16_TO_FP32(blocks[block].d));
        for (int place = 0; place < QK8_0; place += WIDTH) {
            store(floats + block * QK8_0 + place, multiply(scale, load(blocks[block].qs + place)));
        }
    }
}

inline void row_to_floats(const CachedRows & rows, int64_t cell, float * floats) {
    const char * row = rows.row(cell);
    switch (rows.type) {
        case GGML_TYPE_F16:
            plain_to_floats((const ggml_fp16_t *) row, rows.size, floats);
            break;
        case GGML_TYPE_BF16:
            plain_to_floats((const ggml_bf16_t *) row, rows.size, floats);
            break;
        case GGML_TYPE_F32:
            plain_to_floats((const float *) row, rows.size, floats);
            break;
        case GGML_TYPE_Q8_0:
            q8_0_to_floats((const block_q8_0 *) row, rows.size, floats);
            break;
        default:
            ggml_get_type_traits(rows.type)->to_float(row, floats, rows.size);
    }
    for (int place = rows.size; place < rows.padded_size; ++place) {
        floats[place] = 0.0f;
    }
}

ATTENTION_APART void to_floats(const CachedRows & rows, const int32_t * cells, int count, float * floats) {
    for (int place = 0; place < count; ++place) {
        row_to_floats(rows, cells[place], floats + (size_t) place * rows.padded_size);
    }
}

// Where loops read rows from; load() takes the place in a list of cells and the place in a row. Both ways give the
// same floats.

struct FloatRows {
    const float * floats;
    int padded_size;

    Floats load_at(int place, int column) const { return load(floats + (size_t) place * padded_size + column); }
};

template <class Number>
struct RowsInCache {
    const char * data;
    size_t stride_bytes;
    const int32_t * cells;

    RowsInCache(const CachedRows & rows, const int32_t * list)
        : data(rows.data), stride_bytes(rows.stride_bytes), cells(list) {}

    Floats load_at(int place, int column) const {
        return load((const Number *) (data + (size_t) cells[place] * stride_bytes) + column);
    }
};

// Calls `use` with the rows as they are in the cache; only if they are readable.
template <class Use>
inline void with_rows_in_cache(const CachedRows & rows, const int32_t * cells, const Use & use) {
    switch (rows.type) {
        case GGML_TYPE_F16:
            use(RowsInCache<ggml_fp16_t>(rows, cells));
            break;
        case GGML_TYPE_BF16:
            use(RowsInCache<ggml_bf16_t>(rows, cells));
            break;
        default:
            use(RowsInCache<float>(rows, cells));
    }
}

}  // namespace
