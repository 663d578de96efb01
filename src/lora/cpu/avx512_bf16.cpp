// SPDX-License-Identifier: Apache-2.0
// Shrink and expand of bfloat16 pairs with vdpbf16ps (AVX512-BF16).
//
// vdpbf16ps adds the two products of a pair to a float32 lane one after the other, the odd one
// first, each with one rounding to nearest; it reads subnormal inputs as zero and flushes subnormal
// sums to zero, and vcvtne2ps2bf16 does the same to y. So the bits differ from those of the plain
// AVX-512 level, while a sum still depends on its own two rows alone: lane l holds the pairs l,
// l + 16, ... of a chunk in order, whatever the batch.
#include "lora/cpu/simd.h"

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))

#include <immintrin.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/cpu_target.h"
#include "core/float16.h"
#include "core/int_math.h"

// Everything between these lines, and nothing else, may use the instructions.
#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")
// GCC 12 takes the deliberately undefined operands in its own intrinsics for a mistake.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#define MORTAR_LEVEL_NAMESPACE avx512_bf16
#include "lora/cpu/expand-inl.h"
#include "lora/cpu/shrink-inl.h"

namespace mortar::avx512_bf16 {
namespace {

#define MORTAR_INLINE inline __attribute__((always_inline))

struct PairShrink {
  using X = BFloat16;
  using A = BFloat16;
  using Copy = BFloat16;
  using Vec = __m512;
  static constexpr std::int64_t kLanes = 16;
  static constexpr std::int64_t kStep = 32;
  static constexpr std::int64_t kChunk = 1024;  // 16 KB of A
  static constexpr bool kFetchesNext = true;
  static constexpr int kTileRanks = 8;  // 24 sums + 3 + 1 of 32 registers

  static MORTAR_INLINE Vec zero() { return _mm512_setzero_ps(); }
  static MORTAR_INLINE void store(Vec v, float* p) { _mm512_store_ps(p, v); }
  static MORTAR_INLINE Vec add_pairs(Vec a, Vec b) {
    const __m512i even =
        _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    return _mm512_add_ps(_mm512_permutex2var_ps(a, even, b), _mm512_permutex2var_ps(a, odd, b));
  }
  static MORTAR_INLINE __m512bh load_x(const BFloat16* p) {
    return (__m512bh)_mm512_loadu_si512(p);
  }
  static MORTAR_INLINE __m512bh load_a(const BFloat16* p) { return load_x(p); }
  static MORTAR_INLINE Vec dot(__m512bh x, __m512bh a, Vec sum) {
    return _mm512_dpbf16_ps(sum, x, a);
  }
  static MORTAR_INLINE void store_a(__m512bh a, BFloat16* to) {
    _mm512_store_si512(to, (__m512i)a);
  }
};

template <class YType>
struct PairExpand {
  using Y = YType;
  using Entry = std::uint32_t;
  using Vec = __m512;
  using Packed = __m512bh;
  static constexpr std::int64_t kLanes = 16;
  static constexpr int kTileTokens = 6;  // 24 sums + 4 + 1 of 32 registers
  static constexpr int kTileVecs = 4;
  static constexpr int kParts = 1;

  static MORTAR_INLINE Vec zero() { return _mm512_setzero_ps(); }
  static MORTAR_INLINE Packed load(const std::uint32_t* p) {
    return (__m512bh)_mm512_load_si512(p);
  }
  template <int>
  static MORTAR_INLINE Packed part(Packed unit) {
    return unit;
  }
  static MORTAR_INLINE Packed broadcast(std::uint32_t pair) {
    return (__m512bh)_mm512_set1_epi32(static_cast<int>(pair));
  }
  static MORTAR_INLINE Vec multiply(Packed h, Packed b, Vec sum) {
    return _mm512_dpbf16_ps(sum, h, b);
  }

  static MORTAR_INLINE Vec widen(const float* p) { return _mm512_loadu_ps(p); }
  static MORTAR_INLINE Vec widen(const BFloat16* p) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
  }
  static MORTAR_INLINE void update(const Vec (&sum)[kTileVecs], float scale, const Y* base, Y* y) {
    const Vec factor = _mm512_set1_ps(scale);
    const auto scaled = [&](Vec v, int i) __attribute__((always_inline)) {
      return base != nullptr ? _mm512_fmadd_ps(v, factor, widen(base + i * kLanes))
                             : _mm512_mul_ps(v, factor);
    };
    MORTAR_UNROLL
    for (int v = 0; v < kTileVecs; v += 2, y += 2 * kLanes) {
      const Vec low = scaled(sum[v], v), high = scaled(sum[v + 1], v + 1);
      if constexpr (std::is_same_v<Y, float>) {
        _mm512_storeu_ps(y, low);
        _mm512_storeu_ps(y + kLanes, high);
      } else {
        _mm512_storeu_si512(y, (__m512i)_mm512_cvtne2ps_pbh(high, low));
      }
    }
  }
};

}  // namespace
}  // namespace mortar::avx512_bf16

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace mortar::lora::cpu {

std::unique_ptr<Kernels> avx512_bf16_kernels(const Kernels& base) {
  if (!has_avx512_bf16()) return nullptr;
  auto table = std::make_unique<Kernels>(base);
  table->level = "AVX512-BF16";
  table->shrink[1][1] = avx512_bf16::shrink<avx512_bf16::PairShrink>;
  table->expand_pairs[0] = avx512_bf16::expand<avx512_bf16::PairExpand<float>>;
  table->expand_pairs[1] = avx512_bf16::expand<avx512_bf16::PairExpand<BFloat16>>;
  return table;
}

}  // namespace mortar::lora::cpu

#else

namespace mortar::lora::cpu {

std::unique_ptr<Kernels> avx512_bf16_kernels(const Kernels&) { return nullptr; }

}  // namespace mortar::lora::cpu

#endif
