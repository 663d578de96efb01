// SPDX-License-Identifier: Apache-2.0
// When expand loads B straight into the fragments of the MMA (cuda/expand_direct.cu), and how many
// columns a CTA takes then.
#include <algorithm>

#include "lora/launch_choice.h"

namespace mortar::lora {
namespace {

/// Columns of all tiles from which on it does: below, what counts is the time to the first result.
/// (us, direct and decode, rank 8: one token, 8,192 to 2 x 28,672, 5.0 and 3.8; 10 tokens of 76
/// adapters, 2,048 to 2 x 8,192, 4.4 and 5.2; on an H100 119 of 119, 1,024 to 512 + 2 x 256, 6.7
/// and 7.8.)
constexpr std::int64_t kDirectColumns = 100000, kDirectColumnsBy8 = 60000;

/// Tokens of an adapter and columns of all tiles up to which it takes what tiles of 64 would take
/// otherwise, of such ranks. (us, direct and prefill: 776 tokens of 22 adapters, rank 4, qkv, 11.5
/// and 14.2; 995 of 53, rank 8, 8,192 to 8,192 + 2 x 1,024, 28.8 and 36.6; but 431 of 12, rank 16,
/// gate_up, 24.4 and 22.5; 6,710 of 171, rank 4, 5,120 to 2 x 13,824, 334 and 297.)
constexpr std::int64_t kDirectTokens = 45, kDirectMostColumns = 1200000;

}  // namespace

bool runs_direct(const LoraShape& s) {
  return s.one_type && s.aligned_y && h_width(s) <= kDirectMaxRank;
}

ExpandPlan direct_expand(int cols, int groups) {
  ExpandPlan c;
  c.kernel = ExpandKernel::kDirect;
  c.cols = cols;
  c.groups = groups;
  return c;
}

bool runs_direct_parts(const LoraShape& s, const Machine& m) {
  return s.op == Op::kApply && s.float_weights && m.arch == 90 && s.aligned_y &&
         h_width(s) <= kDirectMaxRank;
}

bool shares_steps(const LoraShape& s, const Machine& m) {
  return runs_direct(s) && m.arch >= 90 && s.max_rank * kDirectGroups <= kDirectMaxRank;
}

namespace {

/// Groups of columns that share an MMA step. Several where adapters have a token or two, or up to
/// four and many columns. (us on an H100, one and four, rank 4: 3 tokens of 93 adapters, 5,120 to 3
/// x 5,120, 3.6 and 2.6; 17 of 31, 5,120 to 5,120, 4.0 and 3.1; one token, 13,824 to 5,120, 3.5 and
/// 2.9; on an H200 230 tokens of 135 adapters, 5,120 to 2 x 13,824, 40.9 and
/// 25.5; 97 of 62, 1,024 to 2,048 + 2 x 1,024, 5.4 and 4.9; 98 of 69, 8,192 to 8,192 + 2 x 1,024,
/// 16.3 and 12.2; 267 of 112, 4,096 to 2 x 14,336, 23.0 and 19.4; 894 of 390, 896 to 3,584, 13.4
/// and 12.2; on an H100 562 of 169, 3,584 to 2 x 18,944, 57.7 and 52.5; but 240 of 81, 7.6 and 8.5;
/// 14 of 18, 1,024 to 2 x 3,072, 3.07 and 3.15.)
int step_groups(const LoraShape& s, const Machine& m) {
  constexpr std::int64_t kFewTokens = 2, kMoreTokens = 4, kManyColumns = 1000000;
  const std::int64_t columns = max_tiles(s.num_tokens, s.num_adapters, 16) * s.sum_widths();
  const std::int64_t tokens = tokens_per_adapter(s);
  const bool few = tokens <= kFewTokens || (tokens <= kMoreTokens && columns >= kManyColumns);
  return few && shares_steps(s, m) ? kDirectGroups : 1;
}

}  // namespace

ExpandPlan choose_direct(const LoraShape& s, const Machine& m) {
  // As many CTAs as run at once, but none with more than its share of bytes, or the last ones leave
  // SMs idle. (us, by columns: 230 tokens of 135 adapters, rank 4, 5,120 to 2 x 13,824, 46 with
  // 1,024, 40 with 4,096, 52 with 8,192; 453 of 24, 27 with 1,024, 31 with 2,048, 46 with 4,096.)
  // Of several groups a full tile, which takes one at a time, would be last. (us, 663 of 351, 3,584
  // to 4,096, 2,560 columns 17.3, 3,584 19.8; 414 of 243, 2,048 to 2 x 8,192, 2,560 21.0, 4,096
  // 23.8; but 265 of 274, 3,584 to 2 x 18,944, 3,072 51.8, 5,120 49.8.)
  constexpr std::int64_t kOneGroup = 60 * 1024, kGroups = 40 * 1024, kFewTiles = 32;
  const std::int64_t tiles = max_tiles(s.num_tokens, s.num_adapters, 16);
  const int groups = step_groups(s, m), step = kDirectCols * groups;
  // There are fewer tiles than `tiles` as a rule. (us, four groups, three CTAs an SM and four: 28
  // tokens of 31 adapters, 2,048 to 2 x 8,192, 6.2 and 5.1.)
  constexpr int kMostPerSm = 4;
  const int per_sm = groups == 1 && tiles <= kFewTiles ? 3 : kMostPerSm;
  const std::int64_t column_bytes = ceil_div(4 * s.num_tokens, tiles) + 2 * s.max_rank;
  const std::int64_t most = groups > 1 ? kGroups : kOneGroup;
  ExpandPlan c = direct_expand(step, groups);
  while (tiles * column_blocks(s, c.cols) > per_sm * m.sms &&
         (c.cols + step) * column_bytes <= most) {
    c.cols += step;
  }
  // Whole rounds of the groups of columns that a warp has in flight. (us on an H100, 240 tokens of
  // 81 adapters, rank 4, 3,584 to 3,584 + 2 x 512, 1,024 columns 9.4, 1,280 10.5; 453 of 24, 5,120
  // to 2 x 13,824, 31.7 and 35.0; but 98 of 69, 8,192 to 8,192 + 2 x 1,024, 1,536 columns 17.3,
  // 1,664 14.8.)
  constexpr int kRound = 4 * kDirectCols;
  // Not where a few more CTAs come of that than there are places, or hardly fewer, of which some
  // start late. (Rank 8: 9 of 201, 4,096 to 2 x 14,336, 512 columns 5.8, 768 5.1; 17 of 81, 4,096
  // to 16,384, 7.6 and 5.4; 75 of 125, 1,024 to 4,096, 512 columns 7.9, 640 6.9; but 448 CTAs in
  // 528 places, 14 of 146, 2,048 to 2 x 8,192, 512 columns 4.1, 640 4.6; by Zipf's law 141 of 69,
  // 2,048 to 8,192, 1,024 columns 8.3, 1,280 9.3.)
  constexpr int kNearly = 93;  // per cent
  const int rounded = c.cols / kRound * kRound;
  const auto nearly_fit = [&](int cols) {
    return 100 * even_tiles(s) * column_blocks(s, cols) <= kNearly * kMostPerSm * m.sms;
  };
  if (groups == 1 && c.cols > kRound && (nearly_fit(rounded) || !nearly_fit(c.cols))) {
    c.cols = rounded;
  }
  // As many CTAs, the widest of which have fewer columns, where those of half of the tiles run at
  // once: by Zipf's law there may be no more. (us on an H100: 488 of 484, Zipf, rank 4, 4,096 to
  // 4,096, 2,048 columns 14.1, 3,072 15.4; 975 of 84, 2,048 to 2,048 + 2 x 512, 1,024 columns 12.5,
  // 1,536 14.3; 1,059 of 135, even, 2,048 to 2 x 2,048, 12.8 and 13.4; 426 of 230, rank 8, 7,168 to
  // 8,192, 2,048 columns 31.6, 2,560 33.0; but all tiles there, 1.3 rounds of CTAs, 367 of 337,
  // 3,584 to 3,584, 27.0 and 24.9, 1,463 of 333, 4,096 to 4,096, 28.7 and 28.1; of more CTAs 1,389
  // of 331, 8,192 to 8,192, 45.8 and 44.9.)
  const std::int64_t blocks = ceil_div<std::int64_t>(s.max_width(), c.cols);
  const int even = round_up(static_cast<int>(ceil_div(s.max_width(), blocks)), kRound);
  const std::int64_t ctas = column_blocks(s, even);
  if (ctas == column_blocks(s, c.cols) && tiles * ctas <= 2 * per_sm * m.sms) {
    c.cols = std::min(c.cols, even);
  }
  return c;
}

/// CTAs that run at once, but none with more than its share of bytes. (us on an H200, by columns:
/// 551 tokens of 55 adapters, rank 4, 16,384 to 2 x 53,248, 172 with 1,152, 155 with 3,072; 276 of
/// 24, rank 8, 89 with 1,152, 85 with 2,304, 93 with 4,608; 29 of 172, rank 4, 3,584 to 2 x 18,944,
/// 21 with 1,024, 19 with 2,048, 31 with 4,096, by mma.sync from a ring of B 26.)
ExpandPlan direct_parts_expand(const LoraShape& s, const Machine& m) {
  constexpr std::int64_t kMostBytes = 120 * 1024;
  constexpr int kPerSm = 4;
  const std::int64_t tiles = max_tiles(s.num_tokens, s.num_adapters, 16);
  const std::int64_t bytes = ceil_div(4 * s.num_tokens, tiles) + 4 * s.max_rank;  // of a column
  ExpandPlan c = direct_expand(kDirectCols, 1);
  while (tiles * column_blocks(s, c.cols) > kPerSm * m.sms &&
         (c.cols + kDirectCols) * bytes <= kMostBytes) {
    c.cols += kDirectCols;
  }
  c.cols = even_cols(s, c.cols, kDirectCols);
  return c;
}

bool suits_direct_parts(const LoraShape& s, const Machine& m) {
  return runs_direct_parts(s, m) && best_tile_tokens(s) == 16 &&
         max_tiles(s.num_tokens, s.num_adapters, 16) * s.sum_widths() >= kDirectColumns;
}

bool suits_direct(const LoraShape& s) {
  if (!runs_direct(s)) return false;
  const std::int64_t columns = max_tiles(s.num_tokens, s.num_adapters, 16) * s.sum_widths();
  if (best_tile_tokens(s) == 64) {
    return s.max_rank <= kDirectRank && tokens_per_adapter(s) <= kDirectTokens &&
           columns <= kDirectMostColumns;
  }
  // Rows that start at multiples of 8 bytes come by 8 bytes otherwise. (us on an H100, rank 4,
  // decode and direct: 47 tokens of 3 adapters, 8,192 to 8,192 + 2 x 1,024, 4.2 and 5.1; 542 of
  // one, 3,584 to 896 + 2 x 128, 5.8 and 6.1; but 321 of one, 14,336 to 4,096, 10.2 and 9.3.)
  const bool by_8 = s.b_by_8 && (!knows_tiles(s) || columns >= kDirectColumnsBy8);
  return by_8 || (s.max_rank <= kDirectRank && columns >= kDirectColumns);
}

}  // namespace mortar::lora
