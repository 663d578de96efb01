// SPDX-License-Identifier: Apache-2.0
// Launch choices of LoRA's CUDA backend: K chunks that a CTA of the decode shrink takes.
#include <algorithm>

#include "lora/launch_choice.h"

namespace mortar::lora {

bool takes_chunks(const LoraShape& s, const Machine& m, int chunks) {
  constexpr int kLeastRows = 8;  // of an MMA
  const int rows = decode_ring_rows(s.hidden, 1) / chunks;
  return leaf_size(s.hidden) == kDecodeK && rows >= kLeastRows &&
         decode_smem(s.hidden, rows, 1, chunks) + kDecodeStaticSmem <= m.max_smem;
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
/// 32, rank 16, 14,336 to 4,096, 9.7 and 10.3.)
void take_chunks(const LoraShape& s, const Machine& m, const ExpandPlan& expand, ShrinkPlan& c) {
  constexpr int kMost = 4, kHalfTile = 8, kMostRows = 12;
  constexpr std::int64_t kFewTokens = 2, kShortLeaves = 32, kRound = 8;  // CTAs of an SM
  const int rows = s.rank_rows();
  const auto can = [&](int chunks) {
    return chunks * rows <= decode_ring_rows(s.hidden, 1) && chunks <= num_leaves(s.hidden) &&
           takes_chunks(s, m, chunks);
  };
  if (rows > c.rows || !can(2)) return;
  const int most = can(kMost) ? kMost : 2;
  const auto take = [&](int chunks, int x_tokens) {
    c.leaves = chunks;
    c.x_tokens = x_tokens;
    c.rows = rows;
  };
  if (num_leaves(s.hidden) > kShortLeaves && !shrink_fits(s, m, rows, 1, expand) &&
      shrink_fits(s, m, rows, most, expand)) {
    return take(most, c.x_tokens);
  }
  if (rows > kMostRows || tokens_per_adapter(s) > kFewTokens || both_fit(s, m, rows, 1, expand)) {
    return;
  }
  for (int chunks = 2; chunks <= most; chunks *= 2) {
    if (both_fit(s, m, rows, chunks, expand)) {
      return take(chunks, chunks > 2 ? kHalfTile : c.x_tokens);
    }
  }
  if (decode_shrink_ctas(s, rows, 1) > kRound * m.sms) take(2, kHalfTile);
}

}  // namespace mortar::lora
