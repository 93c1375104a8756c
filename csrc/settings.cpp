#include "settings.h"

#include <atomic>
#include <cstdlib>
#include <limits>
#include <stdexcept>

namespace shmsync {

namespace {

// Measured in shared memory with three slots in turn, 32 MiB of last-level cache and 1 or 2 threads. Copies through the
// cache are faster while all slots fit into it (4 MB: 1.2 times), streaming ones from 8 MB on (16 and 32 MB: twice). A
// reader on another core reads 8 MB up to 1.7 times as fast if it is in the cache; from 32 MB on that makes no difference.
// The copy and the first reading together take the same time at about 8 MB.
constexpr std::size_t kStreamMinBytes = std::size_t{8} << 20;

std::optional<std::string> variable(const char* name) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') return std::nullopt;
  return text;
}

// A number in the environment, from `least` to `most`. It is read once: getenv may not run beside a change.
class Number {
 public:
  constexpr Number(const char* name, std::size_t least, std::size_t most) : name_(name), least_(least), most_(most) {}

  std::size_t value_or(std::size_t otherwise) {
    std::size_t value = value_.load(std::memory_order_relaxed);
    if (value == kUnread) value_.store(value = read(), std::memory_order_relaxed);
    return value == kUnset ? otherwise : value;
  }

 private:
  // Both are more than any value: number() takes 18 digits at most.
  static constexpr std::size_t kUnread = std::numeric_limits<std::size_t>::max(), kUnset = kUnread - 1;

  std::size_t read() const {
    const auto text = variable(name_);
    if (!text) return kUnset;
    // stoull takes a sign and blanks, and stops at the first letter.
    const bool digits = text->find_first_not_of("0123456789") == std::string::npos && text->size() <= 18;
    const std::size_t value = digits ? std::stoull(*text) : 0;
    if (digits && value >= least_ && value <= most_) return value;
    throw std::invalid_argument("Expected a whole number from " + std::to_string(least_) + " to " +
                                std::to_string(most_) + ", got '" + *text + "' - in the environment variable " + name_);
  }

  const char* name_;
  std::size_t least_, most_;
  std::atomic<std::size_t> value_{kUnread};
};

Number threads_in_environment{"SHMSYNC_THREADS", 1, kMostThreads};
Number stream_min_bytes_in_environment{"SHMSYNC_STREAM_MIN_BYTES", 0, 999'999'999'999'999'999};
std::atomic<std::size_t> threads_set{1};

}  // namespace

std::size_t threads() { return threads_in_environment.value_or(threads_set.load(std::memory_order_relaxed)); }

void set_threads(std::size_t count) {
  if (count < 1 || count > kMostThreads) {
    throw std::invalid_argument("Expected 1 to " + std::to_string(kMostThreads) + " threads, got " +
                                std::to_string(count));
  }
  threads_set.store(count, std::memory_order_relaxed);
}

std::size_t stream_min_bytes() { return stream_min_bytes_in_environment.value_or(kStreamMinBytes); }

std::optional<std::string> forced_isa() { return variable("SHMSYNC_ISA"); }

}  // namespace shmsync
