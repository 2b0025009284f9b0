// A unit: rows and query heads of one stream and KV head, which one thread computes together, segment by segment.
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
          kv_head_(index / (operation.row_parts * operation.head_parts) % operation.num_kv_heads),
          stream_(index / (operation.row_parts * operation.head_parts * operation.num_kv_heads)),
          first_head_(kv_head_ * operation.heads_of_kv_head + head_part_ * operation.heads_at_once),
          first_row_(row_part_ * operation.rows_at_once),
          num_heads_((int) std::min(operation.heads_at_once, heads_from(operation, first_head_))),
          num_rows_((int) std::min(operation.rows_at_once, operation.num_rows - first_row_)),
          keys_(operation.keys, kv_head_, stream_),
          values_(operation.values, kv_head_, stream_) {
        const auto take = [&scratch](int64_t count) {
            float * taken = scratch;
            scratch += count;
            return taken;
        };
        const int64_t num_queries = operation.rows_at_once * operation.heads_at_once;
        queries_ = take(num_queries * operation.padded_key);
        float_keys_ = take(CELLS_AT_ONCE * operation.padded_key);
        float_values_ = take(VALUE_CELLS * operation.padded_value);
        weights_ = take(num_queries * SEGMENT_CELLS);
        masks_ = take(operation.rows_at_once * SEGMENT_CELLS);
        cells_ = (int32_t *) take(operation.rows_at_once * SEGMENT_CELLS);
        read_queries();
    }

    static size_t num_floats(const Operation & operation) {
        const int64_t num_queries = operation.rows_at_once * operation.heads_at_once;
        return num_queries * (operation.padded_key + SEGMENT_CELLS) + CELLS_AT_ONCE * operation.padded_key +
               VALUE_CELLS * operation.padded_value + 2 * operation.rows_at_once * SEGMENT_CELLS;
    }

    int num_queries() const { return num_rows_ * num_heads_; }

    // Place of a query among all of the operation.
    int64_t place_of(int query) const {
        const int64_t row = first_row_ + query / num_heads_;
        return (stream_ * operation_.num_rows + row) * operation_.num_heads + first_head_ + query % num_heads_;
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
        operation_.write(stream_, first_head_ + query % num_heads_, first_row_ + query / num_heads_, total);
    }

private:
    // Heads of the same KV head from this one on.
    static int64_t heads_from(const Operation & operation, int64_t head) {
        return operation.heads_of_kv_head - head % operation.heads_of_kv_head;
    }

    void read_queries() {
        for (int query = 0; query < num_queries(); ++query) {
            const int64_t head = first_head_ + query % num_heads_, row = first_row_ + query / num_heads_;
            float * to = query_at(query);
            std::copy_n(operation_.query(stream_, head, row), keys_.size, to);
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
            const auto clipped = [this](int place) { return std::min(place, group_.num_cells); };
            prefetch(keys_, group_.cells, clipped(begin + CELLS_AHEAD), clipped(begin + CELLS_AHEAD + CELLS_AT_ONCE));
            prefetch(values_, group_.cells, cells.begin, cells.end);
            multiply_with_cells(cells);
        }
        prefetch_following();
        WeightedSum sums[MOST_QUERIES];
        int num_sums = 0;
        for (int i = 0; i < group_.num_rows; ++i) {
            for (int head = 0; head < num_heads_; ++head) {
                const int row = group_.rows[i], query = row * num_heads_ + head;
                const ScoreRule rule = operation_.rule_of(first_head_ + head);
                softmax(weights_of(query), masks_of(row), group_.runs[i].count(), rule, parts[query]);
                sums[num_sums++] = {group_.runs[i], weights_of(query), parts[query].values()};
            }
        }
        sum_values(sums, num_sums);
    }

    // The next segment begins most often where this one ends.
    void prefetch_following() const {
        const int64_t next = group_.cells[group_.num_cells - 1] + 1;
        const int64_t end = std::min<int64_t>(next + CELLS_AHEAD, operation_.num_cells);
        for (int64_t cell = next; cell < end; ++cell) {
            prefetch(keys_, cell);
        }
    }

    // Products of the group's queries with a few of its cells; each query keeps those of its run.
    void multiply_with_cells(Run cells) {
        const bool is_whole = cells.count() == CELLS_AT_ONCE;
        if (is_whole && num_heads_ * group_.num_rows == 1 && keys_.is_readable()) {
            with_rows_in_cache(keys_, group_.cells + cells.begin, [&](auto rows) { multiply_group(cells, rows); });
        } else {
            to_floats(keys_, group_.cells + cells.begin, cells.count(), float_keys_);
            multiply_group(cells, FloatRows{float_keys_, keys_.padded_size});
        }
    }

    template <class Rows>
    void multiply_group(Run cells, Rows rows) {
        for (int i = 0; i < group_.num_rows; ++i) {
            const Run run = group_.runs[i], own = run.within(cells.begin, cells.end);
            for (int head = 0; head < num_heads_ && own.count() > 0; ++head) {
                const int query = group_.rows[i] * num_heads_ + head;
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

    void sum_values(const WeightedSum * sums, int num_sums) {
        if (num_sums <= QUERIES_AT_ONCE && values_.is_readable()) {
            const Run all = {0, group_.num_cells};
            with_rows_in_cache(values_, group_.cells, [&](auto rows) {
                add_values(sums, num_sums, rows, 0, all, values_.padded_size);
            });
            return;
        }
        for (int begin = 0; begin < group_.num_cells; begin += VALUE_CELLS) {
            const Run cells = {begin, std::min(begin + VALUE_CELLS, group_.num_cells)};
            to_floats(values_, group_.cells + begin, cells.count(), float_values_);
            const FloatRows rows = {float_values_, values_.padded_size};
            for (int first = 0; first < num_sums; first += QUERIES_AT_ONCE) {
                const int count = std::min(QUERIES_AT_ONCE, num_sums - first);
                add_values(sums + first, count, rows, begin, cells, values_.padded_size);
            }
        }
    }

    const Operation & operation_;
    const int64_t row_part_, head_part_, kv_head_, stream_, first_head_, first_row_;
    const int num_heads_, num_rows_;
    const CachedRows keys_, values_;
    VisibleCells visible_[MOST_ROWS];
    RowGroup group_;
    float * queries_, * float_keys_, * float_values_, * weights_, * masks_;
    int32_t * cells_;
};

}  // namespace
