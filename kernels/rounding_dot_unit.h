// How vector units that have dot products of bfloat16 multiply tiles whose weights may be rounded to it: all products are of pairs
// of bfloat16 numbers, at twice the rate of float32.
#pragma once

#include "pairs.h"
#include "products.h"
#include "softmax.h"

#if RINGMPI_DOT_PRODUCTS

namespace ringmpi {

struct RoundingDotUnit {
    using T = float;

    static constexpr int LANES = 64;
    static constexpr int64_t TILE_KEYS = 96;    // 24 KiB of scores, as those of the other vector units
    static constexpr int64_t KEY_UNIT = 2;      // a pair
    static constexpr int64_t DEPTH_UNIT = 2 * WIDTH<T>;
    static constexpr double SPEED = 1.8;        // about: all products at twice the rate, beside the softmax
    static constexpr bool PREPARES = true;
    static constexpr bool SCALES_SCORES = true; // q times the scale is no bfloat16

    using Operand = PairedRows<LANES>;

    static void enter() {}
    static void leave() {}

    // k and v of a KV head in pairs: along head_dim for scores, across two keys for sums over keys.
    class Block {
      public:
        struct Rows : KeyRows<BFloat16> { // as they lie
            Pair *along;                  // [keys][head_dim / 2], or none
            Pair *across;                 // [keys / 2][head_dim], or none
        };

        static int64_t nbytes(const Problem &problem) {
            const int64_t keys = problem.task.keys, head_dim = problem.task.head_dim;
            return 2 * Scratch::nbytes_of<Pair>(keys * halves(head_dim)) + Scratch::nbytes_of<Pair>(halves(keys) * head_dim);
        }

        Block(const Problem &problem, Scratch &scratch) : problem_(problem), pairs_(halves(problem.task.head_dim)) {
            const int64_t keys = problem.task.keys;
            Pair *k_along = scratch.take<Pair>(keys * pairs_), *v_along = scratch.take<Pair>(keys * pairs_);
            Pair *across = scratch.take<Pair>(halves(keys) * problem.task.head_dim);
            const bool backward = problem.task.backward != 0;
            k_ = {{}, k_along, backward ? across : nullptr};
            v_ = {{}, backward ? v_along : nullptr, backward ? nullptr : across};
        }

        void choose(int64_t kv_head) {
            static_cast<KeyRows<BFloat16> &>(k_) = as_they_lie<BFloat16>(problem_, problem_.task.k, kv_head);
            static_cast<KeyRows<BFloat16> &>(v_) = as_they_lie<BFloat16>(problem_, problem_.task.v, kv_head);
        }

        void prepare(Keys keys) {
            for (const Rows *rows : {&k_, &v_}) {
                if (rows->along != nullptr) pair_along(*rows, keys);
                if (rows->across != nullptr) pair_across(*rows, keys);
            }
        }

        const Rows &k() const { return k_; }
        const Rows &v() const { return v_; }

      private:
        static int64_t halves(int64_t count) { return (count + 1) / 2; }

        void pair_along(const Rows &rows, Keys keys) const {
            const int64_t head_dim = problem_.task.head_dim;
            for (int64_t key = keys.first; key < keys.last; ++key) {
                Pair *pairs = rows.along + key * pairs_;
                std::memcpy(pairs, rows.from(key), static_cast<size_t>(head_dim / 2) * sizeof(Pair));
                if (head_dim % 2) pairs[pairs_ - 1] = pair(rows.from(key)[head_dim - 1], {});
            }
        }

        // The last key of all may be alone.
        void pair_across(const Rows &rows, Keys keys) const {
            const int64_t head_dim = problem_.task.head_dim;
            for (int64_t key = keys.first; key < keys.last; key += 2) {
                const BFloat16 *first = rows.from(key), *second = rows.from(key + 1);
                Pair *pairs = rows.across + key / 2 * head_dim;
                if (key + 1 < keys.last)
                    for (int64_t d = 0; d < head_dim; ++d) pairs[d] = pair(first[d], second[d]);
                else
                    for (int64_t d = 0; d < head_dim; ++d) pairs[d] = pair(first[d], {});
            }
        }

        const Problem &problem_;
        int64_t pairs_; // of a row
        Rows k_{}, v_{};
    };

    static int64_t nbytes(const Problem &) { return Scratch::nbytes_of<Pair>(TILE_KEYS * LANES / 2); }

    RoundingDotUnit(const Problem &problem, int64_t width, Scratch &scratch)
        : head_dim_(problem.task.head_dim), pairs_((head_dim_ + 1) / 2), width_(width),
          rounded_(scratch.take<Pair>(TILE_KEYS * LANES / 2)) {}

    // tile[key][lane] = sum over d of rows[key][d] * operand[lane][d]
    void scores(const Block::Rows &rows, Keys keys, const Operand &operand, T *tile) {
        const ByRow<Pair> left{rows.along + keys.first * pairs_, pairs_};
        multiply<false>(keys.count(), LANES, pairs_, left, operand.by_number(), LANES, tile, LANES);
    }

    // The same, while what is read next is on its way.
    void scores(const Block::Rows &rows, Keys keys, const Operand &operand, T *tile, const Block::Rows &next) {
        static_assert(ROWS % 2 == 0, "pairs of keys");
        for (int64_t key = keys.first; key < keys.last; key += ROWS) {
            const int64_t last = std::min(keys.last, key + ROWS);
            for (int64_t ahead = key; ahead < last; ahead += 2) fetch(next.across + ahead / 2 * head_dim_, head_dim_);
            scores(rows, {key, last}, operand, tile + (key - keys.first) * LANES);
        }
    }

    // sums[d][lane] += sum over keys of rows[key][d] * tile[key][lane]
    void gather(const Block::Rows &rows, Keys keys, T *tile, T *sums) {
        const int64_t count = complete(tile, keys.count(), 0);
        for (int64_t key = 0; key < count; key += 2)
            for (int64_t lane = 0; lane < LANES; lane += WIDTH<T>)
                round_pair(load(tile + key * LANES + lane), load(tile + (key + 1) * LANES + lane), key, lane);
        gather_pairs(rows, keys.first, count, sums);
    }

    // Add to `sums` the values of some keys with the weights of their scores, after `rescale` was called.
    template <class Rescale>
    void absorb(const Block::Rows &rows, Keys keys, T *tile, Softmax<T, LANES> &softmax, T *sums, Rescale rescale) {
        rescale();
        const int64_t count = complete(tile, keys.count(), -INFINITY);
        for (int64_t lane = 0; lane < LANES; lane += WIDTH<T>) {
            Vector<T> sum = load(softmax.row_sum + lane);
            for (int64_t key = 0; key < count; key += 2) {
                const Vector<T> even = softmax.weights(tile + key * LANES + lane, lane);
                const Vector<T> odd = softmax.weights(tile + (key + 1) * LANES + lane, lane);
                sum += even + odd;
                round_pair(even, odd, key, lane);
            }
            store(softmax.row_sum + lane, sum);
        }
        gather_pairs(rows, keys.first, count, sums);
    }

    // Add what `absorb` has left for later.
    void finish(T *) {}

    // sums[key][d] += sum over lanes of tile[key][lane] * operand[lane][d]
    void scatter(T *tile, int64_t keys, const Operand &operand, T *sums) {
        for (int64_t at = 0; at < keys * LANES; at += 2 * WIDTH<T>)
            _mm512_storeu_si512(rounded_ + at / 2, rounded_row(_mm512_loadu_ps(tile + at), _mm512_loadu_ps(tile + at + WIDTH<T>)));
        multiply<true>(keys, width_, LANES / 2, ByRow<Pair>{rounded_, LANES / 2}, operand.by_row(), width_, sums, width_);
    }

  private:
    // Where a key is alone in its pair, put a row beside it; return how many there are.
    static int64_t complete(T *tile, int64_t keys, T value) {
        if (keys % 2) std::fill_n(tile + keys * LANES, LANES, value);
        return up_to_multiple(keys, 2);
    }

    void round_pair(Vector<T> even, Vector<T> odd, int64_t key, int64_t lane) {
        _mm512_storeu_si512(rounded_ + key / 2 * LANES + lane, rounded_pairs((__m512)even, (__m512)odd));
    }

    void gather_pairs(const Block::Rows &rows, int64_t first, int64_t count, T *sums) {
        const ByTerm<Pair> left{rows.across + first / 2 * head_dim_, head_dim_};
        multiply<true>(head_dim_, LANES, count / 2, left, rounded_, LANES, sums, LANES);
    }

    int64_t head_dim_, pairs_, width_;
    Pair *rounded_; // weights of a tile: [keys / 2][LANES], or [keys][LANES / 2]
};

} // namespace ringmpi

#endif
