// Included ahead of llama.cpp's sources where the compiler is GCC and the processor has Intel's AMX.
//
// GCC before 11.5, 12.4 and 13.3 tells the optimiser that `_tile_loadconfig` reads 8 bytes, where it reads 64. Stores
// to the others are dropped as dead, the processor refuses what is left, and the first product of two rows or more
// ends the process (GCC PR 114098; ggml-org/llama.cpp #20824, #26954). This says all that is read.
#if defined(__AMX_TILE__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
#undef _tile_loadconfig
#define _tile_loadconfig(config) \
    __asm__ volatile("ldtilecfg\t%X0" : : "m"(*(const unsigned char (*)[64])(config)))
#endif
