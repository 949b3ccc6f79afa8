// From global memory to tiles in shared memory.
#pragma once

#include <ptx.cuh>

namespace ringmpi {

// The tokens of one head of a tensor [batch, heads, tokens, head_dim].
template <class Raw, class Index> struct Rows {
    const Raw *data;
    Index count;
    int width; // head_dim

    // Another head, so many further on.
    __device__ Rows further(Index heads) const { return {data + heads * count * width, count, width}; }

    // Whether every row begins at a multiple of 16 bytes.
    __device__ bool aligned() const {
        return reinterpret_cast<Bits64>(data) % 16 == 0 && width * static_cast<int>(sizeof(Raw)) % 16 == 0;
    }
};

// How many numbers fill 16 bytes.
template <class Raw> constexpr int RUN = 16 / static_cast<int>(sizeof(Raw));

template <class Raw> struct __align__(16) Run {
    Raw at[RUN<Raw>];
};

template <class Raw> __device__ inline Run<Raw> load_run(const Raw *shared) { return *reinterpret_cast<const Run<Raw> *>(shared); }

// Products over head_dim go in steps of so many numbers; what is missing to a multiple of it is zeros, in shared memory alone.
constexpr int STEP = 16;

// Copy TOKENS rows from `first` on, WIDTH numbers from `column` on, with zeros for what lies beyond the tensor. Rows of a tile are
// `stride` apart. Ends with the copies of this thread under way, in no group yet.
template <int TOKENS, int WIDTH, int THREADS, class Raw, class Index>
__device__ inline void load_tile(Raw *tile, int stride, const Rows<Raw, Index> &from, Index first, int column) {
    constexpr int LENGTH = RUN<Raw>, RUNS = WIDTH / LENGTH, ROWS_AT_ONCE = THREADS / RUNS;
    static_assert(WIDTH % LENGTH == 0 && THREADS % RUNS == 0, "whole runs, and the same one of a row for a thread");
    const int run = threadIdx.x % RUNS * LENGTH, d = column + run;
    if (d >= (from.width + STEP - 1) / STEP * STEP) return; // nobody reads it
    const int count = least(LENGTH, from.width - d);
    const bool whole = from.aligned() && count == LENGTH;
    int row = threadIdx.x / RUNS;
    const Raw *source = from.data + (first + row) * from.width + d;
#pragma unroll 2
    for (; row < TOKENS; row += ROWS_AT_ONCE, source += ROWS_AT_ONCE * from.width) {
        Raw *to = tile + row * stride + run;
        const bool inside = first + row < from.count;
        if (whole && inside) {
            copy_async(to, source);
            continue;
        }
#pragma unroll 1
        for (int i = 0; i < LENGTH; ++i) to[i] = inside && i < count ? source[i] : Raw{};
    }
}

} // namespace ringmpi
