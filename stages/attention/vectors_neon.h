// Vectors of 64-bit ARM processors: see vectors.h.
#pragma once

#include <arm_neon.h>

namespace {

using Floats = float32x4_t;
constexpr int WIDTH = 4;
constexpr int CELLS_AT_ONCE = 16;
constexpr int QUERIES_AT_ONCE = 4;

inline Floats load(const float * from) { return vld1q_f32(from); }

inline Floats load(const ggml_fp16_t * from) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *) from)));
}

inline Floats load(const ggml_bf16_t * from) {
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16((const uint16_t *) from), 16));
}

inline Floats load(const int8_t * from) {
    int32_t four;
    memcpy(&four, from, sizeof four);
    const int16x8_t numbers = vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four)));
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(numbers)));
}

inline void store(float * to, Floats a) { vst1q_f32(to, a); }

inline Floats all_of(float value) { return vdupq_n_f32(value); }

inline Floats add(Floats a, Floats b) { return vaddq_f32(a, b); }

inline Floats subtract(Floats a, Floats b) { return vsubq_f32(a, b); }

inline Floats multiply(Floats a, Floats b) { return vmulq_f32(a, b); }

inline Floats divide(Floats a, Floats b) { return vdivq_f32(a, b); }

inline Floats multiply_add(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }

// Not a number where one is not.
inline Floats larger(Floats a, Floats b) { return vmaxq_f32(a, b); }

inline Floats absolute(Floats a) { return vabsq_f32(a); }

inline Floats with_sign(Floats a, Floats sign) { return vbslq_f32(vdupq_n_u32(0x80000000u), sign, a); }

inline Floats add_to_exponent(Floats a, Floats integer) {
    const uint32x4_t exponent = vshlq_n_u32(vreinterpretq_u32_f32(integer), 23);
    return vreinterpretq_f32_u32(vaddq_u32(vreinterpretq_u32_f32(a), exponent));
}

inline Floats zero_where_below(Floats a, Floats x, float limit) {
    return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(a), vcltq_f32(x, all_of(limit))));
}

inline void sums_of_lanes(const Floats * vectors, float * sums) {
    ATTENTION_UNROLL
    for (int i = 0; i < CELLS_AT_ONCE; i += 4) {
        const Floats first = vpaddq_f32(vectors[i], vectors[i + 1]);
        store(sums + i, vpaddq_f32(first, vpaddq_f32(vectors[i + 2], vectors[i + 3])));
    }
}

}  // namespace
