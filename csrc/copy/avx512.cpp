// The kernels for AVX-512 (F, BW).
#include "copy/kernels.h"

#if defined(__x86_64__)

// GCC 12 warns about the registers that its own header leaves undefined on purpose.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#define SHMSYNC_TARGET __attribute__((target("avx512f,avx512bw")))
#define SHMSYNC_INLINE SHMSYNC_TARGET __attribute__((always_inline)) inline

#include "copy/convert.h"

namespace shmsync {
namespace {

using Line = __m512i;

SHMSYNC_INLINE void store(char* destination, Line line) { _mm512_storeu_si512(destination, line); }

SHMSYNC_INLINE void stream(char* destination, Line line) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(destination), line);
}

SHMSYNC_INLINE __m512i load_64(const char* source) { return _mm512_loadu_si512(source); }

SHMSYNC_INLINE __m256i load_32(const char* source) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
}

// The results are the upper halves of the 32-bit lanes. In integers, as in convert.h: the instruction for it
// (vcvtneps2bf16) takes denormals for zeros, which torch does not.
SHMSYNC_INLINE __m512i rounded_to_bfloat16(__m512i x) {
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(x, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(x, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
  const __mmask16 nan = _mm512_cmp_ps_mask(_mm512_castsi512_ps(x), _mm512_castsi512_ps(x), _CMP_UNORD_Q);
  const int pattern = bfloat16_nan.load(std::memory_order_relaxed) << 16;
  return _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(pattern));
}

// The upper halves of the 32-bit lanes of `low`, then those of `high`.
SHMSYNC_INLINE __m512i upper_halves(__m512i low, __m512i high) {
  const __m512i every_other = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33,  //
                                               31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  return _mm512_permutex2var_epi16(low, every_other, high);
}

SHMSYNC_INLINE __m256i float16_from(const char* source) {
  return _mm512_cvtps_ph(_mm512_castsi512_ps(load_64(source)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

template <Kind kind>
SHMSYNC_INLINE Line load(const char* source) {
  if constexpr (kind == Kind::bytes) {
    return load_64(source);
  } else if constexpr (kind == Kind::float32_to_bfloat16) {
    return upper_halves(rounded_to_bfloat16(load_64(source)), rounded_to_bfloat16(load_64(source + 64)));
  } else if constexpr (kind == Kind::float32_to_float16) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(float16_from(source)), float16_from(source + 64), 1);
  } else if constexpr (kind == Kind::bfloat16_to_float32) {
    return _mm512_slli_epi32(_mm512_cvtepu16_epi32(load_32(source)), 16);
  } else {
    return _mm512_castps_si512(_mm512_cvtph_ps(load_32(source)));
  }
}

}  // namespace
}  // namespace shmsync

#include "copy/lines.h"

namespace shmsync {

const Kernels* avx512_kernels() {
  static constexpr Kernels kernels = all_kernels("avx512");
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") ? &kernels : nullptr;
}

}  // namespace shmsync

#else

const shmsync::Kernels* shmsync::avx512_kernels() { return nullptr; }

#endif
