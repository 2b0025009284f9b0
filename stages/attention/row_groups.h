// Which rows of a segment are computed together: those whose cells are runs of one list. These are all rows of a text
// (a later one sees more), rows behind a sliding window (shifted by one cell each), and rows without a mask.
#pragma once

#include "sizes.h"

#include <algorithm>
#include <cstring>

namespace {

// A row's cells within the list.
struct Run {
    int begin, end;

    int count() const { return end - begin; }

    Run within(int from, int to) const {
        const int first = std::max(begin, from);
        return {first, std::max(first, std::min(end, to))};
    }
};

struct RowGroup {
    int num_rows, num_cells;
    int rows[MOST_ROWS];
    Run runs[MOST_ROWS];
    int32_t cells[LIST_CELLS];

    Run within(int from, int to) const { return Run{0, num_cells}.within(from, to); }

    void clear() { num_rows = num_cells = 0; }

    // Adds a row if its cells can be a run of the list, made longer at its end if need be; the list ascends.
    bool add(int row, const int32_t * row_cells, int count) {
        int begin = 0;
        if (num_cells > 0) {
            begin = (int) (std::lower_bound(cells, cells + num_cells, row_cells[0]) - cells);
        }
        const int common = std::min(count, num_cells - begin);
        const bool is_run = common > 0 && memcmp(cells + begin, row_cells, common * sizeof *cells) == 0;
        if (num_cells > 0 && (!is_run || begin + count > LIST_CELLS)) {
            return false;
        }
        if (begin + count > num_cells) {
            std::copy(row_cells + common, row_cells + count, cells + begin + common);
            num_cells = begin + count;
        }
        rows[num_rows] = row;
        runs[num_rows++] = {begin, begin + count};
        return true;
    }
};

}  // namespace
