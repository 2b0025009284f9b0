// A unit: rows and heads of one stream, which one thread computes together, segment by segment. KV heads take turns
// every few cells: a cell's heads lie side by side in the cache, and memory is read in its order.
#pragma once

#include "cached_rows.h"
#include "operation.h"
#include "parts.h"
#include "row_groups.h"
#include "scores.h"
#include "sizes.h"
#include "values.h"
#include "visible_cells.h"

#include <algorithm>

namespace {

class Unit {
public:
    // scratch: of num_floats() floats.
    Unit(const Operation & operation, int64_t index, float * scratch)
        : operation_(operation),
          row_part_(index % operation.row_parts),
          head_part_(index / operation.row_parts % operation.head_parts),
          kv_part_(index / (operation.row_parts * operation.head_parts) % operation.kv_parts),
          stream_(index / (operation.row_parts * operation.head_parts * operation.kv_parts)),
          first_kv_head_(kv_part_ * operation.kv_heads_at_once),
          first_head_(first_kv_head_ * operation.heads_of_kv_head + head_part_ * operation.heads_at_once),
          first_row_(row_part_ * operation.rows_at_once),
          num_kv_heads_((int) std::min(operation.kv_heads_at_once, operation.num_kv_heads - first_kv_head_)),
          num_heads_((int) std::min(operation.heads_at_once, heads_from(operation, first_head_))),
          num_rows_((int) std::min(operation.rows_at_once, operation.num_rows - first_row_)),
          keys_(operation.keys, first_kv_head_, stream_),
          values_(operation.values, first_kv_head_, stream_) {
        const auto take = [&scratch](int64_t count) {
            float * taken = scratch;
            scratch += count;
            return taken;
        };
        const int64_t num_queries = operation.queries_at_once();
        queries_ = take(num_queries * operation.padded_key);
        float_keys_ = take(CELLS_AT_ONCE * operation.padded_key);
        float_values_ = take(VALUE_CELLS * operation.padded_value);
        weights_ = take(num_queries * SEGMENT_CELLS);
        masks_ = take(operation.rows_at_once * SEGMENT_CELLS);
        cells_ = (int32_t *) take(operation.rows_at_once * SEGMENT_CELLS);
        read_queries();
    }

    static size_t num_floats(const Operation & operation) {
        const int64_t num_queries = operation.queries_at_once();
        return num_queries * (operation.padded_key + SEGMENT_CELLS) + CELLS_AT_ONCE * operation.padded_key +
               VALUE_CELLS * operation.padded_value + 2 * operation.rows_at_once * SEGMENT_CELLS;
    }

    int num_queries() const { return num_kv_heads_ * num_rows_ * num_heads_; }

    // Place of a query among all of the operation.
    int64_t place_of(int query) const {
        return (stream_ * operation_.num_rows + row_of(query)) * operation_.num_heads + head_of(query);
    }

    void skip_segments(int64_t segments) {
        for (int row = 0; row < num_rows_; ++row) {
            visible_[row].skip_segments(segments);
        }
    }

    // Computes each query's next segment, into a part each; false if no row has cells left, and parts are as before.
    bool compute_segment(const Part * parts) {
        int counts[MOST_ROWS], most = 0;
        for (int row = 0; row < num_rows_; ++row) {
            counts[row] = visible_[row].read_segment(cells_of(row), masks_of(row));
            most = std::max(most, counts[row]);
        }
        if (most == 0) {
            return false;
        }
        for (int query = 0; query < num_queries(); ++query) {
            parts[query].clear(values_.padded_size);
        }
        bool is_done[MOST_ROWS];
        for (int row = 0; row < num_rows_; ++row) {
            is_done[row] = counts[row] == 0;
        }
        for (int first = 0; first < num_rows_; ++first) {
            if (is_done[first]) {
                continue;
            }
            group_.clear();
            for (int row = first; row < num_rows_; ++row) {
                is_done[row] = is_done[row] || group_.add(row, cells_of(row), counts[row]);
            }
            compute_group(parts);
        }
        return true;
    }

    void write(int query, Part total) const {
        operation_.write(stream_, head_of(query), row_of(query), total);
    }

private:
    // Heads of the same KV head from this one on.
    static int64_t heads_from(const Operation & operation, int64_t head) {
        return operation.heads_of_kv_head - head % operation.heads_of_kv_head;
    }

    // Queries are in the order of KV heads, of rows, of heads.
    int query_of(int kv_head, int row, int head) const { return (kv_head * num_rows_ + row) * num_heads_ + head; }
    int64_t row_of(int query) const { return first_row_ + query / num_heads_ % num_rows_; }
    int64_t head_of(int query) const {
        return first_head_ + query / (num_rows_ * num_heads_) * operation_.heads_of_kv_head + query % num_heads_;
    }

    void read_queries() {
        for (int query = 0; query < num_queries(); ++query) {
            float * to = query_at(query);
            std::copy_n(operation_.query(stream_, head_of(query), row_of(query)), keys_.size, to);
            std::fill(to + keys_.size, to + keys_.padded_size, 0.0f);
        }
        for (int row = 0; row < num_rows_; ++row) {
            const ggml_fp16_t * mask = operation_.mask_of(stream_, first_head_, first_row_ + row);
            visible_[row] = VisibleCells(mask, operation_.num_cells);
        }
    }

    float * query_at(int query) const { return queries_ + query * operation_.padded_key; }
    float * weights_of(int query) const { return weights_ + (size_t) query * SEGMENT_CELLS; }
    float * masks_of(int row) const { return masks_ + (size_t) row * SEGMENT_CELLS; }
    int32_t * cells_of(int row) const { return cells_ + (size_t) row * SEGMENT_CELLS; }

    void compute_group(const Part * parts) {
        for (int begin = 0; begin < group_.num_cells; begin += CELLS_AT_ONCE) {
            const Run cells = {begin, std::min(begin + CELLS_AT_ONCE, group_.num_cells)};
            const Run ahead = group_.within(begin + CELLS_AHEAD, begin + CELLS_AHEAD + CELLS_AT_ONCE);
            for (int kv_head = 0; kv_head < num_kv_heads_; ++kv_head) {
                prefetch(keys_.of_head(kv_head), group_.cells, ahead);
                prefetch(values_.of_head(kv_head), group_.cells, cells);
                multiply_with_cells(kv_head, cells);
            }
        }
        prefetch_following();
        WeightedSum sums[MOST_QUERIES];
        int num_sums = 0;
        for (int kv_head = 0; kv_head < num_kv_heads_; ++kv_head) {
            for (int i = 0; i < group_.num_rows; ++i) {
                for (int head = 0; head < num_heads_; ++head) {
                    const int row = group_.rows[i], query = query_of(kv_head, row, head);
                    const ScoreRule rule = operation_.rule_of(head_of(query));
                    softmax(weights_of(query), masks_of(row), group_.runs[i].count(), rule, parts[query]);
                    sums[num_sums++] = {group_.runs[i], weights_of(query), parts[query].values()};
                }
            }
        }
        sum_values(sums, num_sums / num_kv_heads_);
    }

    // The next segment begins most often where this one ends.
    void prefetch_following() const {
        const int64_t next = group_.cells[group_.num_cells - 1] + 1;
        const int64_t end = std::min<int64_t>(next + CELLS_AHEAD, operation_.num_cells);
        for (int kv_head = 0; kv_head < num_kv_heads_; ++kv_head) {
            for (int64_t cell = next; cell < end; ++cell) {
                prefetch(keys_.of_head(kv_head), cell);
            }
        }
    }

    // Products of the group's queries with a few of its cells; each query keeps those of its run.
    void multiply_with_cells(int kv_head, Run cells) {
        const CachedRows keys = keys_.of_head(kv_head);
        const bool is_whole = cells.count() == CELLS_AT_ONCE;
        if (is_whole && num_heads_ * group_.num_rows == 1 && keys.is_readable()) {
            with_rows_in_cache(keys, group_.cells + cells.begin, [&](auto rows) {
                multiply_group(kv_head, cells, rows);
            });
        } else {
            to_floats(keys, group_.cells + cells.begin, cells.count(), float_keys_);
            multiply_group(kv_head, cells, FloatRows{float_keys_, keys.padded_size});
        }
    }

    template <class Rows>
    void multiply_group(int kv_head, Run cells, Rows rows) {
        for (int i = 0; i < group_.num_rows; ++i) {
            const Run run = group_.runs[i], own = run.within(cells.begin, cells.end);
            for (int head = 0; head < num_heads_ && own.count() > 0; ++head) {
                const int query = query_of(kv_head, group_.rows[i], head);
                float * products = weights_of(query) + (own.begin - run.begin);
                if (own.count() == CELLS_AT_ONCE) {
                    multiply_with_keys(query_at(query), rows, keys_.padded_size, products);
                } else {
                    float all[CELLS_AT_ONCE];
                    multiply_with_keys(query_at(query), rows, keys_.padded_size, all);
                    std::copy_n(all + (own.begin - cells.begin), own.count(), products);
                }
            }
        }
    }

    // sums: of each KV head so many.
    void sum_values(const WeightedSum * sums, int num_sums) {
        for (int begin = 0; begin < group_.num_cells; begin += VALUE_CELLS) {
            const Run cells = group_.within(begin, begin + VALUE_CELLS);
            for (int kv_head = 0; kv_head < num_kv_heads_; ++kv_head) {
                sum_values_of(values_.of_head(kv_head), sums + kv_head * num_sums, num_sums, cells);
            }
        }
    }

    void sum_values_of(const CachedRows & values, const WeightedSum * sums, int num_sums, Run cells) {
        if (num_sums <= QUERIES_AT_ONCE && values.is_readable()) {
            with_rows_in_cache(values, group_.cells + cells.begin, [&](auto rows) {
                add_values(sums, num_sums, rows, cells.begin, cells, values.padded_size);
            });
            return;
        }
        to_floats(values, group_.cells + cells.begin, cells.count(), float_values_);
        const FloatRows rows = {float_values_, values.padded_size};
        for (int first = 0; first < num_sums; first += QUERIES_AT_ONCE) {
            const int count = std::min(QUERIES_AT_ONCE, num_sums - first);
            add_values(sums + first, count, rows, cells.begin, cells, values.padded_size);
        }
    }

    const Operation & operation_;
    const int64_t row_part_, head_part_, kv_part_, stream_, first_kv_head_, first_head_, first_row_;
    const int num_kv_heads_, num_heads_, num_rows_;
    const CachedRows keys_, values_;
    VisibleCells visible_[MOST_ROWS];
    RowGroup group_;
    float * queries_, * float_keys_, * float_values_, * weights_, * masks_;
    int32_t * cells_;
};

}  // namespace
