// How the vector units multiply tiles: k and v as they lie, or widened once where they have 16 bits.
#pragma once

#include <type_traits>

#include "products.h"
#include "scratch.h"
#include "softmax.h"
#include "strip.h"

namespace ringmpi {

template <class Raw> struct VectorUnit {
    using T = State<Raw>;

    // Queries of a tile, in lanes.
    static constexpr int LANES = 256 / static_cast<int>(sizeof(T));

    // Keys of a tile: a multiple of ROWS; tiles of 96 x 256 bytes stay in the first-level cache beside a few rows.
    static constexpr int64_t TILE_KEYS = 96;
    static constexpr int64_t KEY_UNIT = 1;      // where a tile may start
    static constexpr int64_t DEPTH_UNIT = WIDTH<T>; // what head_dim is padded to
    static constexpr double SPEED = 1;          // against other units, to size units of work
    static constexpr bool WIDENED = !std::is_same<Raw, T>::value;
    static constexpr bool PREPARES = WIDENED;
    static constexpr bool SCALES_SCORES = false;
    static constexpr bool FUSES = false;        // weighs pairs of the backward pass by itself

    static void enter() {}
    static void leave() {}

    // k and v of a KV head, shared by the threads.
    class Block {
      public:
        using Rows = KeyRows<T>;

        static int64_t nbytes(const Problem &problem) {
            const int64_t count = problem.task.keys * problem.task.head_dim;
            return WIDENED ? 2 * Scratch::nbytes_of<T>(count) : 0;
        }

        Block(const Problem &problem, Scratch &scratch) : problem_(problem) {
            if (WIDENED) {
                wide_k_ = scratch.take<T>(problem.task.keys * problem.task.head_dim);
                wide_v_ = scratch.take<T>(problem.task.keys * problem.task.head_dim);
            }
        }

        void choose(int64_t kv_head) {
            kv_head_ = kv_head;
            if constexpr (WIDENED) {
                k_ = {wide_k_, problem_.task.head_dim};
                v_ = {wide_v_, problem_.task.head_dim};
            } else {
                k_ = as_they_lie<T>(problem_, problem_.task.k, kv_head);
                v_ = as_they_lie<T>(problem_, problem_.task.v, kv_head);
            }
        }

        void prepare(Keys keys) {
            if constexpr (WIDENED) {
                widen_rows(problem_.task.k, keys, wide_k_);
                widen_rows(problem_.task.v, keys, wide_v_);
            }
        }

        const Rows &k() const { return k_; }
        const Rows &v() const { return v_; }

      private:
        void widen_rows(const Tensor &tensor, Keys keys, T *wide) const {
            const int64_t head_dim = problem_.task.head_dim;
            for (int64_t key = keys.first; key < keys.last; ++key) {
                const Raw *row = problem_.of_key<const Raw>(tensor, kv_head_, key);
                for (int64_t d = 0; d < head_dim; ++d) wide[key * head_dim + d] = widen(row[d]);
            }
        }

        const Problem &problem_;
        int64_t kv_head_ = 0;
        T *wide_k_ = nullptr, *wide_v_ = nullptr;
        Rows k_{}, v_{};
    };

    // Rows of a strip, as factors of both kinds of product: [LANES][width] and [width][LANES].
    class Operand {
      public:
        static int64_t nbytes(int64_t width) { return 2 * Scratch::nbytes_of<T>(LANES * width); }

        Operand(int64_t width, Scratch &scratch)
            : width_(width), rows_(scratch.take<T>(LANES * width)), lanes_(scratch.take<T>(LANES * width)) {}

        // With the scale of the scores: what overflows then is a score that the dtype cannot hold.
        void load(const Problem &problem, const Tensor &tensor, const Strip<LANES> &strip, double scale) {
            load_rows<Raw>(problem.task.head_dim, tensor, strip, static_cast<T>(scale), rows_, width_);
            transpose(rows_, width_, LANES, width_, lanes_, LANES);
        }

        const T *rows() const { return rows_; }
        const T *lanes() const { return lanes_; }

      private:
        int64_t width_;
        T *rows_, *lanes_;
    };

    static int64_t nbytes(const Problem &) { return 0; }
    VectorUnit(const Problem &problem, int64_t width, Scratch &) : head_dim_(problem.task.head_dim), width_(width) {}

    void scores(const typename Block::Rows &rows, Keys keys, const Operand &operand, T *tile) {
        ringmpi::scores<LANES, T>({rows.from(keys.first), rows.stride}, keys.count(), operand.lanes(), head_dim_, tile);
    }

    // The same, while what is read next is on its way.
    void scores(const typename Block::Rows &rows, Keys keys, const Operand &operand, T *tile, const typename Block::Rows &next) {
        fetching(keys, next, [&](Keys some) { scores(rows, some, operand, tile + (some.first - keys.first) * LANES); });
    }

    void gather(const typename Block::Rows &rows, Keys keys, T *tile, T *sums) {
        ringmpi::gather<LANES, T>({rows.from(keys.first), rows.stride}, keys.count(), tile, head_dim_, sums);
    }

    // Add to `sums` the values of some keys with the weights of their scores, after `rescale` was called.
    template <class Rescale>
    void absorb(const typename Block::Rows &rows, Keys keys, T *tile, Softmax<T, LANES> &softmax, T *sums, Rescale rescale) {
        rescale();
        softmax.weigh(tile, keys.count());
        gather(rows, keys, tile, sums);
    }

    // Add what `absorb` has left for later.
    void finish(T *) {}

    void scatter(T *tile, int64_t keys, const Operand &operand, T *sums) { scatter(tile, keys, operand.rows(), sums); }

  protected:
    void scatter(const T *tile, int64_t keys, const T *queries, T *sums) {
        ringmpi::scatter<LANES>(tile, keys, queries, width_, sums);
    }

    // Compute a few keys at a time, and fetch rows of theirs: `gather` goes down columns, which the processor does not foresee.
    template <class Compute> void fetching(Keys keys, const typename Block::Rows &next, Compute compute) {
        for (int64_t key = keys.first; key < keys.last; key += ROWS) {
            const int64_t last = std::min(keys.last, key + ROWS);
            for (int64_t ahead = key; ahead < last; ++ahead) fetch(next.from(ahead), head_dim_);
            compute({key, last});
        }
    }

  private:
    int64_t head_dim_, width_;
};

} // namespace ringmpi
