// Which kernels this machine runs.
#include <atomic>
#include <stdexcept>
#include <string>

#include "copy/kernels.h"
#include "settings.h"

namespace shmsync {

namespace {

const Kernels& chosen() {
  const Kernels* available[] = {avx512_kernels(), avx2_kernels(), plain_kernels()};  // the best first
  const auto forced = forced_isa();
  std::string names;
  for (const Kernels* candidate : available) {
    if (candidate == nullptr) continue;
    if (!forced || *forced == candidate->isa) return *candidate;
    names += (names.empty() ? "" : ", ") + std::string(candidate->isa);
  }
  throw std::invalid_argument("Expected one of " + names + ", which this machine has, got '" + *forced +
                              "' - in the environment variable SHMSYNC_ISA");
}

}  // namespace

const Kernels& kernels() {
  // Not a function-local static: a child that is forked while another thread initialises one waits for it for ever.
  static std::atomic<const Kernels*> known{nullptr};
  if (const Kernels* table = known.load(std::memory_order_acquire)) return *table;
  const Kernels& table = chosen();
  known.store(&table, std::memory_order_release);
  return table;
}

}  // namespace shmsync
