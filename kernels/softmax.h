// From scores to the weights of an online softmax, in lanes.
#pragma once

#include "exponential.h"

namespace ringmpi {

template <class T, int L> struct Softmax {
    T shift[L];   // taken from the scores: the largest one so far
    T row_sum[L]; // of the weights so far

    // The weights of some lanes for a score each.
    Vector<T> weights(const T *scores, int64_t lane) const {
        return exponential<T>(load(scores) - load(shift + lane));
    }

    // Turn the scores of a tile into weights, and add them up.
    void weigh(T *tile, int64_t keys) {
        for (int64_t lane = 0; lane < L; lane += WIDTH<T>) {
            Vector<T> sum = load(row_sum + lane);
            for (int64_t key = 0; key < keys; ++key) {
                const Vector<T> of_key = weights(tile + key * L + lane, lane);
                store(tile + key * L + lane, of_key);
                sum += of_key;
            }
            store(row_sum + lane, sum);
        }
    }
};

} // namespace ringmpi
