// Vectors of AVX2 with FMA and F16C: see vectors.h.
#pragma once

#include <immintrin.h>

namespace {

using Floats = __m256;
constexpr int WIDTH = 8;
constexpr int CELLS_AT_ONCE = 8;
constexpr int QUERIES_AT_ONCE = 2;

inline Floats load(const float * from) { return _mm256_loadu_ps(from); }

inline Floats load(const ggml_fp16_t * from) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) from)); }

inline Floats load(const ggml_bf16_t * from) {
    const __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *) from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
}

inline Floats load(const int8_t * from) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *) from)));
}

inline void store(float * to, Floats a) { _mm256_storeu_ps(to, a); }

inline Floats all_of(float value) { return _mm256_set1_ps(value); }

inline Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }

inline Floats subtract(Floats a, Floats b) { return _mm256_sub_ps(a, b); }

inline Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }

inline Floats divide(Floats a, Floats b) { return _mm256_div_ps(a, b); }

inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }

// The second where one is not a number.
inline Floats larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }

inline Floats absolute(Floats a) { return _mm256_andnot_ps(all_of(-0.0f), a); }

inline Floats with_sign(Floats a, Floats sign) {
    return _mm256_or_ps(absolute(a), _mm256_and_ps(all_of(-0.0f), sign));
}

inline Floats add_to_exponent(Floats a, Floats integer) {
    const __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(integer), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), exponent));
}

inline Floats zero_where_below(Floats a, Floats x, float limit) {
    return _mm256_and_ps(_mm256_cmp_ps(x, all_of(limit), _CMP_NLT_UQ), a);
}

inline void sums_of_lanes(const Floats * vectors, float * sums) {
    Floats fours[2];  // of each vector the sums of both halves, one in each half
    ATTENTION_UNROLL
    for (int i = 0; i < 2; ++i) {
        const Floats * four = vectors + 4 * i;
        fours[i] = _mm256_hadd_ps(_mm256_hadd_ps(four[0], four[1]), _mm256_hadd_ps(four[2], four[3]));
    }
    const Floats lower = _mm256_permute2f128_ps(fours[0], fours[1], 0x20);
    store(sums, add(lower, _mm256_permute2f128_ps(fours[0], fours[1], 0x31)));
}

}  // namespace
