// What this processor can do at most: chains of independent multiply-adds that touch no memory.
//
// Usage: peak UNIT THREADS SECONDS, where UNIT is fma (float32) or the unit for bfloat16; prints GFLOP/s of all threads.
//        peak unit                  prints the name of the unit for bfloat16: amx, avx512bf16, or fma where there is none
// Build: c++ -O3 -march=native -pthread peak.cpp
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#if defined(__AMX_BF16__) || defined(__AVX512BF16__)
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int repetitions = 20000; // tens of microseconds between two looks at the clock

#if defined(__AVX512F__)
constexpr int vector_bytes = 64;
#elif defined(__AVX__)
constexpr int vector_bytes = 32;
#else
constexpr int vector_bytes = 16;
#endif
typedef float Vector __attribute__((vector_size(vector_bytes)));

// Twelve chains hide the latency of four cycles on two ports, and leave room in 16 registers.
constexpr int chains = 12;

volatile float sink; // what is written here must be computed

// Each function makes some multiply-adds and returns how many FLOP they were.

double multiply_add() {
    // Read from memory, so that the compiler cannot know that the chains do the same; every sum tends to 1.
    volatile float half = 0.5f;
    const Vector factor = Vector{} + half, summand = Vector{} + half;
    Vector sums[chains];
    for (Vector &sum : sums) sum = Vector{} + half;
    for (int i = 0; i < repetitions; ++i)
#pragma GCC unroll 12
        for (int chain = 0; chain < chains; ++chain) sums[chain] = sums[chain] * factor + summand;
    for (const Vector &sum : sums) sink = sum[0];
    return 2.0 * chains * repetitions * (vector_bytes / sizeof(float));
}

#if defined(__AVX512BF16__)
double dot_products() {
    volatile short zero = 0;
    volatile float start = 0;
    const __m512bh pairs = (__m512bh)_mm512_set1_epi16(zero);
    __m512 sums[chains];
    for (__m512 &sum : sums) sum = _mm512_set1_ps(start);
    for (int i = 0; i < repetitions; ++i)
#pragma GCC unroll 12
        for (int chain = 0; chain < chains; ++chain) sums[chain] = _mm512_dpbf16_ps(sums[chain], pairs, pairs);
    for (const __m512 &sum : sums) sink = sum[0];
    return 2.0 * chains * repetitions * 32;
}
#endif

#if defined(__AMX_BF16__)
bool tiles_permitted() {
    constexpr long request_permission = 0x1023, tile_data = 18; // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool permitted = syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
    return permitted;
}

// Eight tiles: four sums of two by two factors, as in a product of matrices.
double tile_products() {
    struct alignas(64) {
        unsigned char palette = 1, start_row = 0, reserved[14] = {};
        unsigned short row_bytes[16] = {};
        unsigned char rows[16] = {};
    } shape;
    for (int tile = 0; tile < 8; ++tile) shape.row_bytes[tile] = 64, shape.rows[tile] = 16;
    asm volatile("" : : "r"(&shape) : "memory"); // The intrinsic tells GCC only of the first eight bytes.
    _tile_loadconfig(&shape);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
    _tile_zero(6);
    _tile_zero(7);
    for (int i = 0; i < repetitions; ++i) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_release();
    return 2.0 * 4 * repetitions * 16 * 16 * 32;
}
#endif

struct Unit {
    const char *name;
    double (*work)();
};

Unit bfloat16_unit() {
#if defined(__AMX_BF16__)
    if (tiles_permitted()) return {"amx", tile_products};
#endif
#if defined(__AVX512BF16__)
    return {"avx512bf16", dot_products};
#endif
    return {"fma", multiply_add};
}

double seconds_now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double gflops(const Unit &unit, int threads, double seconds) {
    std::atomic<int> waiting{threads};
    std::vector<double> rates(threads);
    std::vector<std::thread> pool;
    for (int t = 0; t < threads; ++t)
        pool.emplace_back([&, t] {
            unit.work();
            // All are measured at the same time.
            --waiting;
            while (waiting > 0) std::this_thread::yield();
            const double start = seconds_now();
            double flop = 0, now;
            do {
                flop += unit.work();
                now = seconds_now();
            } while (now - start < seconds);
            rates[t] = flop / (now - start) * 1e-9;
        });
    double sum = 0;
    for (int t = 0; t < threads; ++t) {
        pool[t].join();
        sum += rates[t];
    }
    return sum;
}

} // namespace

int main(int count, char **arguments) {
    const Unit other = bfloat16_unit();
    const std::string name = count > 1 ? arguments[1] : "";
    if (count == 2 && name == "unit") {
        std::puts(other.name);
        return 0;
    }
    if (count != 4 || (name != "fma" && name != other.name)) {
        std::fprintf(stderr, "usage: peak fma|%s THREADS SECONDS, or peak unit\n", other.name);
        return 2;
    }
    const Unit unit = name == "fma" ? Unit{"fma", multiply_add} : other;
    std::printf("%.1f\n", gflops(unit, std::max(1, std::atoi(arguments[2])), std::atof(arguments[3])));
}
