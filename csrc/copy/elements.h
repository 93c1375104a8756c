// The casts over an array, one number after the other: the plain path, and what the vectorised paths leave at both
// ends. Addresses need no alignment.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "copy/convert.h"
#include "copy/kind.h"

namespace shmsync {

template <class To, class From, To (*convert)(From)>
inline void convert_elements(char* destination, const char* source, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    From from;
    std::memcpy(&from, source + i * sizeof(From), sizeof(From));
    const To to = convert(from);
    std::memcpy(destination + i * sizeof(To), &to, sizeof(To));
  }
}

inline void bfloat16_elements(char* destination, const char* source, std::size_t count) {
  const std::uint16_t nan = bfloat16_nan.load(std::memory_order_relaxed);
  for (std::size_t i = 0; i < count; ++i) {
    std::uint32_t from;
    std::memcpy(&from, source + i * sizeof(from), sizeof(from));
    const std::uint16_t to = bfloat16_from_float32(from, nan);
    std::memcpy(destination + i * sizeof(to), &to, sizeof(to));
  }
}

// `count` numbers of the kind's source type (bytes, for Kind::bytes).
template <Kind kind>
inline void elements(char* destination, const char* source, std::size_t count) {
  if constexpr (kind == Kind::bytes) {
    std::memcpy(destination, source, count);
  } else if constexpr (kind == Kind::float32_to_bfloat16) {
    bfloat16_elements(destination, source, count);
  } else if constexpr (kind == Kind::float32_to_float16) {
    convert_elements<std::uint16_t, std::uint32_t, float16_from_float32>(destination, source, count);
  } else if constexpr (kind == Kind::bfloat16_to_float32) {
    convert_elements<std::uint32_t, std::uint16_t, float32_from_bfloat16>(destination, source, count);
  } else {
    convert_elements<std::uint32_t, std::uint16_t, float32_from_float16>(destination, source, count);
  }
}

}  // namespace shmsync
