// SPDX-License-Identifier: Apache-2.0
// The loops of a shrink, for any dot-product unit: h[t, r] = sum_k x[t, k] A[r, k] in register
// tiles of kTileTokens x kTileRanks dot products, each with a vector of partial sums along K.
//
// A tile step costs (tokens + ranks) loads for tokens * ranks multiply-adds. K goes by in chunks:
// the rows of A in a tile are copied, step by step side by side, to a buffer that stays in the
// first-level cache (rows of 4096 elements would all fall on the same few lines of it) while all
// tokens of the block pass by, and the tokens' part of x stays in the second level. Between chunks
// the partial sums rest in memory as they are, so chunks do not change a bit; nor does the copy,
// which is exact. Up to one tile of tokens, as in decoding, A is read in place.
//
// Included once per SIMD level, between the lines that turn on its instructions, with
// MORTAR_LEVEL_NAMESPACE defined. `Unit` gives:
//   X, A          element types; Copy, the type of A's elements in the buffer
//   Vec           partial sums, kLanes floats;  zero(), load(const float*), store(Vec, float*),
//                 add_lanes(Vec) with one fixed tree
//   kStep         elements of K in one step
//   load_x(const X*), load_a(const A*), load_a(const Copy*), dot(x, a, Vec)
//   copy(const A*, Copy*), of one step

namespace mortar {
namespace MORTAR_LEVEL_NAMESPACE {

using lora::cpu::kMaxShrinkRanks;
using lora::cpu::kMaxShrinkTokens;
using lora::cpu::ShrinkBlock;

/// One tile's rows of A in place. Steps are numbered from the start of the chunk.
template <class Unit>
struct RowsInPlace {
  using A = typename Unit::A;
  const A* row[Unit::kTileRanks];

  auto load(std::int64_t step, int r) const { return Unit::load_a(row[r] + step * Unit::kStep); }
  /// A last step of `count` elements, padded with zeros.
  auto load_part(std::int64_t step, int r, std::int64_t count) const {
    A padded[Unit::kStep] = {};
    std::memcpy(padded, row[r] + step * Unit::kStep, count * sizeof(A));
    return Unit::load_a(padded);
  }
};

/// One tile's chunk of A, copied: [step][rank][kStep], the last step padded with zeros.
template <class Unit>
struct CopiedRows {
  using Copy = typename Unit::Copy;
  static constexpr std::int64_t kElements = lora::cpu::kChunkBytes / sizeof(Copy);
  static constexpr std::int64_t kChunk = kElements / Unit::kTileRanks;  ///< elements of K
  static_assert(kChunk % Unit::kStep == 0, "a chunk must end with a whole step");
  const Copy* data;

  CopiedRows(const RowsInPlace<Unit>& rows, std::int64_t count, Copy* buffer) : data(buffer) {
    for (int r = 0; r < Unit::kTileRanks; ++r) {
      Copy* to = buffer + r * Unit::kStep;
      std::int64_t k = 0;
      for (; k + Unit::kStep <= count; k += Unit::kStep, to += Unit::kTileRanks * Unit::kStep) {
        Unit::copy(rows.row[r] + k, to);
      }
      if (k == count) continue;
      typename Unit::A padded[Unit::kStep] = {};
      std::memcpy(padded, rows.row[r] + k, (count - k) * sizeof(padded[0]));
      Unit::copy(padded, to);
    }
  }
  auto load(std::int64_t step, int r) const {
    return Unit::load_a(data + (step * Unit::kTileRanks + r) * Unit::kStep);
  }
  auto load_part(std::int64_t step, int r, std::int64_t) const { return load(step, r); }
};

template <class Unit, int kTokens>
struct ShrinkTile {
  using X = typename Unit::X;
  using Vec = typename Unit::Vec;
  static constexpr int kRanks = Unit::kTileRanks;

  static float* at(float* sums, int t, int r) { return sums + (t * kRanks + r) * Unit::kLanes; }

  /// Adds the products of elements [begin, end) to the sums in memory. `ahead`: rows of x that come
  /// next, fetched meanwhile.
  template <class Rows>
  static void run(const X* const* x_rows, const Rows& a, std::int64_t begin, std::int64_t end,
                  const X* const* ahead, float* sums) {
    const X* x[kTokens];
    const X* next[kTokens];
    Vec sum[kTokens][kRanks];
    MORTAR_UNROLL
    for (int t = 0; t < kTokens; ++t) {
      x[t] = x_rows[t] + begin;
      next[t] = ahead[t] + begin;
      MORTAR_UNROLL
      for (int r = 0; r < kRanks; ++r) {
        sum[t][r] = begin == 0 ? Unit::zero() : Unit::load(at(sums, t, r));
      }
    }
    const std::int64_t steps = (end - begin) / Unit::kStep, rest = (end - begin) % Unit::kStep;
    decltype(Unit::load_x(x[0])) xv[kTokens];
    for (std::int64_t step = 0; step < steps; ++step) {
      MORTAR_UNROLL
      for (int t = 0; t < kTokens; ++t) {
        xv[t] = Unit::load_x(x[t] + step * Unit::kStep);
        __builtin_prefetch(next[t] + step * Unit::kStep);
      }
      MORTAR_UNROLL
      for (int r = 0; r < kRanks; ++r) {
        const auto av = a.load(step, r);
        MORTAR_UNROLL
        for (int t = 0; t < kTokens; ++t) sum[t][r] = Unit::dot(xv[t], av, sum[t][r]);
      }
    }
    if (rest > 0) {
      for (int t = 0; t < kTokens; ++t) {
        X padded[Unit::kStep] = {};
        std::memcpy(padded, x[t] + steps * Unit::kStep, rest * sizeof(X));
        xv[t] = Unit::load_x(padded);
      }
      MORTAR_UNROLL
      for (int r = 0; r < kRanks; ++r) {
        const auto av = a.load_part(steps, r, rest);
        MORTAR_UNROLL
        for (int t = 0; t < kTokens; ++t) sum[t][r] = Unit::dot(xv[t], av, sum[t][r]);
      }
    }
    MORTAR_UNROLL
    for (int t = 0; t < kTokens; ++t) {
      MORTAR_UNROLL
      for (int r = 0; r < kRanks; ++r) Unit::store(sum[t][r], at(sums, t, r));
    }
  }
};

/// All tokens of a block against one tile of A.
template <class Unit, class Rows>
void shrink_tokens(const typename Unit::X* const* x, std::int64_t num_tokens, const Rows& a,
                   std::int64_t begin, std::int64_t end, float* sums) {
  constexpr std::int64_t kStride = Unit::kTileRanks * Unit::kLanes;
  std::int64_t t = 0;
  for (; t + 3 <= num_tokens; t += 3) {
    const auto* const* ahead = x + (t + 6 <= num_tokens ? t + 3 : t);
    ShrinkTile<Unit, 3>::run(x + t, a, begin, end, ahead, sums + t * kStride);
  }
  if (num_tokens - t == 2) {
    ShrinkTile<Unit, 2>::run(x + t, a, begin, end, x + t, sums + t * kStride);
  } else if (num_tokens - t == 1) {
    ShrinkTile<Unit, 1>::run(x + t, a, begin, end, x + t, sums + t * kStride);
  }
}

template <class Unit>
void shrink(const ShrinkBlock& block) {
  using Copied = CopiedRows<Unit>;
  constexpr int kRanks = Unit::kTileRanks;
  constexpr std::int64_t kTileSums = kMaxShrinkTokens * kRanks * Unit::kLanes;
  alignas(64) float sums[kMaxShrinkRanks / kRanks][kTileSums];  // [tile of ranks][t][r][lane]
  alignas(64) typename Unit::Copy buffer[Copied::kElements];
  const auto* x = reinterpret_cast<const typename Unit::X* const*>(block.x_rows);
  const bool in_place = block.num_tokens <= 3;
  const std::int64_t chunk = in_place ? std::max<std::int64_t>(block.hidden, 1) : Copied::kChunk;
  std::int64_t begin = 0;
  do {
    const std::int64_t end = std::min(block.hidden, begin + chunk);
    for (std::int64_t r0 = 0; r0 < block.num_ranks; r0 += kRanks) {
      RowsInPlace<Unit> rows;  // those past the last repeat it; their sums are dropped
      for (int r = 0; r < kRanks; ++r) {
        const std::int64_t row = std::min<std::int64_t>(r0 + r, block.num_ranks - 1);
        rows.row[r] =
            static_cast<const typename Unit::A*>(block.a) + row * block.a_row_stride + begin;
      }
      float* tile_sums = sums[r0 / kRanks];
      if (in_place) {
        shrink_tokens<Unit>(x, block.num_tokens, rows, begin, end, tile_sums);
      } else {
        const Copied copied(rows, end - begin, buffer);
        shrink_tokens<Unit>(x, block.num_tokens, copied, begin, end, tile_sums);
      }
    }
    begin = end;
  } while (begin < block.hidden);
  for (std::int64_t t = 0; t < block.num_tokens; ++t) {
    for (std::int64_t r = 0; r < block.num_ranks; ++r) {
      const float* sum = sums[r / kRanks] + (t * kRanks + r % kRanks) * Unit::kLanes;
      block.out[t * block.out_stride + r] = Unit::add_lanes(Unit::load(sum));
    }
  }
}

}  // namespace MORTAR_LEVEL_NAMESPACE
}  // namespace mortar
