// SPDX-License-Identifier: Apache-2.0
// How many columns a CTA of the decode expand takes, where there are many tiles of 16 tokens: by
// the time that its CTAs take in rounds of as many as run at once.
//
// The host does not know how tokens are shared out: a plan has to be good where adapters have
// equally many, and where the i-th has them by 1 / i, which makes about half as many tiles.
#include <algorithm>
#include <cmath>

#include "lora/launch_choice.h"

namespace mortar::lora {
namespace {

/// Tiles of 16 tokens if all adapters have as many.
double even_tiles(const LoraShape& s) {
  const std::int64_t groups = std::max<std::int64_t>(1, std::min(s.num_tokens, s.num_adapters));
  const std::int64_t least = s.num_tokens / groups, more = s.num_tokens % groups;
  return static_cast<double>(more * ceil_div<std::int64_t>(least + 1, 16) +
                             (groups - more) * ceil_div<std::int64_t>(least, 16));
}

/// The same if the i-th has them as often as 1 / i. Of z tokens of the first of L adapters, the
/// i-th has none with a chance of exp(-z / i): L (1 - exp(-u)) + z E1(u) have some, u = z / L.
double zipf_tiles(const LoraShape& s) {
  constexpr double kEuler = 0.5772, kTile = 16;
  const auto adapters = static_cast<double>(s.num_adapters);
  const double z =
      static_cast<double>(s.num_tokens) / (std::log(adapters) + kEuler + 0.5 / adapters);
  const double u = z / adapters;
  const double e1 = u < 1 ? u - u * u / 4 - kEuler - std::log(u)
                          : std::exp(-u) * (0.5 * std::log(1 + 1 / u) + 0.25 * std::log(1 + 2 / u));
  const double used = adapters * (1 - std::exp(-u)) + z * e1;
  const double tiles = z / kTile;  // of the first
  const double more = tiles > 1 ? tiles * (std::log(tiles) + kEuler) - tiles / 2 : 0;
  return std::min(static_cast<double>(max_tiles(s.num_tokens, s.num_adapters, 16)),
                  used + std::max(0.0, more));
}

/// Microseconds that expand takes beside what every plan takes, if so many of the tiles are there.
double expand_us(const LoraShape& s, const Machine& m, const ExpandPlan& c, double live) {
  // Of a CTA's start, of a step and what it takes longer by its columns and in fewer registers, of
  // a CTA without a tile, and what the next call waits if CTAs take all of the chip: fitted to the
  // plans of 99 random problems on an H100, and to two plans each of 300.
  constexpr double kStart = 1.24, kStep = 0.507, kColumn = 0.03 / 128, kDense = 1.07,
                   kNoTile = 0.48, kCrowd = 1.34;
  const bool dense = c.per_sm == kDenseExpandPerSm;
  const auto tiles = static_cast<double>(max_tiles(s.num_tokens, s.num_adapters, 16));
  const auto blocks = static_cast<double>(column_blocks(s, c.cols));
  int pitch = 16;  // of a row in shared memory, ranks
  while (pitch < s.max_rank) pitch *= 2;
  const int rows = 16 + std::min(c.stages, ceil_div(c.cols, c.block_cols)) * c.block_cols;
  const int by_smem = m.sm_smem / (rows * pitch * 2 + 2048);
  const int per_sm = std::clamp(by_smem, 1, dense ? kDenseExpandPerSm : int{kExpandPerSm});
  const double step = (kStep + kColumn * c.block_cols) * (dense ? kDense : 1);
  std::int64_t steps = 0;  // of a tile
  for (int i = 0; i < s.num_slices; ++i) steps += ceil_div<std::int64_t>(s.widths[i], c.block_cols);
  const auto most = static_cast<double>(
      ceil_div<std::int64_t>(std::min<std::int64_t>(c.cols, s.max_width()), c.block_cols));
  const double slots = m.sms * per_sm, rounds = std::floor(live * blocks / slots);
  const bool rest = live * blocks - rounds * slots > 0.5;
  return rounds * (kStart + step * static_cast<double>(steps) / blocks) +
         (rest ? kStart + step * most : 0) +
         std::max(0.0, tiles - live) * blocks / slots * kNoTile +
         std::min(1.0, live * blocks / slots) * kCrowd;
}

}  // namespace

bool suits_balance(const LoraShape& s) {
  constexpr std::int64_t kLeastTiles = 8;
  return s.aligned_y && s.max_width() > 0 && s.max_rank <= kExpandPrefillMaxRank &&
         s.num_adapters > 1 && max_tiles(s.num_tokens, s.num_adapters, 16) >= kLeastTiles;
}

ExpandPlan balanced_expand(const LoraShape& s, const Machine& m, const ExpandPlan& c) {
  constexpr std::int64_t kMostBlocks = 64;
  constexpr double kMargin = 0.93;  // that others have to be faster by
  const double even = even_tiles(s), zipf = zipf_tiles(s);
  const auto cost = [&](const ExpandPlan& plan) {
    return expand_us(s, m, plan, even) / even + expand_us(s, m, plan, zipf) / zipf;
  };
  const int widest = s.max_rank <= 16 ? 256 : 128;
  ExpandPlan best = c;
  double least = kMargin * cost(c);
  for (std::int64_t blocks = 1; blocks <= kMostBlocks;
       blocks += std::max<std::int64_t>(1, blocks / 4)) {
    ExpandPlan plan = c;
    const auto cols = static_cast<int>(ceil_div<std::int64_t>(s.max_width(), blocks));
    const bool narrow =
        s.max_rank > 64 ? cols > 320 || !decode_ring_fits(s, m, cols, widest) : 2 * cols <= widest;
    plan.block_cols = narrow ? widest / 2 : widest;
    plan.cols = round_up(cols, plan.block_cols);
    plan.stages = decode_stages(s, plan, m);
    const double us = cost(plan);
    if (us < least) {
      least = us;
      best = plan;
    }
    if (2 * cols <= widest) break;
  }
  return best;
}

}  // namespace mortar::lora
