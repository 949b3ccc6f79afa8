// The forward pass of a strip: an online softmax over some keys of a block, on the running state.
#pragma once

#include "softmax.h"
#include "scratch.h"
#include "strip.h"

namespace ringmpi {

template <class Unit> class Forward {
    using T = typename Unit::T;
    using Block = typename Unit::Block;
    static constexpr int L = Unit::LANES;

  public:
    static int64_t width(const Problem &problem) { return up_to_multiple(problem.task.head_dim, Unit::DEPTH_UNIT); }

    static int64_t nbytes(const Problem &problem) {
        return Unit::nbytes(problem) + Unit::Operand::nbytes(width(problem)) +
               Scratch::nbytes_of<T>(Unit::TILE_KEYS * L) + 2 * Scratch::nbytes_of<T>(width(problem) * L);
    }

    Forward(const Problem &problem, Scratch &scratch)
        : problem_(problem), width_(width(problem)), unit_(problem, width_, scratch), q_(width_, scratch),
          tile_(scratch.take<T>(Unit::TILE_KEYS * L)), sums_(scratch.take<T>(width_ * L)),
          rows_(scratch.take<T>(width_ * L)) {}

    // Attend the rows from `first` on to some keys.
    void attend(const Block &block, int64_t kv_head, int64_t first, Keys keys, Counts &counts) {
        const Strip<L> strip(problem_, kv_head, first);
        const Keys seen = strip.seen_among(keys, Unit::KEY_UNIT);
        int64_t tiles = up_to_multiple(keys.count(), Unit::TILE_KEYS) / Unit::TILE_KEYS;
        if (!seen.empty()) {
            load(strip);
            for (Keys tile{seen.first, 0}; tile.first < seen.last; tile.first = tile.last) {
                tile.last = std::min(seen.last, tile.first + Unit::TILE_KEYS);
                const bool full = strip.sees_all(tile);
                if (!full && !strip.sees_any(tile)) continue;
                attend_tile(block, strip, tile, full);
                counts.computed_pairs += tile.count() * strip.count;
                counts.tiles += 1;
                counts.tiles_unmasked += full;
                tiles -= 1;
            }
            unit_.finish(sums_);
            store(strip);
        }
        counts.tiles_skipped += std::max<int64_t>(tiles, 0);
    }

  private:
    void attend_tile(const Block &block, const Strip<L> &strip, Keys keys, bool full) {
        unit_.scores(block.k(), keys, q_, tile_, block.v());
        if (full) {
            raise_maxima(keys.count());
            unit_.absorb(block.v(), keys, tile_, softmax_, sums_, [this] { rescale(); });
            return;
        }
        const TileMask<T, L> mask(strip, keys);
        mask.select(tile_, keys.count(), -static_cast<T>(INFINITY));
        raise_maxima(keys.count());
        const int64_t head_dim = problem_.task.head_dim;
        const auto *v = block.v().from(keys.first);
        if (!any_wild(v, block.v().stride, keys.count(), head_dim))
            return unit_.absorb(block.v(), keys, tile_, softmax_, sums_, [this] { rescale(); });
        unit_.finish(sums_);
        rescale();
        softmax_.weigh(tile_, keys.count());
        gather_allowed(mask, v, block.v().stride, keys.count(), tile_, head_dim, sums_);
    }

    // Let the maxima rise to the largest of some scores, and rescale row_sum; acc is left to `rescale`.
    void raise_maxima(int64_t keys) {
        constexpr int VECTORS = L / WIDTH<T>;
        const Vector<T> scale = broadcast(scale_of_scores<Unit>(problem_.task));
        Vector<T> top[VECTORS];
        each<VECTORS>([&](auto c) { top[c] = ringmpi::load(row_max_ + c * WIDTH<T>); });
        for (int64_t key = 0; key < keys; ++key)
            each<VECTORS>([&](auto c) {
                T *at = tile_ + key * L + c * WIDTH<T>;
                Vector<T> score = ringmpi::load(at);
                if (Unit::SCALES_SCORES) ringmpi::store(at, score *= scale);
                top[c] = larger<T>(score, top[c]);
            });
        Vector<Integer<T>> risen{};
        each<VECTORS>([&](auto c) {
            T *row_max = row_max_ + c * WIDTH<T>, *row_sum = softmax_.row_sum + c * WIDTH<T>;
            const Vector<T> before = ringmpi::load(row_max), shift = finite_shift<T>(top[c]);
            const Vector<T> factor = exponential<T>(before - shift);
            risen |= before != top[c];
            ringmpi::store(row_max, top[c]);
            ringmpi::store(row_sum, ringmpi::load(row_sum) * factor);
            ringmpi::store(softmax_.shift + c * WIDTH<T>, shift);
            ringmpi::store(factor_ + c * WIDTH<T>, factor);
        });
        risen_ = any<Integer<T>>(risen);
    }

    // Bring acc, which was summed against the maxima before, to those of now.
    void rescale() {
        if (!risen_) return;
        constexpr int VECTORS = L / WIDTH<T>;
        Vector<T> factor[VECTORS];
        each<VECTORS>([&](auto c) { factor[c] = ringmpi::load(factor_ + c * WIDTH<T>); });
        for (int64_t d = 0; d < problem_.task.head_dim; ++d)
            each<VECTORS>([&](auto c) {
                T *at = sums_ + d * L + c * WIDTH<T>;
                ringmpi::store(at, ringmpi::load(at) * factor[c]);
            });
    }

    void load(const Strip<L> &strip) {
        const Task &task = problem_.task;
        q_.load(problem_, task.q, strip, scale_of_queries<Unit>(task));
        load_rows<T>(task.head_dim, task.acc, strip, T(1), rows_, width_);
        transpose(rows_, width_, L, width_, sums_, L);
        load_lanes(task.row_max, strip, row_max_);
        load_lanes(task.row_sum, strip, softmax_.row_sum);
    }

    void store(const Strip<L> &strip) {
        const Task &task = problem_.task;
        transpose(sums_, L, width_, L, rows_, width_);
        for (int64_t lane = 0; lane < strip.count; ++lane)
            std::memcpy(strip.template in<T>(task.acc, lane), rows_ + lane * width_,
                        static_cast<size_t>(task.head_dim) * sizeof(T));
        store_lanes(task.row_max, strip, row_max_);
        store_lanes(task.row_sum, strip, softmax_.row_sum);
    }

    const Problem &problem_;
    int64_t width_;
    Unit unit_;
    typename Unit::Operand q_;
    T *tile_; // [TILE_KEYS][LANES]: scores, then weights
    T *sums_; // [width][LANES]: acc, transposed
    T *rows_; // [LANES][width]: acc on its way
    Softmax<T, L> softmax_;
    T row_max_[L], factor_[L];
    bool risen_ = false; // whether any factor is not 1
};

} // namespace ringmpi
