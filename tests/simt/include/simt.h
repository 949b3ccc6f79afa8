// The words of CUDA C++ that the kernels use, for a C++ compiler. What they do is in executor.cpp; a kernel is compiled with this before it.
//
// Every call that threads make together tells the line that it stands in: threads that meet in different lines have diverged.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#define __device__
#define __global__
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)

struct uint3 {
    unsigned x, y, z;
};
extern uint3 threadIdx, blockIdx, blockDim, gridDim;

namespace simt {

// What the lanes of a warp do together.
enum class Kind : int { SYNC, SHUFFLE, BALLOT, MATRICES, MATRICES_TRANSPOSED, MULTIPLY_BFLOAT16, MULTIPLY_FLOAT16 };

// What a lane brings, and takes away.
struct Lane {
    int source;            // SHUFFLE
    uint64_t value;        // SHUFFLE, BALLOT
    const void *row;       // MATRICES
    uint32_t a[4], b[2];   // MULTIPLY
    uint32_t matrix[4];    // MATRICES
    float d[4];            // MULTIPLY
};

void together(Kind kind, unsigned mask, int line, Lane &lane); // all lanes of the warp
bool barrier(bool predicate, int line);                        // all threads of the block; whether any predicate holds
unsigned char *shared_memory();
void copy_async(void *shared, const void *global);
void commit_copies();
void await_copies(int pending);

template <class T> T shuffle(unsigned mask, T value, int source, int line) {
    static_assert(sizeof(T) <= sizeof(uint64_t), "a register or two");
    Lane lane{};
    lane.source = source;
    std::memcpy(&lane.value, &value, sizeof value);
    together(Kind::SHUFFLE, mask, line, lane);
    std::memcpy(&value, &lane.value, sizeof value);
    return value;
}

} // namespace simt

inline void __syncthreads(int line = __builtin_LINE()) { simt::barrier(false, line); }
inline int __syncthreads_or(int predicate, int line = __builtin_LINE()) { return simt::barrier(predicate != 0, line); }

inline void __syncwarp(unsigned mask = 0xffffffffu, int line = __builtin_LINE()) {
    simt::Lane lane{};
    simt::together(simt::Kind::SYNC, mask, line, lane);
}

template <class T> T __shfl_sync(unsigned mask, T value, int source, int width = 32, int line = __builtin_LINE()) {
    return simt::shuffle(mask, value, static_cast<int>(threadIdx.x % 32) / width * width + source % width, line);
}

template <class T> T __shfl_xor_sync(unsigned mask, T value, int apart, int = 32, int line = __builtin_LINE()) {
    return simt::shuffle(mask, value, static_cast<int>(threadIdx.x % 32) ^ apart, line);
}

inline unsigned __ballot_sync(unsigned mask, bool predicate, int line = __builtin_LINE()) {
    simt::Lane lane{};
    lane.value = predicate;
    simt::together(simt::Kind::BALLOT, mask, line, lane);
    return static_cast<unsigned>(lane.value);
}

inline float __int_as_float(int bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
inline int __float_as_int(float value) {
    int bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}
inline double __longlong_as_double(long long bits) {
    double value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
