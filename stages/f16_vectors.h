// Included ahead of llama.cpp's sources where the processor has AVX512-FP16.
//
// There ggml takes vectors of 32 half-precision numbers, four at a time: a head of fewer than 128 dimensions, as small
// models have, is left to the loop for what remains, which goes number by number and converts by table and by bit
// tricks. Attention then takes about three times as long, which is most of a window's time from some hundred tokens on;
// and what does fit is summed in half precision. Without the macro ggml takes vectors of 16, as on processors with
// AVX512 alone, and sums in single precision.
#if defined(__AVX512FP16__)
#include <immintrin.h>
#undef __AVX512FP16__
#endif
