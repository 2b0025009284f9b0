// What one operation of ggml asks for, and how it is cut into units.
#pragma once

#include "cached_rows.h"
#include "parts.h"
#include "scores.h"
#include "sizes.h"
#include "visible_cells.h"

#include "ggml-cpu-impl.h"
#include "ggml.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace {

class Operation {
public:
    Operation(ggml_tensor * to, int num_threads)
        : queries(to->src[0]),
          keys(to->src[1]),
          values(to->src[2]),
          mask(to->src[3]),
          sinks(to->src[4]),
          result(to),
          num_rows(queries->ne[1]),
          num_heads(queries->ne[2]),
          num_streams(queries->ne[3]),
          num_kv_heads(keys->ne[2]),
          num_cells(keys->ne[1]),
          padded_key(padded(keys->ne[0])),
          padded_value(padded(values->ne[0])) {
        memcpy(&scale_, (const float *) result->op_params + 0, sizeof scale_);
        memcpy(&max_bias_, (const float *) result->op_params + 1, sizeof max_bias_);
        memcpy(&softcap_, (const float *) result->op_params + 2, sizeof softcap_);
        num_segments = divide_up(num_threads > 1 ? most_visible_cells() : num_cells, SEGMENT_CELLS);
        cut(num_threads);
    }

    // Whether the kernel takes it.
    static bool is_taken(const ggml_tensor * result) {
        const ggml_tensor * queries = result->src[0], * keys = result->src[1], * values = result->src[2];
        const ggml_tensor * mask = result->src[3];
        const bool are_shapes_usual = values->ne[2] == keys->ne[2] && queries->ne[2] % keys->ne[2] == 0 &&
                                      keys->ne[3] == queries->ne[3] && values->ne[3] == queries->ne[3];
        const bool are_rows_whole = queries->type == GGML_TYPE_F32 && queries->nb[0] == sizeof(float) &&
                                    keys->nb[0] == ggml_type_size(keys->type) &&
                                    values->nb[0] == ggml_type_size(values->type);
        return are_shapes_usual && are_rows_whole && can_be_made_float(keys->type) &&
               can_be_made_float(values->type) && (mask == nullptr || mask->type == GGML_TYPE_F16);
    }

    const ggml_fp16_t * mask_of(int64_t stream, int64_t head, int64_t row) const {
        if (mask == nullptr) {
            return nullptr;
        }
        const size_t offset = row * mask->nb[1] + head % mask->ne[2] * mask->nb[2] + stream % mask->ne[3] * mask->nb[3];
        return (const ggml_fp16_t *) ((const char *) mask->data + offset);
    }

    const float * query(int64_t stream, int64_t head, int64_t row) const {
        const size_t offset = row * queries->nb[1] + head * queries->nb[2] + stream * queries->nb[3];
        return (const float *) ((const char *) queries->data + offset);
    }

    ScoreRule rule_of(int64_t head) const {
        return {softcap_ != 0.0f ? scale_ / softcap_ : scale_, softcap_, slope_of(head)};
    }

    void write(int64_t stream, int64_t head, int64_t row, Part total) const {
        const float * sink = sinks != nullptr ? (const float *) sinks->data + head : nullptr;
        const size_t offset = head * result->nb[1] + row * result->nb[2] + stream * result->nb[3];
        finish(total, sink, (float *) ((char *) result->data + offset), (int) values->ne[0]);
    }

    int64_t num_units() const { return num_streams * kv_parts * head_parts * row_parts; }

    // Whether threads may leave a part for each segment.
    bool may_keep_parts() const {
        const size_t num_parts = num_streams * num_rows * num_heads * num_segments;
        return num_parts * Part::num_floats(padded_value) <= MOST_KEPT_FLOATS;
    }

    int64_t queries_at_once() const { return kv_heads_at_once * heads_at_once * rows_at_once; }

    const ggml_tensor * queries, * keys, * values, * mask, * sinks;
    ggml_tensor * result;
    int64_t num_rows, num_heads, num_streams, num_kv_heads, num_cells;
    int64_t padded_key, padded_value;
    int64_t num_segments;  // of the row that sees most cells, or more than that
    int64_t heads_of_kv_head, heads_at_once, head_parts, rows_at_once, row_parts, kv_heads_at_once, kv_parts;

private:
    // A row of a cache of many sequences, or behind a sliding window, sees few of its cells.
    int64_t most_visible_cells() const {
        if (mask == nullptr || num_rows * num_streams > MOST_COUNTED_ROWS) {
            return num_cells;
        }
        int64_t most = 1;
        for (int64_t stream = 0; stream < mask->ne[3]; ++stream) {
            for (int64_t head = 0; head < mask->ne[2]; ++head) {
                for (int64_t row = 0; row < num_rows; ++row) {
                    most = std::max(most, VisibleCells(mask_of(stream, head, row), num_cells).count());
                }
            }
        }
        return most;
    }

    void cut(int num_threads) {
        heads_of_kv_head = num_heads / num_kv_heads;
        // If heads have masks of their own, each is computed for itself.
        const bool share_mask = mask == nullptr || mask->ne[2] == 1;
        heads_at_once = share_mask ? std::min<int64_t>(heads_of_kv_head, MOST_SHARING) : 1;
        rows_at_once = std::min<int64_t>({num_rows, MOST_ROWS, MOST_SHARING / heads_at_once});
        kv_heads_at_once = share_mask ? std::min(num_kv_heads, MOST_QUERIES / (heads_at_once * rows_at_once)) : 1;
        count_parts();
        // What shares least is divided first.
        const int64_t least_tasks = num_threads > 1 ? LEAST_TASKS_PER_THREAD * num_threads : 1;
        for (int64_t * at_once : {&kv_heads_at_once, &rows_at_once, &heads_at_once}) {
            while (*at_once > 1 && num_units() * (may_keep_parts() ? num_segments : 1) < least_tasks) {
                *at_once = divide_up(*at_once, 2);
                count_parts();
            }
        }
    }

    void count_parts() {
        head_parts = divide_up(heads_of_kv_head, heads_at_once);
        row_parts = divide_up(num_rows, rows_at_once);
        kv_parts = divide_up(num_kv_heads, kv_heads_at_once);
    }

    // ALiBi, as ggml defines it.
    float slope_of(int64_t head) const {
        if (max_bias_ <= 0.0f) {
            return 1.0f;
        }
        int64_t power = 1;
        while (2 * power <= num_heads) {
            power *= 2;
        }
        const float base = powf(2.0f, -max_bias_ / (float) power);
        const float base_between = powf(2.0f, -(max_bias_ / 2.0f) / (float) power);
        return head < power ? powf(base, (float) (head + 1)) : powf(base_between, (float) (2 * (head - power) + 1));
    }

    float scale_, max_bias_, softcap_;
};

}  // namespace
