// A job that falls into numbered parts. Each thread begins with a stretch of its own, the same one in every run, so
// that what it finds in its cache is its own; then it takes what is left in the stretches of others. So a thread that
// is late, or is taken off its processor, keeps the others from nothing but the part that it is at.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>

#include "threads/pool.h"

namespace shmsync {

class Parts : public Job {
 public:
  Parts(std::size_t count, std::size_t threads)
      : count_(count), stretches_(std::clamp<std::size_t>(std::min(threads, count), 1, kMostStretches)) {
    for (std::size_t i = 0; i < stretches_; ++i) next_[i].value.store(begin(i), std::memory_order_relaxed);
  }

  void work() noexcept final {
    const std::size_t own = arrived_.fetch_add(1, std::memory_order_relaxed);
    for (std::size_t i = 0; i < stretches_; ++i) take((own + i) % stretches_);
    finish();
  }

 protected:
  ~Parts() = default;
  virtual void part(std::size_t index) noexcept = 0;
  // Called by each thread after its last part.
  virtual void finish() noexcept {}

 private:
  static constexpr std::size_t kMostStretches = 64;

  // Alone on its cache line: its owner shall not wait for the others' counting.
  struct alignas(64) Counter {
    std::atomic<std::size_t> value;
  };

  std::size_t begin(std::size_t stretch) const { return count_ * stretch / stretches_; }

  void take(std::size_t stretch) noexcept {
    const std::size_t end = begin(stretch + 1);
    for (std::size_t i; (i = next_[stretch].value.fetch_add(1, std::memory_order_relaxed)) < end;) part(i);
  }

  const std::size_t count_, stretches_;
  std::atomic<std::size_t> arrived_{0};
  Counter next_[kMostStretches];
};

}  // namespace shmsync
