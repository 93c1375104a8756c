// Where helpers may run: on any processor that their caller may use, but for the one that it is on.
#pragma once

#include <pthread.h>

#include <cstddef>
#include <vector>

namespace shmsync {

// A thread that was asleep for some 20 ms or more is often woken on the processor of the thread that wakes it, even if
// another one is idle, and both share it until the scheduler next balances its load: a copy of 4 MB is over by then, and
// took twice as long as need be (measured on 2 processors, Linux 6.18).
class Placement {
 public:
  // Before the helpers are woken. Does nothing where the caller has one processor only, or if the system does not let it.
  void keep_off_caller(const std::vector<pthread_t>& helpers) noexcept;

 private:
  int processor_ = -1;       // that the helpers were kept off the last time
  std::size_t placed_ = 0;  // how many they were
};

}  // namespace shmsync
