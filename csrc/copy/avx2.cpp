// The kernels for AVX2 and F16C.
#include "copy/kernels.h"

#if defined(__x86_64__)

#include <cpuid.h>
#include <immintrin.h>

#define SHMSYNC_TARGET __attribute__((target("avx2,f16c")))
#define SHMSYNC_INLINE SHMSYNC_TARGET __attribute__((always_inline)) inline

#include "copy/convert.h"

namespace shmsync {
namespace {

struct Line {
  __m256i low, high;
};

SHMSYNC_INLINE __m256i* half(char* destination, int which) {
  return reinterpret_cast<__m256i*>(destination + 32 * which);
}

SHMSYNC_INLINE void store(char* destination, Line line) {
  _mm256_storeu_si256(half(destination, 0), line.low);
  _mm256_storeu_si256(half(destination, 1), line.high);
}

SHMSYNC_INLINE void stream(char* destination, Line line) {
  _mm256_stream_si256(half(destination, 0), line.low);
  _mm256_stream_si256(half(destination, 1), line.high);
}

SHMSYNC_INLINE __m256i load_32(const char* source) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
}

SHMSYNC_INLINE __m128i load_16(const char* source) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
}

// The results are the lower halves of the 32-bit lanes.
SHMSYNC_INLINE __m256i bfloat16_from(const char* source) {
  const __m256i x = load_32(source);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(x, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(x, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
  const __m256 is_nan = _mm256_cmp_ps(_mm256_castsi256_ps(x), _mm256_castsi256_ps(x), _CMP_UNORD_Q);
  const __m256i nan = _mm256_set1_epi32(bfloat16_nan.load(std::memory_order_relaxed));
  return _mm256_blendv_epi8(_mm256_srli_epi32(rounded, 16), nan, _mm256_castps_si256(is_nan));
}

// 16 numbers.
SHMSYNC_INLINE __m256i bfloat16_pair(const char* source) {
  // The pack works within 128-bit halves: put the quarters in order afterwards.
  const __m256i packed = _mm256_packus_epi32(bfloat16_from(source), bfloat16_from(source + 32));
  return _mm256_permute4x64_epi64(packed, _MM_SHUFFLE(3, 1, 2, 0));
}

SHMSYNC_INLINE __m128i float16_from(const char* source) {
  return _mm256_cvtps_ph(_mm256_castsi256_ps(load_32(source)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

// 16 numbers.
SHMSYNC_INLINE __m256i float16_pair(const char* source) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(float16_from(source)), float16_from(source + 32), 1);
}

SHMSYNC_INLINE __m256i float32_from_bfloat16s(const char* source) {
  return _mm256_slli_epi32(_mm256_cvtepu16_epi32(load_16(source)), 16);
}

SHMSYNC_INLINE __m256i float32_from_float16s(const char* source) {
  return _mm256_castps_si256(_mm256_cvtph_ps(load_16(source)));
}

template <Kind kind>
SHMSYNC_INLINE Line load(const char* source) {
  if constexpr (kind == Kind::bytes) {
    return {load_32(source), load_32(source + 32)};
  } else if constexpr (kind == Kind::float32_to_bfloat16) {
    return {bfloat16_pair(source), bfloat16_pair(source + 64)};
  } else if constexpr (kind == Kind::float32_to_float16) {
    return {float16_pair(source), float16_pair(source + 64)};
  } else if constexpr (kind == Kind::bfloat16_to_float32) {
    return {float32_from_bfloat16s(source), float32_from_bfloat16s(source + 16)};
  } else {
    return {float32_from_float16s(source), float32_from_float16s(source + 16)};
  }
}

bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

}  // namespace
}  // namespace shmsync

#include "copy/lines.h"

namespace shmsync {

const Kernels* avx2_kernels() {
  static constexpr Kernels kernels = all_kernels("avx2");
  return __builtin_cpu_supports("avx2") && has_f16c() ? &kernels : nullptr;
}

}  // namespace shmsync

#else

const shmsync::Kernels* shmsync::avx2_kernels() { return nullptr; }

#endif
