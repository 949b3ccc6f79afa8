// How the CPU's matrix unit (AMX) multiplies tiles of bfloat16, with float32 sums.
//
// q, k, v and dout are bfloat16, so their products are as exact as those of the vector units. Weights and changes are
// float32, and rounded to bfloat16 they would miss the error bound of a float32 state by far. They are split into three
// bfloat16 numbers whose sum they are, bit for bit: 8 bits of the 24 each. Where they may be rounded, one number is enough.
#pragma once

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__AVX512BW__) && defined(__AVX512BF16__) && defined(__linux__)
#define RINGMPI_MATRIX_UNIT 1
#else
#define RINGMPI_MATRIX_UNIT 0
#endif

#if RINGMPI_MATRIX_UNIT

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "pairs.h"
#include "softmax.h"

namespace ringmpi {

// Whether this CPU has the unit and the kernel lets this process use its registers (Linux, Documentation/arch/x86/xstate.rst).
inline bool matrix_unit_works() {
    constexpr unsigned BF16 = 1u << 22, TILE = 1u << 24; // cpuid leaf 7, edx
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || (edx & BF16) == 0 || (edx & TILE) == 0) return false;
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

namespace amx {

// A register is 16 rows of 64 bytes: 16 float32 sums, or 32 bfloat16 of the left factor, or of the right one 16 pairs, each of
// two consecutive terms.
constexpr int64_t TALL = 16, DEEP = 32, TILE_NUMBERS = TALL * DEEP;

struct alignas(64) Configuration {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_nbytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Where the registers of a factor are in memory; strides in bytes.
struct Factor {
    const void *at;
    int64_t row;  // of a register
    int64_t next; // to the neighbouring register, along the sums
    int64_t step; // to the next terms
    int64_t part; // to the next part, if it is split

    const char *place(int64_t neighbour, int64_t of_step, int64_t of_part) const {
        return static_cast<const char *>(at) + neighbour * next + of_step * step + of_part * part;
    }
};

// Which factor is split into parts.
enum class Split { neither, left, right };

// No work for the vector units, which could do some while the matrix unit multiplies.
struct Nothing {
    void operator()() const {}
};

// M x N registers of sums (0 to 3), from M registers of the left factor (4, 5) and N of the right one (6, 7). `beside` is called
// after every M x N products.
template <int M, int N, Split SPLIT, int PARTS, bool ADD, class Beside>
inline void multiply_registers(Factor left, Factor right, int64_t steps, float *out, int64_t out_row, Beside &beside) {
    const int64_t nbytes = out_row * static_cast<int64_t>(sizeof(float));
    float *below = out + TALL * out_row;
    if (ADD) {
        _tile_loadd(0, out, nbytes);
        if (N > 1) _tile_loadd(1, out + TALL, nbytes);
        if (M > 1) _tile_loadd(2, below, nbytes);
        if (M > 1 && N > 1) _tile_loadd(3, below + TALL, nbytes);
    } else {
        _tile_zero(0);
        if (N > 1) _tile_zero(1);
        if (M > 1) _tile_zero(2);
        if (M > 1 && N > 1) _tile_zero(3);
    }
    for (int64_t step = 0; step < steps; ++step) {
        for (int part = 0; part < PARTS; ++part) {
            if (part == 0 || SPLIT == Split::left) {
                _tile_loadd(4, left.place(0, step, part), left.row);
                if (M > 1) _tile_loadd(5, left.place(1, step, part), left.row);
            }
            if (part == 0 || SPLIT == Split::right) {
                _tile_loadd(6, right.place(0, step, part), right.row);
                if (N > 1) _tile_loadd(7, right.place(1, step, part), right.row);
            }
            _tile_dpbf16ps(0, 4, 6);
            if (N > 1) _tile_dpbf16ps(1, 4, 7);
            if (M > 1) _tile_dpbf16ps(2, 5, 6);
            if (M > 1 && N > 1) _tile_dpbf16ps(3, 5, 7);
            beside();
        }
    }
    _tile_stored(0, out, nbytes);
    if (N > 1) _tile_stored(1, out + TALL, nbytes);
    if (M > 1) _tile_stored(2, below, nbytes);
    if (M > 1 && N > 1) _tile_stored(3, below + TALL, nbytes);
}

// Keeps the compiler from moving accesses to memory past it: GCC's intrinsics don't say what they read.
inline void settle_memory() { __asm__ volatile("" ::: "memory"); }

// out (+)= left times right, for tall x wide registers of sums.
template <Split SPLIT, int PARTS, bool ADD, class Beside = Nothing>
inline void multiply(int64_t tall, int64_t wide, int64_t steps, Factor left, Factor right, float *out, int64_t out_row,
                     Beside beside = {}) {
    settle_memory(); // what was written is there to be read
    for (int64_t m = 0; m < tall; m += 2)
        for (int64_t n = 0; n < wide; n += 2) {
            Factor above = left, across = right;
            above.at = left.place(m, 0, 0);
            across.at = right.place(n, 0, 0);
            float *sums = out + m * TALL * out_row + n * TALL;
            const bool two_tall = m + 1 < tall, two_wide = n + 1 < wide;
            if (two_tall && two_wide)
                multiply_registers<2, 2, SPLIT, PARTS, ADD>(above, across, steps, sums, out_row, beside);
            else if (two_tall)
                multiply_registers<2, 1, SPLIT, PARTS, ADD>(above, across, steps, sums, out_row, beside);
            else if (two_wide)
                multiply_registers<1, 2, SPLIT, PARTS, ADD>(above, across, steps, sums, out_row, beside);
            else
                multiply_registers<1, 1, SPLIT, PARTS, ADD>(above, across, steps, sums, out_row, beside);
        }
    settle_memory(); // nothing is read before it was written, or written over before it was read
}

// Take the upper half of float32 numbers, which are bfloat16 numbers, away from them.
inline __m512i take_upper(__m512 &numbers) {
    const __m512i upper = _mm512_and_si512(_mm512_castps_si512(numbers), _mm512_set1_epi32(static_cast<int>(0xffff0000u)));
    numbers = _mm512_sub_ps(numbers, _mm512_castsi512_ps(upper));
    return upper;
}

} // namespace amx

// L queries and K keys of a tile, multiples of DEEP; a weight is the sum of three numbers, or rounded to one.
template <int L, int64_t K, int PARTS = 3> struct MatrixUnit {
    static_assert(PARTS == 3 || PARTS == 1, "two parts are neither exact nor fast");

    using T = float;
    using Operand = PairedRows<L>;

    static constexpr int LANES = L;
    static constexpr int64_t TILE_KEYS = K;
    static constexpr int64_t KEY_UNIT = amx::DEEP;     // transposed registers hold so many keys
    static constexpr int64_t DEPTH_UNIT = amx::DEEP;
    static constexpr double SPEED = 4;                 // about, with the softmax
    static constexpr bool PREPARES = true;
    static constexpr bool SCALES_SCORES = true;        // q times the scale is no bfloat16
    static constexpr bool FUSES = false;

    static void enter() {
        static constexpr amx::Configuration configuration{}; // in memory as a whole: GCC's intrinsic names its first bytes only
        _tile_loadconfig(&configuration);
    }
    static void leave() { _tile_release(); }

    // k and v of a KV head, cut into registers: rows of 16 keys and 32 numbers, and transposed 16 numbers of 32 keys.
    class Block {
      public:
        struct Rows : KeyRows<BFloat16> { // as they lie
            BFloat16 *along;  // registers [key / 16][d / 32], or none
            BFloat16 *across; // registers [key / 32][d / 16], or none
        };

        static int64_t nbytes(const Problem &problem) { return 3 * Scratch::nbytes_of<BFloat16>(padded_count(problem)); }

        Block(const Problem &problem, Scratch &scratch)
            : problem_(problem), depth_(up_to_multiple(problem.task.head_dim, amx::DEEP)) {
            BFloat16 *registers[3];
            for (BFloat16 *&array : registers) array = scratch.take<BFloat16>(padded_count(problem));
            const bool backward = problem.task.backward != 0;
            k_ = {{}, registers[0], backward ? registers[1] : nullptr};
            v_ = {{}, backward ? registers[2] : nullptr, backward ? nullptr : registers[1]};
        }

        void choose(int64_t kv_head) {
            static_cast<KeyRows<BFloat16> &>(k_) = as_they_lie<BFloat16>(problem_, problem_.task.k, kv_head);
            static_cast<KeyRows<BFloat16> &>(v_) = as_they_lie<BFloat16>(problem_, problem_.task.v, kv_head);
        }

        void prepare(Keys keys) {
            for (int64_t key = keys.first; key < keys.last; key += amx::DEEP) {
                const int64_t count = std::min(amx::DEEP, keys.last - key);
                cut(k_, key, count);
                cut(v_, key, count);
            }
        }

        const Rows &k() const { return k_; }
        const Rows &v() const { return v_; }

      private:
        static constexpr int64_t MOST_DEEP = 256; // the widest head

        static int64_t padded_count(const Problem &problem) {
            return up_to_multiple(problem.task.keys, amx::DEEP) * up_to_multiple(problem.task.head_dim, amx::DEEP);
        }

        void cut(const Rows &rows, int64_t key, int64_t count) const {
            BFloat16 staged[amx::DEEP * MOST_DEEP];
            const int64_t head_dim = problem_.task.head_dim;
            for (int64_t i = 0; i < amx::DEEP; ++i) {
                BFloat16 *row = staged + i * depth_;
                const int64_t filled = i < count ? head_dim : 0;
                if (filled) std::memcpy(row, rows.from(key + i), static_cast<size_t>(filled) * sizeof(BFloat16));
                std::memset(row + filled, 0, static_cast<size_t>(depth_ - filled) * sizeof(BFloat16));
            }
            if (rows.along != nullptr) cut_along(staged, rows.along + key * depth_);
            if (rows.across != nullptr) cut_across(staged, rows.across + key * depth_);
        }

        void cut_along(const BFloat16 *staged, BFloat16 *registers) const {
            for (int64_t key = 0; key < amx::DEEP; ++key)
                for (int64_t d = 0; d < depth_; d += amx::DEEP) {
                    const int64_t which = key / amx::TALL * (depth_ / amx::DEEP) + d / amx::DEEP;
                    std::memcpy(registers + which * amx::TILE_NUMBERS + key % amx::TALL * amx::DEEP, staged + key * depth_ + d,
                                amx::DEEP * sizeof(BFloat16));
                }
        }

        void cut_across(const BFloat16 *staged, BFloat16 *registers) const {
            for (int64_t d = 0; d < depth_; d += amx::TALL) {
                alignas(64) float pairs[amx::TALL * amx::TALL];
                for (int64_t pair = 0; pair < amx::TALL; ++pair) {
                    const BFloat16 *even = staged + 2 * pair * depth_ + d;
                    _mm512_store_si512(pairs + pair * amx::TALL, interleave(even, even + depth_));
                }
                transpose_block(pairs, amx::TALL, reinterpret_cast<float *>(registers + d * amx::DEEP), amx::TALL);
            }
        }

        const Problem &problem_;
        int64_t depth_;
        Rows k_{}, v_{};
    };

    static int64_t nbytes(const Problem &) { return 2 * Scratch::nbytes_of<BFloat16>(PARTS * TILE_KEYS * LANES); }

    MatrixUnit(const Problem &, int64_t width, Scratch &scratch)
        : width_(width), parts_(scratch.take<BFloat16>(PARTS * TILE_KEYS * LANES)),
          more_parts_(scratch.take<BFloat16>(PARTS * TILE_KEYS * LANES)) {}

    // tile[key][lane] = sum over d of rows[key][d] * operand[lane][d]
    void scores(const typename Block::Rows &rows, Keys keys, const Operand &operand, T *tile) {
        const int64_t deep = width_ / amx::DEEP;
        const amx::Factor left{rows.along + keys.first * width_, REGISTER_ROW, REGISTER * deep, REGISTER, 0};
        const amx::Factor right{operand.by_number(), LANES * PAIR, REGISTER_ROW, amx::TALL * LANES * PAIR, 0};
        amx::multiply<amx::Split::neither, 1, false>(registers_of(keys.count()), WIDE, deep, left, right, tile, LANES);
    }

    // What is read next lies in order here.
    void scores(const typename Block::Rows &rows, Keys keys, const Operand &operand, T *tile, const typename Block::Rows &) {
        scores(rows, keys, operand, tile);
    }

    // sums[d][lane] += sum over keys of rows[key][d] * tile[key][lane]
    void gather(const typename Block::Rows &rows, Keys keys, T *tile, T *sums) {
        const int64_t count = up_to_multiple(keys.count(), amx::DEEP);
        clear(tile, keys.count(), count, 0);
        for (int64_t key = 0; key < count; key += 2)
            for (int64_t lane = 0; lane < LANES; lane += amx::TALL)
                split_pair(_mm512_loadu_ps(tile + key * LANES + lane), _mm512_loadu_ps(tile + (key + 1) * LANES + lane), key,
                           lane, parts_);
        gather_parts({&rows, keys.first, count, parts_}, sums, amx::Nothing{});
    }

    // Add to `sums` the values of some keys with the weights of their scores, after `rescale` was called. The products are left
    // for the next call, where they are made while the vector units are at the next weights.
    template <class Rescale>
    void absorb(const typename Block::Rows &rows, Keys keys, T *tile, Softmax<T, L> &softmax, T *sums, Rescale rescale) {
        const int64_t count = up_to_multiple(keys.count(), amx::DEEP);
        clear(tile, keys.count(), count, -INFINITY);
        BFloat16 *into = pending_.parts == parts_ ? more_parts_ : parts_;
        int64_t key = 0, lane = 0;
        const auto weigh = [&] {
            const Vector<T> even = softmax.weights(tile + key * LANES + lane, lane);
            const Vector<T> odd = softmax.weights(tile + (key + 1) * LANES + lane, lane);
            store(softmax.row_sum + lane, load(softmax.row_sum + lane) + (even + odd));
            split_pair((__m512)even, (__m512)odd, key, lane, into);
            if ((lane += amx::TALL) == LANES) {
                lane = 0;
                key += 2;
            }
        };
        if (pending_.count > 0) {
            const int64_t products = pending_.count / amx::DEEP * PARTS * up_to_multiple(width_ / amx::TALL, 2) / 2;
            const int64_t pieces = count / 2 * (LANES / amx::TALL), share = (pieces + products - 1) / products;
            gather_parts(pending_, sums, [&] {
                for (int64_t piece = 0; piece < share && key < count; ++piece) weigh();
            });
        }
        while (key < count) weigh();
        rescale();
        pending_ = {&rows, keys.first, count, into};
    }

    // Add what `absorb` has left for later.
    void finish(T *sums) {
        if (pending_.count > 0) gather_parts(pending_, sums, amx::Nothing{});
        pending_ = {};
    }

    // sums[key][d] += sum over lanes of tile[key][lane] * operand[lane][d]
    void scatter(T *tile, int64_t keys, const Operand &operand, T *sums) {
        const int64_t count = up_to_multiple(keys, amx::TALL);
        clear(tile, keys, count, 0);
        for (int64_t key = 0; key < count; ++key)
            for (int64_t lane = 0; lane < LANES; lane += amx::DEEP)
                split_row(_mm512_loadu_ps(tile + key * LANES + lane), _mm512_loadu_ps(tile + key * LANES + lane + amx::TALL), key, lane);
        const amx::Factor left{parts_, LANES * NUMBER, amx::TALL * LANES * NUMBER, REGISTER_ROW, PART * NUMBER};
        const amx::Factor right{operand.by_row(), width_ * PAIR, REGISTER_ROW, amx::TALL * width_ * PAIR, 0};
        amx::multiply<amx::Split::left, PARTS, true>(count / amx::TALL, width_ / amx::TALL, LANES / amx::DEEP, left, right, sums, width_);
    }

  private:
    static constexpr int64_t NUMBER = sizeof(BFloat16), PAIR = 2 * NUMBER; // bytes
    static constexpr int64_t REGISTER_ROW = 64, REGISTER = amx::TALL * REGISTER_ROW;
    static constexpr int64_t WIDE = LANES / amx::TALL;
    static constexpr int64_t PART = TILE_KEYS * LANES; // numbers

    static int64_t registers_of(int64_t keys) { return up_to_multiple(keys, amx::TALL) / amx::TALL; }

    static void clear(T *tile, int64_t from, int64_t to, T value) {
        std::fill(tile + from * LANES, tile + to * LANES, value);
    }

    // Weights of two keys, as pairs in each part.
    static void split_pair(__m512 even, __m512 odd, int64_t key, int64_t lane, BFloat16 *parts) {
        BFloat16 *at = parts + key * LANES + 2 * lane;
        if constexpr (PARTS == 1) {
            _mm512_storeu_si512(at, rounded_pairs(even, odd));
            return;
        }
        for (int part = 0; part < PARTS; ++part) {
            const __m512i low = _mm512_srli_epi32(amx::take_upper(even), 16);
            _mm512_storeu_si512(at + part * PART, _mm512_or_si512(amx::take_upper(odd), low));
        }
    }

    // Weights of a key, as a row in each part.
    void split_row(__m512 low, __m512 high, int64_t key, int64_t lane) {
        BFloat16 *at = parts_ + key * LANES + lane;
        if constexpr (PARTS == 1) {
            _mm512_storeu_si512(at, rounded_row(low, high));
            return;
        }
        alignas(64) static constexpr uint16_t UPPER[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                                           33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
        for (int part = 0; part < PARTS; ++part) {
            const __m512i of_low = amx::take_upper(low), of_high = amx::take_upper(high);
            _mm512_storeu_si512(at + part * PART, _mm512_permutex2var_epi16(of_low, _mm512_load_si512(UPPER), of_high));
        }
    }

    // Weights of some keys of a block, as pairs of keys.
    struct Weights {
        const typename Block::Rows *rows = nullptr;
        int64_t first = 0, count = 0;
        BFloat16 *parts = nullptr;
    };

    template <class Beside> void gather_parts(const Weights &weights, T *sums, Beside beside) {
        const int64_t tall = width_ / amx::TALL;
        const amx::Factor left{weights.rows->across + weights.first * width_, REGISTER_ROW, REGISTER, REGISTER * tall, 0};
        const amx::Factor right{weights.parts, LANES * PAIR, REGISTER_ROW, amx::TALL * LANES * PAIR, PART * NUMBER};
        amx::multiply<amx::Split::right, PARTS, true>(tall, WIDE, weights.count / amx::DEEP, left, right, sums, LANES, beside);
    }

    int64_t width_;
    BFloat16 *parts_, *more_parts_; // PARTS x [TILE_KEYS][LANES] of a tile, in pairs of keys or as rows
    Weights pending_;
};

} // namespace ringmpi

#else

namespace ringmpi {
inline bool matrix_unit_works() { return false; }
} // namespace ringmpi

#endif
