// Threads that help with one job at a time. The caller is one of them, so a pool of one has no thread of its own.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace ringmpi {

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

class Pool {
  public:
    explicit Pool(int size) {
        for (int index = 1; index < size; ++index) threads_.emplace_back([this, index] { serve(index); });
    }

    Pool(const Pool &) = delete;
    Pool &operator=(const Pool &) = delete;

    ~Pool() {
        {
            const std::lock_guard<std::mutex> lock(mutex_); // Nobody is between looking for a job and going to sleep.
            ending_ = true;
        }
        wake_.notify_all();
        for (std::thread &thread : threads_) thread.join();
    }

    int size() const { return static_cast<int>(threads_.size()) + 1; }

    // Let the other threads call the job, each once and with its index, while the caller goes on. It must be there until `end`.
    // False where there are none, or they have another job until its `end`.
    bool begin(const std::function<void(int)> &job) {
        if (threads_.empty() || taken_) return false;
        taken_ = true;
        working_ = static_cast<int>(threads_.size());
        job_ = &job;
        {
            const std::lock_guard<std::mutex> lock(mutex_); // As above.
            number_.fetch_add(1);
        }
        wake_.notify_all();
        return true;
    }

    // Wait until they have returned.
    void end() {
        while (working_.load() > 0) relax();
        taken_ = false;
    }

  private:
    // A thread looks this long for the next job before it sleeps: longer than it takes from one block to the next, where
    // the next one is there already, and short beside the work on it.
    static constexpr std::chrono::microseconds PATIENCE{100};

    void serve(int index) {
        for (uint64_t done = 0;;) {
            const auto patient_until = std::chrono::steady_clock::now() + PATIENCE;
            while (number_.load() == done && !ending_ && std::chrono::steady_clock::now() < patient_until) relax();
            if (number_.load() == done) {
                std::unique_lock<std::mutex> lock(mutex_);
                wake_.wait(lock, [&] { return number_.load() != done || ending_; });
            }
            if (number_.load() == done) return;
            ++done;
            (*job_)(index);
            working_.fetch_sub(1);
        }
    }

    std::vector<std::thread> threads_;
    bool taken_ = false; // from `begin` to `end`
    std::mutex mutex_;
    std::condition_variable wake_;
    std::atomic<uint64_t> number_{0}; // of jobs given so far
    std::atomic<int> working_{0};     // threads that have not done the current one
    std::atomic<bool> ending_{false};
    const std::function<void(int)> *job_ = nullptr;
};

} // namespace ringmpi
