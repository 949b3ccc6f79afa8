// What a schedule does between attends, item by item: begin, add, merge and finish results. Arrays have no gaps.
#pragma once

#include "number.cuh"
#include "sight.cuh"
#include "softmax.cuh"

namespace ringmpi {

__device__ inline void narrow(double value, double &narrowed) { narrowed = value; }
__device__ inline void narrow(float value, float &narrowed) { narrowed = value; }

// To the nearest, of two the even one; a NaN stays one.
__device__ inline void narrow(float value, BFloat16 &narrowed) {
    const Bits32 bits = bits_of(value);
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    const Bits32 rounded = is_nan ? bits | 0x400000u : bits + 0x7fffu + (bits >> 16 & 1u);
    narrowed.bits = static_cast<Bits16>(rounded >> 16);
}

__device__ inline void narrow(float value, Float16 &narrowed) {
    const Bits32 bits = bits_of(value), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    Bits32 rounded;
    if (magnitude > 0x7f800000u)
        rounded = 0x7e00u; // NaN
    else if (magnitude >= 0x47800000u)
        rounded = 0x7c00u; // 2^16 and more
    else if (magnitude >= 0x38800000u)
        rounded = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13; // may carry up to infinity
    else
        rounded = bits_of(from_bits(magnitude) + 0.5f) - bits_of(0.5f); // below 2^-14; the last bit of 0.5f is 2^-24
    narrowed.bits = static_cast<Bits16>(sign | rounded);
}

__device__ inline float logarithm(float x) { return logf(x); }
__device__ inline double logarithm(double x) { return log(x); }

// Do something about every item, in whatever number of blocks.
template <class Doing> __device__ inline void each(Int64 items, Doing doing) {
    const Int64 threads = static_cast<Int64>(gridDim.x) * blockDim.x;
    for (Int64 at = static_cast<Int64>(blockIdx.x) * blockDim.x + threadIdx.x; at < items; at += threads) doing(at);
}

} // namespace ringmpi

using namespace ringmpi;
using Raw = RINGMPI_RAW;
using State = StateOf<Raw>::type;

extern "C" __global__ void ringmpi_fill(State *total, Int64 items, State value) {
    each(items, [&](Int64 at) { total[at] = value; });
}

extern "C" __global__ void ringmpi_add(State *total, const State *other, Int64 items) {
    each(items, [&](Int64 at) { total[at] += other[at]; });
}

extern "C" __global__ void ringmpi_round(const State *total, Raw *rounded, Int64 items) {
    each(items, [&](Int64 at) { narrow(total[at], rounded[at]); });
}

// Both states are as they were; then come their rows.
extern "C" __global__ void ringmpi_merge_acc(State *acc, const State *row_max, const State *other_acc, const State *other_row_max,
                                             Int64 items, int head_dim) {
    each(items, [&](Int64 at) {
        const State mine = row_max[at / head_dim], others = other_row_max[at / head_dim];
        const State shift = finite_shift(larger(mine, others));
        acc[at] = acc[at] * exponential(mine - shift) + exponential(others - shift) * other_acc[at];
    });
}

extern "C" __global__ void ringmpi_merge_rows(State *row_max, State *row_sum, const State *other_row_max,
                                              const State *other_row_sum, Int64 rows) {
    each(rows, [&](Int64 at) {
        const State mine = row_max[at], others = other_row_max[at], most = larger(mine, others);
        const State shift = finite_shift(most);
        row_sum[at] = row_sum[at] * exponential(mine - shift) + exponential(others - shift) * other_row_sum[at];
        row_max[at] = most;
    });
}

// The largest score adds exp(0) = 1 to a sum, so a sum of 0 means that no key was seen.
extern "C" __global__ void ringmpi_out(const State *acc, const State *row_sum, Raw *out, Int64 items, int head_dim) {
    each(items, [&](Int64 at) {
        const State sum = row_sum[at / head_dim];
        narrow(sum == State(0) ? State(0) : acc[at] / sum, out[at]);
    });
}

extern "C" __global__ void ringmpi_lse(const State *row_max, const State *row_sum, State *lse, Int64 rows) {
    each(rows, [&](Int64 at) {
        lse[at] = row_sum[at] == State(0) ? -Infinite<State>::value() : logarithm(row_sum[at]) + row_max[at];
    });
}

// A warp sums up a row, always in the same order.
extern "C" __global__ void ringmpi_delta(const Raw *dout, const Raw *out, State *delta, Int64 rows, int head_dim) {
    const Int64 warps = static_cast<Int64>(gridDim.x) * (blockDim.x / WARP);
    const int lane = threadIdx.x % WARP;
    for (Int64 row = static_cast<Int64>(blockIdx.x) * (blockDim.x / WARP) + threadIdx.x / WARP; row < rows; row += warps) {
        State sum = 0;
        for (int at = lane; at < head_dim; at += WARP)
            sum += widen(dout[row * head_dim + at]) * widen(out[row * head_dim + at]);
        for (int apart = WARP / 2; apart > 0; apart /= 2) sum += __shfl_xor_sync(WHOLE_WARP, sum, apart);
        if (lane == 0) delta[row] = sum;
    }
}
