// Going over a block in units of about half a millisecond, which threads share, in an order that leaves no choice to time: a
// unit waits for those before it that add to what it adds to. So neither the number of threads nor when the caller takes a break
// changes a bit.
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
        : problem_(task), pool_(pool), workers_(static_cast<size_t>(pool.size())),
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
        for (const Worker &worker : workers_) {
            total.computed_pairs += worker.counts.computed_pairs;
            total.tiles += worker.counts.tiles;
            total.tiles_unmasked += worker.counts.tiles_unmasked;
            total.tiles_skipped += worker.counts.tiles_skipped;
        }
        return total;
    }

  protected:
    // Units in the order in which they are taken: by KV head, by round, by number.
    struct Ticket {
        int64_t kv_head, round, number;
    };

    virtual int64_t rounds() const = 0;                // of a KV head
    virtual int64_t units_of(int64_t round) const = 0;
    virtual bool ready(const Ticket &ticket) const = 0; // once units with lesser tickets are done, at the latest
    virtual void compute(const Ticket &ticket, int thread, Counts &counts) = 0;
    virtual void enter() = 0;                          // called by a thread before its units, and after them
    virtual void leave() = 0;

    const Problem problem_;

  private:
    struct alignas(64) Worker { // a cache line for each thread
        Counts counts{};
        Ticket ticket{};
        bool waiting = false; // for what comes before its ticket
    };

    // The next ticket is a round, counted over all KV heads, and a number in it.
    static constexpr int64_t ROUND = int64_t{1} << 32;

    void begin() {
        begun_ = true;
        for (int64_t round = 0; round < rounds(); ++round) left_ += units_of(round) * problem_.kv_head_count();
        helped_ = pool_.begin(job_);
    }

    void help(int thread) {
        enter();
        while (!finished_ && !stopped_)
            if (!compute_next(thread)) relax();
        leave();
    }

    // Compute a unit; false where none is left to take, or that of this thread's ticket is not ready. Some thread has the least
    // ticket of all, whose unit is ready, so all come to an end.
    bool compute_next(int thread) {
        Worker &worker = workers_[static_cast<size_t>(thread)];
        if (!worker.waiting && !take(worker.ticket)) return false;
        worker.waiting = !ready(worker.ticket);
        if (worker.waiting) return false;
        compute(worker.ticket, thread, worker.counts);
        if (left_.fetch_sub(1) == 1) finished_ = true;
        return true;
    }

    bool take(Ticket &ticket) {
        const int64_t end = rounds() * problem_.kv_head_count() * ROUND;
        for (int64_t next = next_.load(); next < end;) {
            const int64_t round = next / ROUND, number = next % ROUND;
            const bool is_unit = number < units_of(round % rounds());
            if (!next_.compare_exchange_weak(next, is_unit ? next + 1 : (round + 1) * ROUND)) continue;
            if (is_unit) {
                ticket = {round / rounds(), round % rounds(), number};
                return true;
            }
            next = next_.load();
        }
        return false;
    }

    Pool &pool_;
    bool begun_ = false, helped_ = false; // alone where the threads are at another work
    std::atomic<bool> finished_{false}, stopped_{false};
    std::atomic<int64_t> next_{0}, left_{0}; // left_: units that are not done
    std::vector<Worker> workers_;
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

// Numbers of units that are done, for each of some things that units touch one after the other.
class Progress {
  public:
    // All begin at 0.
    void follow(int64_t count) { done_ = std::vector<std::atomic<int64_t>>(static_cast<size_t>(count)); }

    int64_t of(int64_t thing) const { return done_[static_cast<size_t>(thing)].load(); }
    void step(int64_t thing) { done_[static_cast<size_t>(thing)].fetch_add(1); }

  private:
    std::vector<std::atomic<int64_t>> done_;
};

// What both passes have in common. A unit is a cell of a grid: some rows and some keys, which are pieces of all. The rows of a
// piece meet the pieces of keys in rising order; where units add to what belongs to keys, these meet the rows in rising order too.
// Where blocks are prepared, that is a round of its own.
template <class Unit> class BlockWork : public Work {
  public:
    BlockWork(const Task &task, Pool &pool) : Work(task, pool) {}

  protected:
    static constexpr int64_t PREPARATION = Unit::PREPARES ? 1 : 0;

    // Prepared blocks that there is room for: while threads are at the last units of a KV head, others begin with the next one.
    static constexpr int64_t ROOMS = 2;

    struct Cell {
        int64_t rows, keys;
    };

    virtual int64_t round_count() const = 0;
    virtual int64_t unit_count(int64_t round) const = 0;
    virtual Cell cell(int64_t round, int64_t number) const = 0;
    virtual int64_t pieces_of_rows() const = 0;
    virtual int64_t pieces_of_keys() const = 0;
    virtual bool adds_to_keys() const = 0;
    virtual void attend(const Cell &at, const typename Unit::Block &block, int64_t kv_head, int thread, Counts &counts) = 0;

    // To be called once the pieces are known.
    void place_blocks(Scratch &shared) {
        const int64_t kv_heads = problem_.kv_head_count();
        shared.reserve(std::min(ROOMS, kv_heads) * Unit::Block::nbytes(problem_));
        for (int64_t room = 0; room < std::min(ROOMS, kv_heads); ++room) rooms_.emplace_back(problem_, shared);
        prepared_.follow(kv_heads);
        attended_.follow(kv_heads);
        keys_met_.follow(kv_heads * pieces_of_rows());
        rows_met_.follow(kv_heads * pieces_of_keys());
    }

    int64_t rounds() const override { return PREPARATION + round_count(); }

    int64_t units_of(int64_t round) const override {
        return round < PREPARATION ? pieces_in(problem_.task.keys, PREPARED_KEYS) : unit_count(round - PREPARATION);
    }

    bool ready(const Ticket &ticket) const override {
        const int64_t kv_head = ticket.kv_head;
        if (ticket.round < PREPARATION) // The block that was in its room is no longer read.
            return kv_head < ROOMS || attended_.of(kv_head - ROOMS) == pieces_of_rows() * pieces_of_keys();
        if (Unit::PREPARES && prepared_.of(kv_head) < units_of(0)) return false;
        const Cell at = cell(ticket.round - PREPARATION, ticket.number);
        return keys_met_.of(of_rows(kv_head, at)) == at.keys && (!adds_to_keys() || rows_met_.of(of_keys(kv_head, at)) == at.rows);
    }

    void compute(const Ticket &ticket, int thread, Counts &counts) override {
        const int64_t kv_head = ticket.kv_head;
        typename Unit::Block block = rooms_[static_cast<size_t>(kv_head % ROOMS)];
        block.choose(kv_head);
        if (ticket.round < PREPARATION) {
            block.prepare(piece_of(problem_.task.keys, PREPARED_KEYS, ticket.number));
            prepared_.step(kv_head);
            return;
        }
        const Cell at = cell(ticket.round - PREPARATION, ticket.number);
        attend(at, block, kv_head, thread, counts);
        keys_met_.step(of_rows(kv_head, at));
        rows_met_.step(of_keys(kv_head, at));
        attended_.step(kv_head);
    }

    void enter() override { Unit::enter(); }
    void leave() override { Unit::leave(); }

  private:
    int64_t of_rows(int64_t kv_head, const Cell &at) const { return kv_head * pieces_of_rows() + at.rows; }
    int64_t of_keys(int64_t kv_head, const Cell &at) const { return kv_head * pieces_of_keys() + at.keys; }

    std::vector<typename Unit::Block> rooms_;
    Progress prepared_, attended_; // by KV head
    Progress keys_met_, rows_met_; // by KV head and piece of rows; by KV head and piece of keys
};

// A round is a segment of the keys, a unit a strip of rows, whose state it updates.
template <class Unit> class ForwardWork : public BlockWork<Unit> {
    using T = typename Unit::T;

  public:
    ForwardWork(const Task &task, Pool &pool, Memory &memory) : BlockWork<Unit>(task, pool) {
        const Problem &problem = this->problem_;
        segment_ = down_to_multiple(pairs_of_unit<Unit>(task, FORWARD_FLOPS, 2) / Unit::LANES, Unit::TILE_KEYS);
        this->place_blocks(memory.shared);
        for (Scratch &scratch : memory.of_thread) {
            scratch.reserve(Forward<Unit>::nbytes(problem));
            threads_.push_back(std::make_unique<Forward<Unit>>(problem, scratch));
        }
    }

  protected:
    using typename BlockWork<Unit>::Cell;

    int64_t pieces_of_keys() const override { return pieces_in(this->problem_.task.keys, segment_); }
    int64_t pieces_of_rows() const override { return pieces_in(this->problem_.rows, Unit::LANES); }
    bool adds_to_keys() const override { return false; }

    int64_t round_count() const override { return pieces_of_keys(); }
    int64_t unit_count(int64_t) const override { return pieces_of_rows(); }
    Cell cell(int64_t round, int64_t number) const override { return {number, round}; }

    void attend(const Cell &at, const typename Unit::Block &block, int64_t kv_head, int thread, Counts &counts) override {
        const Keys keys = piece_of(this->problem_.task.keys, segment_, at.keys);
        threads_[static_cast<size_t>(thread)]->attend(block, kv_head, at.rows * Unit::LANES, keys, counts);
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
        this->place_blocks(memory.shared);
        for (Scratch &scratch : memory.of_thread) {
            scratch.reserve(Backward<Unit>::nbytes(problem, keys_));
            threads_.push_back(std::make_unique<Backward<Unit>>(problem, keys_, scratch));
        }
    }

  protected:
    using typename BlockWork<Unit>::Cell;

    int64_t pieces_of_keys() const override { return pieces_in(this->problem_.task.keys, keys_); }
    int64_t pieces_of_rows() const override { return pieces_in(this->problem_.rows, chunk_); }
    bool adds_to_keys() const override { return true; }

    int64_t round_count() const override { return pieces_of_keys() + pieces_of_rows() - 1; }

    int64_t unit_count(int64_t round) const override {
        return std::min(round, pieces_of_keys() - 1) - first_of_keys(round) + 1;
    }

    Cell cell(int64_t round, int64_t number) const override {
        const int64_t keys = first_of_keys(round) + number;
        return {round - keys, keys};
    }

    void attend(const Cell &at, const typename Unit::Block &block, int64_t kv_head, int thread, Counts &counts) override {
        const Keys keys = piece_of(this->problem_.task.keys, keys_, at.keys);
        const int64_t last = std::min(this->problem_.rows, (at.rows + 1) * chunk_);
        threads_[static_cast<size_t>(thread)]->attend(block, kv_head, at.rows * chunk_, last, keys, counts);
    }

  private:
    int64_t first_of_keys(int64_t round) const { return std::max<int64_t>(0, round - (pieces_of_rows() - 1)); }

    int64_t keys_, chunk_; // of a unit
    std::vector<std::unique_ptr<Backward<Unit>>> threads_;
};

} // namespace ringmpi
