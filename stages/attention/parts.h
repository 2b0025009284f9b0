// A part is the softmax over some of a row's cells, for one head: the largest score, the sum of exponentials relative
// to it, and the sum of rows of V with these exponentials.
#pragma once

#include "exponentials.h"
#include "sizes.h"
#include "vectors.h"

#include <algorithm>
#include <cmath>

namespace {

struct Part {
    float * floats;  // score and sum, and from LANES on the values

    static size_t num_floats(int num_values) { return (size_t) LANES + num_values; }

    float & top() const { return floats[0]; }
    float & sum() const { return floats[1]; }
    float * values() const { return floats + LANES; }

    // A part of no cells.
    void clear(int num_values) const {
        std::fill(floats, floats + num_floats(num_values), 0.0f);
        top() = -INFINITY;
    }

    // The largest score has an exponential of 1; what is not a number is not zero either.
    bool has_cells() const { return sum() != 0.0f; }
};

// Adds a part of cells that come after those of the total. A total of no cells becomes the part, unchanged.
ATTENTION_APART void merge(Part total, Part part, int num_values) {
    const float top = std::max(total.top(), part.top());
    const float keep = exponential(total.top() - top), take = exponential(part.top() - top);
    const Floats keep_all = all_of(keep), take_all = all_of(take);
    for (int place = 0; place < num_values; place += WIDTH) {
        const Floats kept = multiply(load(total.values() + place), keep_all);
        store(total.values() + place, multiply_add(load(part.values() + place), take_all, kept));
    }
    total.top() = top;
    total.sum() = std::fma(part.sum(), take, total.sum() * keep);
}

// Writes a row's result. sink: score of a cell without V, or null.
ATTENTION_APART void finish(Part total, const float * sink, float * result, int size) {
    float sum = total.sum(), keep = 1.0f;
    if (sink != nullptr) {
        const float top = std::max(total.top(), *sink);
        keep = exponential(total.top() - top);
        sum = std::fma(sum, keep, exponential(*sink - top));
    }
    const float factor = sum == 0.0f ? 0.0f : keep / sum;
    for (int place = 0; place < size; ++place) {
        result[place] = total.values()[place] * factor;
    }
}

}  // namespace
