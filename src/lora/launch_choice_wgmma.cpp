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
  double round;          ///< of the start and end of CTAs behind others, in place of `start`
  double finish;         ///< of the kernel that adds partials, where expand does not
};
/// (The clocks of CTAs behind others by 82 problems on an H200: 1.0105 times as long as the best
/// shape on average, with 12,000 1.013 times. The least clocks of a stage by 80 more: 1.013 times,
/// with 300 1.017 times. us, these and those: 3,348 tokens of 3 adapters, rank 16, 2,048 to 1,024,
/// 11.4 and 14.0; 2,048 of 8, rank 64, 14,336 to 4,096, 39.1 and 40.9; 1,911 of 19, rank 32, 2,048
/// to 2,048, 13.9 and 15.2. What partials cost, `finish` and kPartialBytes, with a stage less in
/// flight where CTAs leave them, by 76 problems of up to 4,500 tokens: 1.020 times, before 1.037.)
constexpr Costs kCosts{45, 4000, 360, 4, 0, 12000, 0, 15000, 2500};
/// Those of ranks up to 64 and so many tokens, whose CTAs are short and start behind others that
/// end: fitted to the plans of 167 random problems on an H100. What they choose takes the whole
/// call 1.024 times as long as the best plan tried, on average, what the others do 1.040 times.
/// (us, theirs and the others': 789 tokens of 91 adapters, rank 64, 18,944 to 3,584, 75 and 104;
/// 345 of 6, ranks up to 64, 16.6 and 19.7; but 2,048 of 8, rank 64, 14,336 to 4,096, 52.8 and
/// 49.5; 12,484 of 9, 14,336 to 4,096, 201 and 171; of rank 128 140 and 107, 10,157 of 6, 4,096 to
/// 1,024 + 2 x 256.)
constexpr std::int64_t kLowTokens = 2000;
constexpr Costs kLowCosts{84, 1294, 161, 2.3, 0.8, 12000, 0.2, 2550, 1500};
/// Those of ranks above 128: fitted to the three or four best shapes of 35 problems on an H100, the
/// rate of L2 and the price of a shape's size anew to all shapes of 32 problems on an H200. What
/// they choose takes the whole call 1.028 times as long as the best shape there, on average, what
/// the former ones did 1.051 times. (us on an H200, with these and with those: 2,092 tokens of 32
/// adapters, rank 256, 18,944 to 3,584, 157 and 187; 368 of 29, rank 512, 14,336 to 4,096, 142 and
/// 166; 511 of 17, rank 256, 3,584 to 3,584 + 2 x 512, 53.4 and 56.8; but 9,581 of 82, 5,120 to 3 x
/// 1,280, 405 and 389.)
constexpr Costs kHighCosts{45, 3100, 430, 3.4, 16, 10000, 6, 10000, 4500};

const Costs& costs_of(const LoraShape& s) {
  const bool low = s.max_rank <= 64 && s.num_tokens <= kLowTokens;
  return s.max_rank > kExpandPrefillMaxRank ? kHighCosts : low ? kLowCosts : kCosts;
}

/// Clocks in which an SM with `ctas` CTAs, of which `resident` run at once, takes stages of so many
/// bytes and products, each no faster than `least`.
double stage_clocks(const Costs& costs, double ctas, double resident, double bytes, int stages,
                    double products, double least) {
  const double in_flight = std::min(ctas, resident) * stages * bytes;
  const double rate = std::min(costs.bytes_a_clock, in_flight / costs.trip);
  return std::max({ctas * bytes / rate, ctas * products, std::ceil(ctas / resident) * least});
}

/// A shape, and of Share::kLeaf the leaves that a CTA takes, one after the other.
struct Choice {
  WgmmaShape shape;
  int leaves = 1;
};

/// CTAs that share K.
double parts_of(const LoraShape& s, const Choice& c) {
  if (c.shape.share == Share::kLeaf) {
    return static_cast<double>(wgmma_leaf_ctas(num_leaves(s.hidden), c.leaves));
  }
  return c.shape.share == Share::kHalf ? 2 : 1;
}
/// CTAs of one run.
double ctas_of(const LoraShape& s, const Choice& c) {
  return parts_of(s, c) * std::max(1, ceil_div(s.rank_rows(), c.shape.rows));
}
/// Steps of K of a CTA.
double steps_of(const LoraShape& s, const Choice& c) {
  if (c.shape.share == Share::kLeaf) {
    return static_cast<double>(c.leaves * leaf_size(s.hidden)) / 64;
  }
  return std::ceil(static_cast<double>(s.hidden) / (64 * parts_of(s, c)));
}

/// CTAs of a run that share its rank rows, and these.
struct Columns {
  double ctas = 0, rows = 0;
};
Columns columns_of(int rank_rows, int cta_rows) {
  return {static_cast<double>(std::max(1, ceil_div(rank_rows, cta_rows))),
          static_cast<double>(rank_rows)};
}
/// The clocks of a problem whose CTAs take so many rank rows. Where adapters have ranks of their
/// own, the largest, half of it and a quarter are taken to be as frequent; but that counts half,
/// and the other half as if all were the largest, as the adapters of most tokens may have that.
/// (us, this and the largest alone: 2,975 tokens of 40 adapters, ranks up to 64, 2,048 to 2,048 + 2
/// x 512, 28.6 and 32.0; 2,089 of 5, 8,192 to 8,192 + 2 x 1,024, 27.8 and 30.9; 401 of 15, 5,120 to
/// 2 x 13,824, 35.8 and 36.8. Of 26 random problems what it chooses takes 1.012 times as long as
/// the best shape, by the largest rank alone 1.023 times.)
template <class Clocks>
double by_ranks(const LoraShape& s, int cta_rows, Clocks&& clocks) {
  const double all = clocks(columns_of(s.rank_rows(), cta_rows));
  if (!s.ragged) return all;
  Columns mean;
  for (const int part : {1, 2, 4}) {
    const Columns c = columns_of(ceil_div(s.rank_rows(), part), cta_rows);
    mean.ctas += c.ctas / 3;
    mean.rows += c.rows / 3;
  }
  return (all + clocks(mean)) / 2;
}

double wgmma_clocks(const Costs& costs, const LoraShape& s, const Machine& m, const Choice& c,
                    double runs, const Columns& columns) {
  const WgmmaShape& shape = c.shape;
  // That an SM reads or writes of partials in a clock, and where expand adds them.
  constexpr double kPartialBytes = 15, kAddedBytes = 45;
  const double ctas = std::ceil(runs * parts_of(s, c) * columns.ctas / m.sms);
  const double tokens = std::min(64.0 * shape.tiles, static_cast<double>(s.num_tokens) / runs);
  const double bytes = 128 * (tokens + columns.rows / columns.ctas);
  const double size = shape.rows * shape.tiles, steps = steps_of(s, c);
  const int stages =
      shape.share == Share::kLeaf && shape.per_sm <= 2 ? shape.stages - 1 : shape.stages;
  const double clocks = stage_clocks(costs, ctas, shape.per_sm, bytes, stages,
                                     costs.product * size + costs.step, costs.least) *
                            steps +
                        costs.start - costs.round +
                        std::ceil(ctas / shape.per_sm) * (costs.round + costs.shape * size);
  if (shape.share != Share::kLeaf) return clocks;
  const std::int64_t partials = partial_bytes(s, wgmma_partials(s, c.leaves));
  const bool added = may_add_chunks(s, m);
  return clocks + (added ? 0 : costs.finish) +
         2 * static_cast<double>(partials) / (m.sms * (added ? kAddedBytes : kPartialBytes));
}

double wgmma_clocks(const Costs& costs, const LoraShape& s, const Machine& m, const Choice& c,
                    double runs) {
  return by_ranks(s, c.shape.rows, [&](const Columns& columns) {
    return wgmma_clocks(costs, s, m, c, runs, columns);
  });
}

/// Runs where all adapters have as many tokens.
double even_runs(const LoraShape& s, int tiles) {
  const std::int64_t own = ceil_div<std::int64_t>(tokens_per_adapter(s), 64 * tiles);
  return static_cast<double>(used_adapters(s) * std::max<std::int64_t>(1, own));
}

/// The host does not know how tokens are shared out, nor how many have no adapter: between as few
/// runs as can be, those of even shares, and the last run of each adapter half full. Three tiles of
/// one are seldom all there, and of ragged ranks narrow CTAs cost more than their clocks, of others
/// less. (us on an H100, 64 rows and 96: 1,454 tokens of 80 adapters, ranks up to 64, 26.2 and
/// 23.9.) Of 417 random problems on an H100 what this chose of shapes without 64 rows took 1.020
/// times as long as the best shape, by the first and the last alone 1.025 times. (us, this and
/// those: 501 tokens of 4 adapters, rank 128, 16,384 to 4,096 + 2 x 256, 46 and 69; 1,912 of 13,
/// 18,944 to 3,584, 87 and 126; but 2,089 of 5, rank 64, 8,192 to 2,048 + 2 x 256, 40 and 34.)
double wgmma_clocks(const Costs& costs, const LoraShape& s, const Machine& m, const Choice& c) {
  const WgmmaShape& shape = c.shape;
  constexpr double kFew = 0.3, kEven = 0.5, kThree = 1.12;
  const double narrow = s.max_rank > kExpandPrefillMaxRank ? 0.9 : s.ragged ? 1.05 : 0.95;
  const std::int64_t groups = used_adapters(s), tokens = 64 * shape.tiles;
  const auto least = static_cast<double>(std::max(groups, ceil_div(s.num_tokens, tokens)));
  const auto most = static_cast<double>((s.num_tokens - groups) / tokens + groups);
  const double half_full = static_cast<double>(s.num_tokens) / static_cast<double>(tokens) +
                           static_cast<double>(groups) / 2;
  const double clocks =
      kFew * wgmma_clocks(costs, s, m, c, least) +
      kEven * wgmma_clocks(costs, s, m, c, even_runs(s, shape.tiles)) +
      (1 - kFew - kEven) *
          wgmma_clocks(costs, s, m, c, std::clamp(half_full, least, std::max(least, most)));
  const bool half = shape.rows == 64 && shape.share == Share::kHalf;
  return clocks * (shape.tiles == 3 ? kThree : half ? narrow : 1);
}

/// Whether fewer stages hold all of a CTA's steps but one, let more CTAs share an SM, and those of
/// two calls do not fit the chip otherwise. (us on an H100, 48 rows, 7 stages and 14: 200 tokens of
/// one adapter, rank 256, 1,024 to 2,048 + 2 x 1,024, 128 CTAs, 9.1 and 12.4; 775 of 20, rank 64,
/// 512 to 2,048, 80 CTAs, 9.0 and 10.2; but 1,211 of two, rank 32, 512 to 2,048, 40 CTAs, 9.3 and
/// 8.5.) Or, up to rank 64, where the shape has not all rank rows, others hold nearly all steps,
/// and all of their CTAs run at once: CTAs of expand find room beside them. (us, 64 rows and 6
/// stages, 96 and 10, 48, two tiles and 9: 1,638 tokens of one, rank 64, 1,024 to 2,048 + 2 x
/// 1,024, 14.3, 15.3 and 15.7; 48 and 7, 96 and 10, 48, two tiles and 9: 1,822 of 8, ranks up to
/// 64, 1,024 to 2 x 768, 10.1, 10.8 and 11.2; but of more steps 64 and 6, 64 and 13, 510 of 15,
/// rank 64, 2,048 to 2,048 + 2 x 512, 12.8 and 12.5.)
bool wastes_stages(const LoraShape& s, const Machine& m, const Choice& c) {
  constexpr int kMore = 2, kMostRank = 64;  // steps than stages
  const WgmmaShape& shape = c.shape;
  if (2 * even_runs(s, shape.tiles) * ctas_of(s, c) <= m.sms) return false;
  return std::any_of(
      std::begin(kWgmmaShapes), std::end(kWgmmaShapes), [&](const WgmmaShape& other) {
        if (other.share != shape.share || other.float_weights != shape.float_weights ||
            other.per_sm <= shape.per_sm) {
          return false;
        }
        const Choice o{other, c.leaves};
        if (other.rows == shape.rows && other.tiles == shape.tiles) {
          return steps_of(s, o) <= other.stages + 1;
        }
        return s.op == Op::kApply && shape.share == Share::kHalf && shape.rows < s.rank_rows() &&
               s.max_rank <= kMostRank && steps_of(s, o) <= other.stages + kMore &&
               even_runs(s, other.tiles) * ctas_of(s, o) <= other.per_sm * m.sms;
      });
}

/// Whether a narrower shape that is the same otherwise holds all rank rows. (us, 64 rows and 48:
/// 1,024 tokens of 8 adapters, rank 16, qkv, K chunks, 17.8 and 16.7; 2,055 of 5, halves of K, 26.2
/// and 24.5.)
bool is_wide(const LoraShape& s, const WgmmaShape& shape) {
  return std::any_of(
      std::begin(kWgmmaShapes), std::end(kWgmmaShapes), [&](const WgmmaShape& other) {
        return other.rows < shape.rows && other.rows >= s.rank_rows() &&
               other.tiles == shape.tiles && other.per_sm == shape.per_sm &&
               other.share == shape.share && other.float_weights == shape.float_weights;
      });
}

/// Rank rows up to which a CTA takes the fewest leaves whose partials fit: it is short, and as many
/// as can be share SMs best. (us, up to three leaves and one: 1,281 tokens of 9 adapters, rank 4,
/// 13,312 to 16,384, 33.3 and 32.2; 2,879 of 3, rank 8, 16,384 to 16,384 + 2 x 1,024, 72.1 and
/// 70.5; but 76 of one, rank 256, 53,248 to 16,384, 25.7 and 33.6.)
constexpr int kFewRows = 48;

/// The shape of one 16-bit type that takes the fewest clocks, of those allowed.
template <class Allowed>
ShrinkPlan least_clocks(const Costs& costs, const LoraShape& s, const Machine& m,
                        Allowed&& allowed) {
  ShrinkPlan best;
  double least = 0;
  const std::int64_t num = num_leaves(s.hidden);
  for (int i = 0; i < static_cast<int>(std::size(kWgmmaShapes)); ++i) {
    const WgmmaShape& shape = kWgmmaShapes[i];
    if (shape.float_weights || !allowed(shape) || is_wide(s, shape)) continue;
    const bool splits = shape.share == Share::kLeaf;
    for (int leaves = 1; leaves <= (splits ? most_wgmma_leaves(num) : 1); ++leaves) {
      const Choice c{shape, leaves};
      if (splits && (!are_even_leaves(num, leaves) || !wgmma_partials_fit(s, leaves))) continue;
      if (wastes_stages(s, m, c)) continue;
      const double clocks = wgmma_clocks(costs, s, m, c);
      if (least == 0 || clocks < least) {
        least = clocks;
        best = wgmma_plan(i, leaves);
      }
      if (s.rank_rows() <= kFewRows) break;
    }
  }
  return best;
}

}  // namespace

double likely_runs(const LoraShape& s, int tiles) {
  const std::int64_t groups = used_adapters(s);
  const std::int64_t tokens = 64 * tiles, half = ceil_div<std::int64_t>(groups, 2);
  return static_cast<double>(groups == 1 ? ceil_div(s.num_tokens, tokens)
                                         : std::max(groups, s.num_tokens / tokens + half));
}

ShrinkPlan wgmma_plan(int shape, int leaves) {
  ShrinkPlan c;
  c.kernel = ShrinkKernel::kWgmma;
  c.shape = shape;
  c.tile_tokens = 64;
  c.rows = kWgmmaShapes[shape].rows;
  c.leaves = leaves;
  if (kWgmmaShapes[shape].share == Share::kLeaf) c.partials = Partials::kFinish;
  return c;
}

double wgmma_clocks(const LoraShape& s, const Machine& m, const ShrinkPlan& c) {
  return wgmma_clocks(costs_of(s), s, m, {kWgmmaShapes[c.shape], c.leaves});
}

double mma_clocks(const LoraShape& s, const Machine& m, int index) {
  const MmaShape& shape = kMmaShapes[index];
  constexpr double kStart = 6000, kLeast = 400, kPerSm = 4;
  const auto tiles = static_cast<double>(max_tiles(s.num_tokens, s.num_adapters, 16));
  return by_ranks(s, shape.rows(), [&](const Columns& columns) {
    const double ctas = std::ceil(tiles * columns.ctas / m.sms);
    const double tokens = std::min(16.0, static_cast<double>(s.num_tokens) / tiles);
    const double bytes = 256 * (tokens + columns.rows / columns.ctas);
    return stage_clocks(kCosts, ctas, kPerSm, bytes, shape.stages - 1, 0, kLeast) *
               std::ceil(static_cast<double>(s.hidden) / 128) +
           std::ceil(ctas / kPerSm) * kStart;
  });
}

ShrinkPlan wgmma_shrink(const LoraShape& s, const Machine& m) {
  const bool splits = num_leaves(s.hidden) > 1;
  return least_clocks(costs_of(s), s, m, [&](const WgmmaShape& shape) {
    return shape.share != Share::kLeaf || splits;
  });
}

/// (us on an H100, chunks of K on wgmma and the decode kernel: 122 tokens of one adapter, rank 64,
/// 16,384 to 16,384 + 2 x 1,024, 16.9 and 26.0; 142 of 3, 8,192 to 8,192 + 2 x 1,024, 15.3 and
/// 20.0; 158 of one, rank 32, 3,584 to 3,584 + 2 x 512, 6.4 and 7.6; 53 of one, rank 128, 8,192 to
/// 2 x 7,168, 12.0 and 14.3; but 47 of one, rank 256, 3,584 to 4,096, 10.7 and 9.6; of one slice,
/// rank 32, 141 of one, 14,336 to 4,096, 9.9 and 8.0.)
bool suits_leaves(const LoraShape& s, const Machine& m) {
  constexpr std::int64_t kLeastTokens = 40;  // of an adapter
  constexpr int kLeastRank = 17, kMostRank = 128, kLeastRows = 96;
  return s.op == Op::kApply && runs_wgmma(s, m) && tokens_per_adapter(s) >= kLeastTokens &&
         s.max_rank >= kLeastRank && s.max_rank <= kMostRank && s.rank_rows() >= kLeastRows;
}

ShrinkPlan leaf_shrink(const LoraShape& s, const Machine& m, Partials partials) {
  ShrinkPlan c = least_clocks(kCosts, s, m,
                              [](const WgmmaShape& shape) { return shape.share == Share::kLeaf; });
  c.partials = partials;
  return c;
}

/// In CTAs that hold no more rank rows than there are, if they do. (us on an H200, 16 rank rows and
/// six stages, 32 and four: 9,393 tokens of 420 adapters, three slices of rank 4, K = 4,096, 44.8
/// and 50.3; 7,453 of 239, one slice, K = 3,072, 17.9 and 19.7; but 5,841 of 403, three of rank 16,
/// K = 1,024, 31.6 and 26.3.)
ShrinkPlan mma_shrink(const LoraShape& s) {
  ShrinkPlan c;
  c.shape = s.rank_rows() <= kMmaShapes[kNarrowMma].rows() ? kNarrowMma : 0;
  c.rows = kMmaShapes[c.shape].rows();
  return c;
}

/// (us on an H200, tiles of 16 and wgmma: 7,453 tokens of 239 adapters, Zipf, rank 4, K = 3,072,
/// 0.75 of its clocks, 17.9 and 29.9; but 4,624 of 160, even, three slices of rank 16, K = 1,024,
/// 0.92 of them, 20.3 and 15.3.)
bool suits_mma(const LoraShape& s, const Machine& m, const ShrinkPlan& mma,
               const ShrinkPlan& wgmma) {
  constexpr double kClearly = 0.85;
  return max_tiles(s.num_tokens, s.num_adapters, 16) <= kMostMmaTiles &&
         mma_clocks(s, m, mma.shape) < kClearly * wgmma_clocks(s, m, wgmma);
}

/// Of few rank rows tiles of 16 where an adapter has so few tokens that the last one of 64 counts.
/// (us, tiles of 16 and wgmma before the same expand: 4,884 tokens of 51 adapters, Zipf, rank 4,
/// 1,024 to 512 + 2 x 256, 15.9 and 18.3; on an H100 5,952 of 131, Zipf, rank 8, 1,024 to 2 x
/// 3,072, 75.3 and 77.7; 14,537 of 144, even, rank 4, 4,736 to 3,584, 140 and 144; 10,936 of 240,
/// Zipf, rank 16, 2,048 to 1,024, 54.5 and 53.9; but 15,447 of 30, 2,048 to 2,048, 82.5 and 78.9.)
ShrinkPlan sm90_shrink(const LoraShape& s, const Machine& m) {
  constexpr std::int64_t kMostTokens = 128;  // of an adapter
  ShrinkPlan c = wgmma_shrink(s, m);
  const ShrinkPlan mma = mma_shrink(s);
  if (s.op == Op::kApply && mma.shape == kNarrowMma && tokens_per_adapter(s) <= kMostTokens &&
      suits_mma(s, m, mma, c)) {
    return mma;
  }
  suits_walk(s, m, c);
  return c;
}

/// (us on an H200, wgmma and tiles of 16, rank 256: 914 tokens of 110 adapters, 2,048 to 2 x 8,192,
/// 452 and 456; but 66 of 17, 5,120 to 3 x 5,120, 98 and 95.5, where wgmma has 0.94 of the clocks.)
ShrinkPlan walking_shrink(const LoraShape& s, const Machine& m) {
  constexpr double kClearly = 0.9;
  const ShrinkPlan mma = mma_shrink(s);
  if (runs_wgmma(s, m)) {
    const ShrinkPlan c = wgmma_shrink(s, m);
    const bool high = s.max_rank > kExpandPrefillMaxRank;
    const double clocks =
        wgmma_clocks(high ? kHighCosts : kCosts, s, m, {kWgmmaShapes[c.shape], c.leaves});
    if (clocks < (high ? kClearly : 1) * mma_clocks(s, m, mma.shape)) return c;
  }
  return mma;
}

}  // namespace mortar::lora
