// The three products of a tile, with vector units. A tile of weights is [keys][lanes]: queries lie in the lanes, so that the
// softmax over keys is work within lanes, and k and v are read as they lie, one number at a time for all lanes.
#pragma once

#include "vectors.h"

namespace ringmpi {

// A block of ROWS x COLUMNS vectors of sums stays in registers, with COLUMNS more and a broadcast to feed it: 29 of 32 registers,
// or 15 of 16. Two multiply-adds a cycle of latency 4 need at least 8 sums under way.
constexpr int ROWS = 6;
constexpr int COLUMNS = VECTOR_REGISTERS == 32 ? 4 : 2;

// Numbers in memory: [row][term] with a stride between rows, or [term][row] with a stride between terms.
template <class T> struct ByRow {
    const T *at;
    int64_t stride;

    T get(int64_t row, int64_t term) const { return at[row * stride + term]; }
    ByRow from(int64_t row) const { return {at + row * stride, stride}; }
};
template <class T> struct ByTerm {
    const T *at;
    int64_t stride;

    T get(int64_t row, int64_t term) const { return at[term * stride + row]; }
    ByTerm from(int64_t row) const { return {at + row, stride}; }
};

// Have numbers that are read soon on their way to the cache, by its lines of 64 bytes.
template <class Number> inline void fetch(const Number *at, int64_t count) {
    for (int64_t i = 0; i < count; i += 64 / static_cast<int64_t>(sizeof(Number))) __builtin_prefetch(at + i);
}

// out[r][c] (+)= sum over terms of left(r, term) * right[term][c], for R rows and C vectors of columns. Factors are of a type F
// as wide as T: T itself, or pairs.
template <int R, int C, bool ADD, class Left, class F, class T>
__attribute__((noinline)) void multiply_block(Left left, const F *right, int64_t right_row, int64_t terms, T *out,
                                              int64_t out_row) {
    Vector<T> sums[R * C];
    each<R * C>([&](auto i) { sums[i] = Vector<T>{}; });
    for (int64_t term = 0; term < terms; ++term) {
        Vector<F> x[C];
        each<C>([&](auto c) { x[c] = load(right + term * right_row + c * WIDTH<F>); });
        each<R>([&](auto r) {
            const Vector<F> factor = broadcast(left.get(r, term));
            each<C>([&](auto c) { sums[r * C + c] = multiply_add(sums[r * C + c], factor, x[c]); });
        });
    }
    // Added as a whole: in one chain of additions over all tiles the error would grow with its length.
    each<R * C>([&](auto i) {
        T *at = out + i / C * out_row + i % C * WIDTH<T>;
        store(at, ADD ? load(at) + sums[i] : sums[i]);
    });
}

template <int C, bool ADD, int R = ROWS, class Left, class F, class T>
inline void multiply_rows(int64_t rows, Left left, const F *right, int64_t right_row, int64_t terms, T *out, int64_t out_row) {
    if constexpr (R > 0) {
        if (rows < R)
            multiply_rows<C, ADD, R - 1>(rows, left, right, right_row, terms, out, out_row);
        else
            multiply_block<R, C, ADD>(left, right, right_row, terms, out, out_row);
    }
}

template <bool ADD, int C = COLUMNS, class Left, class F, class T>
inline void multiply_columns(int64_t vectors, int64_t rows, Left left, const F *right, int64_t right_row, int64_t terms,
                             T *out, int64_t out_row) {
    if constexpr (C > 0) {
        if (vectors < C)
            multiply_columns<ADD, C - 1>(vectors, rows, left, right, right_row, terms, out, out_row);
        else
            multiply_rows<C, ADD>(rows, left, right, right_row, terms, out, out_row);
    }
}

// out[row][column] (+)= sum over terms of left(row, term) * right[term][column]; `columns` is a multiple of WIDTH, and of whole
// blocks where that is said, which spares the compiler the smaller ones.
template <bool ADD, bool WHOLE = false, class Left, class F, class T>
inline void multiply(int64_t rows, int64_t columns, int64_t terms, Left left, const F *right, int64_t right_row, T *out,
                     int64_t out_row) {
    for (int64_t row = 0; row < rows; row += ROWS)
        for (int64_t column = 0; column < columns; column += COLUMNS * WIDTH<T>) {
            T *at = out + row * out_row + column;
            if constexpr (WHOLE)
                multiply_rows<COLUMNS, ADD>(rows - row, left.from(row), right + column, right_row, terms, at, out_row);
            else
                multiply_columns<ADD>((columns - column) / WIDTH<T>, rows - row, left.from(row), right + column, right_row, terms, at,
                                      out_row);
        }
}

// The same for L columns, as many as a tile has lanes.
template <bool ADD, int L, class Left, class F, class T>
inline void multiply_lanes(int64_t rows, int64_t terms, Left left, const F *right, T *out) {
    static_assert(L % (COLUMNS * WIDTH<T>) == 0, "lanes are whole blocks of columns");
    multiply<ADD, true>(rows, L, terms, left, right, L, out, L);
}

// tile[key][lane] = sum over d of rows[key][d] * lanes[d][lane], for L lanes
template <int L, class T>
inline void scores(ByRow<T> rows, int64_t keys, const T *lanes, int64_t head_dim, T *tile) {
    multiply_lanes<false, L>(keys, head_dim, rows, lanes, tile);
}

// sums[d][lane] += sum over keys of rows[key][d] * tile[key][lane]
template <int L, class T> inline void gather(ByTerm<T> rows, int64_t keys, const T *tile, int64_t head_dim, T *sums) {
    multiply_lanes<true, L>(head_dim, keys, rows, tile, sums);
}

// sums[key][d] += sum over lanes of tile[key][lane] * queries[lane][d]; `width` is head_dim up to a multiple of WIDTH.
template <int L, class T> inline void scatter(const T *tile, int64_t keys, const T *queries, int64_t width, T *sums) {
    multiply<true>(keys, width, L, ByRow<T>{tile, L}, queries, width, sums, width);
}

} // namespace ringmpi
