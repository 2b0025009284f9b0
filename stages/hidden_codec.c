/* Codec of `stages.transport.hidden_codec` for f16 and q8, bit for bit that of its arrays. A decode leaves nothing in
 * the processor's caches, and behind it a dozen calls of numpy cost many times what one loop over a row does. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

#define BLOCK_WIDTH 32
#define MOST_STEPS 127.0f

static uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static int is_finite(float value) {
    return (bits_of(value) & 0x7f800000u) != 0x7f800000u;
}

static int are_finite(const float *values, size_t count) {
    int result = 1;
    for (size_t i = 0; i < count; i++) {
        result &= is_finite(values[i]);
    }
    return result;
}

/* Round to nearest, ties to even; what is beyond the range becomes the largest number of half precision. */
static uint16_t half_of(float value) {
    const uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000u;
    uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude >= 0x477fe000u) { /* 65504 */
        return (uint16_t)(sign | 0x7bffu);
    }
    if (magnitude < 0x38800000u) { /* 2^-14: a subnormal half. The addition of 0.5 shifts and rounds. */
        return (uint16_t)(sign | (bits_of(from_bits(magnitude) + 0.5f) - 0x3f000000u));
    }
    magnitude += 0xfffu + (magnitude >> 13 & 1u);
    return (uint16_t)(sign | ((magnitude - 0x38000000u) >> 13));
}

/* To the nearest integer, ties to even, of what is far below 2^22. */
static float rounded(float value) {
    const float shift = 12582912.0f; /* 1.5 * 2^23 */
    return value + shift - shift;
}

static void put_16(uint8_t *to, uint16_t value) {
    to[0] = (uint8_t)value;
    to[1] = (uint8_t)(value >> 8);
}

/* Returns 0, and leaves `to` undefined, if a value is not finite. */
EXPORT int hidden_codec_encode_f16(const float *values, size_t count, uint8_t *to) {
    if (!are_finite(values, count)) {
        return 0;
    }
    for (size_t i = 0; i < count; i++) {
        put_16(to + 2 * i, half_of(values[i]));
    }
    return 1;
}

static size_t num_blocks(size_t width) {
    return (width + BLOCK_WIDTH - 1) / BLOCK_WIDTH;
}

/* Returns 0, and leaves `to` undefined, if a value is not finite. */
EXPORT int hidden_codec_encode_q8(const float *values, size_t num_rows, size_t width, uint8_t *to) {
    if (!are_finite(values, num_rows * width)) {
        return 0;
    }
    for (size_t row = 0; row < num_rows; row++, values += width, to += 2 * num_blocks(width) + width) {
        int8_t *steps = (int8_t *)(to + 2 * num_blocks(width));
        for (size_t block = 0; block < num_blocks(width); block++) {
            const size_t start = block * BLOCK_WIDTH;
            const size_t stop = start + BLOCK_WIDTH < width ? start + BLOCK_WIDTH : width;
            float largest = 0.0f;
            for (size_t i = start; i < stop; i++) {
                const float magnitude = from_bits(bits_of(values[i]) & 0x7fffffffu);
                largest = magnitude > largest ? magnitude : largest;
            }
            /* The upper half of the bits, up, so that no value needs more than 127 steps. */
            const uint32_t upper = (bits_of(largest / MOST_STEPS) + 0xffffu) >> 16;
            const float scale = from_bits(upper << 16);
            put_16(to + 2 * block, (uint16_t)upper);
            for (size_t i = start; i < stop; i++) {
                steps[i] = scale == 0.0f ? 0 : (int8_t)rounded(values[i] / scale);
            }
        }
    }
    return 1;
}

EXPORT void hidden_codec_decode_q8(const uint8_t *from, size_t num_rows, size_t width, float *values) {
    for (size_t row = 0; row < num_rows; row++, values += width, from += 2 * num_blocks(width) + width) {
        const int8_t *steps = (const int8_t *)(from + 2 * num_blocks(width));
        for (size_t i = 0; i < width; i++) {
            const uint8_t *scale = from + 2 * (i / BLOCK_WIDTH);
            values[i] = from_bits((uint32_t)scale[0] << 16 | (uint32_t)scale[1] << 24) * (float)steps[i];
        }
    }
}
