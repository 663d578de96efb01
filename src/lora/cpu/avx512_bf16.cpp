// SPDX-License-Identifier: Apache-2.0
// Shrink and expand of bfloat16 pairs with vdpbf16ps (AVX512-BF16).
//
// vdpbf16ps adds the two products of a pair to a float32 lane one after the other, the odd one
// first, each with one rounding to nearest; it reads subnormal inputs as zero and flushes subnormal
// sums to zero. So the bits differ from those of the plain AVX-512 level, while a sum still depends
// on its own two rows alone: lane and step structure are those that kernels.h states.
#include "lora/cpu/simd.h"

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))

#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "core/float16.h"

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

namespace mortar::lora::cpu {
namespace {

#define MORTAR_INLINE inline __attribute__((always_inline))

constexpr int kLanes = 16;           // float32 lanes
constexpr int kPairs = 2 * kLanes;   // bfloat16 values of a vector

MORTAR_INLINE __m512bh load_pairs(const void* p) {
  return (__m512bh)_mm512_loadu_si512(p);
}

MORTAR_INLINE __m512bh load_first_pairs(const void* p, std::int64_t count) {
  const auto mask = static_cast<__mmask32>((std::uint64_t{1} << count) - 1);
  return (__m512bh)_mm512_maskz_loadu_epi16(mask, p);
}

// ---------------------------------------------------------------------------------------------
// Shrink: the tile and the chunks of K of shrink-inl.h; 24 accumulators + 3 + 1 registers of 32.

constexpr int kShrinkRanks = 8;
constexpr std::int64_t kChunk = 1024;  // elements of K: 16 KB of A stay in the first-level cache

template <int kTokens>
MORTAR_INLINE void shrink_step(const __m512bh (&x)[kTokens], __m512bh a, int r,
                               __m512 (&sum)[kTokens][kShrinkRanks]) {
#pragma GCC unroll 3
  for (int t = 0; t < kTokens; ++t) sum[t][r] = _mm512_dpbf16_ps(sum[t][r], x[t], a);
}

template <int kTokens>
void shrink_tile(const BFloat16* const* x, const BFloat16* const* a, std::int64_t begin,
                 std::int64_t end, float* sums) {
  __m512 sum[kTokens][kShrinkRanks];
#pragma GCC unroll 3
  for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 8
    for (int r = 0; r < kShrinkRanks; ++r) {
      const float* p = sums + (t * kShrinkRanks + r) * kLanes;
      sum[t][r] = begin == 0 ? _mm512_setzero_ps() : _mm512_load_ps(p);
    }
  }
  std::int64_t k = begin;
  __m512bh xv[kTokens];
  for (; k + kPairs <= end; k += kPairs) {
#pragma GCC unroll 3
    for (int t = 0; t < kTokens; ++t) xv[t] = load_pairs(x[t] + k);
#pragma GCC unroll 8
    for (int r = 0; r < kShrinkRanks; ++r) shrink_step<kTokens>(xv, load_pairs(a[r] + k), r, sum);
  }
  if (k < end) {
#pragma GCC unroll 3
    for (int t = 0; t < kTokens; ++t) xv[t] = load_first_pairs(x[t] + k, end - k);
#pragma GCC unroll 8
    for (int r = 0; r < kShrinkRanks; ++r) {
      shrink_step<kTokens>(xv, load_first_pairs(a[r] + k, end - k), r, sum);
    }
  }
#pragma GCC unroll 3
  for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 8
    for (int r = 0; r < kShrinkRanks; ++r) {
      _mm512_store_ps(sums + (t * kShrinkRanks + r) * kLanes, sum[t][r]);
    }
  }
}

void shrink(const ShrinkBlock& block) {
  alignas(64) float sums[kMaxShrinkTokens * kShrinkRanks * kLanes];
  constexpr std::int64_t kTokenSums = kShrinkRanks * kLanes;
  const auto* x = reinterpret_cast<const BFloat16* const*>(block.x_rows);
  for (std::int64_t r0 = 0; r0 < block.num_ranks; r0 += kShrinkRanks) {
    const std::int64_t ranks = std::min<std::int64_t>(kShrinkRanks, block.num_ranks - r0);
    const BFloat16* a[kShrinkRanks];  // rows past the last repeat it; their sums are dropped
    for (int r = 0; r < kShrinkRanks; ++r) {
      a[r] = static_cast<const BFloat16*>(block.a) +
             (r0 + std::min<std::int64_t>(r, ranks - 1)) * block.a_row_stride;
    }
    std::int64_t begin = 0;
    do {
      const std::int64_t end = std::min(block.hidden, begin + kChunk);
      std::int64_t t = 0;
      for (; t + 3 <= block.num_tokens; t += 3) {
        shrink_tile<3>(x + t, a, begin, end, sums + t * kTokenSums);
      }
      float* rest = sums + t * kTokenSums;
      if (block.num_tokens - t == 2) shrink_tile<2>(x + t, a, begin, end, rest);
      if (block.num_tokens - t == 1) shrink_tile<1>(x + t, a, begin, end, rest);
      begin = end;
    } while (begin < block.hidden);
    for (std::int64_t t = 0; t < block.num_tokens; ++t) {
      for (std::int64_t r = 0; r < ranks; ++r) {
        block.out[t * block.out_stride + r0 + r] =
            _mm512_reduce_add_ps(_mm512_load_ps(sums + t * kTokenSums + r * kLanes));
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------
// Expand: tiles of 6 tokens x 64 columns, 24 accumulators + 4 + 1 registers of 32.

constexpr int kExpandTokens = 6;
constexpr int kVecs = 4;
constexpr std::int64_t kColumns = kVecs * kLanes;
static_assert(kColumns <= kMaxColumnTile);

MORTAR_INLINE __m512 widen(__m256i v) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16));
}

/// 32 columns of one row of y. vcvtne2ps2bf16 rounds to nearest even, keeps NaN quiet, and flushes
/// subnormals.
MORTAR_INLINE void update(__m512 low, __m512 high, bool add, BFloat16* y) {
  if (add) {
    low = _mm512_add_ps(widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(y))), low);
    high = _mm512_add_ps(widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(y + kLanes))),
                         high);
  }
  _mm512_storeu_si512(y, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

template <int kTokens>
void expand_tiles(const ExpandBlock& block, std::int64_t token) {
  const auto* h = static_cast<const BFloat16*>(block.h) + token * block.h_stride;
  for (std::int64_t n = 0; n < block.num_columns; n += kColumns) {
    __m512 sum[kTokens][kVecs];
#pragma GCC unroll 6
    for (int t = 0; t < kTokens; ++t) {
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) sum[t][v] = _mm512_setzero_ps();
    }
    const std::uint32_t* b = block.b + n;
    for (std::int64_t u = 0; u < block.units; ++u, b += block.b_stride) {
      __m512bh bv[kVecs];
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) bv[v] = load_pairs(b + v * kLanes);
#pragma GCC unroll 6
      for (int t = 0; t < kTokens; ++t) {
        int pair;
        std::memcpy(&pair, h + t * block.h_stride + 2 * u, sizeof(pair));
        const auto hv = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
        for (int v = 0; v < kVecs; ++v) sum[t][v] = _mm512_dpbf16_ps(sum[t][v], hv, bv[v]);
      }
    }
    const std::int64_t columns = block.num_columns - n;
#pragma GCC unroll 6
    for (int t = 0; t < kTokens; ++t) {
      BFloat16* y = static_cast<BFloat16*>(block.y_rows[token + t]) + n;
      BFloat16 edge[kColumns] = {};
      BFloat16* to = columns >= kColumns ? y : edge;
      if (to == edge) std::memcpy(edge, y, columns * sizeof(BFloat16));
      update(sum[t][0], sum[t][1], block.add, to);
      update(sum[t][2], sum[t][3], block.add, to + 2 * kLanes);
      if (to == edge) std::memcpy(y, edge, columns * sizeof(BFloat16));
    }
  }
}

void expand(const ExpandBlock& block) {
  std::int64_t t = 0;
  for (; t + kExpandTokens <= block.num_tokens; t += kExpandTokens) {
    expand_tiles<kExpandTokens>(block, t);
  }
  for (; t + 2 <= block.num_tokens; t += 2) expand_tiles<2>(block, t);
  for (; t < block.num_tokens; ++t) expand_tiles<1>(block, t);
}

}  // namespace
}  // namespace mortar::lora::cpu

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace mortar::lora::cpu {

std::unique_ptr<Kernels> avx512_bf16_kernels(const Kernels& base) {
  if (!__builtin_cpu_supports("avx512bf16") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq")) {
    return nullptr;
  }
  auto table = std::make_unique<Kernels>(base);
  table->level = "AVX512-BF16";
  table->shrink[1][1] = shrink;
  table->expand_pairs = expand;
  return table;
}

}  // namespace mortar::lora::cpu

#else

namespace mortar::lora::cpu {

std::unique_ptr<Kernels> avx512_bf16_kernels(const Kernels&) { return nullptr; }

}  // namespace mortar::lora::cpu

#endif
