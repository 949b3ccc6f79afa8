// Numbers of 16 bits as they lie in memory, and what they are in the dtype of the state.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace ringmpi {

struct Float16 {
    uint16_t bits;
};
struct BFloat16 {
    uint16_t bits;
};

// The dtype of the state for inputs of a dtype.
template <class Raw> struct StateOf {
    using type = float;
};
template <> struct StateOf<double> {
    using type = double;
};
template <class Raw> using State = typename StateOf<Raw>::type;

inline float from_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline uint32_t to_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline double widen(double value) { return value; }
inline float widen(float value) { return value; }
inline float widen(BFloat16 value) { return from_bits(static_cast<uint32_t>(value.bits) << 16); }

#if defined(__FLT16_MAX__)
inline float widen(Float16 value) {
    _Float16 half;
    std::memcpy(&half, &value, sizeof half);
    return static_cast<float>(half);
}
#else
// IEEE 754 binary16: with its exponent moved to where float has it, a value is 2^112 too small, subnormal ones included.
inline float widen(Float16 value) {
    const uint32_t magnitude = value.bits & 0x7fffu, sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
    if (magnitude >= 0x7c00u) return from_bits(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
    const float small = from_bits(magnitude << 13) * from_bits(0x77800000u); // times 2^112
    return sign ? -small : small;
}
#endif

// The bits of a number without its sign: those of infinity and of every NaN are at least `INFINITE`.
template <class Raw> struct Bits;
template <> struct Bits<double> {
    using type = uint64_t;
    static constexpr type INFINITE = 0x7ff0000000000000u;
};
template <> struct Bits<float> {
    using type = uint32_t;
    static constexpr type INFINITE = 0x7f800000u;
};
template <> struct Bits<Float16> {
    using type = uint16_t;
    static constexpr type INFINITE = 0x7c00u;
};
template <> struct Bits<BFloat16> {
    using type = uint16_t;
    static constexpr type INFINITE = 0x7f80u;
};

// Whether there is a NaN or an infinity among some numbers. Of integers compilers make vector code, of std::isfinite not.
template <class Raw> inline bool any_not_finite(const Raw *numbers, int64_t count) {
    using I = typename Bits<Raw>::type;
    constexpr I MAGNITUDE = static_cast<I>(~I(0)) >> 1;
    I largest = 0;
    for (int64_t i = 0; i < count; ++i) {
        I bits;
        std::memcpy(&bits, numbers + i, sizeof bits);
        bits &= MAGNITUDE;
        largest = bits > largest ? bits : largest;
    }
    return largest >= Bits<Raw>::INFINITE;
}

} // namespace ringmpi
