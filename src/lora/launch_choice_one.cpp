// SPDX-License-Identifier: Apache-2.0
// Where lora_apply is one kernel.
#include <algorithm>

#include "lora/launch_choice.h"

namespace mortar::lora {

namespace {

/// Shared memory of a CTA with so many columns, static and dynamic.
std::int64_t one_cta_smem(const LoraShape& s, int cols) {
  return one_smem(s.hidden, cols, one_ranks(s.max_rank)) + kOneStaticSmem;
}

}  // namespace

bool runs_one(const LoraShape& s, const Machine& m, int cols) {
  constexpr std::int64_t kLongest = 1 << 20;  // more of K fits no CTA, and its bytes no int
  return s.op == Op::kApply && m.arch == 90 && s.one_type && s.aligned_x && s.aligned_y &&
         s.hidden > 0 && s.hidden <= kLongest && s.max_rank > 0 && s.max_rank <= kOneMaxRank &&
         cols % 32 == 0 && cols <= kOneMaxCols && one_cta_smem(s, cols) <= m.max_smem &&
         max_tiles(s.num_tokens, s.num_adapters, 16) <= 65535;
}

ExpandPlan one_expand(int cols) {
  ExpandPlan c;
  c.kernel = ExpandKernel::kOne;
  c.cols = cols;
  return c;
}

namespace {

/// Tiles of 16 tokens that there are likely to be: those of a sole adapter are known, of several
/// the last ones are half full.
double likely_tiles(const LoraShape& s) {
  const auto tokens = static_cast<double>(s.num_tokens);
  const auto adapters = static_cast<double>(used_adapters(s));
  if (adapters <= 1) return static_cast<double>(ceil_div<std::int64_t>(s.num_tokens, 16));
  return std::min(static_cast<double>(max_tiles(s.num_tokens, s.num_adapters, 16)),
                  std::max(adapters, tokens / 16 + adapters / 2));
}

/// CTAs of the one kernel that an SM has shared memory for, and that the device runs at once:
/// clusters leave some SMs idle.
std::int64_t ones_per_sm(const LoraShape& s, const Machine& m, int cols) {
  return std::min<std::int64_t>(kOnePerSm, m.sm_smem / (one_cta_smem(s, cols) + 1024));
}
double room_for_one(const LoraShape& s, const Machine& m, int cols) {
  return 0.88 * m.sms * static_cast<double>(ones_per_sm(s, m, cols));
}

/// Share of that up to which the next call's CTAs find room, too: of one CTA an SM all 16 clusters
/// do. (us on an H200: 23 tokens of one adapter, rank 64, 3,584 to 2 x 4,736, 64 CTAs 4.2, 96 5.3.)
double share_of_two(const LoraShape& s, const Machine& m, int cols) {
  return ones_per_sm(s, m, cols) == 1 ? 0.56 : 0.5;
}

/// Tokens from which on its CTAs may take all of the chip. A model's decode step has fewer, of
/// which more CTAs than below delay the next matrix product.
constexpr std::int64_t kManyTokens = 65;
bool fills_chip(const LoraShape& s) { return s.num_tokens >= kManyTokens; }

/// us a call of the one kernel, and of two, on an H100, fitted to choose well among 822 problems of
/// up to 146 tokens and ranks of 4 to 64 in 19 layers, calls back to back: what it chooses takes
/// 0.873 times as long as two kernels do on average, and the best choice would 0.854. Of the one,
/// up to 64 tokens, fitted anew on an H200 to 154 plans of seeds 1 to 4. For the one counts how
/// many CTAs start, what each of them reads and how many read at once, and whether the next call's
/// CTAs find room beside them; for two, what all CTAs read, and the split-K partials that each of
/// expand's adds. From kManyTokens on fitted anew to 440 problems of up to 600 tokens
/// and 64 adapters. (us, one kernel and two: 146 tokens of one adapter, rank 32, 4,096 to 1,024 + 2
/// x 256, 5.7 and 7.0; 91 of 4, rank 64, 3,584 to 3,584, 4.3 and 6.2; 422 of 2, rank 16, 2,048 to
/// 1,024, 3.6 and 4.8; but 74 of one, rank 32, 1,024 to 2,048 + 2 x 1,024, 256 columns a CTA 3.2,
/// 512 3.7; 112 of one, rank 32, 8,192 to 8,192, 7.4 and 7.0.)
double us_of_one(const LoraShape& s, const Machine& m, int cols, double ctas) {
  const auto rank = static_cast<double>(s.max_rank), tokens = static_cast<double>(likely_tile(s));
  const auto leaves = static_cast<double>(num_leaves(s.hidden));
  const double kb = one_turns(s.hidden) * (rank + tokens) + cols * 2 * (rank + 2 * tokens) / 1024;
  const double full = ctas / room_for_one(s, m, cols);
  if (fills_chip(s)) {
    return 1.4 + 0.052 * leaves + 0.0026 * ctas + (0.0086 + 0.00007 * ctas) * kb +
           2.24 * std::max(0.0, full - 0.5);
  }
  return 1.5 + 0.043 * leaves + 0.0035 * ctas + (0.006 + 0.0001 * ctas) * kb +
         (full > share_of_two(s, m, cols) ? 0.29 : 0);
}
double us_of_two(const LoraShape& s, double tiles) {
  const auto rank = static_cast<double>(s.max_rank), tokens = static_cast<double>(likely_tile(s));
  const auto hidden = static_cast<double>(s.hidden), columns = static_cast<double>(s.sum_widths());
  const double rows = s.num_slices * rank;
  const double a = hidden * rows, x = hidden * 16, b = columns * rank, y = columns * 2 * tokens;
  const double partials = static_cast<double>(num_leaves(s.hidden)) * rows * tokens;
  return 2.6 + tiles * (0.4e-6 * a + 0.96e-6 * x + 0.48e-6 * b + 0.8e-6 * y) + 3.8e-5 * partials;
}

/// Most CTAs, unless each tile and slice has one cluster alone: after more, the next matrix
/// product of a model takes longer. (us, 50 tokens of 4 adapters, rank 32, 8,192 to 2,048, 40 CTAs
/// 3.6, two kernels 4.9; 36 of 5, rank 16, 2,048 to 1,024, 40 CTAs 2.35, 80 2.55; on an H100 8 of
/// 8, 4,096 to 4,096, 64 CTAs 2.75, 128 3.04, behind a matrix product 4.86 and 5.11. One cluster a
/// tile and slice, and two kernels: 40 of 369, rank 8, 4,096 to 4,096, 3.4 and 4.4; 30 of 11, rank
/// 64, 768 to 1,024, 3.6 and 4.9; 32 of 32, rank 16, 4,096 to 4,096, behind a matrix product, 6.2
/// and 7.3.) Tiles of few tokens and long K, so many of which leave no room for those of the next
/// call where an SM has one CTA. (us on an H100, rank 16, 14,336 to 4,096: 6 tokens of 6 adapters
/// 3.6 and 4.35; 8 of 8 4.7 and 4.4, but behind a matrix product 5.4 and 6.5; 14 of 14 6.0 and
/// 5.4; where an SM has more, 46 of 24, 8,192 to 2,048, 3.9 and 4.8; 9 of 29, 4,736 to 3,584, 3.0
/// and 3.8.)
constexpr std::int64_t kHalfTile = 8;
constexpr double kMostCtas = 128, kMostTilesOfTurns = 8;
constexpr int kRankOfTurns = 8;
/// Ranks above which tiles of few tokens of long K take two kernels: every CTA that adds up a part
/// of K reads all rank rows, which those of the decode shrink share out (1.1 to 1.4 times as long).
constexpr int kMostRankOfFew = 32;
constexpr std::int64_t kFewTokens = 7;
/// Ranks of which many tokens take it with one turn and so many columns of all tiles alone: those
/// of expand_direct.cu cost less than counted. (us on an H100, rank 4, one kernel and two: 88
/// tokens of 12 adapters, qkv, 5.8 and 4.4; 152 of 6, 14,336 to 4,096, 7.0 and 6.2; but 215 of 8,
/// 2,048 to 1,024, 2.7 and 4.1.)
constexpr int kLowRank = 4;
constexpr double kLowColumns = 70000;

}  // namespace

bool suits_one(const LoraShape& s, const Machine& m, ExpandPlan& c) {
  if (s.num_tokens <= 0 || !runs_one(s, m, 32)) return false;
  const double tiles = likely_tiles(s);
  const bool fills = fills_chip(s), few = likely_tile(s) < kHalfTile;
  const bool turns = one_turns(s.hidden) > 1;
  if (turns && s.max_rank > kMostRankOfFew && likely_tile(s) <= kFewTokens) return false;
  if (fills && s.max_rank <= kLowRank &&
      (one_turns(s.hidden) > 1 || tiles * static_cast<double>(s.sum_widths()) > kLowColumns)) {
    return false;
  }
  const bool long_turns =
      few && !fills && turns && s.max_rank > kRankOfTurns && tiles > kMostTilesOfTurns;
  double least = us_of_two(s, tiles);
  bool suits = false;
  for (int cols = 32; runs_one(s, m, cols); cols *= 2) {
    const double ctas =
        tiles * kOneCluster * static_cast<double>(column_blocks(s, cols * kOneCluster));
    const bool spread = column_blocks(s, cols * kOneCluster) > s.num_slices;
    if (ctas > room_for_one(s, m, cols) || (!fills && spread && ctas > kMostCtas)) continue;
    if (long_turns && ones_per_sm(s, m, cols) == 1) continue;
    if (const double us = us_of_one(s, m, cols, ctas); us < least) {
      least = us;
      c = one_expand(cols);
      suits = true;
    }
  }
  return suits;
}

}  // namespace mortar::lora
