// The native CPU device: what Python calls. Every function is called by one thread at a time for each pool.

#include <list>

#include "dot_unit.h"
#include "matrix_unit.h"
#include "rounding_dot_unit.h"
#include "work.h"

namespace ringmpi {
namespace {

// Threads, and their memory, of which there is more than one only where works overlap.
struct Device {
    Device(int threads, bool with_matrix_unit) : pool(threads), matrix_unit(with_matrix_unit) {}

    Memory &borrow() {
        for (Loan &loan : loans)
            if (!loan.lent) return take(loan);
        loans.emplace_back(pool.size());
        return take(loans.back());
    }

    void give_back(const Memory &memory) {
        for (Loan &loan : loans)
            if (&loan.memory == &memory) loan.lent = false;
    }

    struct Loan {
        explicit Loan(int threads) : memory(threads) {}
        Memory memory;
        bool lent = false;
    };

    static Memory &take(Loan &loan) {
        loan.lent = true;
        return loan.memory;
    }

    Pool pool;
    bool matrix_unit;
    std::list<Loan> loans; // whose addresses stay
};

template <class ForwardUnit, class BackwardUnit = ForwardUnit>
std::unique_ptr<Work> make_work(const Task &task, Device &device, Memory &memory) {
    if (task.backward) return std::make_unique<BackwardWork<BackwardUnit>>(task, device.pool, memory);
    return std::make_unique<ForwardWork<ForwardUnit>>(task, device.pool, memory);
}

std::unique_ptr<Work> choose_work(const Task &task, Device &device, Memory &memory) {
    switch (task.dtype) {
    case Dtype::float64: return make_work<VectorUnit<double>>(task, device, memory);
    case Dtype::float32: return make_work<VectorUnit<float>>(task, device, memory);
    case Dtype::float16: return make_work<VectorUnit<Float16>>(task, device, memory);
    case Dtype::bfloat16: break;
    }
    const bool rounds = task.rounds_weights != 0;
#if RINGMPI_MATRIX_UNIT
    if (device.matrix_unit)
        return rounds ? make_work<MatrixUnit<32, 64, 1>, MatrixUnit<64, 96, 1>>(task, device, memory)
                      : make_work<MatrixUnit<32, 64>, MatrixUnit<64, 96>>(task, device, memory);
#endif
#if RINGMPI_DOT_PRODUCTS
    return rounds ? make_work<RoundingDotUnit>(task, device, memory) : make_work<DotUnit>(task, device, memory);
#else
    return make_work<VectorUnit<BFloat16>>(task, device, memory);
#endif
}

// A work with what it has borrowed.
struct Running {
    Device &device;
    Memory &memory;
    std::unique_ptr<Work> work;

    Running(Device &of, const Task &task) : device(of), memory(of.borrow()) {
        try {
            work = choose_work(task, device, memory);
        } catch (...) {
            device.give_back(memory);
            throw;
        }
    }

    ~Running() {
        work->stop();
        device.give_back(memory);
    }
};

} // namespace
} // namespace ringmpi

using ringmpi::Device;
using ringmpi::Running;

extern "C" {

int64_t ringmpi_task_nbytes() { return sizeof(ringmpi::Task); }

const char *ringmpi_instruction_set() {
#if RINGMPI_DOT_PRODUCTS
    return "AVX-512 BF16";
#elif defined(__AVX512F__)
    return "AVX-512";
#elif defined(__AVX2__) && defined(__FMA__)
    return "AVX2";
#elif defined(__AVX__)
    return "AVX";
#elif defined(__aarch64__)
    return "NEON";
#else
    return "vectors of 16 bytes";
#endif
}

// Whether vectors multiply pairs of bfloat16 numbers, so that weights that may be rounded are, also without the matrix unit.
int32_t ringmpi_has_dot_products() { return RINGMPI_DOT_PRODUCTS; }

int32_t ringmpi_has_matrix_unit() { return ringmpi::matrix_unit_works(); }

void *ringmpi_open(int32_t threads, int32_t matrix_unit) {
    try {
        return new Device(threads, matrix_unit != 0);
    } catch (const std::exception &) {
        return nullptr;
    }
}

void ringmpi_close(void *device) { delete static_cast<Device *>(device); }

void *ringmpi_start(void *device, const ringmpi::Task *task) {
    try {
        return new Running(*static_cast<Device *>(device), *task);
    } catch (const std::exception &) {
        return nullptr;
    }
}

int32_t ringmpi_advance(void *running, double seconds) { return static_cast<Running *>(running)->work->advance(seconds); }

void ringmpi_counts(const void *running, ringmpi::Counts *counts) { *counts = static_cast<const Running *>(running)->work->counts(); }

void ringmpi_end(void *running) { delete static_cast<Running *>(running); }

// For tests: all memory that no work has borrowed becomes NaN.
void ringmpi_poison(void *device) {
    for (Device::Loan &loan : static_cast<Device *>(device)->loans) {
        if (loan.lent) continue;
        loan.memory.shared.poison();
        for (ringmpi::Scratch &scratch : loan.memory.of_thread) scratch.poison();
    }
}

} // extern "C"
