// The products of a tile of 16-bit numbers on tensor cores, sm_80 and newer.
//
// Each of 4 warps has 16 rows of the tile, and lanes hold its numbers as mma.m16n8k16 lays them out. The rows stay in shared
// memory. Of the columns there are two tiles: while one is multiplied the other one is on its way, so "first" and "last" take turns.
//
//     first(x)   x = rows @ columns'              then columns of the next tile are sent for
//     second(x)  x = last_rows @ last_columns'
//     absorb(x)  sums += x @ last_columns         then, in `close`, all are done with them
//
// Tensor cores cut where others round, so their sums are kept for a tile only, and added up with ordinary ones.
#pragma once

#include "load.cuh"
#include "parts.cuh"
#include "sight.cuh"

namespace ringmpi {

template <class Raw_, class Index_, int HEAD_SIZE, int COLUMNS_, int OPERANDS> class Tensor {
  public:
    using Raw = Raw_;
    using Index = Index_;
    using State = float;
    using From = Rows<Raw, Index>;

    static constexpr int ROWS = 64, COLUMNS = COLUMNS_, THREADS = 128;
    static constexpr int LANES = 4; // neighbours that share their rows
    static constexpr int ROWS_EACH = 2, COLUMNS_EACH = COLUMNS / LANES, WIDTH_EACH = HEAD_SIZE / LANES;

    static __device__ int row(int i) { return threadIdx.x / WARP * 16 + threadIdx.x % WARP / LANES + i * 8; }
    static __device__ int column(int j) { return j / 2 * 8 + threadIdx.x % LANES * 2 + j % 2; }
    static __device__ int width(int c) { return column(c); }

  private:
    static constexpr int STRIDE = HEAD_SIZE + RUN<Raw>; // an odd number of 16 bytes: 8 rows lie in different banks

  public:
    static constexpr int SHARED_BYTES = (OPERANDS * ROWS + 2 * COLUMNS) * STRIDE * static_cast<int>(sizeof(Raw));

    // `last_rows` are there where OPERANDS is 2.
    __device__ Tensor(From rows, From last_rows, From columns, From last_columns, Index first_row)
        : from_rows_(rows), from_last_rows_(last_rows), from_columns_(columns), from_last_columns_(last_columns),
          first_row_(first_row), rows_(reinterpret_cast<Raw *>(shared_memory())), columns_(rows_ + OPERANDS * ROWS * STRIDE),
          last_columns_(columns_ + COLUMNS * STRIDE) {}

    __device__ void open(const Tile<Index> &tile) {
        load_tile<ROWS, HEAD_SIZE, THREADS>(rows_, STRIDE, from_rows_, first_row_, 0);
        if (OPERANDS == 2) load_tile<ROWS, HEAD_SIZE, THREADS>(rows_ + ROWS * STRIDE, STRIDE, from_last_rows_, first_row_, 0);
        load(columns_, from_columns_, tile);
        commit_copies();
    }

    __device__ void first(State (&scores)[ROWS_EACH][COLUMNS_EACH], const Tile<Index> &tile, const Tile<Index> &next) {
        load(last_columns_, from_last_columns_, tile);
        commit_copies();
        await_copies<1>();
        __syncthreads(); // rows and columns are there for all
        multiply(rows_, columns_, scores);
        __syncthreads(); // nobody reads the columns that are replaced
        if (next.any) load(columns_, from_columns_, next);
        commit_copies();
    }

    __device__ void await_last() {
        await_copies<1>();
        __syncthreads(); // the last columns are there for all
    }

    __device__ void second(State (&scores)[ROWS_EACH][COLUMNS_EACH], const Tile<Index> &) {
        multiply(rows_ + ROWS * STRIDE, last_columns_, scores);
    }

    // sums = sums * factor + weights @ last_columns, which uses the weights up; a pair that is not allowed adds nothing, even where
    // its value is NaN.
    template <bool AT_MOST_ONE, class Allows>
    __device__ void absorb(State (&weights)[ROWS_EACH][COLUMNS_EACH], const Tile<Index> &tile, Allows allows,
                           const State (&factor)[ROWS_EACH], State (&sums)[ROWS_EACH][WIDTH_EACH]) {
        if (!tile.full && __syncthreads_or(any_wild())) return absorb_pairs(weights, allows, factor, sums);
        State scale[ROWS_EACH] = {1, 1}, unscale[ROWS_EACH] = {1, 1};
        if constexpr (Parts<Raw>::SCALES) {
#pragma unroll
            for (int i = 0; i < ROWS_EACH; ++i) {
                const Bits32 exponent = Parts<Raw>::exponent_for(AT_MOST_ONE ? 1.0f : largest_of(weights[i]));
                scale[i] = Parts<Raw>::power(exponent);
                unscale[i] = Parts<Raw>::inverse(exponent);
            }
        }
        // Where accumulators hold a tile of products and where they take its left factor from, rows and columns lie alike.
        Bits32 parts[STEPS][PARTS][4];
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
#pragma unroll
            for (int at = 0; at < 4; ++at) {
                const int i = at % 2, j = step * 4 + at / 2 * 2;
                Bits32 part[PARTS];
                Parts<Raw>::split(weights[i][j] * scale[i], weights[i][j + 1] * scale[i], part);
#pragma unroll
                for (int p = 0; p < PARTS; ++p) parts[step][p][at] = part[p];
            }
        const int lane = threadIdx.x % WARP;
        const Raw *values = last_columns_ + (lane % 8 + lane / 8 % 2 * 8) * STRIDE + lane / 16 * 8;
#pragma unroll
        for (int d = 0; d < HEAD_SIZE; d += 16) {
            if (d >= from_rows_.width) break;
            State sum[2][4] = {};
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                Bits32 value[4];
                load_matrices_transposed(value, values + step * 16 * STRIDE + d);
#pragma unroll
                for (int p = PARTS; p-- > 0;) // the smallest ones first
#pragma unroll
                    for (int half = 0; half < 2; ++half)
                        multiply_add(Raw{}, sum[half][0], sum[half][1], sum[half][2], sum[half][3], parts[step][p],
                                     value[2 * half], value[2 * half + 1]);
            }
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int at = 0; at < 4; ++at) {
                    State &of_row = sums[at / 2][d / 4 + half * 2 + at % 2];
                    of_row = of_row * factor[at / 2] + sum[half][at] * unscale[at / 2];
                }
        }
    }

    __device__ void close() {
        __syncthreads(); // nobody reads the last columns any more
    }

  private:
    static constexpr int STEPS = COLUMNS / 16, PARTS = Parts<Raw>::COUNT;

    __device__ void load(Raw *to, const From &from, const Tile<Index> &tile) {
        load_tile<COLUMNS, HEAD_SIZE, THREADS>(to, STRIDE, from.further(tile.head), tile.first, 0);
    }

    // scores = rows @ columns'
    __device__ void multiply(const Raw *rows, const Raw *columns, State (&scores)[ROWS_EACH][COLUMNS_EACH]) {
        const int lane = threadIdx.x % WARP;
        rows += (threadIdx.x / WARP * 16 + lane % 16) * STRIDE + lane / 16 * 8;
        columns += (lane % 8 + lane / 16 * 8) * STRIDE + lane / 8 % 2 * 8;
#pragma unroll
        for (int i = 0; i < ROWS_EACH; ++i)
#pragma unroll
            for (int j = 0; j < COLUMNS_EACH; ++j) scores[i][j] = 0;
#pragma unroll 2
        for (int d = 0; d < from_rows_.width; d += 16) {
            Bits32 a[4];
            load_matrices(a, rows + d);
#pragma unroll
            for (int j = 0; j < COLUMNS_EACH; j += 4) {
                Bits32 b[4];
                load_matrices(b, columns + j / 4 * 16 * STRIDE + d);
                multiply_add(Raw{}, scores[0][j], scores[0][j + 1], scores[1][j], scores[1][j + 1], a, b[0], b[1]);
                multiply_add(Raw{}, scores[0][j + 2], scores[0][j + 3], scores[1][j + 2], scores[1][j + 3], a, b[2], b[3]);
            }
        }
    }

    // The largest weight of a row, without its sign.
    __device__ static State largest_of(const State (&weights)[COLUMNS_EACH]) {
        State largest = 0;
#pragma unroll
        for (int j = 0; j < COLUMNS_EACH; ++j) largest = larger(largest, fabsf(weights[j]));
        for (int apart = LANES / 2; apart > 0; apart /= 2)
            largest = larger(largest, __shfl_xor_sync(WHOLE_WARP, largest, apart));
        return largest;
    }

    // Whether this thread finds a NaN or an infinity among the last columns, of which each thread looks at its share.
    __device__ bool any_wild() const {
        bool wild = false;
        for (int at = threadIdx.x; at < COLUMNS * (HEAD_SIZE / RUN<Raw>); at += THREADS) {
            const int d = at % (HEAD_SIZE / RUN<Raw>) * RUN<Raw>;
            if (d >= from_rows_.width) continue;
            const Run<Raw> run = load_run(last_columns_ + at / (HEAD_SIZE / RUN<Raw>) * STRIDE + d);
#pragma unroll
            for (int i = 0; i < RUN<Raw>; ++i) wild |= is_wild(run.at[i]);
        }
        return wild;
    }

    // The same pair by pair, since 0 * NaN is NaN. Registers have no addresses, so weights move up to where the first one stands.
    template <class Allows>
    __device__ void absorb_pairs(State (&weights)[ROWS_EACH][COLUMNS_EACH], Allows allows, const State (&factor)[ROWS_EACH],
                                 State (&sums)[ROWS_EACH][WIDTH_EACH]) {
#pragma unroll
        for (int i = 0; i < ROWS_EACH; ++i)
#pragma unroll
            for (int c = 0; c < WIDTH_EACH; ++c) sums[i][c] *= factor[i];
#pragma unroll 1
        for (int moved = 0; moved < COLUMNS_EACH; ++moved) {
#pragma unroll 1
            for (int lane = 0; lane < LANES; ++lane) { // those that share the rows
                const int key = moved / 2 * 8 + lane * 2 + moved % 2;
#pragma unroll
                for (int i = 0; i < ROWS_EACH; ++i) {
                    const State weight = __shfl_sync(WHOLE_WARP, weights[i][0], lane, LANES);
                    if (!allows(i, key)) continue;
#pragma unroll
                    for (int c = 0; c < WIDTH_EACH; ++c) // beyond head_dim are sums that nobody reads
                        sums[i][c] += weight * widen(last_columns_[key * STRIDE + width(c)]);
                }
            }
#pragma unroll
            for (int i = 0; i < ROWS_EACH; ++i)
#pragma unroll
                for (int j = 0; j + 1 < COLUMNS_EACH; ++j) weights[i][j] = weights[i][j + 1];
        }
    }

    From from_rows_, from_last_rows_, from_columns_, from_last_columns_;
    Index first_row_;
    Raw *rows_;         // [OPERANDS][ROWS][STRIDE]
    Raw *columns_;      // [COLUMNS][STRIDE]
    Raw *last_columns_; // [COLUMNS][STRIDE]
};

} // namespace ringmpi
