// The products of a tile on the ordinary units, for every dtype and architecture.
//
// A tile is 64 rows by 64 columns, or 32 rows in float64; each of 16 x 16 threads has some of both, in registers. What is
// multiplied comes through shared memory 16 numbers deep, in two buffers, of which one is filled while the other one is
// multiplied: so that a block needs as little shared memory for a head_dim of 256 as for one of 64.
#pragma once

#include "load.cuh"
#include "sight.cuh"

namespace ringmpi {

template <class Raw_, class Index_, int HEAD_SIZE, int COLUMNS_, int OPERANDS_> class Plain {
  public:
    using Raw = Raw_;
    using Index = Index_;
    using State = typename StateOf<Raw>::type;
    using From = Rows<Raw, Index>;

    // Numbers of 64 bits take two registers: half as many rows for a thread.
    static constexpr int ROWS = sizeof(State) == 8 ? 32 : 64, COLUMNS = COLUMNS_, THREADS = 256;
    static constexpr int LANES = 16; // neighbours that share their rows
    static constexpr int ROWS_EACH = ROWS / (THREADS / LANES), COLUMNS_EACH = COLUMNS / LANES, WIDTH_EACH = HEAD_SIZE / LANES;

    static __device__ int row(int i) { return threadIdx.x / LANES + i * (THREADS / LANES); }
    static __device__ int column(int j) { return threadIdx.x % LANES + j * LANES; }
    static __device__ int width(int c) { return c / EACH * PANEL + threadIdx.x % LANES * EACH + c % EACH; }

  private:
    static constexpr int PANEL = HEAD_SIZE < 64 ? HEAD_SIZE : 64, PANELS = HEAD_SIZE / PANEL; // of head_dim
    static constexpr int EACH = PANEL / LANES;
    static constexpr int STRIDE = STEP + RUN<Raw>; // an odd number of 16 bytes: 8 rows lie in different banks
    static constexpr int WEIGHT_STRIDE = COLUMNS + RUN<State>;
    static constexpr int RUNS_AT_ONCE = sizeof(Raw) == 2 ? 1 : 2; // as registers allow
    static constexpr int BUFFER = (ROWS + COLUMNS) * STRIDE;
    static_assert(STEP * PANEL <= BUFFER, "both kinds of tiles fit");

  public:
    static constexpr int SHARED_BYTES =
        2 * BUFFER * static_cast<int>(sizeof(Raw)) + ROWS * WEIGHT_STRIDE * static_cast<int>(sizeof(State));

    // `rows` and `columns` are multiplied first, `last_rows` and `last_columns` then, and the weights by `last_columns`.
    __device__ Plain(From rows, From last_rows, From columns, From last_columns, Index first_row)
        : rows_(rows), last_rows_(last_rows), columns_(columns), last_columns_(last_columns), first_row_(first_row),
          buffer_(reinterpret_cast<Raw *>(shared_memory())), weights_(reinterpret_cast<State *>(buffer_ + 2 * BUFFER)) {}

    __device__ void open(const Tile<Index> &) {}

    __device__ void first(State (&scores)[ROWS_EACH][COLUMNS_EACH], const Tile<Index> &tile, const Tile<Index> &) {
        multiply(rows_, columns_.further(tile.head), tile.first, scores);
    }

    __device__ void await_last() {}

    __device__ void second(State (&scores)[ROWS_EACH][COLUMNS_EACH], const Tile<Index> &tile) {
        multiply(last_rows_, last_columns_.further(tile.head), tile.first, scores);
    }

    // sums = sums * factor + weights @ last_columns; a pair that is not allowed adds nothing, even where its value is NaN.
    template <bool AT_MOST_ONE, class Allows>
    __device__ void absorb(const State (&weights)[ROWS_EACH][COLUMNS_EACH], const Tile<Index> &tile, Allows allows,
                           const State (&factor)[ROWS_EACH], State (&sums)[ROWS_EACH][WIDTH_EACH]) {
        const From from = last_columns_.further(tile.head);
        for (int i = 0; i < ROWS_EACH; ++i)
            for (int j = 0; j < COLUMNS_EACH; ++j) weights_[row(i) * WEIGHT_STRIDE + column(j)] = weights[i][j];
        constexpr int CHUNKS = COLUMNS / STEP;
#pragma unroll
        for (int panel = 0; panel < PANELS; ++panel) {
            if (panel * PANEL >= from.width) break;
            State sum[ROWS_EACH][EACH] = {};
            load_tile<STEP, PANEL, THREADS>(buffer_, PANEL, from, tile.first, panel * PANEL);
            commit_copies();
#pragma unroll 1
            for (int chunk = 0; chunk < CHUNKS; ++chunk) {
                if (chunk + 1 < CHUNKS)
                    load_tile<STEP, PANEL, THREADS>(buffer_ + (chunk + 1) % 2 * BUFFER, PANEL, from,
                                                    tile.first + (chunk + 1) * STEP, panel * PANEL);
                commit_copies();
                await_copies<1>();
                __syncthreads(); // the chunk and the weights are there for all
                const Raw *values = buffer_ + chunk % 2 * BUFFER + threadIdx.x % LANES * EACH;
#pragma unroll 4
                for (int key = 0; key < STEP; ++key) {
                    const int column = chunk * STEP + key;
#pragma unroll
                    for (int i = 0; i < ROWS_EACH; ++i) {
                        const State weight = weights_[row(i) * WEIGHT_STRIDE + column];
                        const bool counts = tile.full || allows(i, column);
#pragma unroll
                        for (int c = 0; c < EACH; ++c)
                            if (counts) sum[i][c] += weight * widen(values[key * PANEL + c]);
                    }
                }
                __syncthreads(); // nobody reads the buffer that is filled next
            }
            for (int i = 0; i < ROWS_EACH; ++i)
#pragma unroll
                for (int c = 0; c < EACH; ++c) {
                    State &of_row = sums[i][panel * EACH + c];
                    of_row = of_row * factor[i] + sum[i][c];
                }
        }
    }

    __device__ void close() {}

  private:
    // scores = rows @ columns'
    __device__ void multiply(const From &rows, const From &columns, Index first_column, State (&scores)[ROWS_EACH][COLUMNS_EACH]) {
#pragma unroll
        for (int i = 0; i < ROWS_EACH; ++i)
#pragma unroll
            for (int j = 0; j < COLUMNS_EACH; ++j) scores[i][j] = 0;
        load(rows, columns, first_column, 0, buffer_);
        commit_copies();
#pragma unroll 1
        for (int d = 0, at = 0; d < rows.width; d += STEP, at = 1 - at) {
            if (d + STEP < rows.width) load(rows, columns, first_column, d + STEP, buffer_ + (1 - at) * BUFFER);
            commit_copies();
            await_copies<1>();
            __syncthreads(); // the chunk is there for all
            const Raw *of_rows = buffer_ + at * BUFFER, *of_columns = of_rows + ROWS * STRIDE;
#pragma unroll RUNS_AT_ONCE
            for (int run = 0; run < STEP; run += RUN<Raw>) {
                Run<Raw> a[ROWS_EACH], b[COLUMNS_EACH];
#pragma unroll
                for (int i = 0; i < ROWS_EACH; ++i) a[i] = load_run(of_rows + row(i) * STRIDE + run);
#pragma unroll
                for (int j = 0; j < COLUMNS_EACH; ++j) b[j] = load_run(of_columns + column(j) * STRIDE + run);
#pragma unroll
                for (int k = 0; k < RUN<Raw>; ++k)
#pragma unroll
                    for (int i = 0; i < ROWS_EACH; ++i)
#pragma unroll
                        for (int j = 0; j < COLUMNS_EACH; ++j) scores[i][j] += widen(a[i].at[k]) * widen(b[j].at[k]);
            }
            __syncthreads(); // nobody reads the buffer that is filled next
        }
    }

    __device__ void load(const From &rows, const From &columns, Index first_column, int d, Raw *buffer) {
        load_tile<ROWS, STEP, THREADS>(buffer, STRIDE, rows, first_row_, d);
        load_tile<COLUMNS, STEP, THREADS>(buffer + ROWS * STRIDE, STRIDE, columns, first_column, d);
    }

    From rows_, last_rows_, columns_, last_columns_;
    Index first_row_;
    Raw *buffer_;    // two of them
    State *weights_; // [ROWS][WEIGHT_STRIDE]
};

} // namespace ringmpi
