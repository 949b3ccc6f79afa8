// How vector units that have dot products of bfloat16 (AVX512_BF16) multiply tiles: scores from pairs of bfloat16 numbers, at
// twice the rate of float32; all else, where a factor is float32, as the vector units do it.
//
// A float32 weight would be three bfloat16 numbers (matrix_unit.h), and cost three halves of what it does now.
#pragma once

#include "vector_unit.h"

#if RINGMPI_DOT_PRODUCTS

namespace ringmpi {

struct DotUnit : VectorUnit<BFloat16> {
    using Wide = VectorUnit<BFloat16>;

    static constexpr double SPEED = 1.3;        // about: one product of two, or two of five, at twice the rate
    static constexpr bool SCALES_SCORES = true; // q times the scale is no bfloat16

    // k and v of a KV head, wide, and those that make scores as pairs of numbers too.
    class Block {
      public:
        struct Rows : Wide::Block::Rows {
            const Pair *pairs;
            int64_t pairs_stride;
        };

        static int64_t nbytes(const Problem &problem) {
            return Wide::Block::nbytes(problem) + 2 * Scratch::nbytes_of<Pair>(problem.task.keys * pairs_of(problem));
        }

        Block(const Problem &problem, Scratch &scratch)
            : problem_(problem), wide_(problem, scratch),
              k_pairs_(scratch.take<Pair>(problem.task.keys * pairs_of(problem))),
              v_pairs_(scratch.take<Pair>(problem.task.keys * pairs_of(problem))) {}

        void choose(int64_t kv_head) {
            wide_.choose(kv_head);
            const int64_t stride = pairs_of(problem_);
            k_ = {wide_.k(), k_pairs_, stride};
            v_ = {wide_.v(), v_pairs_, stride};
        }

        void prepare(Keys keys) {
            wide_.prepare(keys);
            pair_rows(k_, keys, k_pairs_);
            if (problem_.task.backward) pair_rows(v_, keys, v_pairs_);
        }

        const Rows &k() const { return k_; }
        const Rows &v() const { return v_; }

      private:
        static int64_t pairs_of(const Problem &problem) { return up_to_multiple(problem.task.head_dim, 2) / 2; }

        void pair_rows(const Rows &rows, Keys keys, Pair *pairs) const {
            const int64_t head_dim = problem_.task.head_dim;
            for (int64_t key = keys.first; key < keys.last; ++key) {
                const T *row = rows.from(key);
                Pair *of_key = pairs + key * rows.pairs_stride;
                for (int64_t d = 0; d < head_dim / 2; ++d) of_key[d] = pair(row[2 * d], row[2 * d + 1]);
                if (head_dim % 2) of_key[head_dim / 2] = pair(row[head_dim - 1], 0);
            }
        }

        const Problem &problem_;
        Wide::Block wide_;
        Pair *k_pairs_, *v_pairs_; // [keys][head_dim / 2]
        Rows k_{}, v_{};
    };

    // Rows of a strip, as factors of both kinds of product: [LANES][width], and pairs [width / 2][LANES].
    class Operand {
      public:
        static int64_t nbytes(int64_t width) { return Wide::Operand::nbytes(width) + Scratch::nbytes_of<Pair>(LANES * width / 2); }

        Operand(int64_t width, Scratch &scratch)
            : width_(width), wide_(width, scratch), pairs_(scratch.take<Pair>(LANES * width / 2)) {}

        void load(const Problem &problem, const Tensor &tensor, const Strip<LANES> &strip, double) {
            wide_.load(problem, tensor, strip, 1);
            for (int64_t d = 0; d < width_; d += 2)
                for (int64_t lane = 0; lane < LANES; ++lane)
                    pairs_[d / 2 * LANES + lane] = pair(wide_.lanes()[d * LANES + lane], wide_.lanes()[(d + 1) * LANES + lane]);
        }

        const T *rows() const { return wide_.rows(); }
        const Pair *pairs() const { return pairs_; }

      private:
        int64_t width_;
        Wide::Operand wide_;
        Pair *pairs_;
    };

    DotUnit(const Problem &problem, int64_t width, Scratch &scratch)
        : Wide(problem, width, scratch), pairs_(up_to_multiple(problem.task.head_dim, 2) / 2) {}

    void scores(const Block::Rows &rows, Keys keys, const Operand &operand, T *tile) {
        const Pair *first = rows.pairs + keys.first * rows.pairs_stride;
        multiply_lanes<false, LANES>(keys.count(), pairs_, ByRow<Pair>{first, rows.pairs_stride}, operand.pairs(), tile);
    }

    void scores(const Block::Rows &rows, Keys keys, const Operand &operand, T *tile, const Block::Rows &next) {
        fetching(keys, next, [&](Keys some) { scores(rows, some, operand, tile + (some.first - keys.first) * LANES); });
    }

    void scatter(T *tile, int64_t keys, const Operand &operand, T *sums) { Wide::scatter(tile, keys, operand.rows(), sums); }


  private:
    // Two numbers that are bfloat16, the first one in the low half.
    static Pair pair(T first, T second) {
        return static_cast<Pair>(to_bits(first) >> 16 | (to_bits(second) & 0xffff0000u));
    }

    int64_t pairs_; // of a row
};

} // namespace ringmpi

#endif
