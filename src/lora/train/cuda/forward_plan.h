// SPDX-License-Identifier: Apache-2.0
// h and y in one launch (lora/cuda/product_forward.cu): when, and how it is cut.
#pragma once

#include <algorithm>
#include <cstdint>

#include "lora/cuda/product_forward.h"
#include "lora/train/cuda/config.h"

namespace mortar::lora::train::cuda {

using lora::cuda::ForwardPlan;

/// A plan of so many thread blocks a cluster, one for each tile or `clusters` for all.
inline ForwardPlan forward_plan(std::int64_t columns, int leaves, int parts, int clusters = 0) {
  return {parts, leaf_columns(columns, leaves), leaves / parts, clusters};
}

/// Whether one launch takes less than two by what a thread block takes of its own: steps of 64
/// columns of x as fast as its shared memory fills, then 0.45 us for 128 columns of y. Two launches
/// take 6 us and their bytes at 3.4 TB/s, and 1.5 us more where they are products.
inline bool pays_in_one(std::int64_t rows, std::int64_t columns, std::int64_t out_columns,
                        int width, int parts) {
  const auto of_block = [&](std::int64_t all, int unit) {
    return static_cast<double>(ceil_div<std::int64_t>(ceil_div<std::int64_t>(all, unit), parts));
  };
  const int ranks = width <= 32 ? 32 : lora::cuda::kForwardRanks;
  const double step_us =
      2.0 * lora::cuda::kProductStep * (lora::cuda::kForwardRows + ranks) / kStageBytesPerUs;
  const double one = 3.5 + of_block(columns, lora::cuda::kProductStep) * step_us +
                     of_block(out_columns, lora::cuda::kForwardColumns) * 0.45;
  const auto wide = static_cast<double>(columns + out_columns);
  return one < 6 + 2 * wide * static_cast<double>(rows + width) / 3.4e6 + (width > 32 ? 1.5 : 0);
}

/// Tiles of 64 rows all run at once, or, of so many ranks that two launches take longer, in two
/// full rounds. y has at most as many columns as x, or twice as many where clusters fill the
/// device: few thread blocks that store much take longer than the same stores from all SMs.
inline ForwardPlan choose_forward(std::int64_t rows, std::int64_t columns, std::int64_t out_columns,
                                  int width, int sms) {
  using namespace lora::cuda;
  constexpr int kTwoRoundRanks = 64;
  if (width > kForwardRanks) return {};
  const int leaves = leaves_of(rows, columns, width, 0, false, false, ShrinkOperands::kOneType);
  const int fewest = std::max(leaves / kMostForwardLeaves, 2);
  const std::int64_t tiles = ceil_div<std::int64_t>(rows, kForwardRows);
  for (int parts = leaves; parts >= fewest; parts /= 2) {
    if (tiles > clusters_at_once(parts, 1, sms)) continue;
    const bool fills = 4 * tiles * parts >= 3 * sms;
    if (out_columns > (fills ? 2 : 1) * columns) return {};
    if (!pays_in_one(rows, columns, out_columns, width, parts)) return {};
    return forward_plan(columns, leaves, parts);
  }
  const std::int64_t at_once = clusters_at_once(fewest, 1, sms);
  const bool two_rounds = tiles <= 2 * at_once && 10 * tiles >= 18 * at_once;
  if (leaves < fewest || width < kTwoRoundRanks || !two_rounds || out_columns > columns) return {};
  return forward_plan(columns, leaves, fewest, static_cast<int>(at_once));
}

}  // namespace mortar::lora::train::cuda
