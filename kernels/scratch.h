// Memory that is kept from one block to the next, since fresh memory costs a page fault each 4 KiB. Nothing reads from it
// what the same unit of work, or the preparation of the same block, has not written.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

namespace ringmpi {

class Scratch {
  public:
    Scratch() = default;
    Scratch(const Scratch &) = delete;
    Scratch &operator=(const Scratch &) = delete;
    ~Scratch() { std::free(memory_); }

    // Make room for so many bytes; what was taken before is given back.
    void reserve(int64_t nbytes) {
        taken_ = 0;
        if (nbytes <= held_) return;
        std::free(memory_);
        held_ = 0;
        nbytes = (nbytes + PAGE - 1) / PAGE * PAGE;
        memory_ = static_cast<char *>(std::aligned_alloc(PAGE, static_cast<size_t>(nbytes)));
        if (memory_ == nullptr) throw std::bad_alloc();
        held_ = nbytes;
    }

    template <class T> static int64_t nbytes_of(int64_t count) {
        return (count * static_cast<int64_t>(sizeof(T)) + LINE - 1) / LINE * LINE;
    }

    // Take an array that starts on a cache line.
    template <class T> T *take(int64_t count) {
        T *array = reinterpret_cast<T *>(memory_ + taken_);
        taken_ += nbytes_of<T>(count);
        if (taken_ > held_) throw std::bad_alloc();
        return array;
    }

    // Fill with bits that are NaN in every dtype.
    void poison() {
        if (held_ > 0) std::memset(memory_, 0xff, static_cast<size_t>(held_));
    }

  private:
    static constexpr int64_t PAGE = 4096, LINE = 64;
    char *memory_ = nullptr;
    int64_t held_ = 0;
    int64_t taken_ = 0;
};

} // namespace ringmpi
