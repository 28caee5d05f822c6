/* Functions of vectors of f32, from the verbs of tile_cpu.h, which includes this where they are known. */
#ifndef TILE_MATH_H
#define TILE_MATH_H

/* ---- math, f32. Errors in units of the last place: log 1, exp and exp2 3, exp_below
 * 3 + |x| / 4, sigmoid 4, tanh 6, erf 7 at most. NaN goes through, overflow is IEEE's, and exponentials that are no
 * normal floats are 0. */
TILE_INLINE f32v fmax_f32(f32v a, f32v b) { return max_raw(b, a); } /* a if b is NaN */
TILE_INLINE f32v abs_f32(f32v x) { return (f32v)((i32v)x & 0x7fffffff); }
TILE_INLINE f32v sign_f32(f32v x) {
    return select_f32(x != x, x, select_f32(x > 0, splat_f32(1), select_f32(x < 0, splat_f32(-1), splat_f32(0))));
}
/* a b + c, rounded once. Compilers make that of a plain expression, clang not of two that share a product. */
#if defined(__has_builtin)
#if __has_builtin(__builtin_elementwise_fma)
#define TILE_MULTIPLY_ADD(a, b, c) __builtin_elementwise_fma(a, b, c)
#endif
#endif
#if !defined(TILE_MULTIPLY_ADD)
#define TILE_MULTIPLY_ADD(a, b, c) ((a) * (b) + (c))
#endif
#if defined(__AVX512DQ__)
/* exp2: results below 2^-126 are 0; above the largest float, inf. One instruction takes x less its floor, another scales
 * by 2 to that floor; what is left out by the mask costs no time for numbers that are too small. */
TILE_INLINE f32v exp2_f32(f32v x) {
    f32v r;
    TILE_ABOVE_FLOOR(r, x);
    f32v p = splat_f32(1.86713168e-3f); /* 2^r to 8.3e-8 of itself, exact at 0 */
    p = p * r + 9.01702690e-3f;
    p = p * r + 5.57999155e-2f;
    p = p * r + 2.40164449e-1f;
    p = p * r + 6.93151312e-1f;
    p = p * r + 1.0f;
    const __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ); /* NaN is, too */
    return (f32v)_mm512_maskz_scalef_ps(normal, (__m512)p, (__m512)x);
}
/* 2^(i / 32). A table and two terms of r, at most 1/64 beside it, take fewer steps than five terms of r up to 1/2. */
static const float powers_of_2[32] __attribute__((aligned(64))) = {
    1.0f, 1.0218972f, 1.04427373f, 1.06714046f, 1.09050775f, 1.1143868f, 1.13878858f, 1.1637249f,
    1.18920708f, 1.21524739f, 1.24185777f, 1.26905096f, 1.29683959f, 1.32523668f, 1.35425556f, 1.38390994f,
    1.41421354f, 1.44518077f, 1.47682619f, 1.50916445f, 1.54221082f, 1.5759809f, 1.61049032f, 1.64575553f,
    1.68179286f, 1.71861935f, 1.75625217f, 1.79470909f, 1.8340081f, 1.87416768f, 1.91520655f, 1.95714414f,
};
#define TILE_TO_32NDS 393216.0f /* 1.5 * 2^18: adding it rounds to a 32nd, of which the lowest bits hold the number */
/* (1 + p) 2^n, n the 32nds that stand in `shifted`: five bits of their number are a place in the table, and a scaling by
 * 2 to n's floor does the rest. 0 where x < -126 ln(2); NaN is not. */
TILE_INLINE f32v tile_power(f32v p, f32v shifted, f32v x) {
    const __m512i place = (__m512i)shifted;
    const f32v power = (f32v)_mm512_permutex2var_ps(_mm512_loadu_ps(powers_of_2), place, _mm512_loadu_ps(powers_of_2 + 16));
    const __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.3365448f), _CMP_NLT_UQ);
    return (f32v)_mm512_maskz_scalef_ps(normal, (__m512)(power * p + power), (__m512)(shifted - TILE_TO_32NDS));
}
/* exp: results below 2^-126 are 0, above the largest float inf. x less n ln(2) takes two steps. */
TILE_INLINE f32v exp_f32(f32v x) {
    const f32v y = min_raw(splat_f32(89.0f), x); /* second operand: NaN goes through */
    const f32v shifted = y * 1.44269504f + TILE_TO_32NDS, n = shifted - TILE_TO_32NDS;
    f32v r = y - n * 0.693145752f;
    r = r - n * 1.42860677e-6f;
    return tile_power((r * 0.499999970f + 1.00001466f) * r, shifted, x); /* e^r to 5.4e-8 of itself */
}
/* exp of what is not above 0: nothing overflows, and x log2(e) less its nearest 32nd takes one step, in which the error
 * of log2(e) is left. */
TILE_INLINE f32v exp_below_f32(f32v x) {
    const f32v scale = splat_f32(1.44269504f), shift = splat_f32(TILE_TO_32NDS);
    const f32v shifted = TILE_MULTIPLY_ADD(x, scale, shift);
    const f32v r = TILE_MULTIPLY_ADD(x, scale, shift - shifted);
    return tile_power((r * 0.240226492f + 0.693157315f) * r, shifted, x); /* 2^r to 5.4e-8 of itself */
}
#else
/* 2^r doubled, for |r| <= 1/2, to 9.2e-8 of itself, exact at 0. */
#define TILE_TWICE_EXP2_OF_REST(p, r)  \
    f32v p = splat_f32(0.00265293056f); \
    p = p * r + 0.0193430223f;         \
    p = p * r + 0.111014679f;          \
    p = p * r + 0.480444848f;          \
    p = p * r + 1.38629401f;           \
    p = p * r + 2.0f
/* exp2: results below 2^-125.5 are 0; above the largest float, inf. Adding 1.5 * 2^23 rounds x to an integer n that then
 * stands in the lowest bits; 2^(n - 1) is made of them, and the polynomial is 2^r doubled. */
TILE_INLINE f32v exp2_f32(f32v x) {
    f32v y = max_raw(splat_f32(-126.0f), min_raw(splat_f32(128.0f), x)); /* second operand: NaN goes through */
    f32v shifted = y + (12582912.0f + 126.0f);
    f32v r = y - (shifted - (12582912.0f + 126.0f));
    TILE_TWICE_EXP2_OF_REST(p, r);
    return p * (f32v)((i32v)shifted << 23);
}
/* e^r doubled, for |r| <= ln(2) / 2, to 9.2e-8 of itself, exact at 0. */
#define TILE_TWICE_EXP_OF_REST(p, r)  \
    f32v p = splat_f32(0.0165805444f); \
    p = p * r + 0.0837963223f;        \
    p = p * r + 0.333352774f;         \
    p = p * r + 0.999982953f;         \
    p = p * r + 1.9999994f;           \
    p = p * r + 2.0f
/* exp: results below 2^-125.5 are 0, above the largest float inf. As exp2, but x less n ln(2) takes two steps. */
TILE_INLINE f32v exp_f32(f32v x) {
    f32v y = max_raw(splat_f32(-87.3365448f), min_raw(splat_f32(89.0f), x)); /* second operand: NaN goes through */
    f32v shifted = y * 1.44269504f + (12582912.0f + 126.0f);
    f32v n = shifted - (12582912.0f + 126.0f);
    f32v r = y - n * 0.693145752f;
    r = r - n * 1.42860677e-6f;
    TILE_TWICE_EXP_OF_REST(p, r);
    return p * (f32v)((i32v)shifted << 23);
}
/* exp of what is not above 0: nothing overflows, and x log2(e) less its nearest integer takes one step, in which the
 * error of log2(e) is left. */
TILE_INLINE f32v exp_below_f32(f32v x) {
    const f32v y = max_raw(splat_f32(-87.3365448f), x); /* second operand: NaN goes through */
    const f32v scale = splat_f32(1.44269504f), shift = splat_f32(12582912.0f + 126.0f);
    const f32v shifted = TILE_MULTIPLY_ADD(y, scale, shift);
    const f32v r = TILE_MULTIPLY_ADD(y, scale, shift - shifted);
    TILE_TWICE_EXP2_OF_REST(p, r);
    return p * (f32v)((i32v)shifted << 23);
}
#endif
TILE_INLINE f32v log_f32(f32v x) { /* Cephes: log(m * 2^e) with m in [sqrt(1/2), sqrt(2)) */
    f32v tiny = splat_f32(1.17549435e-38f);
    i32v denormal = x < tiny;
    f32v y = select_f32(denormal, x * 8388608.0f, x);
    i32v bits = (i32v)y, e = (bits >> 23) - 126;
    f32v m = (f32v)((bits & 0x007fffff) | 0x3f000000);
    i32v low = m < 0.707106781f;
    m = select_f32(low, m + m, m) - 1.0f;
    f32v n = __builtin_convertvector(e + low, f32v) - select_f32(denormal, splat_f32(23.0f), splat_f32(0.0f));
    f32v z = m * m, p = splat_f32(7.0376836292e-2f);
    p = p * m + -1.1514610310e-1f;
    p = p * m + 1.1676998740e-1f;
    p = p * m + -1.2420140846e-1f;
    p = p * m + 1.4249322787e-1f;
    p = p * m + -1.6668057665e-1f;
    p = p * m + 2.0000714765e-1f;
    p = p * m + -2.4999993993e-1f;
    p = p * m + 3.3333331174e-1f;
    p = p * m * z + n * -2.12194440e-4f + z * -0.5f;
    f32v r = m + p + n * 0.693359375f;
    r = select_f32(x == 0, splat_f32(-INFINITY), r);
    r = select_f32(x == INFINITY, x, r);
    return select_f32((x < 0) | (x != x), splat_f32(NAN), r);
}
TILE_INLINE f32v log2_f32(f32v x) { return log_f32(x) * 1.44269504f; }
TILE_INLINE f32v rsqrt_f32(f32v x) { return 1.0f / sqrt_f32v(x); }
TILE_INLINE f32v sigmoid_f32(f32v x) { return 1.0f / (1.0f + exp_f32(-x)); }
TILE_INLINE f32v tanh_f32(f32v x) { /* odd rational in x for |x| <= 9, where tanh is 1 to the last bit */
    f32v c = max_raw(splat_f32(-9.0f), min_raw(splat_f32(9.0f), x)), s = c * c;
    f32v p = splat_f32(-2.76076847742355e-16f);
    p = p * s + 2.00018790482477e-13f;
    p = p * s + -8.60467152213735e-11f;
    p = p * s + 5.12229709037114e-08f;
    p = p * s + 1.48572235717979e-05f;
    p = p * s + 6.37261928875436e-04f;
    p = p * s + 4.89352455891786e-03f;
    f32v q = splat_f32(1.19825839466702e-06f);
    q = q * s + 1.18534705686654e-04f;
    q = q * s + 2.26843463243900e-03f;
    q = q * s + 4.89352518554385e-03f;
    return p * c / q;
}
TILE_INLINE f32v erf_f32(f32v x) { /* odd rational in x for |x| <= 4, where erf is 1 to the last bit */
    f32v c = max_raw(splat_f32(-4.0f), min_raw(splat_f32(4.0f), x)), s = c * c;
    f32v p = splat_f32(-2.72614225801306e-10f);
    p = p * s + 2.77068142495902e-08f;
    p = p * s + -2.10102402082508e-06f;
    p = p * s + -5.69250639462346e-05f;
    p = p * s + -7.34990630326855e-04f;
    p = p * s + -2.95459980854025e-03f;
    p = p * s + -1.60960333262415e-02f;
    f32v q = splat_f32(-1.45660718464996e-05f);
    q = q * s + -2.13374055278905e-04f;
    q = q * s + -1.68282697438203e-03f;
    q = q * s + -7.37332916720468e-03f;
    q = q * s + -1.42647390514189e-02f;
    return p * c / q;
}
#if defined(__AVX512DQ__)
/* The terms of c Q(c), Q the upper tail of the normal distribution, around c = 3/16 i, in powers of 16/3 c - i. */
static const float tail_terms[5][32] __attribute__((aligned(64))) = {
    {0.0f, 0.0798064321f, 0.132686332f, 0.161374331f, 0.169970512f, 0.163360044f, 0.146581337f, 0.124261916f,
     0.100210801f, 0.0772092417f, 0.056993179f, 0.0403839126f, 0.0275050625f, 0.0180243552f, 0.0113726771f,
     0.00691284705f, 0.00404969417f, 0.00228716596f, 0.00124563975f, 0.000654324191f, 0.000331564836f,
     0.000162096898f, 7.64640499e-05f, 3.48059511e-05f, 1.52895318e-05f, 6.48194009e-06f, 2.65220706e-06f,
     1.04741673e-06f, 3.99260671e-07f, 1.4690329e-07f, 5.21741725e-08f, 0.0f},
    {0.09375f, 0.0660255551f, 0.0401971936f, 0.0178723112f, 0.000145280326f, -0.012516682f, -0.0202624574f,
     -0.0237380099f, -0.0239004865f, -0.0218156856f, -0.0184833985f, -0.0147187561f, -0.0110981092f, -0.00796104502f,
     -0.00545036187f, -0.00356942927f, -0.00223980891f, -0.00134835718f, -0.000779470778f, -0.000433037436f,
     -0.000231337559f, -0.000118898606f, -5.88158546e-05f, -2.8012164e-05f, -1.28486599e-05f, -5.67719189e-06f,
     -2.41693238e-06f, -9.91582624e-07f, -3.92098087e-07f, -1.49458856e-07f, -5.49239836e-08f, 0.0f},
    {-0.0140253305f, -0.0135386679f, -0.0121538201f, -0.0100788977f, -0.00760931289f, -0.00506609678f,
     -0.00273511675f, -0.000821936817f, 0.000569158408f, 0.00143133022f, 0.00183259184f, 0.0018840608f,
     0.00170864479f, 0.00141701743f, 0.00109387655f, 0.000793989049f, 0.000545326329f, 0.000355903408f,
     0.000221378083f, 0.000131526394f, 7.47626837e-05f, 4.07106381e-05f, 2.12580908e-05f, 1.06534753e-05f,
     5.12746146e-06f, 2.37138261e-06f, 1.05437334e-06f, 4.50874296e-07f, 1.85496134e-07f, 7.34450296e-08f,
     2.79931172e-08f, 0.0f},
    {1.33829559e-07f, 0.000319371873f, 0.00058987044f, 0.00077357702f, 0.000851294259f, 0.000825073861f,
     0.0007152381f, 0.000553361373f, 0.000373713759f, 0.000205732795f, 6.92796821e-05f, -2.67268406e-05f,
     -8.28422126e-05f, -0.000105969237f, -0.000105864543f, -9.22542604e-05f, -7.30344545e-05f, -5.356974e-05f,
     -3.68126821e-05f, -2.38662742e-05f, -1.46659995e-05f, -8.57069426e-06f, -4.77482672e-06f, -2.54064298e-06f,
     -1.2930202e-06f, -6.30154432e-07f, -2.94360149e-07f, -1.31898759e-07f, -5.67304426e-08f, -2.34339854e-08f,
     -9.30115363e-09f, 0.0f},
    {8.18660192e-05f, 7.563705e-05f, 5.80185006e-05f, 3.30342737e-05f, 5.92212837e-06f, -1.81653359e-05f,
     -3.54161893e-05f, -4.40798067e-05f, -4.45126752e-05f, -3.86554748e-05f, -2.92110435e-05f, -1.88289177e-05f,
     -9.52794198e-06f, -2.44930175e-06f, 2.0939799e-06f, 4.38355301e-06f, 5.00813167e-06f, 4.60700721e-06f,
     3.72910495e-06f, 2.74926538e-06f, 1.87896694e-06f, 1.20276775e-06f, 7.25883126e-07f, 4.1489011e-07f,
     2.25315162e-07f, 1.1654474e-07f, 5.75244741e-08f, 2.71339449e-08f, 1.22459429e-08f, 5.2931779e-09f,
     2.19301066e-09f, 0.0f},
};
#define TILE_TAIL(power) (f32v)_mm512_permutex2var_ps(_mm512_loadu_ps(tail_terms[power]), piece, _mm512_loadu_ps(tail_terms[power] + 16))
/* x (1 + erf(x / sqrt(2))) / 2, as what x is above 0 less c Q(c) for c = |x|, which is 0 from 5.9 on. Its error is up to
 * 1e-7 |x|, as that of the formula in single precision; NaN for minus infinity, as there. */
TILE_INLINE f32v gelu_f32(f32v x) {
    const f32v c = min_raw(splat_f32(31.4999962f), abs_f32(x * 5.33333333f)); /* second operand: NaN goes through */
    const __m512i piece = (__m512i)(c + 12582912.0f); /* to the nearest: 1.5 * 2^23 leaves it in the lowest bits */
    f32v r;
    TILE_ABOVE_NEAREST(r, c);
    f32v p = TILE_TAIL(4);
    p = p * r + TILE_TAIL(3);
    p = p * r + TILE_TAIL(2);
    p = p * r + TILE_TAIL(1);
    p = p * r + TILE_TAIL(0);
    return (x - min_raw(splat_f32(0.0f), x)) - p;
}
#else
TILE_INLINE f32v gelu_f32(f32v x) { const f32v half = x * 0.5f; return half * erf_f32(x * 0.707106781f) + half; }
#endif
TILE_INLINE f32v sqrt_f32(f32v x) { return sqrt_f32v(x); }
TILE_INLINE f32v floor_f32(f32v x) { return floor_f32v(x); }
TILE_INLINE f32v ceil_f32(f32v x) { return ceil_f32v(x); }
TILE_INLINE f32v round_f32(f32v x) { return round_f32v(x); }

#endif
