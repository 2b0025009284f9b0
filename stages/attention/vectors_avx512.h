// Vectors of AVX-512 (its foundation alone): see vectors.h.
#pragma once

#include <immintrin.h>

namespace {

using Floats = __m512;
constexpr int WIDTH = 16;
constexpr int CELLS_AT_ONCE = 16;
constexpr int QUERIES_AT_ONCE = 4;

inline Floats load(const float * from) { return _mm512_loadu_ps(from); }

inline Floats load(const ggml_fp16_t * from) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) from)); }

inline Floats load(const ggml_bf16_t * from) {
    const __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *) from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}

inline Floats load(const int8_t * from) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *) from)));
}

inline void store(float * to, Floats a) { _mm512_storeu_ps(to, a); }

inline Floats all_of(float value) { return _mm512_set1_ps(value); }

inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }

inline Floats subtract(Floats a, Floats b) { return _mm512_sub_ps(a, b); }

inline Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }

inline Floats divide(Floats a, Floats b) { return _mm512_div_ps(a, b); }

inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }

// The second where one is not a number.
inline Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }

inline Floats absolute(Floats a) { return _mm512_abs_ps(a); }

inline Floats with_sign(Floats a, Floats sign) {
    const __m512i sign_bit = _mm512_set1_epi32(INT32_MIN);
    const __m512i size = _mm512_andnot_si512(sign_bit, _mm512_castps_si512(a));
    return _mm512_castsi512_ps(_mm512_or_si512(size, _mm512_and_si512(sign_bit, _mm512_castps_si512(sign))));
}

inline Floats add_to_exponent(Floats a, Floats integer) {
    const __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(integer), 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), exponent));
}

inline Floats zero_where_below(Floats a, Floats x, float limit) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, all_of(limit), _CMP_NLT_UQ), a);
}

// Each step halves the lanes that a sum is spread over, and lays two vectors into one.
inline void sums_of_lanes(const Floats * vectors, float * sums) {
    Floats halves[8], quarters[4], pairs[2];
    ATTENTION_UNROLL
    for (int i = 0; i < 8; ++i) {
        const Floats a = vectors[i], b = vectors[i + 8];
        halves[i] = add(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    }
    ATTENTION_UNROLL
    for (int i = 0; i < 4; ++i) {
        const Floats a = halves[i], b = halves[i + 4];
        quarters[i] = add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    }
    ATTENTION_UNROLL
    for (int i = 0; i < 2; ++i) {
        const Floats a = quarters[2 * i], b = quarters[2 * i + 1];
        pairs[i] = add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    }
    const Floats all = add(_mm512_shuffle_ps(pairs[0], pairs[1], 0x44), _mm512_shuffle_ps(pairs[0], pairs[1], 0xee));
    // In fours: vectors 0, 8, 4 and 12 and those that follow each.
    store(sums, _mm512_shuffle_f32x4(all, all, 0xd8));
}

}  // namespace
