// The threads that help with a copy: few, long-lived, asleep when there is nothing to do.
#pragma once

#include <cstddef>

namespace shmsync {

// Something that several threads can do together.
class Job {
 public:
  // Takes part until nothing is left to be begun. Each thread that takes part calls it once, all at the same time; it
  // must be right, only slower, when it is called by one thread alone.
  virtual void work() noexcept = 0;

 protected:
  ~Job() = default;
};

// Calls job.work() on this thread and on up to `helpers` others, and returns when every call has returned. A helper
// that is late finds nothing to do and is not waited for; one that can't be started is done without. Any number of
// threads may call it at once. A forked child starts with no helpers and gets its own.
void run_together(Job& job, std::size_t helpers) noexcept;

}  // namespace shmsync
