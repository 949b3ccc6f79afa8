// Vectors as wide as the machine has them, from the compiler's own extensions: AVX-512, AVX2, NEON and others from one source.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ringmpi {

#if defined(__AVX512F__)
constexpr int VECTOR_BYTES = 64;
constexpr int VECTOR_REGISTERS = 32;
#elif defined(__AVX__)
constexpr int VECTOR_BYTES = 32;
constexpr int VECTOR_REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int VECTOR_BYTES = 16;
constexpr int VECTOR_REGISTERS = 32;
#else
constexpr int VECTOR_BYTES = 16;
constexpr int VECTOR_REGISTERS = 16;
#endif

template <class T> struct VectorOf {
    typedef T type __attribute__((vector_size(VECTOR_BYTES)));
};
template <class T> using Vector = typename VectorOf<T>::type;

// Lanes of a vector.
template <class T> constexpr int WIDTH = VECTOR_BYTES / static_cast<int>(sizeof(T));

// Integers as wide as T: what a comparison of vectors of T gives, lane by lane 0 or -1.
template <class T> struct IntegerOf;
template <> struct IntegerOf<float> {
    using type = int32_t;
};
template <> struct IntegerOf<double> {
    using type = int64_t;
};
template <class T> using Integer = typename IntegerOf<T>::type;

template <class T> inline Vector<T> load(const T *at) {
    Vector<T> vector;
    std::memcpy(&vector, at, sizeof vector);
    return vector;
}

template <class T> inline void store(T *at, Vector<T> vector) { std::memcpy(at, &vector, sizeof vector); }

template <class T> inline Vector<T> broadcast(T value) { return value - Vector<T>{}; }

// The larger one lane by lane; `b` where either is NaN, as the instruction of x86 has it.
template <class T> inline Vector<T> larger(Vector<T> a, Vector<T> b) { return a > b ? a : b; }
#if defined(__AVX512F__)
template <> inline Vector<float> larger<float>(Vector<float> a, Vector<float> b) {
    return (Vector<float>)_mm512_max_ps((__m512)a, (__m512)b);
}
template <> inline Vector<double> larger<double>(Vector<double> a, Vector<double> b) {
    return (Vector<double>)_mm512_max_pd((__m512d)a, (__m512d)b);
}
#elif defined(__AVX__)
template <> inline Vector<float> larger<float>(Vector<float> a, Vector<float> b) {
    return (Vector<float>)_mm256_max_ps((__m256)a, (__m256)b);
}
template <> inline Vector<double> larger<double>(Vector<double> a, Vector<double> b) {
    return (Vector<double>)_mm256_max_pd((__m256d)a, (__m256d)b);
}
#endif

// sum + factor * x, in every lane.
inline Vector<float> multiply_add(Vector<float> sum, Vector<float> factor, Vector<float> x) { return sum + factor * x; }
inline Vector<double> multiply_add(Vector<double> sum, Vector<double> factor, Vector<double> x) { return sum + factor * x; }

// Two bfloat16 numbers, which are multiplied with two others and added up at once.
using Pair = int32_t;
#if defined(__AVX512BF16__)
#define RINGMPI_DOT_PRODUCTS 1
inline Vector<float> multiply_add(Vector<float> sum, Vector<Pair> factor, Vector<Pair> x) {
    return (Vector<float>)_mm512_dpbf16_ps((__m512)sum, (__m512bh)factor, (__m512bh)x);
}
#else
#define RINGMPI_DOT_PRODUCTS 0
#endif

// Whether any lane of a comparison's result is set.
template <class I> inline bool any(Vector<I> set) {
    I found = 0;
    for (int lane = 0; lane < WIDTH<I>; ++lane) found |= set[lane];
    return found != 0;
}

// Call f with 0, 1, .. N - 1, each a constant of its own, so that arrays indexed by it live in registers.
template <int... I, class F> inline __attribute__((always_inline)) void each_of(std::integer_sequence<int, I...>, F f) {
    (f(std::integral_constant<int, I>{}), ...);
}
template <int N, class F> inline __attribute__((always_inline)) void each(F f) {
    each_of(std::make_integer_sequence<int, N>{}, f);
}

// One stage of a transposition: exchange the lanes of two rows whose index has the bit STEP set in one and not in the other.
template <class T, int STEP, size_t... LANE>
inline void exchange(Vector<T> &a, Vector<T> &b, std::index_sequence<LANE...>) {
    constexpr int W = WIDTH<T>;
    const Vector<T> low = __builtin_shufflevector(a, b, ((LANE & STEP) ? W + static_cast<int>(LANE) - STEP : static_cast<int>(LANE))...);
    const Vector<T> high = __builtin_shufflevector(a, b, ((LANE & STEP) ? W + static_cast<int>(LANE) : static_cast<int>(LANE) + STEP)...);
    a = low;
    b = high;
}

template <class T, int STEP> inline void exchange_rows(Vector<T> *rows) {
    if constexpr (STEP < WIDTH<T>) {
        for (int row = 0; row < WIDTH<T>; ++row)
            if ((row & STEP) == 0) exchange<T, STEP>(rows[row], rows[row + STEP], std::make_index_sequence<WIDTH<T>>{});
        exchange_rows<T, 2 * STEP>(rows);
    }
}

// Transpose a square block of WIDTH rows, with strides in elements.
template <class T> inline void transpose_block(const T *from, int64_t from_stride, T *to, int64_t to_stride) {
    Vector<T> rows[WIDTH<T>];
    for (int row = 0; row < WIDTH<T>; ++row) rows[row] = load(from + row * from_stride);
    exchange_rows<T, 1>(rows);
    for (int row = 0; row < WIDTH<T>; ++row) store(to + row * to_stride, rows[row]);
}

// Transpose [rows][columns]; both are multiples of WIDTH.
template <class T>
inline void transpose(const T *from, int64_t from_stride, int64_t rows, int64_t columns, T *to, int64_t to_stride) {
    for (int64_t row = 0; row < rows; row += WIDTH<T>)
        for (int64_t column = 0; column < columns; column += WIDTH<T>)
            transpose_block(from + row * from_stride + column, from_stride, to + column * to_stride + row, to_stride);
}

} // namespace ringmpi
