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

/// Tiles of 64 rows all run at once, or, of so many ranks that two launches take longer, in two
/// full rounds. A thread block that stores much beside what it reads takes longer than the same
/// stores from all SMs: y has at most as many columns as x, or twice as many where clusters fill
/// the device.
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
    return forward_plan(columns, leaves, parts);
  }
  const std::int64_t at_once = clusters_at_once(fewest, 1, sms);
  const bool two_rounds = tiles <= 2 * at_once && 10 * tiles >= 18 * at_once;
  if (leaves < fewest || width < kTwoRoundRanks || !two_rounds || out_columns > columns) return {};
  return forward_plan(columns, leaves, fewest, static_cast<int>(at_once));
}

}  // namespace mortar::lora::train::cuda
