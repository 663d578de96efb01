// SPDX-License-Identifier: Apache-2.0
// When expand is a matrix product on wgmma: expand_wide.cu, and of many steps expand_wide_walk.cu.
#include <algorithm>
#include <cmath>

#include "lora/launch_choice.h"

namespace mortar::lora {

bool runs_wide(const LoraShape& s, const Machine& m) {
  const bool own_h = s.op == Op::kApply;
  return m.arch == 90 &&
         ((s.one_type && (own_h || s.aligned_h)) || (s.float_weights && own_h && s.aligned_y));
}

bool runs_wide_walk(const LoraShape& s, const Machine& m) {
  return runs_wide(s, m) && s.op == Op::kApply && s.aligned_y && !s.segments;
}

bool has_room_for_y(const LoraShape& s) { return h_width(s) <= kWideStagedMaxRank; }

namespace {

/// With y of steps ahead in shared memory where a step moves half as many bytes of y as of B, or
/// more: B has a stage less then. (us on an H200, with and without: 2,106 tokens of one adapter,
/// rank 128, 5,120 to 5,120, 31.0 and 34.3; 5,772 of 3, gate_up, 204 and 220; 4,096 of one, rank
/// 256, qkv, 92 and 100; 7,038 of 79, rank 256, gate_up, 270 and 296; but 914 of 110, rank 256, 328
/// and 309; 66 of 17, 75 and 74.)
int wide_walk_shape(const LoraShape& s) {
  const WideShape& shape = kWideShapes[kWideWalkShape];
  const std::int64_t tokens = std::min<std::int64_t>(64 * shape.tiles, tokens_per_adapter(s));
  const bool moves_y = 4 * tokens >= h_width(s);
  return has_room_for_y(s) && moves_y ? kWideStagedShape : kWideWalkShape;
}

/// Bytes of B that clusters of two CTAs read less from L2 than single ones: half of what those runs
/// of 128 tokens need that have a neighbour. Between even shares, and shares of which an adapter's
/// last run has none.
double shared_bytes(const LoraShape& s) {
  const auto used = static_cast<double>(used_adapters(s));
  const std::int64_t own = ceil_div<std::int64_t>(tokens_per_adapter(s), 2 * 64);
  const double even = used * static_cast<double>(own / 2 * 2);
  const double uneven = std::max(0.0, likely_runs(s, 2) - used);
  return (even + uneven) / 2 * static_cast<double>(s.sum_widths()) * s.max_rank * 2 / 2;
}

}  // namespace

bool rounds_h(const LoraShape& s) { return s.op == Op::kExpand && s.one_type && s.float_h; }

ExpandPlan wide_expand(int shape) {
  ExpandPlan c;
  c.kernel = ExpandKernel::kWide;
  c.shape = shape;
  c.tile_tokens = 64;
  c.cols = kWideShapes[shape].cols;
  return c;
}

bool takes_boxes(const LoraShape& s) {
  return s.b_boxes && s.one_type && s.aligned_y && !s.segments;
}

namespace {

/// CTAs of a step each of so many tiles, where all adapters have as many tokens.
std::int64_t step_ctas(const LoraShape& s, int tiles) {
  const std::int64_t runs = ceil_div<std::int64_t>(tokens_per_adapter(s), 64 * tiles);
  return used_adapters(s) * runs * column_blocks(s, kWalkCols);
}
/// Whether so many CTAs have most SMs shared by two.
bool crowds(std::int64_t ctas, const Machine& m) { return 10 * ctas > 14 * m.sms; }

/// Of so few tokens of an adapter h fills little of a step.
constexpr std::int64_t kFillsSteps = 40;

/// The shape of a step a CTA for high ranks. Two tiles share B where CTAs of one do not all run at
/// once. (us, one tile and two: 551 tokens of 3 adapters, rank 256, 252 CTAs of one, 13.0 and 16.3;
/// 916 of 4, 256, 11.0 and 13.3; 604 of one, rank 512, 320, 23.5 and 20.8; on an H100 378 of one,
/// 384, 31.8 and 25.8.)
///
/// Those of two tiles have an SM each where they make one round and are mostly full, as CTAs of one
/// would ask L2 for h and B half as often again: on an H100 398 tokens of one, rank 512, 1,024 to
/// 2,048 + 2 x 1,024, 15.3 us and 16.2 of one tile; but 76 of one, rank 256, 53,248 to 16,384, 32.8
/// and 31.9. Two CTAs that share an SM take 1.75 times as long as one, so three rounds are faster
/// than two of them, but two slower than one. (us, an SM each and two to an SM: 2.67 rounds, 1,404
/// tokens of one, rank 256, 23.6 and 24.2; 2.73, 367 of one, rank 512, 39.3 and 42.2; 2.24, 79 of
/// one, rank 256, 3,584 to 2 x 18,944, 20.4 and 23.2; but 1.45, 953 of 3, rank 512, 1,024 to 4,096,
/// 18.6 and 17.1; 3.64, 1,470 of 6, rank 256, 33.4 and 31.5.)
int step_shape(const LoraShape& s, const Machine& m) {
  const std::int64_t one = step_ctas(s, 1), tokens = tokens_per_adapter(s);
  const bool many = one > kWideShapes[0].per_sm * m.sms, pairs = tokens > 64 && s.aligned_y;
  if (takes_boxes(s) && tokens >= kFillsSteps) {
    const double two = likely_runs(s, 2) * static_cast<double>(column_blocks(s, kWalkCols));
    const int rounds = static_cast<int>(std::ceil(two / m.sms));
    const bool full = 4 * tokens >= 3 * round_up<std::int64_t>(tokens, 128);
    const bool better = crowds(one, m) && rounds == 1 && full;
    if (better || (many && rounds == 3)) return kWideAloneShape;
  }
  return many && pairs ? 1 : 0;
}

}  // namespace

/// CTAs that share an SM share its copy engine, too, in which h waits behind all their blocks of B:
/// of two CTAs on most SMs cp.async is faster where h fills little of a tile. (us, boxes and
/// cp.async: on an H200 3 tokens of 102 adapters, rank 256, 8,192 to 2 x 7,168, 19.5 and 18.3; 199
/// of 6, 1,024 to 2,048 + 2 x 1,024, 10.7 and 10.1; but 393 of 8, rank 64, 2,048 to 2,048 + 2 x
/// 512, 10.0 and 10.2; 831 of one, rank 512, 3,584 to 4,096, two tiles, 22.1 and 23.2; on an H100
/// 388 of one, rank 128, 1,024 to 2 x 3,072, 9.9 and 11.7; 1,301 of two, 2,048 to 2,048, two tiles,
/// 12.8 and 13.7. Of two tiles 0.971 and 0.980 times as long, 20 random problems on an H100, 13 on
/// an H200.)
ExpandPlan step_expand(const LoraShape& s, const Machine& m, int shape) {
  ExpandPlan c = wide_expand(shape);
  const bool crowded = crowds(step_ctas(s, kWideShapes[shape].tiles), m);
  c.boxes = takes_boxes(s) && (!crowded || tokens_per_adapter(s) >= kFillsSteps);
  return c;
}

ExpandPlan step_expand(const LoraShape& s, const Machine& m) {
  if (rounds_h(s)) return wide_expand(kWideRoundedShape);
  return step_expand(s, m, step_shape(s, m));
}

/// In clusters where that saves 6 us of L2, as they start some 3 us later. (us on an H200, clusters
/// and single CTAs: 1,777 tokens of 3 adapters, rank 512, 3,584 to 2 x 18,944, 233 MB, 167 and 181;
/// but 1,412 of 8, rank 256, 4,096 to 4,096, 17 MB, 33.1 and 29.7; 283 of 8, none, 22.0 and 20.0.)
ExpandPlan wide_walk(const LoraShape& s) {
  constexpr double kLeast = 30e6;
  ExpandPlan c = wide_expand(wide_walk_shape(s));
  if (s.b_boxes && shared_bytes(s) >= kLeast) c.cluster = 2;
  return c;
}

/// High ranks, unless there are so few tiles and columns that the narrow CTAs of the decode kernel
/// share them out better. (us, wide against decode: one token, rank 256, 4,096 to 2 x 14,336, 9.2
/// and 12.9; 23 of 4 adapters, rank 256, 3,584 to 3,584, 9.9 and 12.1; 66 of 17, rank 256, 5,120 to
/// 3 x 5,120, 92 and 95; but 4 tokens of one adapter, rank 512, 1,024 to 4,096, 10.1 and 6.7. On an
/// H100, two tiles of 16 tokens: 24 of one, rank 256, 4,096 to 2 x 3,584, 56 CTAs, 9.4 and 11.3;
/// 1,024 to 2 x 3,072, 48 CTAs, 7.3 and 8.3; 54 of one, 4,096 to 4,096, 8.6 and 11.2; but 17 of
/// one, rank 512, 28,672 to 8,192, 36.8 and 34.7. Behind shrink in tiles of 64, on an H200: 47 of
/// one, rank 256, 3,584 to 4,096, 32 CTAs, 7.4 and 9.1; but 19 of one, rank 512, 18,944 to 3,584,
/// 28 CTAs, 17.7 and 15.5.)
bool suits_wide(const LoraShape& s, const Machine& m) {
  constexpr std::int64_t kTwoTiles = 20, kManyTokens = 48;  // of an adapter
  constexpr int kMidRank = 256;  // up to which a CTA streams few bytes of B
  if (h_width(s) <= kExpandPrefillMaxRank || !runs_wide(s, m)) return false;
  const std::int64_t ctas =
      max_tiles(s.num_tokens, s.num_adapters, 64) * column_blocks(s, kWideShapes[0].cols);
  const int share = s.max_rank <= kMidRank ? 5 : 4;  // of the chip, a fifth or a fourth
  const bool tiles = best_tile_tokens(s) == 64 && (s.num_tokens > 64 || share * ctas >= m.sms);
  return tiles || tokens_per_adapter(s) >= kManyTokens || 4 * ctas >= 3 * m.sms ||
         (tokens_per_adapter(s) >= kTwoTiles && 3 * ctas >= m.sms);
}

/// Of few tiles and columns: a tile a CTA of the wide kernel, two an SM, or two where they are
/// mostly full, up to rank 64 a step a CTA of the prefill kernel, whose CTAs have an SM each; of up
/// to 256 tokens and rank 64 not where a tile is half empty. (us, these and what is chosen
/// otherwise, rank 128: a tile, 200 of one, qkv, 13.1 and 13.8, 300, 4,096 to 4,096, 9.6 and 10.6;
/// in place of a step, on an H200, 71 of one, 4,096 to 1,024 + 2 x 256, 7.2 and 8.7, 514 of one,
/// 3,072 to 1,024, 8.9 and 9.7; two, 800, 16.2 and 17.3; but 514 of one, 1,024 to 2,048 + 2 x
/// 1,024, 12.1 and 11.6; half full, 514 of 4, rank 96, qkv, 21.1 and 18.7. Of few tokens, a tile,
/// 63 of two, 8,192 to 8,192, 8.4 and 10.0; but 111 of two, 2,048 to 512 + 2 x 128, 12 CTAs, 8.7
/// and 7.4. Rank 64, a step, 455 of 3, 3,072 to 1,024, 7.7 and 8.3; a tile, 538 of one, 3,584 to
/// 3,584, 9.6 and 10.3; 191 of one, 3,584 to 3,584 + 2 x 512, 8.1 and 9.4; but half full, a step,
/// 219 of 5, 512 to 2,048, 5.7 and 5.2; a tile, 236 of 3, 3,584 to 3,584, 7.8 and 7.6; two, 93 of
/// one, 3,584 to 2 x 18,944, 13.5 and 11.7. Of more tokens, a tile, on an H100: 322 of 6, ranks up
/// to 64, 2,048 to 2,048 + 2 x 512, 8.0 and 8.7; 476 of 5, 10.4 and 11.0; 896 of 18, rank 128,
/// 2,048 to 1,024, 12.0 and 13.0; of 15 random problems 0.962 times as long, one slower by over
/// 2 %.)
bool suits_round(const LoraShape& s, const Machine& m, ExpandPlan& c) {
  constexpr int kLeastRank = 33, kLowRank = 64;
  constexpr std::int64_t kLeastTokens = 24;  // of an adapter
  const bool few = s.num_tokens <= kSmallTileTokens;
  if (!runs_wide_walk(s, m) || h_width(s) < kLeastRank || h_width(s) > kExpandPrefillMaxRank ||
      best_tile_tokens(s) != 64 || tokens_per_adapter(s) < kLeastTokens) {
    return false;
  }
  const bool low = h_width(s) <= kLowRank;
  const auto mostly_full = [&](int tiles) {
    return 4 * static_cast<double>(s.num_tokens) >= 3 * 64 * tiles * likely_runs(s, tiles);
  };
  const auto ctas = [&](int tiles) {
    return likely_runs(s, tiles) * static_cast<double>(column_blocks(s, kPrefillCols));
  };
  const bool idle = few && 6 * ctas(1) < m.sms;
  if (idle || (low && few && !(mostly_full(1) || saves_reads(s)))) return false;
  if (low && 4 * ctas(1) <= 3 * m.sms && prefill_smem(s) + kPrefillStaticSmem <= m.max_smem) {
    c = prefill_expand(s, m);
  } else if (ctas(1) <= 2 * m.sms && (!low || !few || mostly_full(1))) {
    c = step_expand(s, m, 0);
  } else if (!low && mostly_full(2) && ctas(2) <= 2 * m.sms) {
    c = step_expand(s, m, 1);
  } else {
    return false;
  }
  return true;
}

/// Where a CTA has several steps of up to 128 tokens and 128 columns: two above rank 128, and six
/// where adapters have few tokens, whose h fills little of a step. (us on an H100, the persistent
/// kernel and the one chosen otherwise: 8,860 tokens of 5 adapters, rank 256, 1,280 to 5,120, 119
/// and 147; 162 of 283, 14,336 to 4,096, 111 and 130; 47 of 3, rank 512, 8,192 to 2 x 28,672, 102
/// and 123; but 913 of 4, 3,584 to 3,584, not two steps a CTA, 23.9 and 23.0; 626 of 88, Zipf, 306
/// and 292.) Up to rank 128 three steps, if rows of y are not very long or B serves many tokens.
/// (7,000 tokens of one, rank 128, 4,096 to 4,096, 78 and 82; 1,024 of 8, rank 128, gate_up, 81 and
/// 78; on an H200 5,772 of 3, rank 128, gate_up, 226 and 241.)
bool suits_wide_walk(const LoraShape& s, const Machine& m) {
  if (!runs_wide_walk(s, m)) return false;
  constexpr int kLeastRank = 65;
  constexpr std::int64_t kReusesB = 512;  // tokens of an adapter
  const WideShape& shape = kWideShapes[kWideWalkShape];
  const std::int64_t blocks = column_blocks(s, shape.cols), tokens = tokens_per_adapter(s);
  const double steps = likely_runs(s, shape.tiles) * static_cast<double>(blocks) / m.sms;
  // A step a CTA of boxes starts sooner. (us on an H100, persistent and those, steps: 953 of 3,
  // rank 512, 2.2, 22.8 and 18.6; 1,404 of one, rank 256, 2.7, 25.3 and 23.6; 79 of one, rank 256,
  // 2.2, 25.7 and 20.4; but 401 of two, rank 256, 4.8, 45.4 and 47.1; 849 of two, rank 512, 5.1,
  // 65.0 and 70.4.)
  if (h_width(s) > kExpandPrefillMaxRank) {
    const bool boxes = takes_boxes(s) && tokens >= kFillsSteps;
    return boxes ? steps > 3 : steps >= (tokens >= 10 ? 2 : 6);
  }
  return h_width(s) >= kLeastRank && best_tile_tokens(s) == 64 && tokens >= 64 &&
         (5 * blocks < 3 * m.sms || tokens >= kReusesB) && steps >= 3;
}

}  // namespace mortar::lora
