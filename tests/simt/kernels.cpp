// The kernels, unmodified, as functions that take the addresses of their arguments, as cuLaunchKernel does.
#include "simt.h"

#include "attention.cu"

#include <utility>

namespace {

template <auto KERNEL> struct Call;
template <class... Arguments, void (*KERNEL)(Arguments...)> struct Call<KERNEL> {
    static void from(void **addresses) { spread(addresses, std::index_sequence_for<Arguments...>{}); }

  private:
    template <size_t... I> static void spread(void **addresses, std::index_sequence<I...>) {
        KERNEL(*static_cast<Arguments *>(addresses[I])...);
    }
};

struct Kernel {
    const char *name;
    void (*call)(void **);
    int rows, columns, threads, shared_nbytes; // threads of 0: any
};

constexpr Kernel KERNELS[] = {
    {"ringmpi_bounds", Call<ringmpi_bounds>::from, 0, 0, 0, 0},
    {"ringmpi_fill", Call<ringmpi_fill>::from, 0, 0, 0, 0},
    {"ringmpi_add", Call<ringmpi_add>::from, 0, 0, 0, 0},
    {"ringmpi_round", Call<ringmpi_round>::from, 0, 0, 0, 0},
    {"ringmpi_merge_acc", Call<ringmpi_merge_acc>::from, 0, 0, 0, 0},
    {"ringmpi_merge_rows", Call<ringmpi_merge_rows>::from, 0, 0, 0, 0},
    {"ringmpi_out", Call<ringmpi_out>::from, 0, 0, 0, 0},
    {"ringmpi_lse", Call<ringmpi_lse>::from, 0, 0, 0, 0},
    {"ringmpi_delta", Call<ringmpi_delta>::from, 0, 0, 0, 0},
    {"ringmpi_forward", Call<ringmpi_forward>::from, ROWS, RINGMPI_FORWARD_COLUMNS, THREADS, ForwardKernel::SHARED_BYTES},
    {"ringmpi_backward_q", Call<ringmpi_backward_q>::from, ROWS, RINGMPI_BACKWARD_COLUMNS, THREADS, QueriesKernel::SHARED_BYTES},
    {"ringmpi_backward_k", Call<ringmpi_backward_k>::from, ROWS, RINGMPI_BACKWARD_COLUMNS, THREADS, KeysKernel::SHARED_BYTES},
    {"ringmpi_backward_v", Call<ringmpi_backward_v>::from, ROWS, RINGMPI_BACKWARD_COLUMNS, THREADS, ValuesKernel::SHARED_BYTES},
};

} // namespace

extern "C" const Kernel *simt_kernel(const char *name) {
    for (const Kernel &kernel : KERNELS)
        if (std::strcmp(kernel.name, name) == 0) return &kernel;
    return nullptr;
}
