// Vectors of floats, for each kind of processor under the same names:
//
//   Floats              a vector of WIDTH floats
//   CELLS_AT_ONCE       cells that are scored together: as many sums as registers hold
//   QUERIES_AT_ONCE     queries for which a row of V is read once
//   load, store         16-bit and 8-bit numbers become floats on the way
//   all_of              one number in all lanes
//   multiply_add        a * b + c with one rounding
//   add_to_exponent     a * 2^n, n being in the lowest bits of a float that holds an integer (see exponentials.h)
//   zero_where_below    a, but 0 where x is below a limit; not where x is not a number
//   with_sign           a with the sign of another
//   sums_of_lanes       of CELLS_AT_ONCE vectors; all by the same tree, so that a sum is the same in each place
//
// ATTENTION_HAS_VECTORS is defined if the processor that is compiled for has one of them.
//
// All of the kernel is internal to one source, which is compiled once for each kind of processor: a function with
// an external name could be taken from the library for another.
#pragma once

#include "ggml-cpu-impl.h"  // ahead of the choice: names what Microsoft's compiler leaves unnamed
#include "ggml.h"

#include <cstdint>
#include <cstring>

// Arrays of vectors are registers only where all loops over them are unrolled; and a function of its own has all
// registers for its loop.
#if defined(__clang__)
#define ATTENTION_UNROLL _Pragma("clang loop unroll(full)")
#define ATTENTION_APART __attribute__((noinline))
#elif defined(__GNUC__)
#define ATTENTION_UNROLL _Pragma("GCC unroll 16")
#define ATTENTION_APART __attribute__((noinline))
#else
#define ATTENTION_UNROLL
#define ATTENTION_APART
#endif

#if defined(__AVX512F__)
#define ATTENTION_HAS_VECTORS
#include "vectors_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define ATTENTION_HAS_VECTORS
#include "vectors_avx2.h"
#elif defined(__ARM_NEON) && defined(__aarch64__)
#define ATTENTION_HAS_VECTORS
#include "vectors_neon.h"
#endif
