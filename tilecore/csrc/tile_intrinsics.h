/* The x86 intrinsics that the verbs use. All of <immintrin.h> takes gcc longer to read than a kernel takes to compile,
 * so where gcc's parts of it are known, only those that are needed are read. Those for bf16 differ between its versions. */
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
#include <avx512vlintrin.h>
#include <avx512bwintrin.h>
#include <avx512dqintrin.h>
#include <avx512vlbwintrin.h>
#endif
#else
#include <immintrin.h>
#endif

#endif
