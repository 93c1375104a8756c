#include "threads/pool.h"

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "threads/placement.h"
#include "threads/spin.h"

namespace shmsync {

namespace {

// A job as the pool sees it. It lives on the stack of the thread that brought it, which therefore waits for `busy` to
// become 0 after it has taken the entry out of the list.
struct Entry {
  Job& job;
  std::size_t wanted;            // helpers that may still join; guarded by the pool's mutex
  std::atomic<std::size_t> busy{0};  // helpers at work; incremented under the mutex only
  Entry* next = nullptr;
};

class Pool {
 public:
  void run(Job& job, std::size_t helpers) noexcept;

 private:
  void enter(Entry& entry) noexcept;
  void leave(Entry& entry) noexcept;
  void start_helpers(std::size_t count) noexcept;
  bool start_helper() noexcept;
  void help() noexcept;
  Entry* wait_for_entry(std::unique_lock<std::mutex>& lock) noexcept;
  Entry* joinable() noexcept;

  std::mutex mutex_;
  std::condition_variable work_, done_;
  Entry* entries_ = nullptr;
  std::vector<pthread_t> started_;  // they never end
  Placement placement_;
  std::size_t asleep_ = 0;
  std::atomic<std::size_t> entered_{0};  // so that a helper that spins sees a new entry
};

void Pool::run(Job& job, std::size_t helpers) noexcept {
  Entry entry{job, helpers};
  enter(entry);
  job.work();
  leave(entry);
}

void Pool::enter(Entry& entry) noexcept {
  std::lock_guard<std::mutex> lock(mutex_);
  start_helpers(entry.wanted);
  if (asleep_ > 0) placement_.keep_off_caller(started_);
  entry.next = entries_;
  entries_ = &entry;
  entered_.fetch_add(1, std::memory_order_release);
  for (std::size_t i = 0; i < entry.wanted && i < asleep_; ++i) work_.notify_one();
}

void Pool::leave(Entry& entry) noexcept {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    Entry** link = &entries_;
    while (*link != &entry) link = &(*link)->next;
    *link = entry.next;
  }
  const auto idle = [&] { return entry.busy.load(std::memory_order_acquire) == 0; };
  if (spin_until(idle)) return;
  std::unique_lock<std::mutex> lock(mutex_);
  done_.wait(lock, idle);
}

void Pool::start_helpers(std::size_t count) noexcept {
  while (started_.size() < count && start_helper()) continue;
}

bool Pool::start_helper() noexcept {
  // Python's signal handlers, and a thread that waits for a signal, expect it on threads that Python knows.
  // Those that the processor raises stay as they are: a blocked one kills without a word.
  sigset_t blocked, before;
  sigfillset(&blocked);
  for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP}) sigdelset(&blocked, fault);
  pthread_sigmask(SIG_SETMASK, &blocked, &before);
  bool started = true;
  try {
    started_.reserve(started_.size() + 1);
    std::thread helper([this] { help(); });
    pthread_setname_np(helper.native_handle(), "shmsync-copy");
    started_.push_back(helper.native_handle());
    helper.detach();
  } catch (...) {  // no more threads or memory: the next run tries again
    started = false;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return started;
}

void Pool::help() noexcept {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    Entry* entry = wait_for_entry(lock);
    --entry->wanted;
    entry->busy.fetch_add(1, std::memory_order_relaxed);
    lock.unlock();
    entry->job.work();
    lock.lock();
    // From here on the entry may be gone.
    if (entry->busy.fetch_sub(1, std::memory_order_release) == 1) done_.notify_all();
  }
}

Entry* Pool::wait_for_entry(std::unique_lock<std::mutex>& lock) noexcept {
  if (Entry* entry = joinable()) return entry;
  const std::size_t seen = entered_.load(std::memory_order_relaxed);
  lock.unlock();
  spin_until([&] { return entered_.load(std::memory_order_acquire) != seen; });
  lock.lock();
  Entry* entry;
  while ((entry = joinable()) == nullptr) {
    ++asleep_;
    work_.wait(lock);
    --asleep_;
  }
  return entry;
}

Entry* Pool::joinable() noexcept {
  Entry* entry = entries_;
  while (entry != nullptr && entry->wanted == 0) entry = entry->next;
  return entry;
}

// The process's pool. It is never destroyed: its threads sleep in it until the process ends.
std::atomic<Pool*> process_pool{nullptr};

// The threads are not in the child, and one of them may have held the mutex: the child makes a new pool and forgets
// this one.
void forget_pool() { process_pool.store(nullptr, std::memory_order_relaxed); }

// At load time, when no other thread can be forking: a child must not find this half done.
[[maybe_unused]] const int fork_handler = pthread_atfork(nullptr, nullptr, forget_pool);

Pool* pool() noexcept {
  Pool* known = process_pool.load(std::memory_order_acquire);
  if (known != nullptr) return known;
  Pool* fresh = new (std::nothrow) Pool;
  if (fresh == nullptr || process_pool.compare_exchange_strong(known, fresh)) return fresh;
  delete fresh;  // another thread was first
  return known;
}

}  // namespace

void run_together(Job& job, std::size_t helpers) noexcept {
  Pool* helping = helpers == 0 ? nullptr : pool();
  if (helping == nullptr) return job.work();
  helping->run(job, helpers);
}

}  // namespace shmsync
