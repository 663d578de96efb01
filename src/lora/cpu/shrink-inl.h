// SPDX-License-Identifier: Apache-2.0
// The loops of a shrink, for any dot-product unit: h[t, r] = sum_k x[t, k] A[r, k] in register tiles
// of kTileTokens x kTileRanks dot products, each with a vector of partial sums along K.
//
// A tile step costs (tokens + ranks) loads for tokens * ranks multiply-adds. K goes by in chunks:
// the rows of A in a tile are copied to a buffer that stays in the first-level cache (in rows of
// 4096 elements they would all fall on the same few lines of it) while all tokens of the block pass
// by, and the tokens' part of x stays in the second level. Between chunks the partial sums rest in
// memory as they are, so chunks do not change a bit; nor does the copy, which is exact. Up to one
// tile of tokens, as in decoding, A is read in place.
//
// Included once per SIMD level, between the lines that turn on its instructions, with
// MORTAR_LEVEL_NAMESPACE defined. `Unit` gives:
//   X, A          element types; Copy, the type of A's elements in the buffer
//   Vec           partial sums, kLanes floats;  zero(), load(const float*), store(Vec, float*),
//                 add_lanes(Vec) with one fixed tree
//   kStep         elements of K in one step
//   load_x(const X*), load_a(const A*), load_a(const Copy*), dot(x, a, Vec)
//   copy(const A*, count, Copy*)

namespace mortar {
namespace MORTAR_LEVEL_NAMESPACE {

using lora::cpu::kMaxShrinkRanks;
using lora::cpu::kMaxShrinkTokens;
using lora::cpu::ShrinkBlock;

template <class Unit, int kTokens>
struct ShrinkTile {
  using X = typename Unit::X;
  using Vec = typename Unit::Vec;
  static constexpr int kRanks = Unit::kTileRanks;

  /// Partial sums of token t and rank r: sums[(t * kMaxShrinkRanks + r) * kLanes].
  static float* at(float* sums, int t, int r) {
    return sums + (t * kMaxShrinkRanks + r) * Unit::kLanes;
  }

  template <class A>
  static inline __attribute__((always_inline)) void step(const X* const (&x)[kTokens],
                                                         const A* const (&a)[kRanks],
                                                         std::int64_t x_at, std::int64_t a_at,
                                                         Vec (&sum)[kTokens][kRanks]) {
    decltype(Unit::load_x(x[0])) xv[kTokens];
    MORTAR_UNROLL
    for (int t = 0; t < kTokens; ++t) xv[t] = Unit::load_x(x[t] + x_at);
    MORTAR_UNROLL
    for (int r = 0; r < kRanks; ++r) {
      const auto av = Unit::load_a(a[r] + a_at);
      MORTAR_UNROLL
      for (int t = 0; t < kTokens; ++t) sum[t][r] = Unit::dot(xv[t], av, sum[t][r]);
    }
  }

  /// Adds the products of elements [begin, end) to the sums in memory. Element `begin` of A lies at
  /// a[r]. A last partial step reads copies padded with zeros. `ahead`: rows of x that come next,
  /// fetched meanwhile.
  template <class A>
  static void run(const X* const* x_rows, const A* const (&a)[kRanks], std::int64_t begin,
                  std::int64_t end, const X* const* ahead, float* sums) {
    const X* x[kTokens];
    Vec sum[kTokens][kRanks];
    MORTAR_UNROLL
    for (int t = 0; t < kTokens; ++t) {
      x[t] = x_rows[t];
      MORTAR_UNROLL
      for (int r = 0; r < kRanks; ++r) {
        sum[t][r] = begin == 0 ? Unit::zero() : Unit::load(at(sums, t, r));
      }
    }
    std::int64_t k = begin;
    for (; k + Unit::kStep <= end; k += Unit::kStep) {
      MORTAR_UNROLL
      for (int t = 0; t < kTokens; ++t) __builtin_prefetch(ahead[t] + k);
      step(x, a, k, k - begin, sum);
    }
    if (k < end) {
      X x_tail[kTokens][Unit::kStep] = {};
      A a_tail[kRanks][Unit::kStep] = {};
      const X* x_padded[kTokens];
      const A* a_padded[kRanks];
      for (int t = 0; t < kTokens; ++t) {
        std::memcpy(x_tail[t], x[t] + k, (end - k) * sizeof(X));
        x_padded[t] = x_tail[t];
      }
      for (int r = 0; r < kRanks; ++r) {
        std::memcpy(a_tail[r], a[r] + k - begin, (end - k) * sizeof(A));
        a_padded[r] = a_tail[r];
      }
      step(x_padded, a_padded, 0, 0, sum);
    }
    MORTAR_UNROLL
    for (int t = 0; t < kTokens; ++t) {
      MORTAR_UNROLL
      for (int r = 0; r < kRanks; ++r) Unit::store(sum[t][r], at(sums, t, r));
    }
  }
};

/// All tokens of a block against one tile of A.
template <class Unit, class A>
void shrink_tokens(const typename Unit::X* const* x, std::int64_t num_tokens,
                   const A* const (&a)[Unit::kTileRanks], std::int64_t begin, std::int64_t end,
                   float* sums) {
  const std::int64_t stride = kMaxShrinkRanks * Unit::kLanes;
  std::int64_t t = 0;
  for (; t + 3 <= num_tokens; t += 3) {
    const auto* const* ahead = x + (t + 6 <= num_tokens ? t + 3 : t);
    ShrinkTile<Unit, 3>::run(x + t, a, begin, end, ahead, sums + t * stride);
  }
  if (num_tokens - t == 2) {
    ShrinkTile<Unit, 2>::run(x + t, a, begin, end, x + t, sums + t * stride);
  } else if (num_tokens - t == 1) {
    ShrinkTile<Unit, 1>::run(x + t, a, begin, end, x + t, sums + t * stride);
  }
}

template <class Unit>
void shrink(const ShrinkBlock& block) {
  using A = typename Unit::A;
  using Copy = typename Unit::Copy;
  constexpr int kRanks = Unit::kTileRanks;
  constexpr std::int64_t kChunk = lora::cpu::kChunkBytes / (kRanks * sizeof(Copy));
  static_assert(kChunk % Unit::kStep == 0, "a chunk must end with a whole step");
  alignas(64) float sums[kMaxShrinkTokens * kMaxShrinkRanks * Unit::kLanes];
  alignas(64) Copy copies[kRanks][kChunk];
  const auto* x = reinterpret_cast<const typename Unit::X* const*>(block.x_rows);
  const bool in_place = block.num_tokens <= 3;
  const std::int64_t chunk = in_place ? std::max<std::int64_t>(block.hidden, 1) : kChunk;
  std::int64_t begin = 0;
  do {
    const std::int64_t end = std::min(block.hidden, begin + chunk);
    for (std::int64_t r0 = 0; r0 < block.num_ranks; r0 += kRanks) {
      const A* rows[kRanks];  // rows past the last repeat it; their sums are dropped
      const Copy* buffer[kRanks];
      for (int r = 0; r < kRanks; ++r) {
        const std::int64_t row = std::min<std::int64_t>(r0 + r, block.num_ranks - 1);
        rows[r] = static_cast<const A*>(block.a) + row * block.a_row_stride + begin;
        buffer[r] = copies[r];
        if (!in_place) Unit::copy(rows[r], end - begin, copies[r]);
      }
      float* tile_sums = sums + r0 * Unit::kLanes;
      if (in_place) {
        shrink_tokens<Unit>(x, block.num_tokens, rows, begin, end, tile_sums);
      } else {
        shrink_tokens<Unit>(x, block.num_tokens, buffer, begin, end, tile_sums);
      }
    }
    begin = end;
  } while (begin < block.hidden);
  for (std::int64_t t = 0; t < block.num_tokens; ++t) {
    for (std::int64_t r = 0; r < block.num_ranks; ++r) {
      const float* sum = sums + (t * kMaxShrinkRanks + r) * Unit::kLanes;
      block.out[t * block.out_stride + r] = Unit::add_lanes(Unit::load(sum));
    }
  }
}

}  // namespace MORTAR_LEVEL_NAMESPACE
}  // namespace mortar
