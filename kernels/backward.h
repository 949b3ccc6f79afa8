// The backward pass of some rows and some keys. With p = exp(s - lse), delta = sum of dout * out, and
// ds = p (dout . v - delta): dv = p' dout, dq = scale ds k, dk = scale ds' q (Dao et al. 2022, appendix B.2).
#pragma once

#include "scratch.h"
#include "slopes.h"

namespace ringmpi {

template <class Unit> class Backward {
    using T = typename Unit::T;
    using Block = typename Unit::Block;
    static constexpr int L = Unit::LANES;

  public:
    static int64_t width(const Problem &problem) { return up_to_multiple(problem.task.head_dim, Unit::DEPTH_UNIT); }

    static int64_t nbytes(const Problem &problem, int64_t keys) {
        return Unit::nbytes(problem) + 2 * Unit::Operand::nbytes(width(problem)) +
               2 * Scratch::nbytes_of<T>(Unit::TILE_KEYS * L) + 2 * Scratch::nbytes_of<T>(width(problem) * L) +
               2 * Scratch::nbytes_of<T>(up_to_multiple(keys, Unit::KEY_UNIT) * width(problem));
    }

    Backward(const Problem &problem, int64_t keys, Scratch &scratch)
        : problem_(problem), width_(width(problem)), unit_(problem, width_, scratch), q_(width_, scratch),
          dout_(width_, scratch), weights_(scratch.take<T>(Unit::TILE_KEYS * L)),
          changes_(scratch.take<T>(Unit::TILE_KEYS * L)), dq_(scratch.take<T>(width_ * L)),
          rows_(scratch.take<T>(width_ * L)), dk_(scratch.take<T>(up_to_multiple(keys, Unit::KEY_UNIT) * width_)),
          dv_(scratch.take<T>(up_to_multiple(keys, Unit::KEY_UNIT) * width_)) {}

    // Add to the gradients what the pairs of some rows and some keys give; `keys` are at most those of the constructor.
    void attend(const Block &block, int64_t kv_head, int64_t first, int64_t last, Keys keys, Counts &counts) {
        bool touched = false;
        for (int64_t row = first; row < last; row += L) {
            const Strip<L> strip(problem_, kv_head, row);
            const Keys seen = strip.seen_among(keys, Unit::KEY_UNIT);
            int64_t tiles = up_to_multiple(keys.count(), Unit::TILE_KEYS) / Unit::TILE_KEYS;
            if (!seen.empty()) {
                if (!touched) clear(keys);
                touched = true;
                load(strip);
                for (Keys tile{seen.first, 0}; tile.first < seen.last; tile.first = tile.last) {
                    tile.last = std::min(seen.last, tile.first + Unit::TILE_KEYS);
                    const bool full = strip.sees_all(tile);
                    if (!full && !strip.sees_any(tile)) continue;
                    attend_tile(block, strip, tile, tile.first - keys.first, full);
                    counts.computed_pairs += tile.count() * strip.count;
                    counts.tiles += 1;
                    counts.tiles_unmasked += full;
                    tiles -= 1;
                }
                add_to_queries(strip);
            }
            counts.tiles_skipped += std::max<int64_t>(tiles, 0);
        }
        if (touched) {
            const T scale = scale_of_scores<Unit>(problem_.task);
            add_to_keys(problem_.task.dk, kv_head, keys, dk_, scale);
            add_to_keys(problem_.task.dv, kv_head, keys, dv_, T(1));
        }
    }

  private:
    // `at` is where the tile's first key stands among those of dk_ and dv_.
    void attend_tile(const Block &block, const Strip<L> &strip, Keys keys, int64_t at, bool full) {
        unit_.scores(block.k(), keys, q_, weights_);
        unit_.scores(block.v(), keys, dout_, changes_);
        T *dk = dk_ + at * width_, *dv = dv_ + at * width_;
        if (Unit::FUSES && full) return absorb(block.k(), keys, dk, dv);
        slopes_.weigh(weights_, changes_, keys.count());
        if (full) {
            unit_.scatter(weights_, keys.count(), dout_, dv);
            unit_.scatter(changes_, keys.count(), q_, dk);
            unit_.gather(block.k(), keys, changes_, dq_);
            return;
        }
        const TileMask<T, L> mask(strip, keys);
        mask.select(weights_, keys.count(), T(0));
        mask.select(changes_, keys.count(), T(0));
        scatter_partial(mask, weights_, keys.count(), dout_, dv);
        scatter_partial(mask, changes_, keys.count(), q_, dk);
        const int64_t head_dim = problem_.task.head_dim;
        const auto *k = block.k().from(keys.first);
        if (any_wild(k, block.k().stride, keys.count(), head_dim))
            gather_allowed(mask, k, block.k().stride, keys.count(), changes_, head_dim, dq_);
        else
            unit_.gather(block.k(), keys, changes_, dq_);
    }

    // Add what some keys give that all lanes see, where the unit weighs them by itself.
    void absorb(const typename Block::Rows &k, Keys keys, T *dk, T *dv) {
        if constexpr (Unit::FUSES) unit_.absorb(k, keys, weights_, changes_, slopes_, q_, dout_, dq_, dk, dv);
    }

    void scatter_partial(const TileMask<T, L> &mask, T *tile, int64_t keys, const typename Unit::Operand &operand, T *sums) {
        if (any_wild(operand.rows(), width_, L, width_))
            scatter_allowed(mask, tile, keys, operand.rows(), width_, sums);
        else
            unit_.scatter(tile, keys, operand, sums);
    }

    void clear(Keys keys) {
        const int64_t rows = up_to_multiple(keys.count(), Unit::KEY_UNIT); // the last tile's padding too
        std::memset(dk_, 0, static_cast<size_t>(rows * width_) * sizeof(T));
        std::memset(dv_, 0, static_cast<size_t>(rows * width_) * sizeof(T));
    }

    void load(const Strip<L> &strip) {
        const Task &task = problem_.task;
        q_.load(problem_, task.q, strip, scale_of_queries<Unit>(task));
        dout_.load(problem_, task.dout, strip, 1);
        load_lanes(task.lse, strip, slopes_.lse);
        load_lanes(task.delta, strip, slopes_.delta);
        slopes_.scale = scale_of_scores<Unit>(task);
        std::memset(dq_, 0, static_cast<size_t>(width_ * L) * sizeof(T));
    }

    void add_to_queries(const Strip<L> &strip) {
        const Task &task = problem_.task;
        const T scale = static_cast<T>(task.softmax_scale);
        transpose(dq_, L, width_, L, rows_, width_);
        for (int64_t lane = 0; lane < strip.count; ++lane) {
            T *total = strip.template in<T>(task.dq, lane);
            for (int64_t d = 0; d < task.head_dim; ++d) total[d] += scale * rows_[lane * width_ + d];
        }
    }

    void add_to_keys(const Tensor &tensor, int64_t kv_head, Keys keys, const T *sums, T factor) {
        for (int64_t key = keys.first; key < keys.last; ++key) {
            T *total = problem_.of_key<T>(tensor, kv_head, key);
            const T *row = sums + (key - keys.first) * width_;
            for (int64_t d = 0; d < problem_.task.head_dim; ++d) total[d] += factor * row[d];
        }
    }

    const Problem &problem_;
    int64_t width_;
    Unit unit_;
    typename Unit::Operand q_, dout_;
    T *weights_, *changes_; // [TILE_KEYS][LANES]: q k, then p; dout v, then ds
    T *dq_;                 // [width][LANES], transposed
    T *rows_;               // [LANES][width]: dq on its way
    T *dk_, *dv_;           // [keys][width], and room for the last tile's padding
    Slopes<T, L> slopes_;
};

} // namespace ringmpi
