// GCC's AMX intrinsics up to 13 do not say what memory they read: of a tile configuration only the first 8 bytes, of a
// tile nothing.  The compiler then drops the stores before them, and llama.cpp ends with an illegal instruction at its
// first TILEZERO (rows and columns of every tile are zero).  The same instructions, with what they read.
#pragma once
#if defined(__AMX_TILE__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>

static inline void tile_loadconfig_of_64_bytes(const void *config) {
    __asm__ volatile("ldtilecfg\t%0" ::"m"(*(const char(*)[64])config));
}
#define _tile_loadconfig(config) tile_loadconfig_of_64_bytes(config)

#undef _tile_loadd_internal
#define _tile_loadd_internal(dst, base, stride) \
    __asm__ volatile("tileloadd\t(%0,%1,1), %%tmm" #dst ::"r"((const void *)(base)), "r"((long)(stride)) : "memory")
#endif
