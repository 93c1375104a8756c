#include "threads/placement.h"

#include <sched.h>

namespace shmsync {

void Placement::keep_off_caller(const std::vector<pthread_t>& helpers) noexcept {
  const int here = sched_getcpu();
  if (here < 0 || here >= CPU_SETSIZE) return;
  if (here == processor_ && helpers.size() == placed_) return;
  cpu_set_t allowed;
  if (pthread_getaffinity_np(pthread_self(), sizeof allowed, &allowed) != 0) return;
  CPU_CLR(here, &allowed);
  if (CPU_COUNT(&allowed) == 0) return;
  for (pthread_t helper : helpers) pthread_setaffinity_np(helper, sizeof allowed, &allowed);
  processor_ = here;
  placed_ = helpers.size();
}

}  // namespace shmsync
