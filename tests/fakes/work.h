// Queues and what is in them.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "state.h"

namespace fake {

// ── Floating-point numbers, to the nearest, ties to even ─────────────────────────────────────────────────────────────

inline std::uint32_t bits_of(float number) {
  std::uint32_t bits;
  std::memcpy(&bits, &number, sizeof bits);
  return bits;
}

inline float float_of(std::uint32_t bits) {
  float number;
  std::memcpy(&number, &bits, sizeof number);
  return number;
}

inline std::uint16_t to_bfloat16(float number) {
  const std::uint32_t bits = bits_of(number);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return 0x7FFF;
  return std::uint16_t((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

inline std::uint16_t to_float16(float number) {
  const std::uint32_t bits = bits_of(number);
  const std::uint16_t sign = bits >> 16 & 0x8000;
  const std::uint32_t size = bits & 0x7FFFFFFF;
  if (size > 0x7F800000) return 0x7FFF;
  if (size >= 0x477FF000) return sign | 0x7C00;  // 65520 and more
  if (size < 0x38800000) {                       // subnormal: the addition rounds at 2^-24
    return std::uint16_t(sign | (bits_of(float_of(size) + 0.5f) - bits_of(0.5f)));
  }
  return std::uint16_t(sign | ((size - 0x38000000 + 0xFFF + (size >> 13 & 1)) >> 13));
}

inline float from_float16(std::uint16_t half) {
  const std::uint32_t sign = std::uint32_t(half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 0x3FF;
  if (exponent == 31) return float_of(sign | 0x7F800000 | fraction << 13);
  if (exponent == 0) return (sign ? -1.0f : 1.0f) * float(fraction) / 16777216.0f;
  return float_of(sign | (exponent + 112) << 23 | fraction << 13);
}

// kinds: 0 float32 to bfloat16, 1 float32 to float16, 2 bfloat16 to float32, 3 float16 to float32
inline std::size_t cast_source_bytes(int kind) { return kind < 2 ? 4 : 2; }

inline void cast_one(int kind, char* destination, const char* source) {
  if (kind < 2) {
    float number;
    std::memcpy(&number, source, 4);
    const std::uint16_t half = kind == 0 ? to_bfloat16(number) : to_float16(number);
    std::memcpy(destination, &half, 2);
  } else {
    std::uint16_t half;
    std::memcpy(&half, source, 2);
    const float number = kind == 2 ? float_of(std::uint32_t(half) << 16) : from_float16(half);
    std::memcpy(destination, &number, 4);
  }
}

// ── Pieces ───────────────────────────────────────────────────────────────────────────────────────────────────────────

// The memory of one block of a gather.
inline Row row_of_block(const Gather& gather, unsigned block) {
  const auto piece = shmsync::cuda::piece_of(gather.rows, gather.count, gather.base, block);
  const shmsync::KindTraits& kind = shmsync::traits(piece.kind);
  return {{reinterpret_cast<Address>(piece.destination), piece.items * kind.destination_item},
          {reinterpret_cast<Address>(piece.source), piece.items * kind.source_item},
          0,
          block};
}

inline bool operator==(const Range& a, const Range& b) { return a.begin == b.begin && a.nbytes == b.nbytes; }

// Some threads of a block, by the code that devices run.
inline void run_threads(const Gather& gather, const Row& row, std::size_t first) {
  const Row now = row_of_block(gather, row.block);
  if (!(now.destination == row.destination && now.source == row.source)) {
    state().violation("the table changed under a launch");
    return;
  }
  for (std::size_t i = first; i < row.done; ++i) {
    shmsync::cuda::gather(gather.rows, gather.count, gather.base, row.block, unsigned(i));
  }
}

inline std::size_t items_in(const Entry& entry, const Row& row) {
  if (entry.kind == Kind::gather) return shmsync::cuda::kGatherThreads;
  if (entry.kind == Kind::fill) return row.destination.nbytes;
  return entry.kind == Kind::cast ? row.source.nbytes / cast_source_bytes(entry.cast) : row.source.nbytes;
}

inline void do_items(Entry& entry, Row& row, std::size_t count) {
  char* const to = reinterpret_cast<char*>(row.destination.begin);
  const char* const from = reinterpret_cast<const char*>(row.source.begin);
  const std::size_t first = row.done;
  row.done += count;
  if (entry.kind == Kind::gather) run_threads(entry.gather, row, first);
  if (entry.kind == Kind::copy) std::memmove(to + first, from + first, count);
  if (entry.kind == Kind::fill) std::memset(to + first, entry.value, count);
  if (entry.kind == Kind::cast) {
    const std::size_t size = cast_source_bytes(entry.cast);
    for (std::size_t i = first; i < row.done; ++i) cast_one(entry.cast, to + i * (6 - size), from + i * size);
  }
  if (entry.kind == Kind::check) {
    for (std::size_t i = first; i < row.done; ++i) {
      const auto byte = static_cast<unsigned char>(from[i]);
      entry.least = std::min(entry.least, byte);
      entry.most = std::max(entry.most, byte);
    }
  }
}

// A part of a row of it that is picked by chance, so that a row takes several pieces however long it is.
inline void do_piece(Entry& entry) {
  if (entry.rows.empty()) return;
  const std::size_t picked = state().below(entry.rows.size());
  Row& row = entry.rows[picked];
  const std::size_t items = items_in(entry, row), most = std::max<std::size_t>(16, items / 3);
  do_items(entry, row, std::min(items - row.done, 1 + state().below(most)));
  if (row.done == items) entry.rows.erase(entry.rows.begin() + long(picked));
}

inline bool is_runnable(const Stream& stream) {
  if (stream.queue.empty()) return false;
  const auto& after = stream.queue.front().after;
  return std::all_of(after.begin(), after.end(), [](const Flag& flag) { return *flag; });
}

inline void run_front(Stream& stream) {
  Entry& entry = stream.queue.front();
  do_piece(entry);
  if (!entry.rows.empty()) return;
  if (entry.seen != nullptr) entry.seen[0] = entry.least, entry.seen[1] = entry.most;
  *entry.done = true;
  stream.queue.pop_front();
}

// One piece of a stream that is picked by chance. False: none can go on.
inline bool run_piece() {
  std::vector<Address> runnable;
  for (const auto& [handle, stream] : state().streams) {
    if (is_runnable(stream)) runnable.push_back(handle);
  }
  if (runnable.empty()) return false;
  const Address picked = runnable[state().below(runnable.size())];
  Stream& stream = state().streams[picked];
  run_front(stream);
  if (stream.destroyed && stream.queue.empty()) state().streams.erase(picked);
  return true;
}

inline void run_some(std::size_t pieces) {
  while (pieces-- > 0 && run_piece()) {
  }
}

template <class Condition>
void run_until(Condition condition) {
  while (!condition()) {
    if (run_piece()) continue;
    std::fprintf(stderr, "fake CUDA runtime: deadlock: waiting for work that nothing makes go on\n");
    std::abort();
  }
}

inline std::size_t queued() {
  std::size_t count = 0;
  for (const auto& [handle, stream] : state().streams) count += stream.queue.size();
  return count;
}

inline void drain_all() {
  run_until([] { return queued() == 0; });
}

inline void drain_device(int device) {
  run_until([&] {
    const auto& streams = state().streams;
    return std::all_of(streams.begin(), streams.end(), [&](const auto& item) {
      return item.second.device != device || item.second.queue.empty();
    });
  });
}

inline void drain(const Stream& stream) {
  run_until([&] { return stream.queue.empty(); });
}

inline bool is_in_use(const Range& range) {
  for (const auto& [handle, stream] : state().streams) {
    for (const Entry& entry : stream.queue) {
      for (const Row& row : entry.rows) {
        if (range.meets(row.destination) || range.meets(row.source)) return true;
      }
      const Address table = reinterpret_cast<Address>(entry.gather.rows);
      if (range.meets({table, entry.gather.count * sizeof *entry.gather.rows})) return true;
    }
  }
  return false;
}

// Before memory goes without waiting for the work that uses it.
inline void finish_work_on(const Range& range) {
  if (!is_in_use(range)) return;
  state().violation("released with work pending");
  drain_all();
}

// ── Queues ───────────────────────────────────────────────────────────────────────────────────────────────────────────

// Handles below this are the default streams, one of each for a device: 0 and 1 legacy, 2 per thread (not
// here).
constexpr Address kDefaultStreams = 3;

inline Address default_key(int device, Address handle) {
  return Address(device) * kDefaultStreams + std::max<Address>(handle, 1);
}

// nullptr: no such stream.
inline Stream* stream_of(Address handle, int current_device) {
  auto& streams = state().streams;
  if (handle < kDefaultStreams) {
    Stream& stream = streams[default_key(current_device, handle)];
    stream.device = current_device;
    stream.blocking = handle == 2;
    return &stream;
  }
  const auto found = streams.find(handle);
  return found == streams.end() || found->second.destroyed ? nullptr : &found->second;
}

inline bool is_created_stream(Address handle) { return handle > 0x1000 && stream_of(handle, 0) != nullptr; }

inline bool is_legacy(const Stream& stream) {
  const auto found = state().streams.find(default_key(stream.device, 1));
  return found != state().streams.end() && &found->second == &stream;
}

// The default stream waits for every blocking stream of its device, and they for it.
inline void add_implicit_waits(Entry& entry, const Stream& stream) {
  const bool legacy = is_legacy(stream);
  if (!legacy && !stream.blocking) return;
  for (const auto& [handle, other] : state().streams) {
    const bool counts = legacy ? other.blocking : is_legacy(other);
    if (counts && &other != &stream && other.device == stream.device && other.last) entry.after.push_back(other.last);
  }
}

inline void enqueue(Stream& stream, Entry entry) {
  auto& rows = entry.rows;
  rows.erase(std::remove_if(rows.begin(), rows.end(), [&](const Row& row) { return items_in(entry, row) == 0; }),
             rows.end());
  add_implicit_waits(entry, stream);
  stream.last = entry.done;
  stream.queue.push_back(std::move(entry));
}

}  // namespace fake
