// The online softmax of the rows that a thread shares with the lanes beside it.
#pragma once

#include "sight.cuh"

namespace ringmpi {

// What is subtracted from scores: 0 where no key was seen, since -inf - -inf is NaN.
template <class T> __device__ inline T finite_shift(T row_max) { return row_max == -Infinite<T>::value() ? T(0) : row_max; }

template <class Unit> class Softmax {
    using T = typename Unit::State;
    static constexpr int ROWS = Unit::ROWS_EACH, COLUMNS = Unit::COLUMNS_EACH;

  public:
    T factor[ROWS]; // what sums over the keys before are to be multiplied by

    __device__ void load(int i, T row_max, T row_sum) {
        row_max_[i] = row_max;
        // Each lane sums its own columns, the first one on top of what there was.
        row_sum_[i] = threadIdx.x % Unit::LANES == 0 ? row_sum : T(0);
    }

    // Turn scores, -inf where hidden, into weights.
    __device__ void weigh(T (&scores)[ROWS][COLUMNS]) {
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            T top = scores[i][0];
#pragma unroll
            for (int j = 1; j < COLUMNS; ++j) top = larger(top, scores[i][j]);
            for (int apart = Unit::LANES / 2; apart > 0; apart /= 2)
                top = larger(top, __shfl_xor_sync(WHOLE_WARP, top, apart));
            top = larger(top, row_max_[i]);
            const T shift = finite_shift(top);
            factor[i] = exponential(row_max_[i] - shift);
            row_max_[i] = top;
            T sum = 0;
#pragma unroll
            for (int j = 0; j < COLUMNS; ++j) sum += scores[i][j] = exponential(scores[i][j] - shift);
            row_sum_[i] = row_sum_[i] * factor[i] + sum;
        }
    }

    __device__ T row_max(int i) const { return row_max_[i]; }

    // Over all lanes of the row, which call together.
    __device__ T row_sum(int i) const {
        T sum = row_sum_[i];
        for (int apart = Unit::LANES / 2; apart > 0; apart /= 2) sum += __shfl_xor_sync(WHOLE_WARP, sum, apart);
        return sum;
    }

  private:
    T row_max_[ROWS], row_sum_[ROWS];
};

} // namespace ringmpi
