// Threads that share one call: a pool, and phases that hand out its work.
//
// A phase is a list of items that may run in any order and on any thread. It ends when all items
// are done, not when all threads have arrived, so a thread that lost its core between two items
// holds nobody up. Waiting spins for some microseconds, then yields; idle workers sleep.
// Next file: gemm.h.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "simd.h"

namespace oct {

constexpr long kLine = 64;

// Memory that grows and never shrinks, aligned to a cache line.
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  ~Buffer() { std::free(data_); }
  char* reserve(size_t bytes) {
    if (bytes > size_) {
      std::free(data_);
      size_ = 0;
      const size_t rounded = (bytes + 4095) / 4096 * 4096;
      data_ = (char*)std::aligned_alloc(4096, rounded);
      if (!data_) throw std::bad_alloc();
      std::memset(data_, 0, rounded);
      size_ = rounded;
    }
    return data_;
  }
  char* data() const { return data_; }

 private:
  char* data_ = nullptr;
  size_t size_ = 0;
};

struct alignas(kLine) Counter {
  std::atomic<int> value{0};
};

static inline void spin_or_yield(int& tries) {
  if (++tries < 4000) {
    _mm_pause();
  } else {
    sched_yield();
  }
}

class Pool;

// One thread's view of a running call.
struct Team {
  Pool* pool;
  int id;
  int size;
  Counter* counters;  // size + 1 a phase: work taken from each share, then items done
  int phase = 0;

  // Runs work(i) for all i in [0, items). Each thread starts with its own share of neighbouring
  // items and then helps others; with `queue`, all take from the front of one list.
  template <class Work, class Idle>
  void run(int items, bool queue, Work&& work, Idle&& idle) {
    Counter* counter = counters + (long)phase++ * (size + 1);
    if (size == 1) {
      for (int i = 0; i < items; ++i) work(i);
      return;
    }
    int done = 0;
    if (queue) {
      for (;;) {
        const int i = counter[0].value.fetch_add(1, std::memory_order_relaxed);
        if (i >= items) break;
        work(i);
        ++done;
      }
    } else {
      for (int k = 0; k < size; ++k) {
        const int owner = (id + k) % size;
        const int first = (int)((long)items * owner / size);
        const int count = (int)((long)items * (owner + 1) / size) - first;
        for (;;) {
          // A look before the write keeps the line shared once a share is used up.
          if (counter[owner].value.load(std::memory_order_relaxed) >= count) break;
          const int i = counter[owner].value.fetch_add(1, std::memory_order_relaxed);
          if (i >= count) break;
          work(first + i);
          ++done;
        }
      }
    }
    std::atomic<int>& finished = counter[size].value;
    if (done) finished.fetch_add(done, std::memory_order_release);
    if (finished.load(std::memory_order_acquire) < items) {
      idle();
      int tries = 0;
      while (finished.load(std::memory_order_acquire) < items) spin_or_yield(tries);
    }
  }
  template <class Work>
  void run(int items, bool queue, Work&& work) {
    run(items, queue, work, [] {});
  }
};

class Pool {
 public:
  explicit Pool(int threads) : size_(threads < 1 ? 1 : threads), scratch_(size_) {}
  ~Pool() { stop(); }

  int size() const { return size_; }
  std::mutex& busy() { return busy_; }
  char* scratch(int id) const { return scratch_[id].data(); }

  // Runs body(Team&) on all threads. `phases` is the most phases that it goes through, `bytes`
  // the scratch memory of each thread. One call at a time: the caller holds busy().
  template <class Body>
  void run(int phases, size_t bytes, Body&& body) {
    for (int id = 0; id < size_; ++id) scratch_[id].reserve(bytes + kLine);
    const size_t count = (size_t)(phases + 1) * (size_ + 1);
    if (size_ > 1) {
      Counter* counters = (Counter*)counters_.reserve(count * sizeof(Counter));
      for (size_t i = 0; i < count; ++i) counters[i].value.store(0, std::memory_order_relaxed);
    }
    typedef typename std::remove_reference<Body>::type Function;
    start(
        [](void* function, Team& team) { (*(Function*)function)(team); }, (void*)&body);
  }

 private:
  typedef void (*Call)(void*, Team&);

  void start(Call call, void* argument) {
    if (size_ > 1 && owner_ != getpid()) spawn();
    call_ = call;
    argument_ = argument;
    if (size_ > 1) {
      left_.store(size_ - 1, std::memory_order_relaxed);
      turn_.fetch_add(1, std::memory_order_seq_cst);
      if (sleepers_.load(std::memory_order_seq_cst)) wake();
    }
    Team team{this, 0, size_, (Counter*)counters_.data()};
    call(argument, team);
    int tries = 0;
    while (size_ > 1 && left_.load(std::memory_order_acquire)) spin_or_yield(tries);
  }

  void wake() { syscall(SYS_futex, &turn_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0); }

  // Workers do not survive a fork; the child gets its own.
  void spawn() {
    for (std::thread* worker : workers_) (void)worker;  // a parent's threads: not ours to join
    workers_.clear();
    sleepers_.store(0);
    stop_.store(false);
    const uint32_t turn = turn_.load();
    for (int id = 1; id < size_; ++id) {
      workers_.push_back(new std::thread([this, id, turn] { serve(id, turn); }));
    }
    owner_ = getpid();
  }

  void serve(int id, uint32_t turn) {
    for (;;) {
      wait(turn);
      ++turn;
      if (stop_.load(std::memory_order_acquire)) return;
      Team team{this, id, size_, (Counter*)counters_.data()};
      call_(argument_, team);
      left_.fetch_sub(1, std::memory_order_release);
    }
  }

  // Returns once turn_ has moved on from `turn`: looks for about 0.2 ms, then sleeps.
  void wait(uint32_t turn) {
    typedef std::chrono::steady_clock Clock;
    const Clock::time_point end = Clock::now() + std::chrono::microseconds(200);
    for (int tries = 0; turn_.load(std::memory_order_acquire) == turn; ++tries) {
      if (tries % 64 != 63) {
        _mm_pause();
        continue;
      }
      if (Clock::now() < end) {
        if (tries > 2000) sched_yield();
        continue;
      }
      sleepers_.fetch_add(1, std::memory_order_seq_cst);
      if (turn_.load(std::memory_order_seq_cst) == turn) {
        syscall(SYS_futex, &turn_, FUTEX_WAIT_PRIVATE, turn, nullptr, nullptr, 0);
      }
      sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    }
  }

  void stop() {
    if (workers_.empty() || owner_ != getpid()) return;
    stop_.store(true, std::memory_order_release);
    turn_.fetch_add(1, std::memory_order_seq_cst);
    wake();
    for (std::thread* worker : workers_) {
      worker->join();
      delete worker;
    }
    workers_.clear();
  }

  int size_;
  pid_t owner_ = 0;
  std::mutex busy_;
  std::vector<Buffer> scratch_;
  Buffer counters_;
  std::vector<std::thread*> workers_;
  Call call_ = nullptr;
  void* argument_ = nullptr;
  std::atomic<bool> stop_{false};
  alignas(kLine) std::atomic<uint32_t> turn_{0};
  std::atomic<int> sleepers_{0};
  alignas(kLine) std::atomic<int> left_{0};
};

}  // namespace oct
