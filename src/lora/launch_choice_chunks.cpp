// SPDX-License-Identifier: Apache-2.0
// Launch choices of LoRA's CUDA backend: K chunks that a CTA of the decode shrink takes, and those
// of prefill whose partials the decode expand adds.
#include <algorithm>

#include "lora/launch_choice.h"

namespace mortar::lora {

bool takes_chunks(const LoraShape& s, const Machine& m, int chunks) {
  constexpr int kLeastRows = 8;  // of an MMA
  const int rows = decode_ring_rows(s.hidden, 1) / chunks;
  return leaf_size(s.hidden) == kDecodeK && rows >= kLeastRows &&
         decode_smem(s.hidden, rows, 1, chunks) + kDecodeStaticSmem <= m.max_smem;
}

namespace {

constexpr int kMostChunks = 4, kFewRows = 12;
/// Tokens of an adapter up to which CTAs take chunks, and where one for each would be rounds.
constexpr std::int64_t kFewTokens = 2, kMoreTokens = 4;

/// Whether a CTA of all rank rows can take so many chunks.
bool can_take(const LoraShape& s, const Machine& m, int chunks) {
  return chunks * s.rank_rows() <= decode_ring_rows(s.hidden, 1) &&
         chunks <= num_leaves(s.hidden) && takes_chunks(s, m, chunks);
}

}  // namespace

/// (us on an H100, persistent warps that it is compared with and two chunks: 111 of 334, rank 8,
/// 8,192 to 8,192, 18.8 and 17.0; 28 of 28, 53,248 to 16,384, 17.1 and 15.4; but where expand takes
/// several groups of columns a step, one full tile after the other, 53 of 432, rank 4, Zipf, 16,384
/// to 16,384, 8.8 and 11.2.)
int chunks_of_cta(const LoraShape& s, const Machine& m) {
  const bool few = s.rank_rows() <= kFewRows && s.num_slices == 1 && tokens_per_adapter(s) == 1;
  return few && !shares_steps(s, m) && can_take(s, m, 2) ? 2 : 1;
}

/// Of low ranks a CTA has little to read, and its life is what it waits for: some 3 us, of which A
/// and x are on their way for one. So CTAs take several chunks, though each is ready 0.3 us later:
/// of long K as many as there can be, where CTAs get an SM each so and would not otherwise; of
/// adapters that have a token or two as many as let CTAs of expand start beside them, or two, and
/// x of half a tile at a time, where there are rounds of CTAs, so that more of A is on its way in
/// an SM. (us on an H200, one chunk, two and x of half a tile, four and that: 22 tokens of 251
/// adapters, rank 4, qkv of 8,192, 6.7, 4.8; 42 of 25, 8,192 to 8,192, 5.2, 4.3, 4.9; 161 of 469,
/// 28,672 to 8,192, 29.7, 24.4, 24.2, x of whole tiles 26.1; 103 of 410, rank 8, 14,336 to 4,096,
/// 13.4, 13.2, 14.0; but 61 of 114, rank 4, 16,384 to 4,096 + 2 x 256, 12.7 and 13.6; 33 of 9,
/// rank 4, 28,672 to 8,192, 5.9, four 8.8. One token, rank 4, 53,248 to 16,384: one chunk 4.9, two
/// 4.7, four 4.1. On an H100, room for all: 10 of 109, rank 4, 16,384 to 16,384, 3.8 and 4.6; 8 of
/// 8, rank 16, 14,336 to 4,096, 4.3 and 5.0; no room either way: 36 of 387, rank 8, 4,736 to 3,584,
/// 5.9 and 6.7; short K: 12 of 21, rank 4, 5,120 to 3 x 1,280, 4.4 and 4.75; more rank rows: 32 of
/// 32, rank 16, 14,336 to 4,096, 9.7 and 10.3; with x of whole tiles, of a few tokens more, 79 of
/// 28, rank 4, 18,944 to 3,584, 7.5 and 6.7.)
void take_chunks(const LoraShape& s, const Machine& m, const ExpandPlan& expand, ShrinkPlan& c) {
  constexpr int kHalfTile = 8;
  constexpr std::int64_t kShortLeaves = 32, kRound = 8;  // CTAs of an SM
  const int rows = s.rank_rows();
  if (rows > c.rows || !can_take(s, m, 2)) return;
  const int most = can_take(s, m, kMostChunks) ? kMostChunks : 2;
  const auto take = [&](int chunks, int x_tokens) {
    c.leaves = chunks;
    c.x_tokens = x_tokens;
    c.rows = rows;
  };
  if (num_leaves(s.hidden) > kShortLeaves && !shrink_fits(s, m, rows, 1, expand) &&
      shrink_fits(s, m, rows, most, expand)) {
    return take(most, c.x_tokens);
  }
  const std::int64_t tokens = tokens_per_adapter(s);
  if (rows > kFewRows || tokens > kMoreTokens || both_fit(s, m, rows, 1, expand)) return;
  for (int chunks = 2; chunks <= most && tokens <= kFewTokens; chunks *= 2) {
    if (both_fit(s, m, rows, chunks, expand)) {
      return take(chunks, chunks > 2 ? kHalfTile : c.x_tokens);
    }
  }
  if (decode_shrink_ctas(s, rows, 1) > kRound * m.sms) {
    take(2, tokens <= kFewTokens ? kHalfTile : c.x_tokens);
  }
}

namespace {

/// Row of kWgmmaShapes: K chunks in the smallest CTAs.
constexpr int kSmallLeaf = 6;
static_assert(kWgmmaShapes[kSmallLeaf].rows == 16 &&
              kWgmmaShapes[kSmallLeaf].share == Share::kLeaf);

/// Columns of a block of B of a CTA of expand that adds the partials of chunks.
int adding_block(const LoraShape& s) { return h_width(s) > 16 ? 128 : 256; }

/// Columns of a CTA of the decode expand that adds the partials of chunks, with which all of them
/// run at once; in whole blocks.
int adding_cols(const LoraShape& s, const Machine& m) {
  const std::int64_t tiles = max_tiles(s.num_tokens, s.num_adapters, 16);
  return even_cols(s, ceil_div<std::int64_t>(s.sum_widths() * tiles, kExpandPerSm * m.sms),
                   adding_block(s));
}

}  // namespace

/// Up to rank 32 where all CTAs of expand, of so many columns, run at once; a fourth more may those
/// be that are short. (us on an H100, two kernels and three: 1,024 tokens of 8 adapters, rank 16,
/// qkv 17.9 and 19.1, down 22.7 and 23.8; 2,436 of 3, 3,072 to 1,024, 13.3 and 14.5; 409 of 7, rank
/// 32, 1,280 to 5,120, 7.6 and 8.4; but 1,024 of 8, gate_up, 56.6 and 53.1; 458 of two, rank 8,
/// 8,192 to 8,192 + 2 x 1,024, 17.1 and 15.9; of one and a half rounds 10,409 of 3, rank 16, 768 to
/// 1,024, 31.7 and 26.0. A few more than a round: 1,609 of two, rank 16, 4,096 to 4,096, 1,024
/// columns, 22.2 and 19.7; 804 of one, 8,192 to 8,192, 21.9 and 19.4; 3,581 of 11, 2,048 to 2,048,
/// 18.4 and 17.0; but 512 columns 1,696 of two, 4,096 to 1,024 + 2 x 256, 13.5 and 15.8.)
bool may_add_chunks(const LoraShape& s, const Machine& m) {
  constexpr std::int64_t kMostElements = 1024 * 16;  // of B of a CTA
  if (s.op != Op::kApply || !s.one_type || !s.aligned_y || h_width(s) <= 8 || h_width(s) > 32 ||
      num_leaves(s.hidden) > kLeavesAtOnce) {
    return false;
  }
  const int cols = adding_cols(s, m);
  const std::int64_t elements = cols * h_width(s), blocks = column_blocks(s, cols);
  const std::int64_t round = kExpandPerSm * m.sms;
  if (4 * elements <= 3 * kMostElements) {
    return 4 * max_tiles(s.num_tokens, s.num_adapters, 16) * blocks <= 5 * round;
  }
  return elements <= kMostElements && even_tiles(s) * blocks <= round;
}

bool adds_chunks(const LoraShape& s, const Machine& m, ShrinkPlan& shrink, ExpandPlan& expand) {
  constexpr std::int64_t kSmallX = 16 << 20;
  if (!may_add_chunks(s, m) || shrink.kernel != ShrinkKernel::kWgmma || !shrink.split() ||
      expand.kernel != ExpandKernel::kPrefill) {
    return false;
  }
  expand = decode_expand(s, m);
  expand.block_cols = adding_block(s);
  expand.cols = adding_cols(s, m);
  shrink.partials = Partials::kExpand;
  // As many CTAs as can be, unless x would be read twice and is large. (16 rows and 48: 943 tokens
  // of 4 adapters, rank 32, 8,192 to 2,048, 12.4 and 13.9; but 1,481 of 7, 23.6 and 20.9.)
  const int columns = ceil_div(s.rank_rows(), kWgmmaShapes[kSmallLeaf].rows);
  if (columns <= 1 || (columns == 2 && 2 * s.num_tokens * s.hidden <= kSmallX)) {
    shrink.shape = kSmallLeaf;
    shrink.rows = kWgmmaShapes[kSmallLeaf].rows;
    shrink.leaves = 1;
  }
  return true;
}

}  // namespace mortar::lora
