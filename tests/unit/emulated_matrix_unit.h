// AMX in software, for processors without it: put before the device's sources with -include, it takes the place of the intrinsics
// that kernels/matrix_unit.h uses. What they do: Intel's manual, volume 2, TILELOADD, TDPBF16PS and others.
#pragma once

#include <cpuid.h>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace emulated {

struct Configuration {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_nbytes[16];
    uint8_t rows[16];
};

// The registers of a thread. Without a configuration an instruction is an illegal one.
struct Registers {
    Configuration configuration{};
    unsigned char at[8][16][64];
};

inline Registers &registers() {
    static thread_local Registers of_thread;
    return of_thread;
}

inline Registers &configured(int tile) {
    Registers &all = registers();
    const Configuration &told = all.configuration;
    if (told.palette != 1 || tile < 0 || tile > 7 || told.rows[tile] != 16 || told.row_nbytes[tile] != 64) {
        std::fprintf(stderr, "tile %d of the matrix unit is used without a configuration\n", tile);
        std::abort();
    }
    return all;
}

inline void load_configuration(const void *from) { std::memcpy(&registers().configuration, from, sizeof(Configuration)); }
inline void release() { registers().configuration = {}; }

inline void zero(int tile) { std::memset(configured(tile).at[tile], 0, sizeof registers().at[tile]); }

inline void load_tile(int tile, const void *base, int64_t stride) {
    Registers &all = configured(tile);
    for (int row = 0; row < 16; ++row) std::memcpy(all.at[tile][row], static_cast<const char *>(base) + row * stride, 64);
}

inline void store_tile(int tile, void *base, int64_t stride) {
    Registers &all = configured(tile);
    for (int row = 0; row < 16; ++row) std::memcpy(static_cast<char *>(base) + row * stride, all.at[tile][row], 64);
}

#if defined(__clang__)
#define RINGMPI_FAST __attribute__((noinline, no_sanitize("address", "thread", "undefined")))
#else
#define RINGMPI_FAST __attribute__((noinline, no_sanitize("address", "thread", "undefined"), optimize("O3")))
#endif

// Subnormal numbers count as 0, of either sign.
inline __attribute__((always_inline)) __m512 flushed(__m512 values) {
    const __mmask16 small = _mm512_cmp_ps_mask(_mm512_abs_ps(values), _mm512_set1_ps(0x1p-126f), _CMP_LT_OQ);
    const __m512i sign = _mm512_and_si512(_mm512_castps_si512(values), _mm512_set1_epi32(static_cast<int>(0x80000000u)));
    return _mm512_mask_mov_ps(values, small, _mm512_castsi512_ps(sign));
}

// The first or second numbers of pairs.
inline __attribute__((always_inline)) __m512 first_of(__m512i pairs) {
    return flushed(_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)));
}
inline __attribute__((always_inline)) __m512 second_of(__m512i pairs) {
    return flushed(_mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u)))));
}

// sums[m][n] += left[m][pair] . right[pair][n], where first and second numbers of pairs are added up apart from each other.
// Registers are memory of the thread's own, so no sanitizer needs to look, which would take most of a test's time.
inline RINGMPI_FAST void multiply_add(int sums, int left, int right) {
    Registers &all = configured(sums);
    configured(left);
    configured(right);
    __m512 first[16], second[16];
    for (int pair = 0; pair < 16; ++pair) {
        const __m512i pairs = _mm512_loadu_si512(all.at[right][pair]);
        first[pair] = first_of(pairs);
        second[pair] = second_of(pairs);
    }
    for (int m = 0; m < 16; ++m) {
        __m512 of_first = _mm512_setzero_ps(), of_second = _mm512_setzero_ps();
        for (int pair = 0; pair < 16; ++pair) {
            int32_t both;
            std::memcpy(&both, all.at[left][m] + 4 * pair, sizeof both);
            const __m512i factor = _mm512_set1_epi32(both);
            of_first = flushed(_mm512_fmadd_ps(first_of(factor), first[pair], of_first));
            of_second = flushed(_mm512_fmadd_ps(second_of(factor), second[pair], of_second));
        }
        const __m512 before = flushed(_mm512_loadu_ps(all.at[sums][m]));
        _mm512_storeu_ps(all.at[sums][m], flushed(before + flushed(of_first + of_second)));
    }
}

// A processor and a kernel that have the unit.
inline int cpuid(unsigned &eax, unsigned &ebx, unsigned &ecx, unsigned &edx) {
    eax = ebx = ecx = 0;
    edx = ~0u;
    return 1;
}

} // namespace emulated

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig(from) emulated::load_configuration(from)
#define _tile_release() emulated::release()
#define _tile_loadd(tile, base, stride) emulated::load_tile(tile, base, stride)
#define _tile_stored(tile, base, stride) emulated::store_tile(tile, base, stride)
#define _tile_zero(tile) emulated::zero(tile)
#define _tile_dpbf16ps(sums, left, right) emulated::multiply_add(sums, left, right)
#define __get_cpuid_count(leaf, subleaf, eax, ebx, ecx, edx) emulated::cpuid(*(eax), *(ebx), *(ecx), *(edx))
#define syscall(...) 0L
