// All that needs an instruction by its own name. Section numbers are those of "PTX ISA", part "Instruction Set".
//
// Included as <ptx.cuh>, so that the executor of tests/simt puts functions of its own in the place of these, and of no others.
#pragma once

#include "number.cuh"

namespace ringmpi {

// The block's dynamic shared memory.
__device__ inline unsigned char *shared_memory() {
    extern __shared__ __align__(16) unsigned char dynamic_shared_memory[];
    return dynamic_shared_memory;
}

// Copy 16 bytes from global to shared memory, both at multiples of 16. Seen by this thread once `await_copies` says so, by others
// after a barrier behind that. Below sm_80 it is a plain copy.
__device__ inline void copy_async(void *shared, const void *global) {
#if __CUDA_ARCH__ >= 800
    const Bits32 to = static_cast<Bits32>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
#else
    *static_cast<uint4 *>(shared) = *static_cast<const uint4 *>(global);
#endif
}

// Make one group of all copies since the last group.
__device__ inline void commit_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Wait until at most PENDING of the latest groups of this thread are under way.
template <int PENDING> __device__ inline void await_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

// What follows is from sm_80 on; the host chooses no unit that needs it elsewhere.

// Load four matrices of 8 x 8 numbers of 16 bits; lane i names row i % 8 of matrix i / 8. Lane i gets, of each matrix, the
// numbers 2 (i % 4) and the next of row i / 4.
__device__ inline void load_matrices(Bits32 (&matrix)[4], const void *row) {
    const Bits32 from = static_cast<Bits32>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrix[0]), "=r"(matrix[1]), "=r"(matrix[2]), "=r"(matrix[3])
                 : "r"(from)
                 : "memory");
}

// The same, of each matrix transposed.
__device__ inline void load_matrices_transposed(Bits32 (&matrix)[4], const void *row) {
    const Bits32 from = static_cast<Bits32>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(matrix[0]), "=r"(matrix[1]), "=r"(matrix[2]), "=r"(matrix[3])
                 : "r"(from)
                 : "memory");
}

// d += a b for a of 16 x 16, b of 16 x 8. With g = lane / 4 and t = lane % 4, and pairs of neighbours along k in a register:
// a holds rows g, g + 8, g, g + 8 at k = 2t, 2t, 2t + 8, 2t + 8; b column g at k = 2t, 2t + 8; d row g at columns 2t and
// 2t + 1, then row g + 8 at both.
__device__ inline void multiply_add(BFloat16, float &d0, float &d1, float &d2, float &d3, const Bits32 (&a)[4], Bits32 b0,
                                    Bits32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline void multiply_add(Float16, float &d0, float &d1, float &d2, float &d3, const Bits32 (&a)[4], Bits32 b0,
                                    Bits32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two numbers rounded to bfloat16, to the nearest; the first in the lower half.
__device__ inline Bits32 pack_bfloat16(float low, float high) {
    Bits32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

// The same with float16.
__device__ inline Bits32 pack_float16(float low, float high) {
    Bits32 both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

__device__ inline float unpack_float16(Bits16 half) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
    return value;
}

} // namespace ringmpi
