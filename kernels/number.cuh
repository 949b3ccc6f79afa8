// Numbers as they lie in memory, and what they are in the dtype of the state. No header: NVRTC has none of its own.
#pragma once

namespace ringmpi {

using Bits16 = unsigned short;
using Bits32 = unsigned int;
using Bits64 = unsigned long long;
using Int64 = long long;
static_assert(sizeof(Bits16) == 2 && sizeof(Bits32) == 4 && sizeof(Bits64) == 8 && sizeof(Int64) == 8, "widths");

struct Float16 {
    Bits16 bits;
};
struct BFloat16 {
    Bits16 bits;
};

// The dtype of the state for inputs of a dtype.
template <class Raw> struct StateOf {
    using type = float;
};
template <> struct StateOf<double> {
    using type = double;
};

__device__ inline float from_bits(Bits32 bits) { return __int_as_float(static_cast<int>(bits)); }
__device__ inline Bits32 bits_of(float value) { return static_cast<Bits32>(__float_as_int(value)); }

__device__ inline double widen(double value) { return value; }
__device__ inline float widen(float value) { return value; }
__device__ inline float widen(BFloat16 value) { return from_bits(static_cast<Bits32>(value.bits) << 16); }

// IEEE 754 binary16: with its exponent moved to where float has it, a value is 2^112 too small, subnormal ones included.
__device__ inline float widen(Float16 value) {
    const Bits32 magnitude = value.bits & 0x7fffu, sign = static_cast<Bits32>(value.bits & 0x8000u) << 16;
    if (magnitude >= 0x7c00u) return from_bits(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
    return from_bits(sign | bits_of(from_bits(magnitude << 13) * from_bits(0x77800000u))); // times 2^112
}

// Whether a number is a NaN or an infinity.
__device__ inline bool is_wild(Float16 value) { return (value.bits & 0x7c00u) == 0x7c00u; }
__device__ inline bool is_wild(BFloat16 value) { return (value.bits & 0x7f80u) == 0x7f80u; }

template <class T> struct Infinite;
template <> struct Infinite<float> {
    static __device__ float value() { return from_bits(0x7f800000u); }
};
template <> struct Infinite<double> {
    static __device__ double value() { return __longlong_as_double(0x7ff0000000000000ll); }
};

__device__ inline float exponential(float x) { return expf(x); }
__device__ inline double exponential(double x) { return exp(x); }

// The larger one; a NaN is passed over, and comes back through the exponential of its score.
__device__ inline float larger(float a, float b) { return fmaxf(a, b); }
__device__ inline double larger(double a, double b) { return fmax(a, b); }

template <class T> __device__ inline T least(T a, T b) { return a < b ? a : b; }
template <class T> __device__ inline T most(T a, T b) { return a < b ? b : a; }

} // namespace ringmpi
