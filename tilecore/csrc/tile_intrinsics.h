/* The x86 instructions that the verbs use, as intrinsics and, at the end, in assembler. All of <immintrin.h> takes gcc
 * longer to read than a kernel takes to compile, so where gcc's parts of it are known, only those that are needed are
 * read: of AVX-512 what is of whole registers. Those for bf16 differ between its versions. */
#ifndef TILE_INTRINSICS_H
#define TILE_INTRINSICS_H

#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 11 && __GNUC__ <= 15 && !defined(__AVX512BF16__)
#define _IMMINTRIN_H_INCLUDED /* the parts ask for it */
#include <xmmintrin.h>
#include <smmintrin.h>
#include <avxintrin.h>
#include <avx2intrin.h>
#include <f16cintrin.h>
#if defined(__AVX512F__)
#include <avx512fintrin.h>
typedef unsigned int __mmask32; /* from a part that is left out */
#include <avx512bwintrin.h>
#endif
#else
#include <immintrin.h>
#endif

/* ---- sums of products, in place: gcc moves the sums of intrinsics to other registers and back, and spills them. Those of
 * integers are for processors that multiply and add in one instruction (VNNI), in functions with TILE_FUSED_DOT. */
#if defined(__AVX512BW__)
#define TILE_FUSED_DOT __attribute__((target("avx512vnni")))
#define TILE_KEEP(acc) __asm__("" : "+v"(acc))
#define TILE_ABOVE_FLOOR(rest, x) __asm__("vreduceps $9, %1, %0" : "=v"(rest) : "v"(x))
#define TILE_ABOVE_NEAREST(rest, x) __asm__("vreduceps $8, %1, %0" : "=v"(rest) : "v"(x))
#define TILE_DOT_WORDS(acc, a, b) __asm__("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b))
#define TILE_DOT_BYTES(acc, bytes, signs) __asm__("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(bytes), "v"(signs))
#define TILE_DOT_BF16(acc, a, b) __asm__("vdpbf16ps %1, %2, %0" : "+v"(acc) : "v"(b), "v"(a))
#elif defined(__AVX2__)
#define TILE_FUSED_DOT __attribute__((target("avxvnni")))
#define TILE_KEEP(acc) __asm__("" : "+x"(acc))
#define TILE_DOT_WORDS(acc, a, b) __asm__("%{vex%} vpdpwssd %2, %1, %0" : "+x"(acc) : "x"(a), "x"(b))
#define TILE_DOT_BYTES(acc, bytes, signs) __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(bytes), "x"(signs))
#endif

/* ---- 16 elements of 16 bits under a mask. Those of 512 bits have masks of 32, of which gcc 12 keeps 16 when it spills. */
#if defined(__AVX512BW__)
#define TILE_LOAD_MASKED_16(v, p, mask) \
    __asm__("vmovdqu16 %1, %0%{%2%}%{z%}" : "=v"(v) : "m"(*(const uint16_t(*)[16])(p)), "Yk"(mask))
#define TILE_STORE_MASKED_16(p, mask, v) \
    __asm__("vmovdqu16 %1, %0%{%2%}" : "+m"(*(uint16_t(*)[16])(p)) : "v"(v), "Yk"(mask))
#endif

/* ---- tile registers (AMX), by number. The compiler does not know what memory they read and write: see TILE_FENCE. */
#if defined(__AVX512BW__)
#define TILE_FENCE() __asm__ volatile("" : : : "memory")
#define TILE_CONFIG(shapes) __asm__ volatile("ldtilecfg (%0)" : : "r"(shapes) : "memory")
#define TILE_RELEASE() __asm__ volatile("tilerelease")
#define TILE_ZERO(tile) __asm__ volatile("tilezero %%tmm" #tile : :)
#define TILE_LOAD(tile, p, row) __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile : : "r"(p), "r"((int64_t)(row)))
#define TILE_STORE(tile, p, row) __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" : : "r"(p), "r"((int64_t)(row)))
#define TILE_PRODUCT(name, to, a, b) __asm__ volatile(#name " %%tmm" #b ", %%tmm" #a ", %%tmm" #to : :)
#endif

#endif
