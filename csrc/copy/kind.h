// What happens to the bytes of a row on their way.
#pragma once

#include <cstddef>
#include <cstdint>

namespace shmsync {

enum class Kind : std::uint8_t {
  bytes,
  float32_to_bfloat16,
  float32_to_float16,
  bfloat16_to_float32,
  float16_to_float32,
};

struct KindTraits {
  const char* name;  // as Python spells it
  std::size_t source_item;
  std::size_t destination_item;
};

// In the order of Kind.
constexpr KindTraits kKinds[] = {
    {"bytes", 1, 1},
    {"float32_to_bfloat16", 4, 2},
    {"float32_to_float16", 4, 2},
    {"bfloat16_to_float32", 2, 4},
    {"float16_to_float32", 2, 4},
};

constexpr std::size_t kKindCount = sizeof(kKinds) / sizeof(kKinds[0]);

constexpr const KindTraits& traits(Kind kind) { return kKinds[static_cast<std::size_t>(kind)]; }

// How many bytes `source_nbytes` bytes become.
constexpr std::size_t destination_nbytes(Kind kind, std::size_t source_nbytes) {
  return source_nbytes / traits(kind).source_item * traits(kind).destination_item;
}

}  // namespace shmsync
