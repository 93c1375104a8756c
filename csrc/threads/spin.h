// Waiting without going to sleep, for what is expected within microseconds.
#pragma once

#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace shmsync {

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A sleeping thread takes some 50 µs to wake up on a virtual machine: about as long is worth waiting for it awake.
constexpr std::chrono::microseconds kSpin{50};

// Returns true as soon as condition() does, and false after kSpin.
template <class Condition>
bool spin_until(Condition condition) noexcept {
  if (condition()) return true;
  const auto deadline = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 32; ++i) {
      pause();
      if (condition()) return true;
    }
  } while (std::chrono::steady_clock::now() < deadline);
  return false;
}

}  // namespace shmsync
