// Pairs of bfloat16 numbers, which units with dot products of them multiply: two of a row, or one of each of two rows.
#pragma once

#include "scratch.h"
#include "strip.h"

#if RINGMPI_DOT_PRODUCTS

namespace ringmpi {

inline Pair pair(BFloat16 first, BFloat16 second) {
    return static_cast<Pair>(static_cast<uint32_t>(first.bits) | static_cast<uint32_t>(second.bits) << 16);
}

// Two rows of 16 numbers as 16 pairs.
inline __m512i interleave(const BFloat16 *first, const BFloat16 *second) {
    const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(first)));
    const __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(second)));
    return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}

// 32 float32 numbers of a row, rounded to the nearest bfloat16 numbers.
inline __m512i rounded_row(__m512 low, __m512 high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }

// The same of two rows of 16, as 16 pairs.
inline __m512i rounded_pairs(__m512 first, __m512 second) {
    alignas(64) static constexpr uint16_t BY_TURNS[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                          8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return _mm512_permutexvar_epi16(_mm512_load_si512(BY_TURNS), rounded_row(first, second));
}

// Rows of a strip, as right factors: pairs of numbers [width / 2][L], and pairs of rows [L / 2][width].
template <int L> class PairedRows {
  public:
    static int64_t nbytes(int64_t width) {
        return Scratch::nbytes_of<BFloat16>(L * width) + 2 * Scratch::nbytes_of<Pair>(L * width / 2);
    }

    PairedRows(int64_t width, Scratch &scratch)
        : width_(width), rows_(scratch.take<BFloat16>(L * width)), by_number_(scratch.take<Pair>(L * width / 2)),
          by_row_(scratch.take<Pair>(L * width / 2)) {}

    void load(const Problem &problem, const Tensor &tensor, const Strip<L> &strip, double) {
        const int64_t head_dim = problem.task.head_dim;
        for (int64_t lane = 0; lane < L; ++lane) {
            BFloat16 *row = rows_ + lane * width_;
            const int64_t filled = lane < strip.count ? head_dim : 0;
            if (filled)
                std::memcpy(row, strip.template in<const BFloat16>(tensor, lane), static_cast<size_t>(filled) * sizeof(BFloat16));
            std::memset(row + filled, 0, static_cast<size_t>(width_ - filled) * sizeof(BFloat16));
        }
        transpose(reinterpret_cast<const Pair *>(rows_), width_ / 2, L, width_ / 2, by_number_, L);
        for (int64_t lane = 0; lane < L; lane += 2)
            for (int64_t d = 0; d < width_; d += WIDTH<Pair>)
                _mm512_storeu_si512(by_row_ + lane / 2 * width_ + d,
                                    interleave(rows_ + lane * width_ + d, rows_ + (lane + 1) * width_ + d));
    }

    const BFloat16 *rows() const { return rows_; }
    const Pair *by_number() const { return by_number_; }
    const Pair *by_row() const { return by_row_; }

  private:
    int64_t width_;
    BFloat16 *rows_;
    Pair *by_number_, *by_row_;
};

} // namespace ringmpi

#endif
