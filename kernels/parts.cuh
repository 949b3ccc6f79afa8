// Weights of float32 as sums of 16-bit numbers, which tensor cores multiply. A weight that is rounded once misses the error
// bound of a float32 state by far: 2^-8 of itself in bfloat16, 2^-11 in float16, where the bound is a few 2^-23. It is rounded where
// that was asked for.
#pragma once

#include <ptx.cuh>

namespace ringmpi {

constexpr bool ROUNDS = RINGMPI_ROUNDS_WEIGHTS;

template <class Raw> struct Parts;

// Three numbers of 8 bits are the 24 bits of a float, cut and not rounded: their sum is the weight, bit for bit (one that is
// subnormal apart).
template <> struct Parts<BFloat16> {
    static constexpr int COUNT = ROUNDS ? 1 : 3;
    static constexpr bool SCALES = false;

    static __device__ void split(float low, float high, Bits32 (&part)[COUNT]) {
        if (ROUNDS) {
            part[0] = pack_bfloat16(low, high);
            return;
        }
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const Bits32 of_low = bits_of(low) & 0xffff0000u, of_high = bits_of(high) & 0xffff0000u;
            part[i] = of_low >> 16 | of_high;
            low -= from_bits(of_low);
            high -= from_bits(of_high);
        }
    }
};

// Two numbers of 11 bits, each rounded to the nearest: what is lost is 2^-24 of the weight at most, as much as in one addition.
// The exponents of float16 are few, so a row of weights is first scaled by a power of two; then what is lost of the second
// number to subnormals is 2^-39 of the largest weight of the row.
template <> struct Parts<Float16> {
    static constexpr int COUNT = ROUNDS ? 1 : 2;
    static constexpr bool SCALES = true;
    static constexpr int TOP = 14; // the largest weight of a row gets at least this exponent, of at most 15

    static __device__ void split(float low, float high, Bits32 (&part)[COUNT]) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            part[i] = pack_float16(low, high);
            low -= unpack_float16(static_cast<Bits16>(part[i]));
            high -= unpack_float16(static_cast<Bits16>(part[i] >> 16));
        }
    }

    // The exponent of a float, as it stands in its bits, that the largest weight of a row is multiplied by; and its inverse's.
    static __device__ Bits32 exponent_for(float largest) {
        const Bits32 exponent = bits_of(largest) >> 23 & 0xffu;
        return least(BIAS + TOP + BIAS - exponent, 2 * BIAS - 1);
    }
    static __device__ float power(Bits32 exponent) { return from_bits(exponent << 23); }
    static __device__ float inverse(Bits32 exponent) { return power(2 * BIAS - exponent); }

  private:
    static constexpr Bits32 BIAS = 127;
};

} // namespace ringmpi
