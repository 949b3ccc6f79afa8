// The backward pass. With p = exp(s - lse), delta = sum of dout * out, and ds = p (dout . v - delta): dv = p' dout,
// dq = scale ds k, dk = scale ds' q (Dao et al. 2022, appendix B.2).
//
// Each gradient has a kernel of its own, in which a block of threads owns some of its rows and is alone to add to them: so sums
// have one order, and registers hold one gradient.
#pragma once

#include "load.cuh"
#include "softmax.cuh"

namespace ringmpi {

// What the forward pass told of queries.
template <class State, class Index> struct Statistics {
    const State *lse, *delta; // of the first head; those of others follow
    Index queries;
};

// Statistics of the rows, where rows are queries.
template <class Unit> class RowSight {
    using Index = typename Unit::Index;
    using State = typename Unit::State;

  public:
    static constexpr int SHARED_BYTES = 0;

    __device__ RowSight(const Index *begin, const Index *end, Index first, Index keys, int, Statistics<State, Index> given)
        : sight_(begin, end, first, given.queries, keys) {
        for (int i = 0; i < Unit::ROWS_EACH; ++i) {
            const Index row = first + Unit::row(i);
            lse_[i] = row < given.queries ? finite_shift(given.lse[row]) : State(0);
            delta_[i] = row < given.queries ? given.delta[row] : State(0);
        }
    }

    __device__ Tile<Index> first_tile() const { return sight_.first_tile(); }
    __device__ Tile<Index> after(const Tile<Index> &tile) const { return sight_.after(tile); }
    __device__ void enter(const Tile<Index> &tile) { first_column_ = tile.first; }

    __device__ bool allows(int i, int column) const { return sight_.allows(i, first_column_ + column); }
    __device__ State lse(int i, int) const { return lse_[i]; }
    __device__ State delta(int i, int) const { return delta_[i]; }

  private:
    OfQueries<Unit> sight_;
    Index first_column_ = 0;
    State lse_[Unit::ROWS_EACH], delta_[Unit::ROWS_EACH];
};

// Statistics of the columns, where columns are queries: those of a tile lie in shared memory, behind what the unit has there.
template <class Unit> class ColumnSight {
    using Index = typename Unit::Index;
    using State = typename Unit::State;

  public:
    static constexpr int SHARED_BYTES = Unit::COLUMNS * 2 * static_cast<int>(sizeof(Index) + sizeof(State));

    __device__ ColumnSight(const Index *begin, const Index *end, Index first, Index keys, int heads,
                           Statistics<State, Index> given)
        : sight_(begin, end, first, given.queries, keys, heads), from_begin_(begin), from_end_(end), given_(given),
          begin_(reinterpret_cast<Index *>(shared_memory() + Unit::SHARED_BYTES)), end_(begin_ + Unit::COLUMNS),
          lse_(reinterpret_cast<State *>(end_ + Unit::COLUMNS)), delta_(lse_ + Unit::COLUMNS) {}

    __device__ Tile<Index> first_tile() const { return sight_.first_tile(); }
    __device__ Tile<Index> after(const Tile<Index> &tile) const { return sight_.after(tile); }

    // Read what belongs to a tile; seen by all after the next barrier, of which `first` has one.
    __device__ void enter(const Tile<Index> &tile) {
        const int column = threadIdx.x;
        if (column >= Unit::COLUMNS) return;
        const Index query = tile.first + column;
        const bool inside = query < given_.queries;
        const Index at = tile.head * given_.queries + query;
        begin_[column] = inside ? from_begin_[query] : 0;
        end_[column] = inside ? from_end_[query] : 0;
        lse_[column] = inside ? finite_shift(given_.lse[at]) : State(0);
        delta_[column] = inside ? given_.delta[at] : State(0);
    }

    __device__ bool allows(int i, int column) const { return sight_.allows(i, begin_[column], end_[column]); }
    __device__ State lse(int, int column) const { return lse_[column]; }
    __device__ State delta(int, int column) const { return delta_[column]; }

  private:
    OfKeys<Unit> sight_;
    const Index *from_begin_, *from_end_;
    Statistics<State, Index> given_;
    Index *begin_, *end_;
    State *lse_, *delta_;
};

// What is summed up: columns weighed by p, or by ds.
enum class Summed { WEIGHTS, CHANGES };

template <class Unit, template <class> class Sight, Summed SUMMED> class Backward {
    using Index = typename Unit::Index;
    using State = typename Unit::State;
    using From = typename Unit::From;
    using Numbers = State[Unit::ROWS_EACH][Unit::COLUMNS_EACH];

  public:
    static constexpr int SHARED_BYTES = Unit::SHARED_BYTES + Sight<Unit>::SHARED_BYTES;

    // For WEIGHTS, products of `rows` and `columns` are scores. For CHANGES those of `last_rows` and `last_columns` are, and the
    // former are dout . v. Rows of the gradient get `factor` times the sum of weighed `last_columns`.
    static __device__ void add(From rows, From last_rows, From columns, From last_columns, Sight<Unit> sight, Index first,
                               State scale, State factor, State *gradient) {
        Tile<Index> tile = sight.first_tile();
        if (!tile.any) return;
        Unit unit(rows, last_rows, columns, last_columns, first);
        unit.open(tile);
        State sums[Unit::ROWS_EACH][Unit::WIDTH_EACH] = {};
        State one[Unit::ROWS_EACH];
#pragma unroll
        for (int i = 0; i < Unit::ROWS_EACH; ++i) one[i] = 1;
        while (tile.any) {
            const Tile<Index> next = sight.after(tile);
            sight.enter(tile);
            Numbers scores;
            unit.first(scores, tile, next);
            unit.await_last();
            if constexpr (SUMMED == Summed::WEIGHTS) {
                weigh(sight, scale, scores);
            } else {
                Numbers weights;
                unit.second(weights, tile);
                weigh(sight, scale, weights);
                change(sight, weights, scores);
            }
            if (!tile.full) hide(sight, scores);
            const auto allows = [&](int i, int column) { return sight.allows(i, column); };
            unit.template absorb<false>(scores, tile, allows, one, sums);
            unit.close();
            tile = next;
        }
#pragma unroll
        for (int i = 0; i < Unit::ROWS_EACH; ++i) {
            const Index row = first + Unit::row(i);
            if (row >= rows.count) continue;
#pragma unroll
            for (int c = 0; c < Unit::WIDTH_EACH; ++c)
                if (Unit::width(c) < rows.width) gradient[row * rows.width + Unit::width(c)] += factor * sums[i][c];
        }
    }

  private:
    // Turn products into p.
    static __device__ void weigh(const Sight<Unit> &sight, State scale, Numbers &scores) {
#pragma unroll
        for (int j = 0; j < Unit::COLUMNS_EACH; ++j)
#pragma unroll
            for (int i = 0; i < Unit::ROWS_EACH; ++i)
                scores[i][j] = exponential(scores[i][j] * scale - sight.lse(i, Unit::column(j)));
    }

    // Turn dout . v into ds.
    static __device__ void change(const Sight<Unit> &sight, const Numbers &weights, Numbers &rises) {
#pragma unroll
        for (int j = 0; j < Unit::COLUMNS_EACH; ++j)
#pragma unroll
            for (int i = 0; i < Unit::ROWS_EACH; ++i)
                rises[i][j] = weights[i][j] * (rises[i][j] - sight.delta(i, Unit::column(j)));
    }

    // Put 0 wherever a pair is hidden: selected, since a product with 0 keeps a NaN.
    static __device__ void hide(const Sight<Unit> &sight, Numbers &numbers) {
#pragma unroll
        for (int j = 0; j < Unit::COLUMNS_EACH; ++j)
#pragma unroll
            for (int i = 0; i < Unit::ROWS_EACH; ++i)
                numbers[i][j] = sight.allows(i, Unit::column(j)) ? numbers[i][j] : State(0);
    }
};

} // namespace ringmpi
