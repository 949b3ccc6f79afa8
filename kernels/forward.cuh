// The forward pass: a block of threads attends some queries of one head to the keys of a block, and updates their running state.
#pragma once

#include "load.cuh"
#include "softmax.cuh"

namespace ringmpi {

template <class Unit> class Forward {
    using Index = typename Unit::Index;
    using State = typename Unit::State;
    using From = typename Unit::From;

  public:
    static constexpr int SHARED_BYTES = Unit::SHARED_BYTES;

    // `acc`, `row_max` and `row_sum` are those of the head.
    static __device__ void attend(From q, From k, From v, const Index *begin, const Index *end, Index first, State scale,
                                  State *acc, State *row_max, State *row_sum) {
        const OfQueries<Unit> sight(begin, end, first, q.count, k.count);
        Tile<Index> tile = sight.first_tile();
        if (!tile.any) return;
        Unit unit(q, From{}, k, v, first);
        unit.open(tile);
        Softmax<Unit> softmax;
        State sums[Unit::ROWS_EACH][Unit::WIDTH_EACH];
#pragma unroll
        for (int i = 0; i < Unit::ROWS_EACH; ++i) {
            const Index row = first + Unit::row(i);
            const bool inside = row < q.count;
            softmax.load(i, inside ? row_max[row] : -Infinite<State>::value(), inside ? row_sum[row] : State(0));
#pragma unroll
            for (int c = 0; c < Unit::WIDTH_EACH; ++c)
                sums[i][c] = inside && Unit::width(c) < q.width ? acc[row * q.width + Unit::width(c)] : State(0);
        }
        while (tile.any) {
            const Tile<Index> next = sight.after(tile);
            State scores[Unit::ROWS_EACH][Unit::COLUMNS_EACH];
            unit.first(scores, tile, next);
            select(sight, tile, scale, scores);
            softmax.weigh(scores);
            unit.await_last();
            const auto allows = [&](int i, int column) { return sight.allows(i, tile.first + column); };
            unit.template absorb<true>(scores, tile, allows, softmax.factor, sums);
            unit.close();
            tile = next;
        }
#pragma unroll
        for (int i = 0; i < Unit::ROWS_EACH; ++i) {
            const Index row = first + Unit::row(i);
            const State sum = softmax.row_sum(i);
            if (row >= q.count) continue;
            if (threadIdx.x % Unit::LANES == 0) {
                row_max[row] = softmax.row_max(i);
                row_sum[row] = sum;
            }
#pragma unroll
            for (int c = 0; c < Unit::WIDTH_EACH; ++c)
                if (Unit::width(c) < q.width) acc[row * q.width + Unit::width(c)] = sums[i][c];
        }
    }

  private:
    // Scale scores, and put -inf wherever a pair is hidden: selected away, since a product with 0 keeps a NaN.
    static __device__ void select(const OfQueries<Unit> &sight, const Tile<Index> &tile, State scale,
                                  State (&scores)[Unit::ROWS_EACH][Unit::COLUMNS_EACH]) {
#pragma unroll
        for (int i = 0; i < Unit::ROWS_EACH; ++i)
#pragma unroll
            for (int j = 0; j < Unit::COLUMNS_EACH; ++j) scores[i][j] *= scale;
        if (tile.full) return;
#pragma unroll
        for (int i = 0; i < Unit::ROWS_EACH; ++i)
#pragma unroll
            for (int j = 0; j < Unit::COLUMNS_EACH; ++j)
                scores[i][j] = sight.allows(i, tile.first + Unit::column(j)) ? scores[i][j] : -Infinite<State>::value();
    }
};

} // namespace ringmpi
