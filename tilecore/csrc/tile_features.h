/* Which microarchitecture levels of x86-64 the running processor and its operating system offer (psABI levels v3, v4).
 * Asked of the processor itself: the compilers' own tables need start-up code that not every C library runs. */
#ifndef TILE_FEATURES_H
#define TILE_FEATURES_H

#include <stdint.h>

/* The answer to a question about the processor, which it takes long to give: asked once, kept in `known` as 1 or -1. */
static inline int tile_keep(int8_t* known, int answer) {
    __atomic_store_n(known, answer ? 1 : -1, __ATOMIC_RELAXED);
    return answer;
}
#define TILE_ASKED(known, question) \
    (__atomic_load_n(&(known), __ATOMIC_RELAXED) ? __atomic_load_n(&(known), __ATOMIC_RELAXED) > 0 : tile_keep(&(known), question))

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

static inline int tile_has_bits(uint32_t value, uint32_t bits) { return (value & bits) == bits; }

/* 0 below v3, else 3 or 4. */
static inline int tile_x86_level(void) {
    uint32_t a, b, c, d, low, high, b7, extended;
    const uint32_t v3_ecx = 1u << 12 | 1u << 22 | 1u << 27 | 1u << 28 | 1u << 29; /* FMA MOVBE OSXSAVE AVX F16C */
    const uint32_t v3_ebx = 1u << 3 | 1u << 5 | 1u << 8;                          /* BMI1 AVX2 BMI2 */
    const uint32_t v4_ebx = 1u << 16 | 1u << 17 | 1u << 28 | 1u << 30 | 1u << 31; /* AVX512 F DQ CD BW VL */
    if (!__get_cpuid(1, &a, &b, &c, &d) || !tile_has_bits(c, v3_ecx)) return 0;
    if (!__get_cpuid(0x80000001u, &a, &b, &extended, &d) || !tile_has_bits(extended, 1u << 5)) return 0; /* LZCNT */
    if (!__get_cpuid_count(7, 0, &a, &b7, &c, &d) || !tile_has_bits(b7, v3_ebx)) return 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if (!tile_has_bits(low, 0x06)) return 0; /* the system saves xmm and ymm */
    return tile_has_bits(b7, v4_ebx) && tile_has_bits(low, 0xe6) ? 4 : 3; /* and opmask and zmm */
}

/* Whether there is vdpbf16ps beside all of v4. */
static inline int tile_x86_has_bf16(void) {
    uint32_t a, b, c, d;
    if (tile_x86_level() < 4 || !__get_cpuid_count(7, 1, &a, &b, &c, &d)) return 0;
    return tile_has_bits(a, 1u << 5);
}

/* Whether it pays: on Intel's processors it does half as many products a cycle as f32 has (Sapphire Rapids). */
static inline int tile_x86_bf16(void) {
    uint32_t a, b, c, d;
    if (!tile_x86_has_bf16() || !__get_cpuid(0, &a, &b, &c, &d)) return 0;
    return !(b == signature_INTEL_ebx && c == signature_INTEL_ecx && d == signature_INTEL_edx);
}

/* Whether they have tiles (AMX) as well. Linux gives a process their registers when it asks for them, as this does. */
static inline int tile_x86_amx(void) {
    enum { REQUEST_STATE = 0x1023, TILE_DATA = 18 };
    uint32_t a, b, c, d, low, high;
    if (!tile_x86_has_bf16() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    if (!tile_has_bits(d, 1u << 22 | 1u << 24)) return 0; /* AMX-BF16 AMX-TILE */
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if (!tile_has_bits(low, 3u << 17)) return 0; /* the system saves tiles */
    return syscall(SYS_arch_prctl, REQUEST_STATE, TILE_DATA) == 0;
}

/* The same for tiles of bytes, which no other instructions are asked for beside. */
static inline int tile_x86_amx_bytes(void) {
    enum { REQUEST_STATE = 0x1023, TILE_DATA = 18 };
    uint32_t a, b, c, d, low, high;
    if (tile_x86_level() < 4 || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    if (!tile_has_bits(d, 1u << 24 | 1u << 25)) return 0; /* AMX-TILE AMX-INT8 */
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if (!tile_has_bits(low, 3u << 17)) return 0; /* the system saves tiles */
    return syscall(SYS_arch_prctl, REQUEST_STATE, TILE_DATA) == 0;
}

/* Whether the processor multiplies pairs and adds them in one instruction: 512 or 256 bits at a time. */
static inline int tile_x86_vnni(int bits) {
    uint32_t a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    if (bits == 512) return tile_has_bits(c, 1u << 11);
    return a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && tile_has_bits(a, 1u << 4);
}
#endif

#if defined(__GNUC__) && !defined(__clang__) /* vectors in arguments: every verb is inlined, so that none is passed */
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

#endif
