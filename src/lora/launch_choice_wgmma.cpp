// SPDX-License-Identifier: Apache-2.0
// How shrink takes x and weights of one 16-bit type where no CTA leaves partials for expand: which
// shape of shrink_wgmma.cu, or tiles of 16 tokens of shrink_mma.cu.
//
// Both by the clocks of the busiest SM: its CTAs, in rounds of those that share it, take L2 their
// bytes, the tensor cores their products and each the latency of its copies. The constants are
// fitted to some 1,400 plans of 129 random problems on an H100: what they choose takes 1.02 times
// as long as the best of the plans tried, on average.
#include <algorithm>
#include <cmath>
#include <iterator>

#include "lora/launch_choice.h"

namespace mortar::lora {
namespace {

struct Costs {
  double bytes_a_clock;  ///< of an SM, from L2
  double trip;           ///< clocks of a trip to memory and back of a stage, all loaded
  double least;          ///< of a stage
  double product, step;  ///< of a stage for every tile and rank row of the shape, and besides
  double start, shape;   ///< of a CTA's start and end, and for every tile and rank row
};
constexpr Costs kCosts{45, 4000, 300, 4, 0, 12000, 0};
/// Those of ranks above 128, where L2 is asked for more than it gives: fitted to the three or four
/// best shapes of 35 problems on an H100 of ranks 128 to 512. What they choose takes the whole call
/// 1.008 times as long as the best of them, on average, what the others do 1.027 times. (us, theirs
/// and the others': 3,673 tokens of 18 adapters, rank 256, 28,672 to 8,192, 247 and 298; 790 of 6,
/// 3,584 to 3,584 + 2 x 512, 51 and 59; 8,192 of 16, down, 240 and 258; but 2,048 of 4, rank 128,
/// qkv, 50 and 48.)
constexpr Costs kHighCosts{31, 3100, 430, 3.4, 16, 10000, 11.5};

/// Clocks in which an SM with `ctas` CTAs, of which `resident` run at once, takes stages of so many
/// bytes and products, each no faster than `least`.
double stage_clocks(const Costs& costs, double ctas, double resident, double bytes, int stages,
                    double products, double least) {
  const double in_flight = std::min(ctas, resident) * stages * bytes;
  const double rate = std::min(costs.bytes_a_clock, in_flight / costs.trip);
  return std::max({ctas * bytes / rate, ctas * products, std::ceil(ctas / resident) * least});
}

double wgmma_clocks(const Costs& costs, const LoraShape& s, const Machine& m,
                    const WgmmaShape& shape, double runs) {
  constexpr double kFinish = 1000;  // clocks of the kernel that adds partials
  constexpr std::int64_t kFewPartials = 10 << 20;
  const int columns = std::max(1, ceil_div(s.rank_rows(), shape.rows));
  const bool leaf = shape.share == Share::kLeaf;
  const double parts = leaf                          ? static_cast<double>(num_leaves(s.hidden))
                       : shape.share == Share::kHalf ? 2
                                                     : 1;
  const double ctas = std::ceil(runs * columns * parts / m.sms);
  const double tokens = std::min(64.0 * shape.tiles, static_cast<double>(s.num_tokens) / runs);
  const double bytes = 128 * (tokens + static_cast<double>(s.rank_rows()) / columns);
  const double size = shape.rows * shape.tiles;
  const double clocks = stage_clocks(costs, ctas, shape.per_sm, bytes, shape.stages,
                                     costs.product * size + costs.step, costs.least) *
                            std::ceil(static_cast<double>(s.hidden) / (64 * parts)) +
                        std::ceil(ctas / shape.per_sm) * (costs.start + costs.shape * size);
  if (!leaf) return clocks;
  const double all =
      clocks + kFinish + 2 * static_cast<double>(partial_bytes(s)) / (m.sms * kCosts.bytes_a_clock);
  // Many partials also push x and A out of L2: only where they save a third by this count. (Of
  // 8.8 MB, us on an H100: 319 tokens of one adapter, rank 256, 13,824 to 5,120, 26 and 33.)
  return partials_are_light(s) || partial_bytes(s) <= kFewPartials ? all : 1.5 * all;
}

/// The host does not know how tokens are shared out: between all runs full and the last one of each
/// adapter half full. (8,192 tokens of 16 adapters, all full, rank 64, qkv: 124 us, and 136 by a
/// shape that suits the other.)
double wgmma_clocks(const Costs& costs, const LoraShape& s, const Machine& m,
                    const WgmmaShape& shape) {
  constexpr double kFull = 0.7;
  const auto least =
      static_cast<double>(std::max(std::min(s.num_tokens, s.num_adapters),
                                   ceil_div<std::int64_t>(s.num_tokens, 64 * shape.tiles)));
  return kFull * wgmma_clocks(costs, s, m, shape, least) +
         (1 - kFull) * wgmma_clocks(costs, s, m, shape, likely_runs(s, shape.tiles));
}

double mma_clocks(const LoraShape& s, const Machine& m) {
  constexpr MmaShape kShape = kMmaShapes[0];
  constexpr double kStart = 6000, kLeast = 400, kPerSm = 4;
  const auto tiles = static_cast<double>(max_tiles(s.num_tokens, s.num_adapters, 16));
  const int columns = std::max(1, ceil_div(s.rank_rows(), kShape.rows()));
  const double ctas = std::ceil(tiles * columns / m.sms);
  const double tokens = std::min(16.0, static_cast<double>(s.num_tokens) / tiles);
  const double bytes = 256 * (tokens + static_cast<double>(s.rank_rows()) / columns);
  return stage_clocks(kCosts, ctas, kPerSm, bytes, kShape.stages - 1, 0, kLeast) *
             std::ceil(static_cast<double>(s.hidden) / 128) +
         std::ceil(ctas / kPerSm) * kStart;
}

}  // namespace

double likely_runs(const LoraShape& s, int tiles) {
  const std::int64_t groups = std::max<std::int64_t>(1, std::min(s.num_tokens, s.num_adapters));
  const std::int64_t tokens = 64 * tiles, half = ceil_div<std::int64_t>(groups, 2);
  return static_cast<double>(groups == 1 ? ceil_div(s.num_tokens, tokens)
                                         : std::max(groups, s.num_tokens / tokens + half));
}

ShrinkPlan wgmma_shrink(const LoraShape& s, const Machine& m) {
  const bool splits = num_leaves(s.hidden) > 1 && wgmma_partials_fit(s);
  const Costs& costs = s.max_rank > kExpandPrefillMaxRank ? kHighCosts : kCosts;
  ShrinkPlan best;
  double least = 0;
  for (int i = 0; i < static_cast<int>(std::size(kWgmmaShapes)); ++i) {
    const WgmmaShape& shape = kWgmmaShapes[i];
    const bool leaf = shape.share == Share::kLeaf;
    if (shape.float_weights || (leaf && !splits)) continue;
    const double clocks = wgmma_clocks(costs, s, m, shape);
    if (least != 0 && clocks >= least) continue;
    least = clocks;
    best = {ShrinkKernel::kWgmma, i, 64, shape.rows, leaf ? Partials::kFinish : Partials::kNone, 0};
  }
  return best;
}

ShrinkPlan walking_shrink(const LoraShape& s, const Machine& m) {
  if (runs_wgmma(s, m)) {
    const ShrinkPlan c = wgmma_shrink(s, m);
    if (wgmma_clocks(kCosts, s, m, kWgmmaShapes[c.shape]) < mma_clocks(s, m)) return c;
  }
  ShrinkPlan c;
  c.rows = kMmaShapes[0].rows();
  return c;
}

}  // namespace mortar::lora
