// How vector units that have dot products of bfloat16 multiply tiles whose weights may be rounded to it: all products are of pairs
// of bfloat16 numbers, at twice the rate of float32.
#pragma once

#include "pairs.h"
#include "products.h"
#include "slopes.h"
#include "softmax.h"

#if RINGMPI_DOT_PRODUCTS

namespace ringmpi {

struct RoundingDotUnit {
    using T = float;

    static constexpr int LANES = 64;
    static constexpr int64_t TILE_KEYS = 192;   // 48 KiB of scores: products are so fast that adding up each tile's sums counts
    static constexpr int64_t KEY_UNIT = 2;      // a pair
    static constexpr int64_t DEPTH_UNIT = 2 * WIDTH<T>;
    static constexpr double SPEED = 1.8;        // about: all products at twice the rate, beside the softmax
    static constexpr bool PREPARES = true;
    static constexpr bool SCALES_SCORES = true; // q times the scale is no bfloat16
    static constexpr bool FUSES = true;

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

    static int64_t nbytes(const Problem &) { return 3 * Scratch::nbytes_of<Pair>(TILE_PAIRS); }

    RoundingDotUnit(const Problem &problem, int64_t width, Scratch &scratch)
        : head_dim_(problem.task.head_dim), pairs_((head_dim_ + 1) / 2), width_(width),
          by_lanes_(scratch.take<Pair>(TILE_PAIRS)), changes_by_lanes_(scratch.take<Pair>(TILE_PAIRS)),
          by_keys_(scratch.take<Pair>(TILE_PAIRS)) {}

    // tile[key][lane] = sum over d of rows[key][d] * operand[lane][d]
    void scores(const Block::Rows &rows, Keys keys, const Operand &operand, T *tile) {
        const ByRow<Pair> left{rows.along + keys.first * pairs_, pairs_};
        multiply_lanes<false, LANES>(keys.count(), pairs_, left, operand.by_number(), tile);
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
            _mm512_storeu_si512(by_lanes_ + at / 2, rounded_row(_mm512_loadu_ps(tile + at), _mm512_loadu_ps(tile + at + WIDTH<T>)));
        scatter_pairs(by_lanes_, keys, operand, sums);
    }

    // Add to the gradients what some keys give that all lanes see. Weights and changes are rounded where they arise, and
    // not written as float32 numbers first.
    void absorb(const Block::Rows &k, Keys keys, T *scores, T *rises, const Slopes<T, LANES> &slopes, const Operand &q,
                const Operand &dout, T *dq, T *dk, T *dv) {
        const int64_t count = complete(scores, keys.count(), -INFINITY);
        complete(rises, keys.count(), 0);
        for (int64_t lane = 0; lane < LANES; lane += 2 * WIDTH<T>) {
            const auto low = slopes.lanes(lane), high = slopes.lanes(lane + WIDTH<T>);
            for (int64_t key = 0; key < count; key += 2) {
                Slope<T> of_low[2], of_high[2];
                each<2>([&](auto i) {
                    const int64_t at = (key + i) * LANES + lane;
                    of_low[i] = low.of(load(scores + at), load(rises + at));
                    of_high[i] = high.of(load(scores + at + WIDTH<T>), load(rises + at + WIDTH<T>));
                    _mm512_storeu_si512(by_lanes_ + at / 2, rounded_row((__m512)of_low[i].weights, (__m512)of_high[i].weights));
                    _mm512_storeu_si512(changes_by_lanes_ + at / 2, rounded_row((__m512)of_low[i].changes, (__m512)of_high[i].changes));
                });
                round_pair(of_low[0].changes, of_low[1].changes, key, lane);
                round_pair(of_high[0].changes, of_high[1].changes, key, lane + WIDTH<T>);
            }
        }
        scatter_pairs(by_lanes_, keys.count(), dout, dv);
        scatter_pairs(changes_by_lanes_, keys.count(), q, dk);
        gather_pairs(k, keys.first, count, dq);
    }

  private:
    static constexpr int64_t TILE_PAIRS = TILE_KEYS * LANES / 2;

    // Where a key is alone in its pair, put a row beside it; return how many there are.
    static int64_t complete(T *tile, int64_t keys, T value) {
        if (keys % 2) std::fill_n(tile + keys * LANES, LANES, value);
        return up_to_multiple(keys, 2);
    }

    void round_pair(Vector<T> even, Vector<T> odd, int64_t key, int64_t lane) {
        _mm512_storeu_si512(by_keys_ + key / 2 * LANES + lane, rounded_pairs((__m512)even, (__m512)odd));
    }

    void gather_pairs(const Block::Rows &rows, int64_t first, int64_t count, T *sums) {
        const ByTerm<Pair> left{rows.across + first / 2 * head_dim_, head_dim_};
        multiply_lanes<true, LANES>(head_dim_, count / 2, left, by_keys_, sums);
    }

    void scatter_pairs(const Pair *pairs, int64_t keys, const Operand &operand, T *sums) {
        multiply<true>(keys, width_, LANES / 2, ByRow<Pair>{pairs, LANES / 2}, operand.by_row(), width_, sums, width_);
    }

    int64_t head_dim_, pairs_, width_;
    Pair *by_lanes_, *changes_by_lanes_; // of a tile: [keys][LANES / 2]
    Pair *by_keys_;                      // [keys / 2][LANES]
};

} // namespace ringmpi

#endif
