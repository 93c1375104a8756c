// What the environment says. Every variable is read when it is first needed, not when the library is loaded: a bad
// value must be an error of the call that needs it, and not look like a missing extension.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

namespace shmsync {

constexpr std::size_t kMostThreads = 1024;

// SHMSYNC_THREADS if it is set, else the number given to set_threads, else 1.
std::size_t threads();
void set_threads(std::size_t count);

// A run that writes at least as many bytes uses streaming stores: SHMSYNC_STREAM_MIN_BYTES, else what was measured.
std::size_t stream_min_bytes();

// SHMSYNC_ISA, or nothing if it is not set.
std::optional<std::string> forced_isa();

}  // namespace shmsync
