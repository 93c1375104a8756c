// Casts of single numbers, on their bit patterns, in integers only: exact whatever the rounding mode and the treatment
// of denormals are set to (torch.set_flush_denormal). They define what the vectorised casts must give.
//
// Equal to torch's to the bit. Two of torch's answers about NaN depend on more than the number:
// - float32 → bfloat16 gives one pattern for every NaN: 0xFFFF in its AVX2 and AVX-512 code, 0x7FC0 elsewhere. The caller
//   says which (bfloat16_nan).
// - float16 → float32 makes a NaN quiet and keeps its payload, but for the last numel % 8 numbers of a tensor (of each
//   thread's share of it), where torch 2.13 gives 0x7FFFFFFF. Here every number is treated as the first ones are.
#pragma once

#include <atomic>
#include <cstdint>

namespace shmsync {

inline std::atomic<std::uint16_t> bfloat16_nan{0xFFFF};

inline std::uint16_t bfloat16_from_float32(std::uint32_t x, std::uint16_t nan) {
  if ((x & 0x7FFFFFFF) > 0x7F800000) return nan;
  // To nearest, ties to even: just under half of the last place, and the odd ones one more.
  return static_cast<std::uint16_t>((x + 0x7FFF + (x >> 16 & 1)) >> 16);
}

inline std::uint32_t float32_from_bfloat16(std::uint16_t x) { return static_cast<std::uint32_t>(x) << 16; }

// value / 2^shift, to nearest, ties to even; shift is 1..31.
inline std::uint32_t shifted_to_nearest_even(std::uint32_t value, unsigned shift) {
  const std::uint32_t odd = value >> shift & 1;
  return (value + (1u << (shift - 1)) - 1 + odd) >> shift;
}

inline std::uint16_t float16_from_float32(std::uint32_t x) {
  const std::uint32_t sign = x >> 16 & 0x8000, magnitude = x & 0x7FFFFFFF;
  std::uint32_t result;
  if (magnitude > 0x7F800000) {  // NaN: quiet, with the upper bits of its payload
    result = 0x7E00 | (magnitude >> 13 & 0x3FF);
  } else if (magnitude >= 0x477FF000) {  // halfway between the largest float16 and 2^16, or more: infinity
    result = 0x7C00;
  } else if (magnitude >= 0x38800000) {  // 2^-14 or more: normal. Move the exponent's bias from 127 to 15.
    result = shifted_to_nearest_even(magnitude - (112u << 23), 13);
  } else if (magnitude >= 0x33000000) {  // 2^-25 or more: a multiple of 2^-24, the smallest denormal
    result = shifted_to_nearest_even((magnitude & 0x7FFFFF) | 0x800000, 126 - (magnitude >> 23));
  } else {
    result = 0;
  }
  return static_cast<std::uint16_t>(sign | result);
}

inline std::uint32_t float32_from_float16(std::uint16_t x) {
  const std::uint32_t sign = (x & 0x8000u) << 16, exponent = x >> 10 & 0x1F;
  std::uint32_t mantissa = x & 0x3FF;
  if (exponent == 0x1F) return sign | 0x7F800000 | mantissa << 13 | (mantissa != 0 ? 0x400000 : 0);
  if (exponent != 0) return sign | (exponent + 112) << 23 | mantissa << 13;
  if (mantissa == 0) return sign;
  // A denormal is a normal float32: shift its leading 1 to where float32 has it and does not store it.
  std::uint32_t shifted_exponent = 113;
  for (; (mantissa & 0x400) == 0; mantissa <<= 1) --shifted_exponent;
  return sign | shifted_exponent << 23 | (mantissa & 0x3FF) << 13;
}

}  // namespace shmsync
