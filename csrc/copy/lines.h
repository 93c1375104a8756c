// The loops that the AVX2 and AVX-512 kernels share. A file that includes this one has defined
// - SHMSYNC_TARGET, the attribute that lets a function use the instruction set, and in shmsync's anonymous namespace
// - Line, 64 bytes of results in registers; load<kind>(source), which makes one out of kLineSource<kind> bytes;
//   store(destination, line) and stream(destination, line), the latter to an address that is a multiple of 64.
//
// All of it is in the anonymous namespace, because it is compiled once per instruction set, and the linker must not
// choose one for all.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "copy/elements.h"
#include "copy/kernels.h"

namespace shmsync {
namespace {

constexpr std::size_t kLine = 64;
// A stretch is copied in four lanes side by side, because the hardware prefetches within a page: four of them keep four
// prefetchers busy. Lanes of 64 KiB, because each should get to run on into its next page: of one page, as one
// sometimes sees them, they are slower than no lanes on some processors (measured on an AMD EPYC 9004, 1 GB, one
// thread: no lanes 20.6 GB/s, four of 4 KiB 16.8, of 16 KiB 19.0, of 64 KiB 21.5, of 256 KiB 21.3; eight of 64 KiB
// 21.5).
constexpr std::size_t kLaneLines = (std::size_t{64} << 10) / kLine;

// How many source bytes become one line.
template <Kind kind>
constexpr std::size_t kLineSource = kLine / traits(kind).destination_item * traits(kind).source_item;

// One array on its way. `count` is in numbers, not bytes.
template <Kind kind>
struct Cursor {
  char* destination;
  const char* source;
  std::size_t count;

  static constexpr std::size_t kPerLine = kLine / traits(kind).destination_item;

  void advance(std::size_t numbers) {
    destination += numbers * traits(kind).destination_item;
    source += numbers * traits(kind).source_item;
    count -= numbers;
  }
  void singly(std::size_t numbers) {
    elements<kind>(destination, source, numbers);
    advance(numbers);
  }
};

template <Kind kind>
SHMSYNC_TARGET void run_cached(void* destination, const void* source, std::size_t nbytes) {
  using At = Cursor<kind>;
  At at{static_cast<char*>(destination), static_cast<const char*>(source), nbytes / traits(kind).source_item};
  for (; at.count >= At::kPerLine; at.advance(At::kPerLine)) store(at.destination, load<kind>(at.source));
  at.singly(at.count);
}

// Four lanes of `lines` lines each, side by side.
template <Kind kind>
SHMSYNC_TARGET void stream_lanes(char* destination, const char* source, std::size_t lines) {
  constexpr std::size_t step = kLineSource<kind>;
  const std::size_t to = lines * kLine, from = lines * step;
  for (std::size_t i = 0; i < lines; ++i, destination += kLine, source += step) {
    const Line a = load<kind>(source), b = load<kind>(source + from);
    const Line c = load<kind>(source + 2 * from), d = load<kind>(source + 3 * from);
    stream(destination, a);
    stream(destination + to, b);
    stream(destination + 2 * to, c);
    stream(destination + 3 * to, d);
  }
}

template <Kind kind>
SHMSYNC_TARGET void run_streaming(void* destination, const void* source, std::size_t nbytes) {
  using At = Cursor<kind>;
  At at{static_cast<char*>(destination), static_cast<const char*>(source), nbytes / traits(kind).source_item};
  const std::size_t to_next_line = -reinterpret_cast<std::uintptr_t>(destination) % kLine;
  // No number ends where a line does.
  if (to_next_line % traits(kind).destination_item != 0) return run_cached<kind>(destination, source, nbytes);
  at.singly(std::min(at.count, to_next_line / traits(kind).destination_item));
  while (at.count >= 4 * At::kPerLine) {
    const std::size_t lines = std::min(kLaneLines, at.count / (4 * At::kPerLine));
    stream_lanes<kind>(at.destination, at.source, lines);
    at.advance(4 * lines * At::kPerLine);
  }
  for (; at.count >= At::kPerLine; at.advance(At::kPerLine)) stream(at.destination, load<kind>(at.source));
  at.singly(at.count);
}

// The C library's memcpy is the best cached copy there is.
inline void copy_cached(void* destination, const void* source, std::size_t nbytes) {
  std::memcpy(destination, source, nbytes);
}

SHMSYNC_TARGET inline void fence() { _mm_sfence(); }

constexpr Kernels all_kernels(const char* isa) {
  return {isa,
          {copy_cached, run_cached<Kind::float32_to_bfloat16>, run_cached<Kind::float32_to_float16>,
           run_cached<Kind::bfloat16_to_float32>, run_cached<Kind::float16_to_float32>},
          {run_streaming<Kind::bytes>, run_streaming<Kind::float32_to_bfloat16>,
           run_streaming<Kind::float32_to_float16>, run_streaming<Kind::bfloat16_to_float32>,
           run_streaming<Kind::float16_to_float32>},
          fence};
}

}  // namespace
}  // namespace shmsync
