// The loops that move bytes, one set per instruction set, and the choice among them.
#pragma once

#include <cstddef>

#include "copy/kind.h"

namespace shmsync {

// Reads nbytes bytes at `source`, a multiple of the kind's source item, and writes what they become to `destination`.
// The two must not overlap; no address needs to be aligned.
using Kernel = void (*)(void* destination, const void* source, std::size_t nbytes);

struct Kernels {
  const char* isa;
  // Ordinary stores: what is written stays in the cache, where readers on other cores find it.
  Kernel cached[kKindCount];
  // Stores that go past the cache: they don't read what they overwrite, which pays where the cache could not hold it.
  Kernel streaming[kKindCount];
  // Each thread calls it after its last streaming store: these are not ordered with what it writes next otherwise.
  void (*fence)();
};

// The set that every kernel comes from: the best that this machine has, or what SHMSYNC_ISA names (avx512, avx2,
// plain). Throws std::invalid_argument if SHMSYNC_ISA names none that this machine has.
const Kernels& kernels();

// nullptr where this machine can't run them.
const Kernels* avx512_kernels();
const Kernels* avx2_kernels();
const Kernels* plain_kernels();

}  // namespace shmsync
