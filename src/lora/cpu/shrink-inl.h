// SPDX-License-Identifier: Apache-2.0
// h[t, r] = sum_k x[t, k] A[r, k]: register tiles of kTileTokens x kTileRanks dot products, each
// with a vector of partial sums along K.
//
// A tile step costs (tokens + ranks) loads for tokens * ranks multiply-adds. K goes by in chunks so
// that the tile's rows of A stay in the first-level cache while all tokens of the block pass by;
// between chunks the partial sums rest in memory as they are, so chunks do not change a bit.
#if defined(MORTAR_LORA_CPU_SHRINK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MORTAR_LORA_CPU_SHRINK_INL_H_
#undef MORTAR_LORA_CPU_SHRINK_INL_H_
#else
#define MORTAR_LORA_CPU_SHRINK_INL_H_
#endif

#include <algorithm>
#include <cstring>

#include "core/simd-inl.h"
#include "lora/cpu/kernels.h"

HWY_BEFORE_NAMESPACE();
namespace mortar {
namespace HWY_NAMESPACE {
namespace lora_shrink {

using lora::cpu::kMaxShrinkTokens;
using lora::cpu::ShrinkBlock;

// Accumulators + one vector per token + one of A must fit the registers: 32 of AVX-512 and NEON
// (24 + 3 + 1), 16 of AVX2 (12 + 3 + 1).
inline constexpr int kTileTokens = 3;
inline constexpr int kTileRanks = HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_SCALAR ? 4 : 8;
/// Bytes of A in a chunk: half of a first-level data cache of 32 KB.
inline constexpr std::int64_t kChunkBytes = 16 * 1024;

/// One step along K of a tile: kStep elements of every row.
template <class X, class A>
struct Dot {
  static constexpr std::int64_t kStep = kLanes;
  template <int kTokens>
  static HWY_INLINE void step(const X* const* x, const A* const* a, std::int64_t k,
                              FloatVec (&sum)[kTokens][kTileRanks]) {
    FloatVec xv[kTokens];
    for (int t = 0; t < kTokens; ++t) xv[t] = load_f32(x[t] + k);
    for (int r = 0; r < kTileRanks; ++r) {
      const FloatVec av = load_f32(a[r] + k);
      for (int t = 0; t < kTokens; ++t) sum[t][r] = hn::MulAdd(xv[t], av, sum[t][r]);
    }
  }
};

#if HWY_TARGET != HWY_SCALAR
/// bfloat16 by pairs: a 32-bit lane holds two of them, and each becomes a float32 by one shift or
/// one mask. Even elements first, then odd ones.
template <>
struct Dot<BFloat16, BFloat16> {
  static constexpr std::int64_t kStep = 2 * kLanes;
  template <bool kOdd>
  static HWY_INLINE FloatVec half(const BFloat16* p) {
    const BitsTag u32;
    const BitsVec pair = hn::BitCast(
        u32, hn::LoadU(hn::Repartition<std::uint16_t, BitsTag>(), &p->bits));
    return hn::BitCast(FloatTag(), kOdd ? hn::And(pair, hn::Set(u32, 0xffff0000u))
                                        : hn::ShiftLeft<16>(pair));
  }
  template <int kTokens, bool kOdd>
  static HWY_INLINE void half_step(const BFloat16* const* x, const BFloat16* const* a,
                                   std::int64_t k, FloatVec (&sum)[kTokens][kTileRanks]) {
    FloatVec xv[kTokens];
    for (int t = 0; t < kTokens; ++t) xv[t] = half<kOdd>(x[t] + k);
    for (int r = 0; r < kTileRanks; ++r) {
      const FloatVec av = half<kOdd>(a[r] + k);
      for (int t = 0; t < kTokens; ++t) sum[t][r] = hn::MulAdd(xv[t], av, sum[t][r]);
    }
  }
  template <int kTokens>
  static HWY_INLINE void step(const BFloat16* const* x, const BFloat16* const* a, std::int64_t k,
                              FloatVec (&sum)[kTokens][kTileRanks]) {
    half_step<kTokens, false>(x, a, k, sum);
    half_step<kTokens, true>(x, a, k, sum);
  }
};
#endif

/// Adds the products of [begin, end), begin a multiple of the step, to `sums` in memory. A last
/// partial step reads copies that are padded with zeros.
template <int kTokens, class X, class A>
HWY_INLINE void accumulate(const X* const* x, const A* const* a, std::int64_t begin,
                           std::int64_t end, float* sums) {
  using Op = Dot<X, A>;
  const FloatTag d;
  FloatVec sum[kTokens][kTileRanks];
  for (int t = 0; t < kTokens; ++t) {
    for (int r = 0; r < kTileRanks; ++r) {
      const float* p = sums + (t * kTileRanks + r) * kLanes;
      sum[t][r] = begin == 0 ? hn::Zero(d) : hn::Load(d, p);
    }
  }
  std::int64_t k = begin;
  for (; k + Op::kStep <= end; k += Op::kStep) Op::template step<kTokens>(x, a, k, sum);
  if (k < end) {
    X x_tail[kTokens][Op::kStep] = {};
    A a_tail[kTileRanks][Op::kStep] = {};
    const X* x_rows[kTokens];
    const A* a_rows[kTileRanks];
    for (int t = 0; t < kTokens; ++t) {
      std::memcpy(x_tail[t], x[t] + k, (end - k) * sizeof(X));
      x_rows[t] = x_tail[t];
    }
    for (int r = 0; r < kTileRanks; ++r) {
      std::memcpy(a_tail[r], a[r] + k, (end - k) * sizeof(A));
      a_rows[r] = a_tail[r];
    }
    Op::template step<kTokens>(x_rows, a_rows, 0, sum);
  }
  for (int t = 0; t < kTokens; ++t) {
    for (int r = 0; r < kTileRanks; ++r) {
      hn::Store(sum[t][r], d, sums + (t * kTileRanks + r) * kLanes);
    }
  }
}

/// Sums of the lanes of `count` vectors: pairs of neighbours, then pairs of those, and so on. All
/// trees climb together, so that the compiler can keep several in flight.
inline void add_lanes(const float* sums, std::int64_t count, float* out) {
  const FloatTag d;
  for (std::int64_t i = 0; i < count; ++i) {
    out[i] = hn::GetLane(hn::SumOfLanes(d, hn::Load(d, sums + i * kLanes)));
  }
}

template <class X, class A>
void shrink(const ShrinkBlock& block) {
  alignas(64) float sums[kMaxShrinkTokens * kTileRanks * kLanes];
  constexpr std::int64_t kChunk =
      std::max<std::int64_t>(kLanes, kChunkBytes / (kTileRanks * sizeof(A)));
  for (std::int64_t r0 = 0; r0 < block.num_ranks; r0 += kTileRanks) {
    const std::int64_t ranks = std::min<std::int64_t>(kTileRanks, block.num_ranks - r0);
    const A* a[kTileRanks];  // rows past the last repeat it; their sums are dropped
    for (int r = 0; r < kTileRanks; ++r) {
      a[r] = static_cast<const A*>(block.a) +
             (r0 + std::min<std::int64_t>(r, ranks - 1)) * block.a_row_stride;
    }
    const auto* x = reinterpret_cast<const X* const*>(block.x_rows);
    std::int64_t begin = 0;
    do {
      const std::int64_t end = std::min(block.hidden, begin + kChunk);
      std::int64_t t = 0;
      const auto at = [&](std::int64_t token) { return sums + token * kTileRanks * kLanes; };
      for (; t + 3 <= block.num_tokens; t += 3) accumulate<3>(x + t, a, begin, end, at(t));
      if (t + 2 == block.num_tokens) accumulate<2>(x + t, a, begin, end, at(t));
      if (t + 1 == block.num_tokens) accumulate<1>(x + t, a, begin, end, at(t));
      begin = end;
    } while (begin < block.hidden);
    for (std::int64_t t = 0; t < block.num_tokens; ++t) {
      add_lanes(sums + t * kTileRanks * kLanes, ranks, block.out + t * block.out_stride + r0);
    }
  }
}

}  // namespace lora_shrink
}  // namespace HWY_NAMESPACE
}  // namespace mortar
HWY_AFTER_NAMESPACE();

#endif  // MORTAR_LORA_CPU_SHRINK_INL_H_
