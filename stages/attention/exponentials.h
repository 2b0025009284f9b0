// Exponential and hyperbolic tangent of vectors. They are the same wherever the vectors are as wide, whatever
// mathematical library a host has.
#pragma once

#include "vectors.h"

#include <cmath>

namespace {

// e^x is power * (1 + rest), power being a power of two.
struct Exponential {
    Floats power, rest;
};

// For x from -88 to 0.
inline Exponential split_exponential(Floats x) {
    // Adding this rounds to an integer, which the lowest bits then hold.
    const Floats rounder = all_of(0x1.8p23f);
    const Floats shifted = multiply_add(x, all_of(0x1.715476p0f), rounder);
    const Floats n = subtract(shifted, rounder);
    // ln 2 in two numbers: products of the first with n have no rounding.
    Floats r = multiply_add(n, all_of(-0x1.62e4p-1f), x);
    r = multiply_add(n, all_of(-0x1.7f7d1cp-20f), r);
    // Taylor's series of e^r - 1: within 1e-8 of it for |r| up to half of ln 2.
    Floats series = all_of(1.0f / 5040.0f);
    series = multiply_add(series, r, all_of(1.0f / 720.0f));
    series = multiply_add(series, r, all_of(1.0f / 120.0f));
    series = multiply_add(series, r, all_of(1.0f / 24.0f));
    series = multiply_add(series, r, all_of(1.0f / 6.0f));
    series = multiply_add(series, r, all_of(0.5f));
    series = multiply_add(multiply(series, r), r, r);
    return {add_to_exponent(all_of(1.0f), shifted), series};
}

// Of numbers up to 0: 1 at 0, 0 below -87, where the result would be next to no normal number; what is not a number
// stays so.
inline Floats exponential(Floats x) {
    const Exponential e = split_exponential(larger(all_of(-88.0f), x));
    return zero_where_below(multiply_add(e.power, e.rest, e.power), x, -87.0f);
}

inline float exponential(float x) {
    float lanes[WIDTH];
    store(lanes, exponential(all_of(x)));
    return lanes[0];
}

// By e^(-2|x|) - 1, which is precise near 0 as well.
inline Floats hyperbolic_tangent(Floats x) {
    const Floats size = multiply(absolute(x), all_of(-2.0f));
    const Exponential e = split_exponential(larger(all_of(-88.0f), size));
    const Floats less_one = multiply_add(e.power, e.rest, subtract(e.power, all_of(1.0f)));
    return with_sign(divide(less_one, add(less_one, all_of(2.0f))), x);
}

}  // namespace
