// SPDX-License-Identifier: Apache-2.0
// Launch choices of LoRA's CUDA backend: columns with which the CTAs of the decode expand make one
// round, as the host cuts them and where the device does.
#include <algorithm>
#include <cstdint>

#include "lora/launch_choice.h"

namespace mortar::lora {

namespace {

constexpr int kLowRank = 64;
/// Of higher ranks, elements of B of a CTA from which on four CTAs share an SM, if all of them ran
/// at once, and columns that it then takes at most: half a round of CTAs more would take as long as
/// a whole one. CTAs that start and end beside others are faster than more bytes of each in flight.
/// (us on an H100, four and two or three: 125 tokens of 181 adapters, ranks up to 64, 1,024 to
/// 4,096, 22.2 and 28.1; 431 of 20, rank 128, 8,192 to 2 x 28,672, 191 and 252; 20 of 102, 3,584 to
/// 2 x 18,944, 21.4 and 25.2; but 90 of one, rank 128, 5,120 to 2 x 13,824, 20.7 and 19.4. Of 179
/// random problems with 40,000 elements or more 0.938 times as long on average, of 58 with 20,000
/// to 40,000 0.955 times, of 34 down to 12,000 0.97 times, of 37 down to 8,000 1.02 times. At most
/// 2,048 columns in place of 1,024: 1.02 times, 97 problems; but 11 of 149, 8,192 to 2 x 28,672,
/// 1,280 columns 27.5, 1,024 31.1; on an H200 11 of 8, ranks up to 64, 16,384 to 2 x 53,248, 1,664
/// columns 27.5, 1,024 30.6, but of rank 128 on an H100 22 of 59, 3,584 to 2 x 18,944, 65.2 and
/// 60.8.)
constexpr std::int64_t kDenseElements = 12000, kMostDenseCols = 1024;
constexpr std::int64_t kOneRoundCols = 1792, kOneRoundWideCols = 1536;

/// The mean rank of those that adapters may have, if each has its own.
std::int64_t mean_rank(const LoraShape& s) { return s.ragged ? s.max_rank / 2 : s.max_rank; }

}  // namespace

/// Of short CTAs a few more than a round take as long as all before them. (us on an H200: 38 tokens
/// of 323 adapters, ranks up to 64, 896 to 3,584, 532 CTAs 8.4, 380 6.1.) Of up to four tiles CTAs
/// that are long for ragged ranks' mean, too. (Four tokens of 7 adapters, 16,384 to 2 x 53,248,
/// 1,664 columns 17.4, 832 14.5; but on an H100 one token of such, 384 columns 5.2, 256 5.9.)
void share_round(const LoraShape& s, const Machine& m, std::int64_t likely, ExpandPlan& c) {
  constexpr std::int64_t kFewTiles = 4;
  const std::int64_t round = kDenseExpandPerSm * m.sms;
  const std::int64_t own = ceil_div<std::int64_t>(s.sum_widths() * likely, round);
  const bool low = s.max_rank <= kLowRank;
  const bool few = low && max_tiles(s.num_tokens, s.num_adapters, 16) <= kFewTiles;
  if (few && !s.ragged) return;
  if (own * (few ? mean_rank(s) : s.max_rank) < kDenseElements) return;
  c.per_sm = kDenseExpandPerSm;
  c.block_cols = decode_ring_fits(s, m, own, 128, kDenseExpandStages) ? 128 : 64;
  c.cols = even_cols(s, own, c.block_cols);
  if (const std::int64_t most = low ? kOneRoundCols : kOneRoundWideCols;
      own > most || c.cols > most) {
    c.cols = even_cols(s, std::min(own, kMostDenseCols), c.block_cols);
  }
  const std::int64_t tiles = expected_tiles(s);
  const auto ctas = [&](int cols) { return tiles * column_blocks(s, cols); };
  // There may be so many tiles fewer than the host has to assume that CTAs of fewer columns make a
  // round. (us on an H100: 172 tokens of 11 adapters, ranks up to 64, 2,048 to 2 x 8,192, 768
  // columns 14.1, 512 13.3; 46 of 11, 16,384 to 16,384, 512 columns 17.2, 384 16.2.)
  while (c.cols > 2 * c.block_cols && 20 * ctas(c.cols - c.block_cols) <= 19 * round) {
    c.cols -= c.block_cols;
  }
  if (c.cols >= kDenseExpandStages * c.block_cols || 20 * ctas(c.cols) > 21 * round) return;
  while (ctas(c.cols) > round && c.cols < s.max_width()) c.cols += c.block_cols;
}

/// Where adapters have as many tokens each there are nearly as many tiles as there may be; by
/// Zipf's law half as many, and CTAs of columns cut for all would be few and long. (us on an H200,
/// cut by the device and by the host: 192 tokens of 125 adapters, rank 16, 4,096 to 16,384, 20.0
/// and 23.3; 141 of 80, ranks up to 64, 8,192 to 8,192, 26.9 and 28.3; fewer CTAs, of 1.04 rounds,
/// 407 of 132, rank 32, 4,736 to 3,584, 28.2 and 32.2. To know the tiles first takes some 0.3 us,
/// and short CTAs have no use for it: 269 of 67, rank 16, 13,824 to 5,120, 20.5 and 18.8. CTAs
/// that run at once are best left alone up to nearly all places of the chip: 384 in 396 places
/// took 33.3, and 43.2 when they were fewer and longer, 256 of 64, rank 16, 4,096 to 2 x 14,336.)
int expand_round(const LoraShape& s, const Machine& m, const ExpandPlan& c) {
  constexpr int kMostRounds = 3;
  constexpr std::int64_t kLongBytes = 64 << 10;  // of B and y of a CTA
  constexpr double kFull = 0.975;
  if (m.arch < 90 || c.kernel != ExpandKernel::kDecode || c.cluster > 1 || c.tile_tokens != 16 ||
      c.per_sm == 1 || s.segments || knows_tiles(s) || h_width(s) > kLowRank) {
    return 0;
  }
  const std::int64_t tiles = max_tiles(s.num_tokens, s.num_adapters, 16);
  const std::int64_t bytes = c.cols * (2 * mean_rank(s) + 4 * ceil_div(s.num_tokens, tiles));
  const auto ctas = static_cast<double>(decode_expand_per_sm(s, m, c) * m.sms);
  const auto round = static_cast<int>(kFull * ctas);
  const bool suits = bytes >= kLongBytes && tiles * column_blocks(s, c.cols) <= kMostRounds * round;
  return suits ? round : 0;
}

}  // namespace mortar::lora
