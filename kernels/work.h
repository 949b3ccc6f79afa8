// Going over a block in units of about half a millisecond, which threads share, in an order that leaves no choice to time:
// units of one round touch nothing in common, and rounds follow each other. So neither the number of threads nor when the
// caller takes a break changes a bit.
#pragma once

#include <atomic>
#include <memory>

#include "backward.h"
#include "forward.h"
#include "pool.h"

namespace ringmpi {

// Memory of a pool's threads, and what they share.
struct Memory {
    explicit Memory(int threads) : of_thread(static_cast<size_t>(threads)) {}

    Scratch shared;
    std::vector<Scratch> of_thread; // made once: a Scratch does not move
};

class Work {
  public:
    Work(const Task &task, Pool &pool)
        : problem_(task), pool_(pool), counts_of_thread_(static_cast<size_t>(pool.size())),
          job_([this](int thread) { help(thread); }) {}
    virtual ~Work() = default;

    // Compute until the time is over; true once all is done. Other threads go on meanwhile, and between two calls.
    bool advance(double seconds) {
        const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
        if (!begun_) begin();
        enter();
        do {
            if (!compute_next(0)) relax();
        } while (!finished_ && std::chrono::steady_clock::now() < end);
        leave();
        return finished_;
    }

    // Let no thread touch this any more. To be called before it goes.
    void stop() {
        stopped_ = true;
        if (helped_) pool_.end();
    }

    Counts counts() const {
        Counts total{};
        for (const Padded &of : counts_of_thread_) {
            total.computed_pairs += of.counts.computed_pairs;
            total.tiles += of.counts.tiles;
            total.tiles_unmasked += of.counts.tiles_unmasked;
            total.tiles_skipped += of.counts.tiles_skipped;
        }
        return total;
    }

  protected:
    virtual int64_t rounds() const = 0;                // of a KV head
    virtual int64_t units_of(int64_t round) const = 0;
    virtual void choose(int64_t kv_head) = 0;          // called by one thread, before the rounds of a KV head
    virtual void compute(int64_t round, int64_t unit, int thread, Counts &counts) = 0;
    virtual void enter() = 0;                          // called by a thread before its units, and after them
    virtual void leave() = 0;

    const Problem problem_;
    int64_t kv_head_ = 0;

  private:
    struct alignas(64) Padded { // a cache line for each thread
        Counts counts{};
    };

    // A ticket is a round, counted over all KV heads, and a unit of it. A thread takes one by adding 1, which gives a unit that
    // there is not once all are taken; the next round begins when the last unit of this one is done.
    static constexpr int64_t ROUND = int64_t{1} << 32;

    void begin() {
        begun_ = true;
        choose(0);
        helped_ = pool_.begin(job_);
    }

    void help(int thread) {
        enter();
        while (!finished_ && !stopped_)
            if (!compute_next(thread)) relax();
        leave();
    }

    // Take a unit and compute it; false where none is left of this round.
    bool compute_next(int thread) {
        const int64_t seen = ticket_.load();
        if (seen % ROUND >= units_of(seen / ROUND % rounds())) return false; // So tickets don't run into the next round.
        const int64_t ticket = ticket_.fetch_add(1), round = ticket / ROUND % rounds(), units = units_of(round);
        if (ticket % ROUND >= units) return false;
        compute(round, ticket % ROUND, thread, counts_of_thread_[static_cast<size_t>(thread)].counts);
        if (done_.fetch_add(1) + 1 == units) begin_round(ticket / ROUND + 1);
        return true;
    }

    // Called by the one thread that has done the last unit, while the others find none.
    void begin_round(int64_t number) {
        done_ = 0;
        if (number == rounds() * problem_.kv_head_count()) {
            finished_ = true;
            return;
        }
        if (number % rounds() == 0) choose(++kv_head_);
        ticket_ = number * ROUND;
    }

    Pool &pool_;
    bool begun_ = false, helped_ = false; // alone where the threads are at another work
    std::atomic<bool> finished_{false}, stopped_{false};
    std::atomic<int64_t> ticket_{0}, done_{0}; // done_: units of this round
    std::vector<Padded> counts_of_thread_;
    const std::function<void(int)> job_;
};

// A unit of work is half a millisecond to a millisecond at the 130 GFLOP/s that one core with AVX-512 gives in float32.
constexpr double FORWARD_FLOPS = 64e6, BACKWARD_FLOPS = 128e6;

// Pairs of a row and a key that make such a unit, in `products` products of head_dim numbers.
template <class Unit> double pairs_of_unit(const Task &task, double flops, int products) {
    const double narrow = static_cast<double>(sizeof(float)) / sizeof(typename Unit::T);
    return flops * Unit::SPEED * narrow / static_cast<double>(2 * products * task.head_dim);
}

// A number down to a multiple of `step`, at least one of them.
inline int64_t down_to_multiple(double number, int64_t step) {
    return std::max<int64_t>(1, static_cast<int64_t>(number) / step) * step;
}

// Keys that a thread prepares at once.
constexpr int64_t PREPARED_KEYS = 960;

inline Keys piece_of(int64_t all, int64_t length, int64_t index) {
    return {index * length, std::min(all, (index + 1) * length)};
}

inline int64_t pieces_in(int64_t all, int64_t length) { return (all + length - 1) / length; }

// What both passes have in common: a block that is prepared in a round of its own, where that is needed.
template <class Unit> class BlockWork : public Work {
  public:
    BlockWork(const Task &task, Pool &pool) : Work(task, pool) {}

  protected:
    static constexpr int64_t PREPARATION = Unit::PREPARES ? 1 : 0;

    virtual int64_t unit_count(int64_t round) const = 0;
    virtual int64_t round_count() const = 0;
    virtual void attend(int64_t round, int64_t unit, int thread, Counts &counts) = 0;

    void place_block(Scratch &shared) {
        shared.reserve(Unit::Block::nbytes(problem_));
        block_ = std::make_unique<typename Unit::Block>(problem_, shared);
    }

    int64_t rounds() const override { return PREPARATION + round_count(); }

    int64_t units_of(int64_t round) const override {
        return round < PREPARATION ? pieces_in(problem_.task.keys, PREPARED_KEYS) : unit_count(round - PREPARATION);
    }

    void choose(int64_t kv_head) override { block_->choose(kv_head); }

    void compute(int64_t round, int64_t unit, int thread, Counts &counts) override {
        if (round < PREPARATION)
            block_->prepare(piece_of(problem_.task.keys, PREPARED_KEYS, unit));
        else
            attend(round - PREPARATION, unit, thread, counts);
    }

    void enter() override { Unit::enter(); }
    void leave() override { Unit::leave(); }

    std::unique_ptr<typename Unit::Block> block_;
};

// A round is a segment of the keys, a unit a strip of rows, whose state it updates.
template <class Unit> class ForwardWork : public BlockWork<Unit> {
    using T = typename Unit::T;

  public:
    ForwardWork(const Task &task, Pool &pool, Memory &memory) : BlockWork<Unit>(task, pool) {
        const Problem &problem = this->problem_;
        segment_ = down_to_multiple(pairs_of_unit<Unit>(task, FORWARD_FLOPS, 2) / Unit::LANES, Unit::TILE_KEYS);
        this->place_block(memory.shared);
        for (Scratch &scratch : memory.of_thread) {
            scratch.reserve(Forward<Unit>::nbytes(problem));
            threads_.push_back(std::make_unique<Forward<Unit>>(problem, scratch));
        }
    }

  protected:
    int64_t round_count() const override { return pieces_in(this->problem_.task.keys, segment_); }
    int64_t unit_count(int64_t) const override { return pieces_in(this->problem_.rows, Unit::LANES); }

    void attend(int64_t round, int64_t unit, int thread, Counts &counts) override {
        const Keys keys = piece_of(this->problem_.task.keys, segment_, round);
        threads_[static_cast<size_t>(thread)]->attend(*this->block_, this->kv_head_, unit * Unit::LANES, keys, counts);
    }

  private:
    int64_t segment_;
    std::vector<std::unique_ptr<Forward<Unit>>> threads_;
};

// Keys and rows are cut into a grid, and a round is one of its diagonals: so every dq gets its terms by rising key, and
// every dk and dv by rising row.
template <class Unit> class BackwardWork : public BlockWork<Unit> {
    using T = typename Unit::T;

    // dk and dv of so many keys take 480 KiB at head_dim 128 in float32, which leaves room in a second-level cache of 1 MiB.
    static constexpr int64_t MOST_KEYS = 480;
    static_assert(PREPARED_KEYS % Unit::TILE_KEYS == 0, "tiles start where prepared pieces do");

  public:
    BackwardWork(const Task &task, Pool &pool, Memory &memory) : BlockWork<Unit>(task, pool) {
        const Problem &problem = this->problem_;
        // About as many keys as rows: what a unit does once a row and once a key beside the pairs costs about the same.
        const double pairs = pairs_of_unit<Unit>(task, BACKWARD_FLOPS, 5);
        keys_ = down_to_multiple(std::min(std::sqrt(pairs), static_cast<double>(MOST_KEYS)), Unit::TILE_KEYS);
        chunk_ = down_to_multiple(pairs / static_cast<double>(keys_), Unit::LANES);
        this->place_block(memory.shared);
        for (Scratch &scratch : memory.of_thread) {
            scratch.reserve(Backward<Unit>::nbytes(problem, keys_));
            threads_.push_back(std::make_unique<Backward<Unit>>(problem, keys_, scratch));
        }
    }

  protected:
    int64_t key_pieces() const { return pieces_in(this->problem_.task.keys, keys_); }
    int64_t chunks() const { return pieces_in(this->problem_.rows, chunk_); }
    int64_t round_count() const override { return key_pieces() + chunks() - 1; }
    int64_t first_piece(int64_t round) const { return std::max<int64_t>(0, round - (chunks() - 1)); }

    int64_t unit_count(int64_t round) const override {
        return std::min(round, key_pieces() - 1) - first_piece(round) + 1;
    }

    void attend(int64_t round, int64_t unit, int thread, Counts &counts) override {
        const int64_t piece = first_piece(round) + unit, chunk = round - piece;
        const Keys keys = piece_of(this->problem_.task.keys, keys_, piece);
        const int64_t last = std::min(this->problem_.rows, (chunk + 1) * chunk_);
        threads_[static_cast<size_t>(thread)]->attend(*this->block_, this->kv_head_, chunk * chunk_, last, keys, counts);
    }

  private:
    int64_t keys_, chunk_; // of a unit
    std::vector<std::unique_ptr<Backward<Unit>>> threads_;
};

} // namespace ringmpi
