// From scores, and products of dout with values, to weights and their changes in the backward pass, in lanes.
#pragma once

#include "exponential.h"
#include "strip.h"

namespace ringmpi {

// p = exp(s - lse) and ds = p (dout . v - delta), for a key.
template <class T> struct Slope {
    Vector<T> weights, changes;
};

template <class T, int L> struct Slopes {
    T lse[L], delta[L];
    T scale; // of the scores, where q does not have it already

    // What all keys have in common, of a vector of lanes.
    struct Lanes {
        Vector<T> shift, delta, scale;

        Slope<T> of(Vector<T> scores, Vector<T> rises) const {
            const Vector<T> weights = exponential<T>(scores * scale - shift);
            return {weights, weights * (rises - delta)};
        }
    };

    Lanes lanes(int64_t lane) const { return {finite_shift<T>(load(lse + lane)), load(delta + lane), broadcast(scale)}; }

    // Turn the scores of a tile into weights, and the products into changes.
    void weigh(T *scores, T *rises, int64_t keys) const {
        for (int64_t lane = 0; lane < L; lane += WIDTH<T>) {
            const Lanes of_lanes = lanes(lane);
            for (int64_t at = lane; at < keys * L; at += L) {
                const Slope<T> slope = of_lanes.of(load(scores + at), load(rises + at));
                store(scores + at, slope.weights);
                store(rises + at, slope.changes);
            }
        }
    }
};

} // namespace ringmpi
