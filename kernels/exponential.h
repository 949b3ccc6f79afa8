// exp(x), lane by lane: 2^n times a polynomial for 2^f, where n + f = x / ln 2 and |f| <= 1/2.
#pragma once

#include <cmath>

#include "vectors.h"

namespace ringmpi {

// Coefficients of 2^f on [-1/2, 1/2], found by Remez exchange for the smallest relative error with the first one held at 1,
// so that exp(0) is 1 exactly: a row that sees one key then gives its value. Errors 2.6e-9 and 1.8e-17, far below rounding.
template <class T> struct Exponential;

template <> struct Exponential<float> {
    static constexpr float POWER_OF_TWO[] = {1.0f,
                                             0.693147215f,
                                             0.2402265278f,
                                             0.05550310551f,
                                             0.009617692976f,
                                             0.001340664385f,
                                             0.0001559467702f};
    static constexpr float LEAST = -87.3f;      // ln of the smallest normal number is -87.34
    static constexpr float GREATEST = 88.72f;    // ln of the largest number is 88.7228
    static constexpr float ROUNDER = 12582912.0f; // 1.5 * 2^23: adding it leaves a whole number in the low bits
    static constexpr int MANTISSA = 23;
};

template <> struct Exponential<double> {
    static constexpr double POWER_OF_TWO[] = {1.0,
                                              0.6931471805599456968,
                                              0.2402265069591009801,
                                              0.05550410866479039453,
                                              0.009618129107607002617,
                                              0.001333355815343996974,
                                              0.000154035304415718501,
                                              0.00001525272738518977478,
                                              1.321544267545285518e-6,
                                              1.018064766057306934e-7,
                                              7.072570394540799434e-9,
                                              4.078071786092870417e-10};
    static constexpr double LEAST = -708.3;   // ln of the smallest normal number is -708.40
    static constexpr double GREATEST = 709.78; // ln of the largest number is 709.7827
    static constexpr double ROUNDER = 6755399441055744.0; // 1.5 * 2^52
    static constexpr int MANTISSA = 52;
};

// 0 below the normal numbers, infinity above all of them, NaN for NaN. x / ln 2 is taken in one rounding: its error grows
// with |x| as fast as exp(x) falls, so that it stays below a third of an epsilon of the largest weight, which is 1.
template <class T> inline Vector<T> exponential(Vector<T> given) {
    Vector<T> x = given;
    using E = Exponential<T>;
    using I = Integer<T>;
    constexpr T INVERSE = static_cast<T>(1.4426950408889634074); // 1 / ln 2
    const Vector<I> tiny = x < broadcast(E::LEAST), huge = x > broadcast(E::GREATEST), number = x == x;
    x = tiny | huge | ~number ? Vector<T>{} : x; // Beyond, and for a NaN, the bits below would overflow.
    const Vector<T> shifted = x * broadcast(INVERSE) + broadcast(E::ROUNDER);
    const Vector<T> n = shifted - broadcast(E::ROUNDER);
    const Vector<T> f = x * broadcast(INVERSE) - n;
    constexpr int DEGREE = sizeof(E::POWER_OF_TWO) / sizeof(T) - 1;
    Vector<T> power = broadcast(E::POWER_OF_TWO[DEGREE]);
    for (int i = DEGREE - 1; i >= 0; --i) power = power * f + broadcast(E::POWER_OF_TWO[i]);
    Vector<T> result = (Vector<T>)((Vector<I>)power + ((Vector<I>)shifted << E::MANTISSA));
    result = huge ? broadcast(static_cast<T>(INFINITY)) : result;
    result = tiny ? Vector<T>{} : result;
    return number ? result : given;
}

#if defined(__AVX512F__)
// The same, with the instructions that AVX-512 has for rounding and scaling.
template <> inline Vector<float> exponential<float>(Vector<float> given) {
    using E = Exponential<float>;
    const __m512 x = (__m512)given;
    // "Not less" holds for NaN too, which must stay.
    const __mmask16 normal = _mm512_cmp_ps_mask(x, _mm512_set1_ps(E::LEAST), _CMP_NLT_UQ);
    const __m512 t = _mm512_mul_ps(x, _mm512_set1_ps(1.4426950408889634074f));
    const __m512 n = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 f = _mm512_fmsub_ps(x, _mm512_set1_ps(1.4426950408889634074f), n);
    __m512 power = _mm512_set1_ps(E::POWER_OF_TWO[6]);
    for (int i = 5; i >= 0; --i) power = _mm512_fmadd_ps(power, f, _mm512_set1_ps(E::POWER_OF_TWO[i]));
    return (Vector<float>)_mm512_maskz_scalef_ps(normal, power, n);
}

template <> inline Vector<double> exponential<double>(Vector<double> given) {
    using E = Exponential<double>;
    const __m512d x = (__m512d)given;
    const __mmask8 normal = _mm512_cmp_pd_mask(x, _mm512_set1_pd(E::LEAST), _CMP_NLT_UQ);
    const __m512d t = _mm512_mul_pd(x, _mm512_set1_pd(1.4426950408889634074));
    const __m512d n = _mm512_roundscale_pd(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512d f = _mm512_fmsub_pd(x, _mm512_set1_pd(1.4426950408889634074), n);
    __m512d power = _mm512_set1_pd(E::POWER_OF_TWO[11]);
    for (int i = 10; i >= 0; --i) power = _mm512_fmadd_pd(power, f, _mm512_set1_pd(E::POWER_OF_TWO[i]));
    return (Vector<double>)_mm512_maskz_scalef_pd(normal, power, n);
}
#endif

} // namespace ringmpi
