// Sizes that decide in which order sums are made, and those that decide only what is computed together.
#pragma once

#include <cstddef>
#include <cstdint>

namespace {

// A change of these changes the bits of results, and asks for another OPERATIONS_VERSION.
constexpr int SEGMENT_CELLS = 256;  // visible cells of one softmax
constexpr int LANES = 16;           // in which exponentials are summed; rows of K and V are padded to whole ones

// These do not.
constexpr int MOST_ROWS = 32;          // computed together
constexpr int MOST_SHARING = 32;       // rows times heads that read the same KV head together
constexpr int MOST_QUERIES = 64;       // of all KV heads that are computed together
constexpr int LIST_CELLS = SEGMENT_CELLS + 2 * MOST_ROWS;  // cells of rows that are computed together
constexpr int LEAST_TASKS_PER_THREAD = 2;
constexpr int MOST_COUNTED_ROWS = 64;  // whose visible cells are counted ahead: reading their masks must cost little
constexpr size_t MOST_KEPT_FLOATS = (size_t) 16 << 20;  // of parts that threads leave to be merged
constexpr int VALUE_CELLS = 32;        // whose V is made float at once
constexpr int CELLS_AHEAD = 32;        // from the cell that is scored to the one that is fetched

constexpr int64_t padded(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

constexpr int64_t divide_up(int64_t count, int64_t by) { return (count + by - 1) / by; }

}  // namespace
