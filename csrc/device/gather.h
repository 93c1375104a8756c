// What the gather kernel does: many arrays of a device copied to one place on it, or cast on the way, in one launch.
//
//   row     one array: `count` items of its kind, from `source` to `offset` behind the launch's base
//   piece   kPieceItems of a row or what is left of it; row r has the pieces from rows[r].first on
//   block   of the launch: does the piece of its number
//   pack    the items that a thread loads and stores at once, up to 16 bytes of the wider side
//
// So a long row is as many blocks as its bytes need, and which row a block's piece is of is searched for in the table.
//
// Compiled by nvcc for devices (gather.cu), and for the host by the tests and their fake runtime. Only `load`, `store`
// and the casts of single numbers differ. On a device these are the intrinsics that torch's own types use there, so
// that whatever a GPU makes of a NaN is what it makes in torch. On the host they give what NVIDIA documents: 0x7FFF for
// every NaN that becomes a float16, or a bfloat16 from compute capability 8.0 on (before that it is 0x7FC0, as torch
// has it there). A NaN that is widened keeps its payload.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "copy/kind.h"

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define SHMSYNC_DEVICE __device__ __forceinline__
#define SHMSYNC_BOTH __host__ __device__
#else
#include <cstdlib>

#include "copy/convert.h"
#define SHMSYNC_DEVICE inline
#define SHMSYNC_BOTH
#endif

namespace shmsync::cuda {

// Whoever changes what the kernel is given changes its name, so that no build calls another one's.
#define SHMSYNC_GATHER_KERNEL shmsync_gather_1

struct GatherRow {
  std::uint64_t source;
  std::uint64_t offset;
  std::uint64_t count;
  std::uint32_t kind;
  std::uint32_t first;
};
static_assert(sizeof(GatherRow) == 32, "it lies in device memory as it is");

constexpr unsigned kGatherThreads = 256;  // of a block
constexpr unsigned kPacksTogether = 4;    // loaded by a thread before it stores the first of them

// The same bytes on the wider side for all kinds, and a multiple of every pack.
constexpr unsigned kPieceBytes = 16384;
SHMSYNC_BOTH constexpr unsigned piece_items(bool cast) { return cast ? kPieceBytes / 4 : kPieceBytes; }

constexpr std::uint64_t pieces(bool cast, std::uint64_t count) {
  return count / piece_items(cast) + (count % piece_items(cast) != 0);
}

// ── Memory ───────────────────────────────────────────────────────────────────────────────────────────────────────────

template <class T>
SHMSYNC_DEVICE bool is_aligned(const char* at) {
  return reinterpret_cast<std::uintptr_t>(at) % alignof(T) == 0;
}

#ifdef __CUDACC__

template <class T>
SHMSYNC_DEVICE T load(const char* at) {
  return *reinterpret_cast<const T*>(at);
}

template <class T>
SHMSYNC_DEVICE void store(char* at, const T& value) {
  *reinterpret_cast<T*>(at) = value;
}

#else

template <class T>
inline T load(const char* at) {
  if (!is_aligned<T>(at)) std::abort();  // which a device answers with an error
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

template <class T>
inline void store(char* at, const T& value) {
  if (!is_aligned<T>(at)) std::abort();
  std::memcpy(at, &value, sizeof value);
}

#endif

// ── What becomes of one number ───────────────────────────────────────────────────────────────────────────────────────

template <class T>
struct Same {
  using From = T;
  using To = T;
  static SHMSYNC_DEVICE T cast(T x) { return x; }
};

struct Float32ToBfloat16 {
  using From = std::uint32_t;
  using To = std::uint16_t;
  static SHMSYNC_DEVICE To cast(From x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    return __bfloat16_as_ushort(__float2bfloat16_rn(__uint_as_float(x)));
#else
#ifdef __CUDACC__
    const To nan = 0x7FC0;
#else
    const To nan = 0x7FFF;
#endif
    return (x & 0x7FFFFFFF) > 0x7F800000 ? nan : static_cast<To>((x + 0x7FFF + (x >> 16 & 1)) >> 16);
#endif
  }
};

struct Float32ToFloat16 {
  using From = std::uint32_t;
  using To = std::uint16_t;
  static SHMSYNC_DEVICE To cast(From x) {
#ifdef __CUDACC__
    return __half_as_ushort(__float2half_rn(__uint_as_float(x)));
#else
    return (x & 0x7FFFFFFF) > 0x7F800000 ? To{0x7FFF} : float16_from_float32(x);
#endif
  }
};

struct Bfloat16ToFloat32 {
  using From = std::uint16_t;
  using To = std::uint32_t;
  static SHMSYNC_DEVICE To cast(From x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    return __float_as_uint(__bfloat162float(__ushort_as_bfloat16(x)));
#else
    return static_cast<To>(x) << 16;  // which older devices do too, but not every nvcc has a name for it there
#endif
  }
};

struct Float16ToFloat32 {
  using From = std::uint16_t;
  using To = std::uint32_t;
  static SHMSYNC_DEVICE To cast(From x) {
#ifdef __CUDACC__
    return __float_as_uint(__half2float(__ushort_as_half(x)));
#else
    return float32_from_float16(x);
#endif
  }
};

template <std::size_t nbytes>
struct Bytes {
  unsigned char bytes[nbytes];
};

// For addresses that are no multiple of the numbers' sizes.
template <class Cast>
struct ByBytes {
  using From = Bytes<sizeof(typename Cast::From)>;
  using To = Bytes<sizeof(typename Cast::To)>;
  static SHMSYNC_DEVICE To cast(const From& x) {
    typename Cast::From from;
    memcpy(&from, &x, sizeof from);
    const typename Cast::To to = Cast::cast(from);
    To result;
    memcpy(&result, &to, sizeof to);
    return result;
  }
};

// ── A piece ──────────────────────────────────────────────────────────────────────────────────────────────────────────

template <class T, unsigned count>
struct alignas(alignof(T) * count) Pack {
  T items[count];
};

template <class Cast, unsigned count>
SHMSYNC_DEVICE Pack<typename Cast::To, count> cast_pack(const Pack<typename Cast::From, count>& from) {
  Pack<typename Cast::To, count> to;
  for (unsigned i = 0; i < count; ++i) to.items[i] = Cast::cast(from.items[i]);
  return to;
}

// One thread's share: every kGatherThreads-th pack.
template <class Cast, unsigned count>
SHMSYNC_DEVICE void move_packs(char* to, const char* from, unsigned packs, unsigned thread) {
  using From = Pack<typename Cast::From, count>;
  using To = Pack<typename Cast::To, count>;
  for (unsigned begin = thread; begin < packs; begin += kGatherThreads * kPacksTogether) {
    From loaded[kPacksTogether];
#ifdef __CUDACC__
#pragma unroll
#endif
    for (unsigned i = 0; i < kPacksTogether; ++i) {
      const unsigned pack = begin + i * kGatherThreads;
      if (pack < packs) loaded[i] = load<From>(from + std::size_t{pack} * sizeof(From));
    }
#ifdef __CUDACC__
#pragma unroll
#endif
    for (unsigned i = 0; i < kPacksTogether; ++i) {
      const unsigned pack = begin + i * kGatherThreads;
      if (pack < packs) store(to + std::size_t{pack} * sizeof(To), cast_pack<Cast, count>(loaded[i]));
    }
  }
}

// As many whole packs as `items` make; how many items that are.
template <class Cast, unsigned count>
SHMSYNC_DEVICE unsigned move_whole_packs(char* to, const char* from, unsigned items, unsigned thread) {
  move_packs<Cast, count>(to, from, items / count, thread);
  return items / count * count;
}

template <class Cast>
SHMSYNC_DEVICE void move_numbers(char* to, const char* from, unsigned items, unsigned thread) {
  using From = typename Cast::From;
  using To = typename Cast::To;
  constexpr unsigned many = 4;
  if (!is_aligned<From>(from) || !is_aligned<To>(to)) return move_packs<ByBytes<Cast>, 1>(to, from, items, thread);
  const bool packed = is_aligned<Pack<From, many>>(from) && is_aligned<Pack<To, many>>(to);
  const unsigned done = packed ? move_whole_packs<Cast, many>(to, from, items, thread) : 0;
  move_packs<Cast, 1>(to + done * sizeof(To), from + done * sizeof(From), items - done, thread);
}

template <class Word, unsigned count>
SHMSYNC_DEVICE bool fits(const char* to, const char* from) {
  return is_aligned<Pack<Word, count>>(to) && is_aligned<Pack<Word, count>>(from);
}

SHMSYNC_DEVICE void move_bytes(char* to, const char* from, unsigned nbytes, unsigned thread) {
  using Long = std::uint32_t;
  using Short = std::uint16_t;
  unsigned done = 0;
  if (fits<Long, 4>(to, from)) {
    done = move_whole_packs<Same<Long>, 4>(to, from, nbytes / 4 / 4 * 4, thread) * 4;
  } else if (fits<Long, 1>(to, from)) {
    done = move_whole_packs<Same<Long>, 1>(to, from, nbytes / 4, thread) * 4;
  } else if (fits<Short, 1>(to, from)) {
    done = move_whole_packs<Same<Short>, 1>(to, from, nbytes / 2, thread) * 2;
  }
  move_packs<Same<unsigned char>, 1>(to + done, from + done, nbytes - done, thread);
}

// The last row that begins at that piece or before. Every row has a piece.
SHMSYNC_DEVICE unsigned row_of(const GatherRow* rows, unsigned count, unsigned piece) {
  unsigned low = 0;
  for (unsigned high = count; high - low > 1;) {
    const unsigned middle = low + (high - low) / 2;
    (rows[middle].first <= piece ? low : high) = middle;
  }
  return low;
}

struct GatherPiece {
  char* destination;
  const char* source;
  unsigned items;
  Kind kind;
};

SHMSYNC_DEVICE GatherPiece piece_of(const GatherRow* rows, unsigned count, char* base, unsigned piece) {
  const GatherRow row = rows[row_of(rows, count, piece)];
  const Kind kind = static_cast<Kind>(row.kind);
  const bool widening = kind == Kind::bfloat16_to_float32 || kind == Kind::float16_to_float32;
  const bool cast = kind != Kind::bytes;
  const std::uint64_t begin = std::uint64_t{piece - row.first} * piece_items(cast);
  const std::uint64_t left = row.count - begin;
  const unsigned source_item = !cast ? 1 : widening ? 2 : 4, destination_item = !cast ? 1 : widening ? 4 : 2;
  return {base + row.offset + begin * destination_item,
          reinterpret_cast<const char*>(row.source) + begin * source_item,
          left < piece_items(cast) ? static_cast<unsigned>(left) : piece_items(cast), kind};
}

// All that one thread of one block does.
SHMSYNC_DEVICE void gather(const GatherRow* rows, unsigned count, char* base, unsigned block, unsigned thread) {
  const GatherPiece piece = piece_of(rows, count, base, block);
  char* const to = piece.destination;
  const char* const from = piece.source;
#ifdef __CUDACC__
  __builtin_assume(__isGlobal(from));
#endif
  switch (piece.kind) {
    case Kind::bytes: return move_bytes(to, from, piece.items, thread);
    case Kind::float32_to_bfloat16: return move_numbers<Float32ToBfloat16>(to, from, piece.items, thread);
    case Kind::float32_to_float16: return move_numbers<Float32ToFloat16>(to, from, piece.items, thread);
    case Kind::bfloat16_to_float32: return move_numbers<Bfloat16ToFloat32>(to, from, piece.items, thread);
    case Kind::float16_to_float32: return move_numbers<Float16ToFloat32>(to, from, piece.items, thread);
  }
}

}  // namespace shmsync::cuda
