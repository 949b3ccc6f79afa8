// In the place of kernels/ptx.cuh: the same functions, done by the executor.
#pragma once

#include "number.cuh"

namespace ringmpi {

inline unsigned char *shared_memory() { return simt::shared_memory(); }
inline void copy_async(void *shared, const void *global) { simt::copy_async(shared, global); }
inline void commit_copies() { simt::commit_copies(); }
template <int PENDING> void await_copies() { simt::await_copies(PENDING); }

inline void load_matrices(Bits32 (&matrix)[4], const void *row, int line = __builtin_LINE()) {
    simt::Lane lane{};
    lane.row = row;
    simt::together(simt::Kind::MATRICES, 0xffffffffu, line, lane);
    std::memcpy(matrix, lane.matrix, sizeof matrix);
}

inline void load_matrices_transposed(Bits32 (&matrix)[4], const void *row, int line = __builtin_LINE()) {
    simt::Lane lane{};
    lane.row = row;
    simt::together(simt::Kind::MATRICES_TRANSPOSED, 0xffffffffu, line, lane);
    std::memcpy(matrix, lane.matrix, sizeof matrix);
}

inline void multiply(simt::Kind kind, float &d0, float &d1, float &d2, float &d3, const Bits32 (&a)[4], Bits32 b0, Bits32 b1,
                     int line) {
    simt::Lane lane{0, 0, nullptr, {a[0], a[1], a[2], a[3]}, {b0, b1}, {}, {d0, d1, d2, d3}};
    simt::together(kind, 0xffffffffu, line, lane);
    d0 = lane.d[0], d1 = lane.d[1], d2 = lane.d[2], d3 = lane.d[3];
}

inline void multiply_add(BFloat16, float &d0, float &d1, float &d2, float &d3, const Bits32 (&a)[4], Bits32 b0, Bits32 b1,
                         int line = __builtin_LINE()) {
    multiply(simt::Kind::MULTIPLY_BFLOAT16, d0, d1, d2, d3, a, b0, b1, line);
}

inline void multiply_add(Float16, float &d0, float &d1, float &d2, float &d3, const Bits32 (&a)[4], Bits32 b0, Bits32 b1,
                         int line = __builtin_LINE()) {
    multiply(simt::Kind::MULTIPLY_FLOAT16, d0, d1, d2, d3, a, b0, b1, line);
}

// IEEE 754 binary16 of a float, to the nearest, ties to even.
inline Bits16 float16_of(float value) {
    const Bits32 bits = bits_of(value), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return static_cast<Bits16>(sign | 0x7fffu);
    if (magnitude >= 0x477ff000u) return static_cast<Bits16>(sign | 0x7c00u); // 65520 and more
    if (magnitude < 0x38800000u) // below 2^-14: a multiple of 2^-24, which is what float rounds to beside 1/2
        return static_cast<Bits16>(sign | (bits_of(from_bits(magnitude) + 0.5f) - bits_of(0.5f)));
    const Bits32 moved = magnitude - (112u << 23); // the exponent's bias is 15 and not 127
    return static_cast<Bits16>(sign | (moved + 0xfffu + (moved >> 13 & 1u)) >> 13);
}

// bfloat16 of a float, to the nearest, ties to even.
inline Bits16 bfloat16_of(float value) {
    const Bits32 bits = bits_of(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
    return static_cast<Bits16>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

inline Bits32 pack_bfloat16(float low, float high) {
    return static_cast<Bits32>(bfloat16_of(high)) << 16 | bfloat16_of(low);
}

inline Bits32 pack_float16(float low, float high) {
    return static_cast<Bits32>(float16_of(high)) << 16 | float16_of(low);
}
inline float unpack_float16(Bits16 half) { return widen(Float16{half}); }

} // namespace ringmpi
