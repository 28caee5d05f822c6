/* What a core does at best: its clock, products per second, and bytes read and copied per second.
 *
 * Every probe returns a rate of the calling thread over its own run (work per second of processor time), and 0 where the
 * instruction set has no such instruction. The caller repeats it, on as many threads as it wants, and takes the best.
 */
#include <stdint.h>
#include <string.h>
#include <time.h>

#include "tile_cpu.h"

#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__AVX512F__)
#include <immintrin.h>
enum { LANES = 16, CHAINS = 24 };
#elif defined(__AVX2__)
#include <immintrin.h>
enum { LANES = 8, CHAINS = 12 };
#else
enum { LANES = 4, CHAINS = 24 };
#endif
#define PUBLIC __attribute__((visibility("default")))
#define UNROLL _Pragma("GCC unroll 32")

#if defined(__x86_64__)
#define ADD_TO_ITSELF(x) __asm__ volatile("add %0, %0" : "+r"(x))
#elif defined(__aarch64__)
#define ADD_TO_ITSELF(x) __asm__ volatile("add %0, %0, %0" : "+r"(x))
#endif

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t); /* what others take from this core does not count */
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Cycles per second: additions that wait for each other take one cycle each on every processor of the table. */
PUBLIC double probe_clock(int64_t rounds) {
    uint64_t x = (uint64_t)rounds;
    const double start = now();
    for (int64_t i = 0; i < rounds; i++) {
        UNROLL for (int j = 0; j < 32; j++) ADD_TO_ITSELF(x); /* in assembler: a compiler would join them */
    }
    return 32.0 * (double)rounds / (now() - start);
}

#define KEEP(chain) UNROLL for (int i = 0; i < CHAINS; i++) __asm__ volatile("" : : "m"(chain[i]))
#define CHAINED(vector, first, step)                        \
    vector chain[CHAINS];                                   \
    UNROLL for (int i = 0; i < CHAINS; i++) chain[i] = first; \
    const double start = now();                             \
    for (int64_t round = 0; round < rounds; round++) {      \
        UNROLL for (int i = 0; i < CHAINS; i++) step;       \
    }                                                       \
    const double taken = now() - start;                     \
    KEEP(chain)

/* Multiply-adds of f32 a second. */
PUBLIC double probe_fma(int64_t rounds, const float* values) {
    const f32v a = values[0] - (f32v){0}, b = values[1] - (f32v){0};
    CHAINED(f32v, a * (float)i, chain[i] = chain[i] * a + b);
    return (double)rounds * CHAINS * LANES / taken;
}

/* e^x to about 1e-7 without care for any edge: what exponentials cost at least. */
static inline f32v plain_exp(f32v x) {
#if defined(__AVX512F__)
    return exp_below_f32(x); /* has a table, and its care costs nothing */
#else
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer, which is then in the low bits */
    const f32v shifted = x * 1.44269504f + magic;
    const f32v r = x - (shifted - magic) * 0.693147181f;
    f32v y = r * 0.00138888889f + 0.00833333333f;
    y = y * r + 0.0416666667f;
    y = y * r + 0.166666667f;
    y = y * r + 0.5f;
    y = y * r + 1.0f;
    y = y * r + 1.0f;
    return (f32v)((i32v)y + ((i32v)shifted << 23));
#endif
}

/* Values of f32 a second of a function, from and to L1. */
#define PROBE_FUNCTION(name, function)                                                              \
    PUBLIC double name(int64_t rounds, const float* values) {                                       \
        enum { COUNT = 64 };                                                                        \
        f32v in[COUNT], out[COUNT];                                                                 \
        for (int i = 0; i < COUNT; i++) in[i] = values[0] * (float)i - (f32v){0};                   \
        const double start = now();                                                                 \
        for (int64_t round = 0; round < rounds / 8; round++) {                                      \
            _Pragma("GCC unroll 4") for (int i = 0; i < COUNT; i++) out[i] = function(in[i]);       \
            __asm__ volatile("" : : "m"(out), "m"(in) : "memory");                                  \
        }                                                                                           \
        return (double)(rounds / 8) * COUNT * LANES / (now() - start);                              \
    }
PROBE_FUNCTION(probe_exp, plain_exp)
PROBE_FUNCTION(probe_gelu, gelu_f32) /* the leanest form that is known here; it needs no exponential */

/* Products of bytes a second, summed in 32 bits: vpdpbusd, or vpmaddwd on bytes that were widened before. */
PUBLIC double probe_bytes(int64_t rounds, const float* values) {
#if defined(__AVX512VNNI__)
    const __m512i a = _mm512_set1_epi32((int)values[0]), b = _mm512_set1_epi32((int)values[1]);
    CHAINED(i32v, i - (i32v){0}, chain[i] = (i32v)_mm512_dpbusd_epi32((__m512i)chain[i], a, b));
    return (double)rounds * CHAINS * 64 / taken;
#elif defined(__AVX512BW__)
    const __m512i b = _mm512_set1_epi32((int)values[1]);
    CHAINED(i32v, i - (i32v){0}, chain[i] += (i32v)_mm512_madd_epi16((__m512i)chain[i], b));
    return (double)rounds * CHAINS * 32 / taken;
#elif defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i b = _mm256_set1_epi32((int)values[1]);
    /* of the sum itself, so that every round has a product of its own */
    CHAINED(i32v, i - (i32v){0}, chain[i] += (i32v)_mm256_madd_epi16((__m256i)chain[i], b));
    return (double)rounds * CHAINS * 16 / taken;
#else
    (void)rounds;
    (void)values;
    return 0;
#endif
}

#if defined(__AMX_BF16__) && defined(__linux__)
/* Products of bf16 a second of four tiles of 16 × 16 results, 32 deep; 0 where the system gives no tile registers. */
static double probe_tiles(int64_t rounds) {
    enum { REQUEST_STATE = 0x1023, TILE_DATA = 18 };
    struct { uint8_t palette, reserved[15]; uint16_t bytes[16]; uint8_t rows[16]; } shapes __attribute__((aligned(64)));
    if (syscall(SYS_arch_prctl, REQUEST_STATE, TILE_DATA) != 0) return 0;
    memset(&shapes, 0, sizeof shapes);
    shapes.palette = 1;
    for (int i = 0; i < 8; i++) shapes.bytes[i] = 64, shapes.rows[i] = 16;
    __asm__ volatile("" : : "m"(shapes)); /* gcc's _tile_loadconfig says that it reads eight bytes of them */
    _tile_loadconfig(&shapes);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
    _tile_zero(6);
    _tile_zero(7);
    const double start = now();
    for (int64_t round = 0; round < rounds; round++) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    const double taken = now() - start;
    _tile_release();
    return (double)rounds * 4 * 16 * 16 * 32 / taken;
}
#endif

/* Products of bf16 a second, summed in f32: in tiles, or in vectors. */
PUBLIC double probe_bf16(int64_t rounds, const float* values) {
#if defined(__AMX_BF16__) && defined(__linux__)
    const double tiles = probe_tiles(rounds / 4);
    if (tiles > 0) return tiles;
#endif
#if defined(__AVX512BF16__)
    const __m512bh a = (__m512bh)_mm512_set1_ps(values[0]), b = (__m512bh)_mm512_set1_ps(values[1]);
    CHAINED(f32v, (float)i - (f32v){0}, chain[i] = (f32v)_mm512_dpbf16_ps((__m512)chain[i], a, b));
    return (double)rounds * CHAINS * 32 / taken;
#else
    (void)rounds;
    (void)values;
    return 0;
#endif
}

/* Bytes read a second from `bytes` of memory (a multiple of twelve vectors), `repeats` times over. */
PUBLIC double probe_read(const float* data, int64_t bytes, int64_t repeats) {
    enum { ROWS = 12 };
    f32v sum[ROWS];
    UNROLL for (int j = 0; j < ROWS; j++) sum[j] = (f32v){0};
    const int64_t count = bytes / 4;
    const double start = now();
    for (int64_t r = 0; r < repeats; r++) {
        for (int64_t i = 0; i < count; i += ROWS * LANES) {
            UNROLL for (int j = 0; j < ROWS; j++) {
                f32v v;
                memcpy(&v, data + i + j * LANES, sizeof v);
                sum[j] += v;
            }
        }
    }
    const double taken = now() - start;
    UNROLL for (int j = 0; j < ROWS; j++) __asm__ volatile("" : : "m"(sum[j]));
    return (double)bytes * (double)repeats / taken;
}

/* Bytes copied a second (each counted once) between the halves of `bytes` of memory. */
PUBLIC double probe_copy(float* data, int64_t bytes, int64_t repeats) {
    const int64_t half = bytes / 8;
    const double start = now();
    for (int64_t r = 0; r < repeats; r++) {
        for (int64_t i = 0; i < half; i += LANES) {
            f32v v;
            memcpy(&v, data + i, sizeof v);
            memcpy(data + half + i, &v, sizeof v);
        }
        __asm__ volatile("" : : : "memory");
    }
    return 4.0 * (double)half * (double)repeats / (now() - start);
}
