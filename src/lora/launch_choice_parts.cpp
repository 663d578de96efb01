// SPDX-License-Identifier: Apache-2.0
// Which kernel of each pass suits a mixture of dtypes, or float32, and in which shape.
#include <algorithm>
#include <cmath>
#include <iterator>

#include "lora/launch_choice.h"

namespace mortar::lora {
namespace {

/// The shape of shrink_wgmma.cu for float32 weights that takes the busiest SM the fewest clocks.
///
/// A stage of a CTA takes its products some clocks per tile and rank row, and L2 its bytes; CTAs of
/// an SM share both, and none has a stage in less than its share of a trip to memory and back, by
/// how many stages of float32 rows are on their way. The constants are fitted to 32 problems on an
/// H200 under up to nine shapes each: what they choose takes the whole call 1.026 times as long as
/// the best of them on average, at most 1.19 times.
ShrinkPlan wgmma_parts_shrink(const LoraShape& s, const Machine& m) {
  constexpr double kBytesAClock = 40;           // of an SM, from L2
  constexpr double kProduct = 7;                // clocks of a stage for a tile and rank row
  constexpr double kTrip = 1200, kLeast = 270;  // of a trip, and of a stage beside it
  constexpr double kBehind = 3300;              // of the start and end of CTAs behind others
  constexpr double kFinish = 1200;              // of the kernel that adds partials
  const bool splits = num_leaves(s.hidden) > 1 && wgmma_partials_fit(s);
  const double stages = static_cast<double>(ceil_div<std::int64_t>(s.hidden, 64));
  const double leaf_stages = static_cast<double>(leaf_size(s.hidden)) / 64;
  ShrinkPlan best;
  double least = 0;
  for (int i = 0; i < static_cast<int>(std::size(kWgmmaShapes)); ++i) {
    const WgmmaShape& shape = kWgmmaShapes[i];
    const bool leaf = shape.share == Share::kLeaf;
    if (!shape.float_weights || (leaf && !splits)) continue;
    for (int leaves = 1; leaves <= (leaf ? kMostLeaves : 1); ++leaves) {
      const auto shares =
          static_cast<double>(leaf ? ceil_div<std::int64_t>(num_leaves(s.hidden), leaves) : 2);
      const double ctas = likely_runs(s, shape.tiles) * shares *
                          static_cast<double>(ceil_div(s.rank_rows(), shape.rows));
      const double an_sm = std::ceil(ctas / m.sms);
      const double rounds = std::ceil(an_sm / shape.per_sm);
      const int rows = std::min(shape.rows, s.rank_rows());
      const double stage = std::max(kProduct * shape.rows * shape.tiles,
                                    (128.0 * 64 * shape.tiles + 256.0 * rows) / kBytesAClock);
      const int ahead = shape.ahead > 0 ? shape.ahead : 2;
      const double trip = kLeast + kTrip / ahead;
      // The CTA of the last K chunks may have fewer.
      const double own = leaf ? std::min(stages, leaves * leaf_stages) : stages / shares;
      double clocks = own * std::max(an_sm * stage, rounds * trip) + (rounds - 1) * kBehind;
      if (leaf) {
        clocks += kFinish + 2.0 * static_cast<double>(partial_bytes(s)) / (m.sms * kBytesAClock);
      }
      if (least != 0 && clocks >= least) continue;
      least = clocks;
      best = wgmma_plan(i, leaves);
    }
  }
  return best;
}

/// With float32 weights, where the products of parts take mma.sync longer than memory takes for y,
/// and CTAs of 64 tokens fill half of the chip. Up to rank 64 where the tiles of an adapter are
/// half full, too, and of high ranks wherever tiles of 64 are chosen for some tokens of an adapter.
/// (us on an H100, mma.sync and wgmma: 1,439 tokens of 65 adapters, ranks up to 64, 1,024 to 2,048
/// + 2 x 1,024, 56 and 73; 1,134 of 42, rank 64, 164 and 173; 4,555 of 81, 57 and 53; 87 of one,
/// rank 256, 512 to 2,048, 21.9 and 17.9; on an H200, both passes in tiles of 64, 28 of one, rank
/// 512, 1,024 to 2,048 + 2 x 1,024, 37.0 and 18.7; 44 of one, 1,280 to 5,120, 35.4 and 20.1.)
bool suits_wide_parts(const LoraShape& s, const Machine& m) {
  constexpr std::int64_t kSomeTokens = 24;
  const std::int64_t ctas =
      max_tiles(s.num_tokens, s.num_adapters, 64) * column_blocks(s, kWideShapes[0].cols);
  const std::int64_t least_tokens = h_width(s) <= 64 ? 40 : 1;  // of an adapter
  const bool some = h_width(s) > kExpandPrefillMaxRank && tokens_per_adapter(s) >= kSomeTokens;
  return runs_wide(s, m) && s.float_weights && best_tile_tokens(s) == 64 && h_width(s) > 48 &&
         tokens_per_adapter(s) >= least_tokens && (2 * ctas >= m.sms || some);
}

/// Persistent CTAs where each has four steps of 128 tokens, of which an adapter has more than half,
/// and parts of h fit beside B: those are made once for all columns, y moves while a step's
/// products run, and only the first step waits for its rows. (us on an H100, these and a CTA for
/// each tile: 364 tokens of one adapter, rank 128, 3,584 to 2 x 18,944, 53 and 68; 1,288 of one,
/// rank 256, 248 and 299; but three steps, 866 of 6, rank 256, 4,096 to 4,096, 46 and 41; 27 tokens
/// an adapter, 515 of 19, rank 256, 1,024 to 2 x 3,072, 88 and 85.)
bool suits_walk_parts(const LoraShape& s, const Machine& m) {
  const WideShape& shape = kWideShapes[kWideWalkPartsShape];
  const double steps =
      likely_runs(s, shape.tiles) * static_cast<double>(column_blocks(s, shape.cols)) / m.sms;
  return runs_wide_walk(s, m) && h_width(s) > kWideKeptMaxRank &&
         h_width(s) <= kWideWalkPartsMaxRank && tokens_per_adapter(s) > 64 && steps >= 4;
}

/// Tiles and columns that the kernel that keeps B takes at a time.
double kept_steps(const LoraShape& s) {
  return likely_runs(s, 1) *
         static_cast<double>(column_blocks(s, kWideShapes[kWideKeptShape].cols));
}

/// Wherever wgmma is chosen for such ranks; of ranks up to 48 where tiles are mostly full, and from
/// four steps an SM on. (us on an H100, this and mma.sync: 6,777 tokens of one adapter, rank 4,
/// 1,024 to 2 x 3,072, 82 and 112; 366 of 3, rank 8, 5,120 to 2 x 13,824, 25.7 and 28.3; but 1,955
/// of 42, rank 4, 88 and 69; 339 of 5, rank 16, 8,192 to 8,192, 14.7 and 14.6.)
bool suits_kept(const LoraShape& s, const Machine& m) {
  constexpr std::int64_t kLeastTokens = 96;  // of an adapter
  if (!runs_kept(s, m)) return false;
  return suits_wide_parts(s, m) || (best_tile_tokens(s) == 64 && kept_steps(s) >= 4 * m.sms &&
                                    tokens_per_adapter(s) >= kLeastTokens);
}

/// The run that takes the least time: rounds of the CTAs that are resident at once, of which one
/// takes half a tile's time for B of every adapter; alone on an SM it is faster.
int kept_run(const LoraShape& s, const Machine& m) {
  constexpr double kB = 0.5, kAlone = 0.87, kUneven = 0.3;
  const double own = std::max(1.0, static_cast<double>(tokens_per_adapter(s)) / 64);
  int best = 0;
  double least = 0;
  for (int log_run = 0; log_run <= kMostKeptRun; ++log_run) {
    const double run = 1 << log_run, ctas = kept_steps(s) / run;
    const double rounds = ctas / (kWideShapes[kWideKeptShape].per_sm * m.sms);
    const double time = (rounds <= 1 ? 1 : rounds + kUneven) *
                        (run + kB * std::max(1.0, run / own)) * (ctas <= m.sms ? kAlone : 1);
    if (least != 0 && time >= least) continue;
    least = time;
    best = log_run;
  }
  return best;
}

}  // namespace

ExpandPlan parts_expand(const LoraShape& s, const Machine& m) {
  // As many CTAs of 16 or 32 tokens as run at once, three per SM.
  ExpandPlan c;
  c.kernel = ExpandKernel::kParts;
  c.tile_tokens = best_tile_tokens(s);
  const std::int64_t ctas = c.tile_tokens == 16 ? max_tiles(s.num_tokens, s.num_adapters, 16)
                                                : ceil_div<std::int64_t>(s.num_tokens, 32);
  // Wider ones leave SMs idle at the end. (us on an H100: 579 tokens of 2 adapters, rank 32, 3,584
  // to 2 x 18,944, 1,792 columns 92, 1,024 75, 512 77; 6,777 of one, rank 4, 1,024 to 2 x 3,072,
  // 3,072 columns 145, 1,024 112, 512 110.) B of a high rank is long to stream beside the start of
  // a CTA. (us on an H200, 1,024 columns and these: 111 tokens of 139 adapters, rank 256, 896 to
  // 3,584, 258 and 200; 720 of 125, ranks up to 64, qkv of 1,024, 61.0 and 55.9; but rank 64 in 128
  // columns 68.3, in 1,024 51.9, 102 of 11, gate_up.)
  const std::int64_t most = h_width(s) <= 32                      ? 1024
                            : h_width(s) <= kExpandPrefillMaxRank ? 512
                                                                  : 128;
  const std::int64_t cols = ceil_div<std::int64_t>(s.sum_widths() * ctas, 3 * m.sms);
  c.cols = even_cols(s, std::clamp<std::int64_t>(cols, 128, most), 128);
  return c;
}

ShrinkPlan parts_shrink(const LoraShape& s, const Machine& m) {
  ShrinkPlan c;
  c.kernel = ShrinkKernel::kParts;
  c.tile_tokens = best_tile_tokens(s);
  const std::int64_t leaves = num_leaves(s.hidden);
  const std::int64_t tiles = max_tiles(s.num_tokens, s.num_adapters, c.tile_tokens);
  const bool split = leaves > 1 && partials_fit(s);
  const bool finish = c.tile_tokens > 16 || s.max_rank > kExpandPrefillMaxRank;
  if (split) c.partials = finish ? Partials::kFinish : Partials::kExpand;
  // Rank rows are shared out until there are two CTAs per SM, of 16 tokens in one part about as
  // many as run at once, but no more. (us on an H200, two and these: 79 tokens of 7 adapters, rank
  // 64, 8,192 to 8,192, 17.0 and 12.9; 19 of 469, rank 64, qkv of 2,048, 16.3 and 12.5; 35 of one,
  // rank 128, qkv of 16,384, 43.0 and 38.1, but four of long chunks an SM 47.0; 44 of 6, rank 64,
  // 16,384 to 16,384, in one round 26.6, in more than one 31.2.)
  const bool few = c.tile_tokens == 16 && s.float_weights;
  const bool shorter = leaf_size(s.hidden) == leaf_size(1);
  const std::int64_t ctas = std::max<std::int64_t>(tiles * (split ? leaves : 1), 1);
  const std::int64_t at_once = (!few ? 2 : shorter ? 4 : 3) * m.sms;
  const std::int64_t most = split ? kPartsMaxRows : kPartsMaxTotals;
  const std::int64_t rows = std::max(1, s.rank_rows());
  const std::int64_t shares = std::clamp<std::int64_t>(at_once / ctas, ceil_div(rows, most),
                                                       ceil_div<std::int64_t>(rows, 16));
  c.rows = round_up(static_cast<int>(ceil_div<std::int64_t>(s.rank_rows(), shares)), 16);
  // Chunks of few rank rows come together where they are more, short ones in pairs: a CTA is mostly
  // its start. (us on an H200, one and two: 60 tokens of 74 adapters, rank 4, qkv of 4,096, 23.4
  // and 19.7; 100 of 183, rank 16, 2,048 to 2 x 2,048, 26.6 and 23.3; of 64 rows 57 of 81, 24.3 and
  // 28.3. One and four long ones: 77 of 268, rank 8, 28,672 to 8,192, 67.2 and 60.9; 1,301 of 401,
  // 127 and 111; 720 of 288, rank 4, 18,944 to 3,584, 98.8 and 82.7; but 94 of 230, 5,120 to 2 x
  // 3,456, one 28.4, three 26.2, four 29.5.)
  if (split && few && s.rank_rows() <= 32) {
    c.leaves = static_cast<int>(
        std::clamp<std::int64_t>(ceil_div(ctas, std::int64_t{at_once}), 1, shorter ? 2 : 4));
  }
  return c;
}

bool light_parts(const LoraShape& s) {
  constexpr std::int64_t kMostTokens = 64;  // of an adapter
  constexpr std::int64_t kMostRows = 1280;  // times rank rows
  return s.float_weights && partials_are_light(s) && tokens_per_adapter(s) <= kMostTokens &&
         tokens_per_adapter(s) * s.rank_rows() <= kMostRows;
}

ShrinkPlan choose_parts_shrink(const LoraShape& s, const Machine& m) {
  // Few rank rows of few tokens fill no wgmma. (us on an H100, mma.sync and wgmma: 339 tokens of 5
  // adapters, rank 16, 14.8 and 19.3; 438 of 7, rank 4, three slices, 28.5 and 33.2; as fast from
  // some 1,500 tokens on.)
  const bool few = s.rank_rows() <= 16 && s.num_tokens <= 512;
  const bool wgmma = s.float_weights && runs_wgmma(s, m) && best_tile_tokens(s) == 64 && !few;
  return wgmma ? wgmma_parts_shrink(s, m) : parts_shrink(s, m);
}

bool runs_kept(const LoraShape& s, const Machine& m) {
  return runs_wide(s, m) && s.float_weights && h_width(s) <= kWideKeptMaxRank;
}

ExpandPlan kept_expand(int log_run) {
  ExpandPlan c = wide_expand(kWideKeptShape);
  c.log_run = log_run;
  return c;
}

ExpandPlan choose_parts_expand(const LoraShape& s, const Machine& m) {
  if (suits_kept(s, m)) return kept_expand(kept_run(s, m));
  if (!suits_wide_parts(s, m)) {
    return suits_direct_parts(s, m) ? direct_parts_expand(s, m) : parts_expand(s, m);
  }
  if (suits_walk_parts(s, m)) return wide_expand(kWideWalkPartsShape);
  // Two tiles share B: faster above rank 128 where they are full, or where a CTA has an SM to
  // itself, as it has more of B on its way. (us on an H200, two and one: 156 and 206, 356 tokens of
  // 4 adapters, rank 512, 5,120 to 2 x 13,824; 307 and 349, 1,827 of one, rank 256; 26.3 and 33.4,
  // 126 of two, rank 512, 5,120 to 5,120; but 255 and 220, 1,632 of 68, rank 256; 103 and 96, 2,656
  // of 17, rank 128, 3,584 to 3,584.)
  const bool full = h_width(s) > kExpandPrefillMaxRank && tokens_per_adapter(s) > 64;
  const bool alone =
      likely_runs(s, 2) * static_cast<double>(column_blocks(s, kWideShapes[0].cols)) <= m.sms;
  return wide_expand(full || alone ? kWidePairPartsShape : kWidePartsShape);
}

}  // namespace mortar::lora
