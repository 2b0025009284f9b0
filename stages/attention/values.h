// Sums of rows of V with weights: for each query and column one chain of multiply-adds over its cells, in their order.
#pragma once

#include "cached_rows.h"
#include "row_groups.h"
#include "sizes.h"
#include "vectors.h"

#include <algorithm>

namespace {

// A query's weights of the cells of its run, and what they are summed to.
struct WeightedSum {
    Run run;
    const float * weights;  // of the run's first cell on
    float * values;

    const float * weights_from(int place) const { return weights + (place - run.begin); }
};

// COLUMNS vectors from `column` on, for N queries that all see the cells from `begin` to `end`.
template <int N, int COLUMNS, class Rows>
inline void add_columns(const WeightedSum * sums, const Rows & rows, int first_place, Run cells, int column) {
    Floats totals[N][COLUMNS];
    const float * weights[N];
    ATTENTION_UNROLL
    for (int i = 0; i < N; ++i) {
        weights[i] = sums[i].weights_from(cells.begin);
        ATTENTION_UNROLL
        for (int c = 0; c < COLUMNS; ++c) {
            totals[i][c] = load(sums[i].values + column + c * WIDTH);
        }
    }
    for (int place = 0; place < cells.count(); ++place) {
        Floats row[COLUMNS];
        ATTENTION_UNROLL
        for (int c = 0; c < COLUMNS; ++c) {
            row[c] = rows.load_at(cells.begin - first_place + place, column + c * WIDTH);
        }
        ATTENTION_UNROLL
        for (int i = 0; i < N; ++i) {
            const Floats weight = all_of(weights[i][place]);
            ATTENTION_UNROLL
            for (int c = 0; c < COLUMNS; ++c) {
                totals[i][c] = multiply_add(weight, row[c], totals[i][c]);
            }
        }
    }
    ATTENTION_UNROLL
    for (int i = 0; i < N; ++i) {
        ATTENTION_UNROLL
        for (int c = 0; c < COLUMNS; ++c) {
            store(sums[i].values + column + c * WIDTH, totals[i][c]);
        }
    }
}

template <int N, class Rows>
ATTENTION_APART void add_rows(const WeightedSum * sums, const Rows & rows, int first_place, Run cells, int size) {
    // A lone query's multiply-adds would wait for each other with fewer columns.
    constexpr int MOST_COLUMNS = N == 1 ? 8 : 4;
    int column = 0;
    for (; column + MOST_COLUMNS * WIDTH <= size; column += MOST_COLUMNS * WIDTH) {
        add_columns<N, MOST_COLUMNS>(sums, rows, first_place, cells, column);
    }
    for (; column + 4 * WIDTH <= size; column += 4 * WIDTH) {
        add_columns<N, 4>(sums, rows, first_place, cells, column);
    }
    for (; column < size; column += WIDTH) {
        add_columns<N, 1>(sums, rows, first_place, cells, column);
    }
}

template <int N, class Rows>
inline void add_shared_rows(
    const WeightedSum * sums, int num_sums, const Rows & rows, int first_place, Run cells, int size
) {
    if (num_sums == N) {
        add_rows<N>(sums, rows, first_place, cells, size);
    } else if constexpr (N > 1) {
        add_shared_rows<N - 1>(sums, num_sums, rows, first_place, cells, size);
    }
}

// Adds the cells from `cells.begin` to `cells.end` of the list to up to QUERIES_AT_ONCE queries, to each those of its
// run. `rows` begin at the list's `first_place`. Cells that not all queries see are added apart: a weight of zero
// would not do, since what is hidden may be infinite or no number.
template <class Rows>
inline void add_values(
    const WeightedSum * sums, int num_sums, const Rows & rows, int first_place, Run cells, int size
) {
    Run shared = cells;
    for (int i = 0; i < num_sums; ++i) {
        shared = sums[i].run.within(shared.begin, shared.end);
    }
    const auto add_apart = [&](Run run, const WeightedSum & sum) {
        const Run own = sum.run.within(run.begin, run.end);
        if (own.count() > 0) {
            add_rows<1>(&sum, rows, first_place, own, size);
        }
    };
    if (shared.count() == 0) {
        for (int i = 0; i < num_sums; ++i) {
            add_apart(cells, sums[i]);
        }
        return;
    }
    for (int i = 0; i < num_sums; ++i) {
        add_apart({cells.begin, shared.begin}, sums[i]);
    }
    add_shared_rows<QUERIES_AT_ONCE>(sums, num_sums, rows, first_place, shared, size);
    for (int i = 0; i < num_sums; ++i) {
        add_apart({shared.end, cells.end}, sums[i]);
    }
}

}  // namespace
