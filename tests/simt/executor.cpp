// Runs a kernel's blocks of threads on one CPU thread, to find faults that a GPU would show once in a while, or never.
//
// * Threads are fibers. One runs until it has to wait for others; then any one of those that can run is taken, as a seed says. So
//   lanes of a warp diverge wherever they may, and what is not ordered by a barrier happens in any order. Blocks run in any order too.
// * Shared memory is at the end of a page behind which there is none, and as large as the launch says; it starts as NaN or as noise.
// * Barriers, shuffles, votes and matrix instructions want all threads, at the same line, and none that has ended.
// * An asynchronous copy makes its target NaN at once, and happens when its own thread waits for it.
// * Matrix products cut each sum of 8 products to a float, which is the least exact that NVIDIA's hardware has been found to do
//   (Fasi et al. 2021, "Numerical behavior of NVIDIA tensor cores").
// * A memory fault ends the launch, and not the process.
#include "simt.h"

#include <csetjmp>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <memory>
#include <random>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>
#if !defined(__x86_64__) || defined(SIMT_UCONTEXT)
#include <ucontext.h>
#endif

uint3 threadIdx, blockIdx, blockDim, gridDim;

namespace simt {
namespace {

constexpr int WARP = 32;
constexpr size_t STACK = 128 * 1024;
constexpr int NAN_BYTE = 0xff; // all bits set are a NaN in every dtype

// A place to go on from.
#if defined(__x86_64__) && !defined(SIMT_UCONTEXT) // swapcontext asks the kernel about signals, at each switch
asm(R"(
.text
.type simt_switch, @function
simt_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq (%rsi), %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size simt_switch, .-simt_switch
)");
struct Context {
    void *stack_pointer;
};
extern "C" void simt_switch(Context *from, Context *to);

void prepare(Context &context, unsigned char *stack, void (*entry)()) {
    // Six registers and the address to return to; at entry the stack is 8 bytes off a multiple of 16, as after a call.
    void **top = reinterpret_cast<void **>(stack + STACK) - 3;
    *--top = reinterpret_cast<void *>(entry);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    context.stack_pointer = top;
}
#else
using Context = ucontext_t;
void simt_switch(Context *from, Context *to) { swapcontext(from, to); }
void prepare(Context &context, unsigned char *stack, void (*entry)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = STACK;
    context.uc_link = nullptr;
    makecontext(&context, entry, 0);
}
#endif

// Pages without access around memory that may be used.
class Guarded {
  public:
    // Of `nbytes` that end, or begin, at a page without access.
    Guarded(size_t nbytes, bool at_end) : page_(static_cast<size_t>(sysconf(_SC_PAGESIZE))), nbytes_(nbytes), at_end_(at_end) {
        room_ = (nbytes + page_ - 1) / page_ * page_;
        void *all = mmap(nullptr, room_ + 2 * page_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (all == MAP_FAILED) return;
        pages_ = static_cast<unsigned char *>(all) + page_;
        protect(PROT_READ | PROT_WRITE);
    }
    Guarded(const Guarded &) = delete;
    Guarded &operator=(const Guarded &) = delete;
    ~Guarded() {
        if (pages_ != nullptr) munmap(pages_ - page_, room_ + 2 * page_);
    }

    unsigned char *data() const { return pages_ == nullptr ? nullptr : pages_ + (at_end_ ? room_ - nbytes_ : 0); }
    void protect(int access) const {
        if (room_ > 0) mprotect(pages_, room_, access);
    }

    // What is left of the pages beside the memory, which nobody may write to.
    void mark(unsigned char value) { std::memset(at_end_ ? pages_ : pages_ + nbytes_, value, room_ - nbytes_); }
    bool is_marked(unsigned char value) const {
        const unsigned char *rest = at_end_ ? pages_ : pages_ + nbytes_;
        for (size_t i = 0; i < room_ - nbytes_; ++i)
            if (rest[i] != value) return false;
        return true;
    }

  private:
    size_t page_, nbytes_, room_ = 0;
    bool at_end_;
    unsigned char *pages_ = nullptr;
};

struct Copy {
    void *to;
    const void *from;
};

enum class Status { READY, IN_WARP, AT_BARRIER, ENDED };

struct Thread {
    Context context;
    Status status;
    Kind kind;
    int line;
    Lane *lane;
    bool predicate;
    std::vector<std::vector<Copy>> groups; // of copies under way; the last one is not complete
};

struct Launch {
    void (*kernel)(void **);
    void **arguments;
    std::mt19937_64 random;
    std::unique_ptr<Guarded> shared;
    std::unique_ptr<Guarded> stacks;
    std::vector<Thread> threads;
    std::vector<int> ready;
    int waiting = 0, ended = 0; // at the barrier; at the end
    bool any = false;           // of the predicates at the barrier
    int current = 0;
    Context scheduler;
    sigjmp_buf fault;
    char message[400] = "";
};

Launch *launch = nullptr;

Thread &current() { return launch->threads[static_cast<size_t>(launch->current)]; }

__attribute__((format(printf, 1, 2))) void fail(const char *format, ...) {
    if (launch->message[0] != 0) return;
    va_list values;
    va_start(values, format);
    const int told = snprintf(launch->message, sizeof launch->message, "block %u, thread %u: ", blockIdx.x, threadIdx.x);
    vsnprintf(launch->message + told, sizeof launch->message - static_cast<size_t>(told), format, values);
    va_end(values);
}

void leave() { simt_switch(&current().context, &launch->scheduler); }

[[noreturn]] void give_up() { // This fiber is never taken again: the scheduler has a message to tell.
    leave();
    __builtin_trap();
}

void end_thread() {
    Thread &thread = current();
    for (const auto &group : thread.groups)
        if (!group.empty()) fail("ends before its asynchronous copies do");
    thread.status = Status::ENDED;
    launch->ended += 1;
    leave();
    __builtin_trap();
}

void enter_thread() {
    launch->kernel(launch->arguments);
    end_thread();
}

float number(Kind kind, uint32_t pair, int half) {
    const uint32_t bits = half == 0 ? pair & 0xffffu : pair >> 16;
    if (kind == Kind::MULTIPLY_BFLOAT16) return __int_as_float(static_cast<int>(bits << 16));
    const int exponent = static_cast<int>(bits >> 10 & 0x1fu), fraction = static_cast<int>(bits & 0x3ffu);
    float value = exponent == 31 ? (fraction != 0 ? NAN : INFINITY)
                                 : std::ldexp(static_cast<float>(exponent == 0 ? fraction : fraction + 1024),
                                              (exponent == 0 ? 1 : exponent) - 25);
    return (bits & 0x8000u) != 0 ? -value : value;
}

float cut(double value) {
    const float rounded = static_cast<float>(value);
    return std::fabs(static_cast<double>(rounded)) > std::fabs(value) && std::isfinite(value) ? std::nextafterf(rounded, 0.0f)
                                                                                             : rounded;
}

// mma.m16n8k16, with the fragments of PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type".
void multiply(Kind kind, Lane *const (&lanes)[WARP]) {
    float a[16][16], b[16][8];
    for (int lane = 0; lane < WARP; ++lane) {
        const int group = lane >> 2, in_group = lane % 4;
        for (int i = 0; i < 8; ++i) { // a_i
            const int row = (i < 2 || (i >= 4 && i < 6)) ? group : group + 8;
            const int column = i < 4 ? in_group * 2 + (i & 1) : in_group * 2 + (i & 1) + 8;
            a[row][column] = number(kind, lanes[lane]->a[i / 2], i % 2);
        }
        for (int i = 0; i < 4; ++i) { // b_i
            const int row = in_group * 2 + (i & 1) + (i < 2 ? 0 : 8);
            b[row][group] = number(kind, lanes[lane]->b[i / 2], i % 2);
        }
    }
    for (int lane = 0; lane < WARP; ++lane)
        for (int i = 0; i < 4; ++i) { // c_i and d_i
            const int row = i < 2 ? lane >> 2 : (lane >> 2) + 8, column = lane % 4 * 2 + (i & 1);
            float sum = lanes[lane]->d[i];
            for (int first = 0; first < 16; first += 8) {
                double exact = static_cast<double>(sum);
                for (int k = first; k < first + 8; ++k)
                    exact += static_cast<double>(a[row][k]) * static_cast<double>(b[k][column]);
                sum = cut(exact);
            }
            lanes[lane]->d[i] = sum;
        }
}

// ldmatrix.x4, with the fragments of PTX ISA, "Warp-level matrix load instruction: ldmatrix".
void load_matrices(bool transposed, Lane *const (&lanes)[WARP]) {
    for (int matrix = 0; matrix < 4; ++matrix) {
        uint16_t element[8][8];
        for (int row = 0; row < 8; ++row) {
            const void *from = lanes[matrix * 8 + row]->row;
            if (reinterpret_cast<uintptr_t>(from) % 16 != 0) return fail("ldmatrix of a row that is not at a multiple of 16");
            std::memcpy(element[row], from, sizeof element[row]);
        }
        for (int lane = 0; lane < WARP; ++lane) {
            const int row = lane / 4, column = lane % 4 * 2;
            const uint16_t low = transposed ? element[column][row] : element[row][column];
            const uint16_t high = transposed ? element[column + 1][row] : element[row][column + 1];
            lanes[lane]->matrix[matrix] = static_cast<uint32_t>(high) << 16 | low;
        }
    }
}

void perform(Kind kind, Lane *const (&lanes)[WARP]) {
    uint64_t values[WARP], votes = 0;
    for (int lane = 0; lane < WARP; ++lane) {
        values[lane] = lanes[lane]->value;
        votes |= static_cast<uint64_t>(values[lane] != 0) << lane;
    }
    switch (kind) {
    case Kind::SYNC: return;
    case Kind::SHUFFLE:
        for (Lane *lane : lanes) lane->value = values[lane->source];
        return;
    case Kind::BALLOT:
        for (Lane *lane : lanes) lane->value = votes;
        return;
    case Kind::MATRICES: return load_matrices(false, lanes);
    case Kind::MATRICES_TRANSPOSED: return load_matrices(true, lanes);
    case Kind::MULTIPLY_BFLOAT16:
    case Kind::MULTIPLY_FLOAT16: return multiply(kind, lanes);
    }
}

// Let those go on that all waited for.
void meet_in_warp(int first) {
    Lane *lanes[WARP];
    Thread *threads = &launch->threads[static_cast<size_t>(first)];
    for (int lane = 0; lane < WARP; ++lane) {
        Thread &thread = threads[lane];
        if (thread.status != Status::IN_WARP) return;
        if (thread.kind != threads->kind || thread.line != threads->line)
            return fail("lanes of a warp meet at lines %d and %d: they have diverged", threads->line, thread.line);
        lanes[lane] = thread.lane;
    }
    perform(threads->kind, lanes);
    for (int lane = 0; lane < WARP; ++lane) {
        threads[lane].status = Status::READY;
        launch->ready.push_back(first + lane);
    }
}

void meet_at_barrier() {
    const int count = static_cast<int>(launch->threads.size());
    if (launch->waiting < count) return;
    for (int i = 0; i < count; ++i) {
        Thread &thread = launch->threads[static_cast<size_t>(i)];
        if (thread.line != launch->threads[0].line)
            return fail("threads meet at barriers of lines %d and %d: they have diverged", launch->threads[0].line, thread.line);
        thread.status = Status::READY;
        launch->ready.push_back(i);
    }
    launch->waiting = 0;
}

void run_block(unsigned block) {
    const int count = static_cast<int>(launch->threads.size());
    blockIdx = {block, 0, 0};
    launch->ready.clear();
    launch->waiting = launch->ended = 0;
    for (int i = 0; i < count; ++i) {
        Thread &thread = launch->threads[static_cast<size_t>(i)];
        prepare(thread.context, launch->stacks->data() + static_cast<size_t>(i) * STACK, enter_thread);
        thread.status = Status::READY;
        thread.groups.assign(1, {});
        launch->ready.push_back(i);
    }
    while (!launch->ready.empty() && launch->message[0] == 0) {
        const size_t at = launch->random() % launch->ready.size();
        launch->current = launch->ready[at];
        launch->ready[at] = launch->ready.back();
        launch->ready.pop_back();
        threadIdx = {static_cast<unsigned>(launch->current), 0, 0};
        simt_switch(&launch->scheduler, &current().context);
    }
    if (launch->message[0] == 0 && launch->ended < count)
        fail("%d threads have ended, %d wait at a barrier and %d in their warps: they have diverged", launch->ended, launch->waiting,
             count - launch->ended - launch->waiting);
}

void on_fault(int, siginfo_t *info, void *) {
    fail("memory fault at %p", info->si_addr);
    siglongjmp(launch->fault, 1);
}

} // namespace

void together(Kind kind, unsigned mask, int line, Lane &lane) {
    Thread &thread = current();
    if (mask != 0xffffffffu) {
        fail("a warp's mask of %#x at line %d: not all lanes", mask, line);
        give_up();
    }
    thread.status = Status::IN_WARP;
    thread.kind = kind;
    thread.line = line;
    thread.lane = &lane;
    meet_in_warp(launch->current / WARP * WARP);
    leave();
}

bool barrier(bool predicate, int line) {
    Thread &thread = current();
    thread.status = Status::AT_BARRIER;
    thread.line = line;
    thread.predicate = predicate;
    launch->waiting += 1;
    if (launch->waiting == static_cast<int>(launch->threads.size())) {
        launch->any = false;
        for (const Thread &other : launch->threads) launch->any |= other.predicate;
    }
    meet_at_barrier();
    leave();
    return launch->any;
}

unsigned char *shared_memory() { return launch->shared->data(); }

void copy_async(void *shared, const void *global) {
    if (reinterpret_cast<uintptr_t>(shared) % 16 != 0 || reinterpret_cast<uintptr_t>(global) % 16 != 0) {
        fail("an asynchronous copy of 16 bytes from %p to %p: not at multiples of 16", global, shared);
        give_up();
    }
    std::memset(shared, NAN_BYTE, 16);
    current().groups.back().push_back({shared, global});
}

void commit_copies() { current().groups.emplace_back(); }

void await_copies(int pending) {
    auto &groups = current().groups; // the last one is open and does not count
    while (static_cast<int>(groups.size()) - 1 > pending) {
        for (const Copy &copy : groups.front()) std::memcpy(copy.to, copy.from, 16);
        groups.erase(groups.begin());
    }
}

} // namespace simt

extern "C" {

void *simt_allocate(size_t nbytes, int at_end) {
    auto *memory = new simt::Guarded(nbytes, at_end != 0);
    return memory;
}
void *simt_address(void *memory) { return static_cast<simt::Guarded *>(memory)->data(); }
void simt_protect(void *memory, int readable, int writeable) {
    static_cast<simt::Guarded *>(memory)->protect((readable ? PROT_READ : PROT_NONE) | (writeable ? PROT_WRITE : 0));
}
void simt_free(void *memory) { delete static_cast<simt::Guarded *>(memory); }

// Run all blocks of a kernel; returns what went wrong, or an empty text.
const char *simt_run(void (*kernel)(void **), void **arguments, unsigned grid, unsigned block, size_t shared_nbytes, uint64_t seed) {
    using namespace simt;
    static char told[sizeof Launch::message];
    const auto here = std::make_unique<Launch>();
    launch = here.get();
    launch->kernel = kernel;
    launch->arguments = arguments;
    launch->random.seed(seed);
    launch->shared = std::make_unique<Guarded>(shared_nbytes, true);
    launch->stacks = std::make_unique<Guarded>(block * STACK, true);
    launch->threads.resize(block);
    blockDim = {block, 1, 1};
    gridDim = {grid, 1, 1};
    std::vector<unsigned> blocks(grid);
    for (unsigned i = 0; i < grid; ++i) blocks[i] = i;
    for (unsigned i = grid; i > 1; --i) std::swap(blocks[i - 1], blocks[launch->random() % i]);

    std::vector<unsigned char> signal_stack(64 * 1024);
    stack_t own{}, before{};
    own.ss_sp = signal_stack.data();
    own.ss_size = signal_stack.size();
    sigaltstack(&own, &before);
    struct sigaction action{}, segv{}, bus{};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, &segv);
    sigaction(SIGBUS, &action, &bus);
    if (block % WARP != 0 || block == 0) fail("%u threads: not whole warps", block);
    if (shared_nbytes % 16 != 0) fail("%zu bytes of shared memory: not a multiple of 16", shared_nbytes);
    if (sigsetjmp(launch->fault, 1) == 0) {
        for (const unsigned at : blocks) {
            if (launch->message[0] != 0) break;
            const bool noise = launch->random() % 2 == 0;
            for (size_t i = 0; i < shared_nbytes; ++i)
                launch->shared->data()[i] = static_cast<unsigned char>(noise ? launch->random() : NAN_BYTE);
            launch->shared->mark(0x5a);
            run_block(at);
            if (!launch->shared->is_marked(0x5a)) fail("writes in front of its shared memory");
        }
    }
    sigaction(SIGSEGV, &segv, nullptr);
    sigaction(SIGBUS, &bus, nullptr);
    sigaltstack(&before, nullptr);
    std::memcpy(told, launch->message, sizeof told);
    launch = nullptr;
    return told;
}
}
