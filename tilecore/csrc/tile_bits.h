/* The bits of one type as another's, and updates of memory that several threads make. A part of tile_cpu.h, which
 * includes it.
 */
#ifndef TILE_BITS_H
#define TILE_BITS_H

/* ---- the bits of one type as another's */
TILE_INLINE i32v bits_f32_as_i32(f32v x) { return (i32v)x; }
TILE_INLINE f32v bits_i32_as_f32(i32v x) { return (f32v)x; }
TILE_INLINE i64v bits_f64_as_i64(f64v x) { return (i64v)x; }
TILE_INLINE f64v bits_i64_as_f64(i64v x) { return (f64v)x; }
TILE_INLINE i32v bits_i8_as_u8(i32v x) { return narrow_u8(x); }
TILE_INLINE i32v bits_u8_as_i8(i32v x) { return narrow_i8(x); }
TILE_INLINE int32_t bits_f32_as_i32_s(float x) { int32_t v; memcpy(&v, &x, sizeof v); return v; }
TILE_INLINE float bits_i32_as_f32_s(int32_t x) { float v; memcpy(&v, &x, sizeof v); return v; }
TILE_INLINE int64_t bits_f64_as_i64_s(double x) { int64_t v; memcpy(&v, &x, sizeof v); return v; }
TILE_INLINE double bits_i64_as_f64_s(int64_t x) { double v; memcpy(&v, &x, sizeof v); return v; }
TILE_INLINE int32_t bits_i8_as_u8_s(int32_t x) { return (uint8_t)x; }
TILE_INLINE int32_t bits_u8_as_i8_s(int32_t x) { return (int8_t)x; }
#define TILE_HALF_BITS(name)                                                                                     \
    TILE_INLINE i32v bits_##name##_as_i16(f32v x) { return narrow_i16(widen_u16(bits_##name(x))); }              \
    TILE_INLINE f32v bits_i16_as_##name(i32v x) { return value_##name(narrow_u16(x & 0xffff)); }                 \
    TILE_INLINE int32_t bits_##name##_as_i16_s(float x) { return (int16_t)bits_##name##_s(x); }                  \
    TILE_INLINE float bits_i16_as_##name##_s(int32_t x) { return value_##name##_s((uint16_t)x); }
TILE_HALF_BITS(f16)
TILE_HALF_BITS(bf16)
TILE_INLINE f32v bits_f16_as_bf16(f32v x) { return value_bf16(bits_f16(x)); }
TILE_INLINE f32v bits_bf16_as_f16(f32v x) { return value_f16(bits_bf16(x)); }
TILE_INLINE float bits_f16_as_bf16_s(float x) { return value_bf16_s(bits_f16_s(x)); }
TILE_INLINE float bits_bf16_as_f16_s(float x) { return value_f16_s(bits_bf16_s(x)); }

/* ---- one step that no other thread comes between: *p = join(*p, v); per lane at its own offset */
typedef int8_t __attribute__((may_alias)) word8;
typedef int16_t __attribute__((may_alias)) word16;
typedef int32_t __attribute__((may_alias)) word32;
typedef int64_t __attribute__((may_alias)) word64;
#define TILE_ATOMIC(verb, name, element, vector, word, join)                                                      \
    TILE_INLINE void atomic_##verb##_##name(element* p, element v) {                                              \
        word seen = __atomic_load_n((word*)p, __ATOMIC_RELAXED), next;                                            \
        do {                                                                                                      \
            element x;                                                                                            \
            memcpy(&x, &seen, sizeof x);                                                                          \
            x = (element)join(x, v);                                                                              \
            memcpy(&next, &x, sizeof next);                                                                       \
        } while (!__atomic_compare_exchange_n((word*)p, &seen, next, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED));     \
    }                                                                                                             \
    TILE_ATOMIC_LANES(verb, name, element, vector)
#define TILE_ATOMIC_LANES(verb, name, element, vector)                                                            \
    TILE_INLINE void atomic_##verb##_lanes_##name(element* p, i64v at, i32v m, vector v) {                        \
        TILE_UNROLL for (int i = 0; i < TILE_LANES; i++) if (m[i]) atomic_##verb##_##name(p + at[i], v[i]);       \
    }
#define TILE_ATOMIC_HALF(verb, name, join) /* of bits in memory, joined in f32 */                                 \
    TILE_INLINE void atomic_##verb##_##name(uint16_t* p, float v) {                                               \
        uint16_t seen = __atomic_load_n(p, __ATOMIC_RELAXED), next;                                               \
        v = value_##name##_s(bits_##name##_s(v));                                                                 \
        do next = bits_##name##_s(join(value_##name##_s(seen), v));                                               \
        while (!__atomic_compare_exchange_n(p, &seen, next, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED));              \
    }                                                                                                             \
    TILE_ATOMIC_LANES(verb, name, uint16_t, f32v)
TILE_INLINE float scalar_add_f32(float a, float b) { return a + b; }
TILE_INLINE int64_t wrapping_add(int64_t a, int64_t b) { return (int64_t)((uint64_t)a + (uint64_t)b); }
#define TILE_ATOMICS(name, element, vector, word, sum, largest, smallest) \
    TILE_ATOMIC(add, name, element, vector, word, sum)                    \
    TILE_ATOMIC(max, name, element, vector, word, largest)                \
    TILE_ATOMIC(min, name, element, vector, word, smallest)
TILE_ATOMICS(f32, float, f32v, word32, scalar_add_f32, max_f32_s, min_f32_s)
TILE_ATOMICS(f64, double, f64v, word64, scalar_add, scalar_max, scalar_min)
TILE_ATOMICS(i32, int32_t, i32v, word32, wrapping_add, max_i64, min_i64)
TILE_ATOMICS(i64, int64_t, i64v, word64, wrapping_add, max_i64, min_i64)
TILE_ATOMICS(i16, int16_t, i32v, word16, wrapping_add, max_i64, min_i64)
TILE_ATOMICS(i8, int8_t, i32v, word8, wrapping_add, max_i64, min_i64)
TILE_ATOMICS(u8, uint8_t, i32v, word8, wrapping_add, max_i64, min_i64)
#define TILE_ATOMIC_HALVES(name)                  \
    TILE_ATOMIC_HALF(add, name, scalar_add_f32)   \
    TILE_ATOMIC_HALF(max, name, max_f32_s)        \
    TILE_ATOMIC_HALF(min, name, min_f32_s)
TILE_ATOMIC_HALVES(f16)
TILE_ATOMIC_HALVES(bf16)

#endif
