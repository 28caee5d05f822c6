/* float16 and bfloat16: bits in memory, f32 in registers. A part of tile_cpu.h, which includes it.
 *
 * Rounding is to the nearest, ties to even; what is too large becomes infinite, and NaN stays NaN. A float64 goes there
 * through `odd_f32`, whose last bit says that something was cut off: rounding twice to the nearest is another number.
 */
#ifndef TILE_HALF_H
#define TILE_HALF_H

typedef uint16_t u16v __attribute__((vector_size(2 * TILE_LANES)));
typedef uint32_t u32v __attribute__((vector_size(4 * TILE_LANES)));

#if defined(__AVX512F__)
TILE_INLINE f32v value_f16(u16v h) { return (f32v)_mm512_cvtph_ps((__m256i)h); }
TILE_INLINE u16v bits_f16(f32v x) { return (u16v)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
TILE_INLINE i32v widen_u16(u16v h) { return (i32v)_mm512_cvtepu16_epi32((__m256i)h); }
TILE_INLINE u16v narrow_u16(i32v w) { return (u16v)_mm512_cvtepi32_epi16((__m512i)w); }
#elif defined(__AVX2__)
TILE_INLINE f32v value_f16(u16v h) { return (f32v)_mm256_cvtph_ps((__m128i)h); }
TILE_INLINE u16v bits_f16(f32v x) { return (u16v)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
TILE_INLINE i32v widen_u16(u16v h) { return (i32v)_mm256_cvtepu16_epi32((__m128i)h); }
TILE_INLINE u16v narrow_u16(i32v w) {
    return (u16v)_mm_packus_epi32(_mm256_castsi256_si128((__m256i)w), _mm256_extracti128_si256((__m256i)w, 1));
}
#else
TILE_INLINE f32v value_f16(u16v h) {
    f32v v = {0};
    TILE_UNROLL for (int i = 0; i < TILE_LANES; i++) { __fp16 x; uint16_t b = h[i]; memcpy(&x, &b, sizeof x); v[i] = (float)x; }
    return v;
}
TILE_INLINE u16v bits_f16(f32v v) {
    u16v h = {0};
    TILE_UNROLL for (int i = 0; i < TILE_LANES; i++) { __fp16 x = (__fp16)v[i]; uint16_t b; memcpy(&b, &x, sizeof b); h[i] = b; }
    return h;
}
TILE_INLINE i32v widen_u16(u16v h) { return __builtin_convertvector(h, i32v); }
TILE_INLINE u16v narrow_u16(i32v w) { return __builtin_convertvector(w, u16v); }
#endif
TILE_INLINE f32v value_bf16(u16v h) { return (f32v)(widen_u16(h) << 16); }
#if defined(__AVX512BF16__)
TILE_INLINE u16v bits_bf16(f32v x) { return (u16v)_mm512_cvtneps_pbh((__m512)x); } /* below 2^-126: 0 */
#else
TILE_INLINE u16v bits_bf16(f32v x) {
    u32v b = (u32v)x, high = b >> 16;
    i32v nan = x != x;
    return narrow_u16(((i32v)((b + 0x7fff + (high & 1)) >> 16) & ~nan) | ((i32v)(high | 0x40) & nan));
}
#endif
#if defined(__AVX512F__)
TILE_INLINE u16v load_masked_u16(const uint16_t* p, i32v m) { u16v h; TILE_LOAD_MASKED_16(h, p, bits_of(m)); return h; }
TILE_INLINE void store_masked_u16(uint16_t* p, i32v m, u16v h) { TILE_STORE_MASKED_16(p, bits_of(m), h); }
#else
TILE_INLINE u16v load_masked_u16(const uint16_t* p, i32v m) {
    u16v h = {0};
    TILE_UNROLL for (int i = 0; i < TILE_LANES; i++) if (m[i]) h[i] = p[i];
    return h;
}
TILE_INLINE void store_masked_u16(uint16_t* p, i32v m, u16v h) {
    TILE_UNROLL for (int i = 0; i < TILE_LANES; i++) if (m[i]) p[i] = h[i];
}
#endif
TILE_INLINE float odd_f32_s(double x) {
    float near = (float)x;
    int32_t bits;
    memcpy(&bits, &near, sizeof bits);
    if (x == x && (double)near != x && !(bits & 1)) bits += fabs((double)near) > fabs(x) ? -1 : 1;
    memcpy(&near, &bits, sizeof bits);
    return near;
}
TILE_INLINE f32v odd_f32(f64v x) {
    f32v v = {0};
    TILE_UNROLL for (int i = 0; i < TILE_LANES; i++) v[i] = odd_f32_s(x[i]);
    return v;
}
#define TILE_HALF(name)                                                                                                \
    TILE_INLINE f32v round_##name(f32v x) { return value_##name(bits_##name(x)); }                                     \
    TILE_INLINE float value_##name##_s(uint16_t h) { return value_##name((u16v){h})[0]; }                              \
    TILE_INLINE uint16_t bits_##name##_s(float x) { return bits_##name(splat_f32(x))[0]; }                             \
    TILE_INLINE float round_##name##_s(float x) { return round_##name(splat_f32(x))[0]; }                              \
    TILE_INLINE f32v load_##name(const uint16_t* p) { u16v h; memcpy(&h, p, sizeof h); return value_##name(h); }       \
    TILE_INLINE void store_##name(uint16_t* p, f32v x) { u16v h = bits_##name(x); memcpy(p, &h, sizeof h); }           \
    TILE_INLINE f32v load_masked_##name(const uint16_t* p, i32v m) { return value_##name(load_masked_u16(p, m)); }     \
    TILE_INLINE void store_masked_##name(uint16_t* p, i32v m, f32v x) { store_masked_u16(p, m, bits_##name(x)); }      \
    TILE_INLINE f32v gather_##name(const uint16_t* p, i64v at, i32v m) {                                               \
        u16v h = {0};                                                                                                  \
        TILE_UNROLL for (int i = 0; i < TILE_LANES; i++) if (m[i]) h[i] = p[at[i]];                                    \
        return value_##name(h);                                                                                        \
    }                                                                                                                  \
    TILE_INLINE void scatter_##name(uint16_t* p, i64v at, i32v m, f32v x) {                                            \
        u16v h = bits_##name(x);                                                                                       \
        TILE_UNROLL for (int i = 0; i < TILE_LANES; i++) if (m[i]) p[at[i]] = h[i];                                    \
    }
TILE_HALF(f16)
TILE_HALF(bf16)

#endif
