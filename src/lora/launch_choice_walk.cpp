// SPDX-License-Identifier: Apache-2.0
// When CTAs of prefill's shrink are persistent: shrink_walk.cu.
#include <algorithm>
#include <cmath>
#include <iterator>

#include "lora/launch_choice.h"

namespace mortar::lora {
namespace {

/// Clocks of the busiest SM, as in launch_choice_wgmma.cpp: of a stage for every tile and rank row,
/// those that bytes from L2 take, of a unit's start and end, and of the kernel's. (Fitted to the
/// kernel alone, eight plans of four problems of ranks 128 and 512 on an H200, 0.96 to 1.08 times
/// what they took.)
double walk_clocks(const LoraShape& s, const Machine& m, const WalkShape& shape) {
  constexpr double kProduct = 2.6, kBytesAClock = 45, kUnit = 5500, kStart = 13000;
  const double groups = ceil_div(s.rank_rows(), shape.rows);
  const double steps = std::ceil(static_cast<double>(s.hidden) / 64);
  const auto clocks = [&](double runs) {
    const double tokens =
        std::min<double>(kWalkTokens, static_cast<double>(s.num_tokens) / std::max(1.0, runs));
    const double bytes = 128 * (tokens + s.rank_rows() / groups);
    const double stage = std::max(kProduct * 2 * shape.rows, bytes / kBytesAClock);
    return kStart + std::ceil(runs * groups / m.sms) * (steps * stage + kUnit);
  };
  const std::int64_t own = ceil_div<std::int64_t>(tokens_per_adapter(s), kWalkTokens);
  const auto even = static_cast<double>(used_adapters(s) * own);
  return (clocks(even) + clocks(likely_runs(s, 2))) / 2;
}

}  // namespace

bool runs_walk(const LoraShape& s, const Machine& m) {
  return may_walk(s) && runs_wgmma(s, m) && s.boxes && !s.segments;
}

ShrinkPlan walk_plan(int shape) {
  ShrinkPlan c;
  c.kernel = ShrinkKernel::kWalk;
  c.shape = shape;
  c.tile_tokens = 64;
  c.rows = kWalkShapes[shape].rows;
  return c;
}

/// Its units are long, so it pays where they fill the chip and K is long. (us a call on an H200,
/// persistent and not: 7,071 tokens of one adapter, rank 128, 5,120 to 3 x 1,280, 84.7 and 95.9;
/// 4,096 of one, rank 256, qkv, 86.5 and 91.1; 3,358 of 16, rank 512, 3,584 to 2 x 4,736, units of
/// 128 rank rows, 143 and 156, of 192 rows 152; shrink alone, one round of 105 units of 192 rows,
/// 3,996 of 7, rank 512, K = 2,048, 28.5 and 34.3; but 14,020 of 57, rank 256, units of 192 rows,
/// 185 and 174; 4,145 of one, rank 128, 66 units, 30.0 and 23.6; 1,404 of one, rank 256, 66 units,
/// 23.3 and 22.3. On an H100 of K = 1,024 0.942 times as long, 14 random problems: 8,490 of 6, rank
/// 512, 62 and 75; 6,516 of 8, rank 256, 80 and 86; but 7,179 of 53, 97.3 and 96.3.)
bool suits_walk(const LoraShape& s, const Machine& m, ShrinkPlan& c) {
  constexpr double kClearly = 0.95;
  constexpr std::int64_t kLeastTokens = 128, kLeastHidden = 1024;  // of an adapter; K
  if (!runs_walk(s, m) || tokens_per_adapter(s) < kLeastTokens || s.hidden < kLeastHidden) {
    return false;
  }
  double least = kClearly * wgmma_clocks(s, m, c);
  bool found = false;
  for (int i = 0; i < static_cast<int>(std::size(kWalkShapes)); ++i) {
    const double clocks = walk_clocks(s, m, kWalkShapes[i]);
    if (clocks >= least) continue;
    least = clocks;
    c = walk_plan(i);
    found = true;
  }
  return found;
}

}  // namespace mortar::lora
