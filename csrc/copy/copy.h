// Copying many separate pieces of memory in one call. Knows neither Python nor torch: pointers and sizes only.
#pragma once

#include <cstddef>

namespace shmsync {

// One piece: `nbytes` bytes go from `source` to `destination`. The two must not overlap.
struct Piece {
  void* destination;
  const void* source;
  std::size_t nbytes;
};

// Copies `count` pieces in order, on the calling thread. All bytes have been written when it returns.
void copy_pieces(const Piece* pieces, std::size_t count) noexcept;

}  // namespace shmsync
