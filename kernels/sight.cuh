// Who sees whom. A mask lets a query see one interval of positions; since positions ascend, that is an interval of the block's
// keys, and neither end of it falls from one query to the next.
#pragma once

#include "number.cuh"

namespace ringmpi {

constexpr unsigned WHOLE_WARP = 0xffffffffu;
constexpr int WARP = 32;

// The first index from `low` up to `high` for which `holds`, which stays true once it is; `high` if there is none.
template <class Index, class Holds> __device__ inline Index first_where(Index low, Index high, Holds holds) {
    while (low < high) {
        const Index middle = low + (high - low) / 2;
        if (holds(middle))
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

struct Mask {
    int causal;             // no key after the query itself
    Int64 window;           // how many keys before the own one, or negative: all
    const Int64 *documents; // cumulative offsets, from 0 to the length of the sequence
    int offsets;            // how many of them, or 0: one document
};

// Which positions a query sees, from `first` up to `last`.
__device__ inline void interval(const Mask &mask, Int64 query, Int64 &first, Int64 &last) {
    first = 0, last = 0x7fffffffffffffffll; // positions are not negative
    if (mask.causal) last = query + 1;
    if (mask.window >= 0) first = query - mask.window;
    if (mask.offsets == 0) return;
    // Behind the query's document: the last offset is the length of the sequence, which no position reaches.
    const int after = first_where(0, mask.offsets, [&](int at) { return mask.documents[at] > query; });
    first = most(first, mask.documents[after - 1]);
    last = least(last, mask.documents[after]);
}

// A tile of columns of one head, against the rows of a block of threads.
template <class Index> struct Tile {
    Index first;
    int head;  // counted from the first one that the rows meet
    bool any;  // false: there are no more tiles
    bool full; // every pair is allowed, and all columns are there
};

// Rows are queries, columns are keys. Lanes of every warp know all rows of the block, so that all find the same tiles.
template <class Unit> class OfQueries {
    using Index = typename Unit::Index;

  public:
    __device__ OfQueries(const Index *begin, const Index *end, Index first, Index queries, Index keys) : keys_(keys) {
        const Index last = least(first + Unit::ROWS, queries) - 1;
        for (int i = 0; i < PER_LANE; ++i) {
            const Index row = first + static_cast<Index>(threadIdx.x % WARP + i * WARP);
            lane_begin_[i] = row <= last ? begin[row] : 0;
            lane_end_[i] = row <= last ? end[row] : 0;
        }
        for (int i = 0; i < Unit::ROWS_EACH; ++i) {
            const Index row = first + Unit::row(i);
            begin_[i] = row <= last ? begin[row] : 0;
            end_[i] = row <= last ? end[row] : 0;
        }
        all_from_ = begin[last];
        all_to_ = end[first];
    }

    __device__ Tile<Index> first_tile() const { return from(0); }
    __device__ Tile<Index> after(const Tile<Index> &tile) const { return from(tile.first + Unit::COLUMNS); }

    __device__ bool allows(int i, Index column) const { return begin_[i] <= column && column < end_[i]; }

  private:
    static constexpr int PER_LANE = Unit::ROWS / WARP;

    // The first tile at or behind a key in which any row sees any key: gaps are jumped over.
    __device__ Tile<Index> from(Index key) const {
        Index nearest = keys_;
        for (int i = 0; i < PER_LANE; ++i) {
            const Index seen = most(lane_begin_[i], key);
            if (seen < lane_end_[i]) nearest = least(nearest, seen);
        }
        for (int apart = WARP / 2; apart > 0; apart /= 2)
            nearest = least(nearest, __shfl_xor_sync(WHOLE_WARP, nearest, apart));
        const Index first = nearest / Unit::COLUMNS * Unit::COLUMNS;
        return {first, 0, nearest < keys_, all_from_ <= first && first + Unit::COLUMNS <= all_to_};
    }

    Index keys_, all_from_, all_to_;
    Index lane_begin_[PER_LANE], lane_end_[PER_LANE];
    Index begin_[Unit::ROWS_EACH], end_[Unit::ROWS_EACH]; // of this thread's rows
};

// Rows are keys, columns are the queries of all heads that read them, head by head.
template <class Unit> class OfKeys {
    using Index = typename Unit::Index;

  public:
    __device__ OfKeys(const Index *begin, const Index *end, Index first, Index queries, Index keys, int heads)
        : begin_(begin), end_(end), queries_(queries), low_(first), high_(least(first + Unit::ROWS, keys)), heads_(heads) {
        start_ = first_where(Index(0), queries, [&](Index at) { return end[at] > low_; });
        start_ = start_ / Unit::COLUMNS * Unit::COLUMNS;
        stop_ = first_where(Index(0), queries, [&](Index at) { return begin[at] >= high_; });
        for (int i = 0; i < Unit::ROWS_EACH; ++i) row_[i] = first + Unit::row(i);
    }

    __device__ Tile<Index> first_tile() const { return from(0, start_); }
    __device__ Tile<Index> after(const Tile<Index> &tile) const { return from(tile.head, tile.first + Unit::COLUMNS); }

    __device__ bool allows(int i, Index begin, Index end) const { return begin <= row_[i] && row_[i] < end; }

  private:
    // The first tile at or behind a query of a head in which any query sees any row.
    __device__ Tile<Index> from(int head, Index query) const {
        for (; head < heads_; ++head, query = start_)
            for (; query < stop_; query += Unit::COLUMNS) {
                bool sees = false;
                for (int at = threadIdx.x % WARP; at < Unit::COLUMNS; at += WARP)
                    if (query + at < queries_)
                        sees |= most(begin_[query + at], low_) < least(end_[query + at], high_);
                if (__ballot_sync(WHOLE_WARP, sees) != 0) return {query, head, true, all_see(query)};
            }
        return {0, 0, false, false};
    }

    __device__ bool all_see(Index query) const {
        const Index last = query + Unit::COLUMNS - 1;
        return last < queries_ && begin_[last] <= low_ && high_ <= end_[query];
    }

    const Index *begin_, *end_;
    Index queries_, low_, high_, start_, stop_;
    int heads_;
    Index row_[Unit::ROWS_EACH];
};

} // namespace ringmpi
