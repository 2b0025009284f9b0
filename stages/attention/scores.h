// Scores of a query and cells, and their softmax.
#pragma once

#include "cached_rows.h"
#include "exponentials.h"
#include "parts.h"
#include "sizes.h"
#include "vectors.h"

#include <cmath>
#include <limits>

namespace {

// Products of a query and the K of CELLS_AT_ONCE cells: one sequence of operations for each cell.
template <class Rows>
ATTENTION_APART void multiply_with_keys(const float * query, Rows keys, int size, float * products) {
    Floats sums[CELLS_AT_ONCE];
    ATTENTION_UNROLL
    for (int place = 0; place < CELLS_AT_ONCE; ++place) {
        sums[place] = all_of(0.0f);
    }
    for (int column = 0; column < size; column += WIDTH) {
        const Floats part = load(query + column);
        ATTENTION_UNROLL
        for (int place = 0; place < CELLS_AT_ONCE; ++place) {
            sums[place] = multiply_add(part, keys.load_at(place, column), sums[place]);
        }
    }
    sums_of_lanes(sums, products);
}

struct ScoreRule {
    float scale, softcap;  // no softcap: 0
    float slope;           // of the mask
};

inline Floats score(Floats product, Floats mask, const ScoreRule & rule) {
    Floats scaled = multiply(product, all_of(rule.scale));
    if (rule.softcap != 0.0f) {
        scaled = multiply(hyperbolic_tangent(scaled), all_of(rule.softcap));
    }
    return multiply_add(all_of(rule.slope), mask, scaled);
}

inline float largest(const float * numbers, int count) {
    Floats tops = all_of(-INFINITY);
    for (int place = 0; place < count; place += WIDTH) {
        tops = larger(tops, load(numbers + place));
    }
    // Scores of minus infinity alone are a part of no cells.
    float lanes[WIDTH], top = -std::numeric_limits<float>::max();
    store(lanes, tops);
    for (float lane : lanes) {
        top = lane > top ? lane : top;
    }
    return top;
}

// Replaces numbers by the exponentials of their distance to `top`, and returns the sum of these.
inline float to_exponentials(float * numbers, int count, float top) {
    constexpr int VECTORS = LANES / WIDTH;
    Floats sums[VECTORS];
    ATTENTION_UNROLL
    for (int i = 0; i < VECTORS; ++i) {
        sums[i] = all_of(0.0f);
    }
    for (int place = 0; place < count; place += LANES) {
        ATTENTION_UNROLL
        for (int i = 0; i < VECTORS; ++i) {
            float * at = numbers + place + i * WIDTH;
            const Floats found = exponential(subtract(load(at), all_of(top)));
            store(at, found);
            sums[i] = add(sums[i], found);
        }
    }
    float lanes[LANES];
    for (int i = 0; i < VECTORS; ++i) {
        store(lanes + i * WIDTH, sums[i]);
    }
    for (int half = LANES / 2; half > 0; half /= 2) {
        for (int lane = 0; lane < half; ++lane) {
            lanes[lane] += lanes[lane + half];
        }
    }
    return lanes[0];
}

// Makes of products the weights of cells, with score and sum of the part. Products and masks have room for whole
// lanes; behind the last cell scores are minus infinity, which adds zeros.
ATTENTION_APART void softmax(float * products, const float * masks, int count, const ScoreRule & rule, Part part) {
    const int whole = (int) padded(count);
    for (int place = 0; place < whole; place += WIDTH) {
        store(products + place, score(load(products + place), load(masks + place), rule));
    }
    std::fill(products + count, products + whole, -INFINITY);
    part.top() = largest(products, whole);
    part.sum() = to_exponentials(products, whole, part.top());
}

}  // namespace
