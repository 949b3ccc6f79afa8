// A strip: as many rows of a KV head as a tile has lanes, and what they may see.
#pragma once

#include "problem.h"
#include "vectors.h"

namespace ringmpi {

template <int L> struct Strip {
    int64_t count; // rows; lanes beyond them see what the last one sees, and hold zeros
    int64_t begin[L], end[L];

    Strip(const Problem &problem, int64_t kv_head, int64_t first_row)
        : count(std::min<int64_t>(L, problem.rows - first_row)), batch_(kv_head / problem.task.kv_heads) {
        const int64_t first_head = kv_head % problem.task.kv_heads * problem.group;
        int64_t query = first_row / problem.group, head = first_row % problem.group;
        for (int64_t lane = 0; lane < L; ++lane) { // Divisions are slow: one for all lanes.
            begin[lane] = problem.task.begin[query];
            end[lane] = problem.task.end[query];
            query_[lane] = query;
            head_[lane] = first_head + head;
            if (lane + 1 >= count || ++head < problem.group) continue;
            head = 0;
            ++query;
        }
    }

    // What a tensor of the queries holds for a row.
    template <class T> T *in(const Tensor &tensor, int64_t lane) const {
        return reinterpret_cast<T *>(tensor.data + batch_ * tensor.batch_stride + head_[lane] * tensor.head_stride +
                                     query_[lane] * tensor.token_stride);
    }

    // The keys among some from the first to the last that any lane sees (neither end falls from lane to lane), and those beside
    // them that are computed together with them: hidden ones have to be masked, since 0 * NaN is NaN.
    Keys seen_among(Keys keys, int64_t together) const {
        const Keys seen{std::max(keys.first, begin[0]), std::min(keys.last, end[L - 1])};
        if (seen.empty()) return seen;
        return {seen.first - (seen.first - keys.first) % together,
                std::min(keys.last, keys.first + up_to_multiple(seen.last - keys.first, together))};
    }

    bool sees_all(Keys keys) const { return begin[L - 1] <= keys.first && end[0] >= keys.last; }

    bool sees_any(Keys keys) const {
        bool seen = false;
        for (int64_t lane = 0; lane < L; ++lane)
            seen |= std::max(keys.first, begin[lane]) < std::min(keys.last, end[lane]);
        return seen;
    }

  private:
    int64_t batch_;
    int64_t query_[L], head_[L];
};

// Which pairs of a tile are allowed: in each lane the keys from `low` up to `high`, counted from the tile's first one.
template <class T, int L> struct TileMask {
    Integer<T> low[L], high[L];

    TileMask(const Strip<L> &strip, Keys keys) {
        for (int64_t lane = 0; lane < L; ++lane) {
            low[lane] = static_cast<Integer<T>>(std::clamp<int64_t>(strip.begin[lane] - keys.first, 0, keys.count()));
            high[lane] = static_cast<Integer<T>>(std::clamp<int64_t>(strip.end[lane] - keys.first, 0, keys.count()));
        }
    }

    bool allows(int64_t key, int64_t lane) const { return low[lane] <= key && key < high[lane]; }

    // Put `hidden` wherever a pair is not allowed: selected away, since a product with 0 keeps a NaN.
    void select(T *tile, int64_t keys, T hidden) const {
        for (int64_t key = 0; key < keys; ++key)
            for (int64_t lane = 0; lane < L; lane += WIDTH<T>) {
                const Vector<Integer<T>> at = broadcast(static_cast<Integer<T>>(key));
                const Vector<Integer<T>> allowed = (load(low + lane) <= at) & (at < load(high + lane));
                T *weights = tile + key * L + lane;
                store(weights, allowed ? load(weights) : broadcast(hidden));
            }
    }
};

// Copy rows of a tensor [.., tokens, head_dim] times a factor to [LANES][width], with zeros around them.
template <class Raw, class T, int L>
void load_rows(int64_t head_dim, const Tensor &tensor, const Strip<L> &strip, T factor, T *rows, int64_t width) {
    for (int64_t lane = 0; lane < L; ++lane) {
        T *row = rows + lane * width;
        int64_t d = 0;
        if (lane < strip.count) {
            const Raw *from = strip.template in<const Raw>(tensor, lane);
            for (; d < head_dim; ++d) row[d] = widen(from[d]) * factor;
        }
        for (; d < width; ++d) row[d] = 0;
    }
}

// Copy numbers of a tensor [.., tokens] to lanes, with 0 beyond the rows.
template <class T, int L> void load_lanes(const Tensor &tensor, const Strip<L> &strip, T *lanes) {
    for (int64_t lane = 0; lane < L; ++lane)
        lanes[lane] = lane < strip.count ? *strip.template in<const T>(tensor, lane) : T(0);
}

template <class T, int L> void store_lanes(const Tensor &tensor, const Strip<L> &strip, const T *lanes) {
    for (int64_t lane = 0; lane < strip.count; ++lane)
        *strip.template in<T>(tensor, lane) = lanes[lane];
}

// The factor of scores goes into the queries as they are loaded, where a unit holds them in the dtype of the state; else it is
// left over for the scores, and for sums over queries.
template <class Unit> inline double scale_of_queries(const Task &task) { return Unit::SCALES_SCORES ? 1 : task.softmax_scale; }
template <class Unit> inline typename Unit::T scale_of_scores(const Task &task) {
    return static_cast<typename Unit::T>(Unit::SCALES_SCORES ? task.softmax_scale : 1);
}

// What is subtracted from scores: 0 where no key was seen, since -inf - -inf is NaN.
template <class T> inline Vector<T> finite_shift(Vector<T> row_max) {
    const Vector<T> none = broadcast(-static_cast<T>(INFINITY));
    return row_max == none ? Vector<T>{} : row_max;
}

// A NaN or an infinity in rows that not all may see: 0 * NaN is NaN, so such a tile is multiplied pair by pair.
template <class Raw> bool any_wild(const Raw *rows, int64_t row_stride, int64_t count, int64_t width) {
    bool wild = false;
    for (int64_t row = 0; row < count; ++row) wild |= any_not_finite(rows + row * row_stride, width);
    return wild;
}

template <class Raw, class T, int L>
void gather_allowed(const TileMask<T, L> &mask, const Raw *rows, int64_t row_stride, int64_t keys, const T *tile,
                    int64_t head_dim, T *sums) {
    for (int64_t key = 0; key < keys; ++key)
        for (int64_t lane = 0; lane < L; ++lane)
            if (mask.allows(key, lane))
                for (int64_t d = 0; d < head_dim; ++d)
                    sums[d * L + lane] += tile[key * L + lane] * widen(rows[key * row_stride + d]);
}

template <class Raw, class T, int L>
void scatter_allowed(const TileMask<T, L> &mask, const T *tile, int64_t keys, const Raw *queries, int64_t width, T *sums) {
    for (int64_t key = 0; key < keys; ++key)
        for (int64_t lane = 0; lane < L; ++lane)
            if (mask.allows(key, lane))
                for (int64_t d = 0; d < width; ++d)
                    sums[key * width + d] += tile[key * L + lane] * widen(queries[lane * width + d]);
}

} // namespace ringmpi
