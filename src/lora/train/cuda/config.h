// SPDX-License-Identifier: Apache-2.0
// The launch plan of LoRA training on CUDA: a pure function of sizes and dtypes, so that bits
// depend on sizes alone and never on the device.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/int_math.h"
#include "mortar/tensor.h"

namespace mortar::lora::train::cuda {

inline constexpr int kThreads = 256;      ///< of every product kernel: eight warps
inline constexpr int kTileRows = 128;     ///< of shrink and expand: weights are read once per tile
inline constexpr int kTileColumns = 128;  ///< of expand and outer
inline constexpr int kBlockColumns = 64;  ///< 16-bit elements of a row of 128 bytes, swizzled
inline constexpr int kStepRows = 64;      ///< rows of outer's pipeline steps
inline constexpr int kReduceRows = 16;    ///< of the reduction of h: one value a thread at rank 16
inline constexpr int kMostRanks = 64;     ///< rank columns of a thread block
/// Stages of a pipeline: 4 of 18 to 24 KB, two thread blocks an SM, keep about 100 KB in flight.
inline constexpr int kStages = 4;
/// Thread blocks that a product kernel should have: two for each of the 132 SMs of an H200, and a
/// fixed number, as the summation tree follows from it.
inline constexpr std::int64_t kWantedBlocks = 256;

/// Precision policy: operands of one 16-bit type as they are, or all as sums of bfloat16 parts
/// (split-bf16).
enum class Policy { kFloat16, kBFloat16, kSplit };

constexpr Policy policy_of(DType a, DType b) {
  if (a == b && a == DType::kBFloat16) return Policy::kBFloat16;
  if (a == b && a == DType::kFloat16) return Policy::kFloat16;
  return Policy::kSplit;
}

/// bfloat16 parts that a dtype is the sum of.
constexpr int parts_of(DType dtype) {
  return dtype == DType::kFloat32 ? 3 : (dtype == DType::kFloat16 ? 2 : 1);
}

/// One product of M rows with a reduction over `columns`: h or ds.
struct ShrinkPlan {
  int ranks = 16;  ///< rank columns of a thread block: 16, 32 or 64
  int splits = 1;  ///< of the columns; more than 1 leave split-K partials
  int chunk = 64;  ///< columns of a split, whole blocks of 64
};

/// One sum over rows under split-bf16: dA or dB.
struct OuterPlan {
  int ranks = 16;
  int chunk_rows = kStepRows;  ///< rows of a partial sum, whole steps
};

constexpr int ranks_of(int width, Policy policy) {
  const int most = policy == Policy::kSplit ? 32 : kMostRanks;
  return std::min(most, width <= 16 ? 16 : (width <= 32 ? 32 : 64));
}

/// Columns are split until there are enough thread blocks, each with 256 columns or more.
constexpr ShrinkPlan choose_shrink(std::int64_t rows, std::int64_t columns, int width,
                                   Policy policy) {
  ShrinkPlan plan;
  plan.ranks = ranks_of(width, policy);
  const std::int64_t tiles = std::max<std::int64_t>(ceil_div<std::int64_t>(rows, kTileRows), 1) *
                             std::max(ceil_div(width, plan.ranks), 1);
  const std::int64_t most = std::max<std::int64_t>(columns / 256, 1);
  const std::int64_t wanted = std::clamp<std::int64_t>(kWantedBlocks / tiles, 1, most);
  plan.chunk = static_cast<int>(round_up<std::int64_t>(
      ceil_div<std::int64_t>(std::max<std::int64_t>(columns, 1), wanted), kBlockColumns));
  plan.splits =
      static_cast<int>(std::max<std::int64_t>(ceil_div<std::int64_t>(columns, plan.chunk), 1));
  return plan;
}

/// Rows are cut until there are enough thread blocks; a chunk of fewer than 256 rows would leave
/// more bytes of partial sums than it reads at rank 64.
constexpr OuterPlan choose_outer(std::int64_t rows, std::int64_t columns, int width) {
  OuterPlan plan;
  plan.ranks = ranks_of(width, Policy::kSplit);
  const std::int64_t tiles =
      std::max<std::int64_t>(ceil_div<std::int64_t>(columns, kTileColumns), 1) *
      std::max(ceil_div(width, plan.ranks), 1);
  const std::int64_t wanted = std::max<std::int64_t>(kWantedBlocks / tiles, 1);
  const std::int64_t chunk =
      round_up<std::int64_t>(ceil_div(std::max<std::int64_t>(rows, 1), wanted), kStepRows);
  plan.chunk_rows = static_cast<int>(std::max<std::int64_t>(chunk, rows <= 1024 ? 128 : 256));
  return plan;
}

}  // namespace mortar::lora::train::cuda
