// SPDX-License-Identifier: Apache-2.0
// When expand takes tiles of 64 tokens and 128 columns in turn (cuda/expand_prefill.cu), and in
// which order.
#include <algorithm>

#include "lora/launch_choice.h"

namespace mortar::lora {

int prefill_smem(const LoraShape& s) {
  const int ranks = !s.aligned_y || h_width(s) > 64 ? 128
                    : h_width(s) > 32               ? 64
                    : h_width(s) > 16               ? 32
                                                    : 16;
  const int stages = ranks == 16 ? 4 : 3, b_slots = ranks == 16 ? 4 : ranks == 32 ? 3 : 2;
  return stages * (64 * kPrefillCols * 2 + 64 * ranks * 2) + b_slots * kPrefillCols * ranks * 2;
}

ExpandPlan prefill_expand(const LoraShape& s, const Machine& m) {
  ExpandPlan c;
  c.kernel = ExpandKernel::kPrefill;
  c.tile_tokens = 64;
  c.cols = kPrefillCols;
  c.per_sm = 2 * (prefill_smem(s) + kPrefillStaticSmem) <= m.sm_smem ? 2 : 1;
  const std::int64_t steps =
      max_tiles(s.num_tokens, s.num_adapters, 64) * column_blocks(s, kPrefillCols);
  // A tile at a time only where all of them run at once. Runs of two have B for the second tile in
  // time, and longer ones reuse it, which pays above rank 64, if an adapter has so many tiles. (us,
  // runs of one tile and of two: 1,126 tokens of 3 adapters, rank 64, 3,072 to 1,024, 7.2 and 8.9;
  // but 3,385 of 8, rank 16, 3,584 to 896 + 2 x 128, 17.1 and 16.4. Runs of 2 and 8 on an H100:
  // 2,847 tokens of one adapter, rank 128, 2,048 to 2 x 8,192, 1.07 times as long; 541 of 12, rank
  // 128, 3,584 to 2 x 18,944, 0.93 times; but 5,745 of 75, 16,384 to 2 x 53,248, 1.06 times.)
  const std::int64_t ctas = m.sms * c.per_sm;
  c.log_run = steps > ctas ? 1 : 0;
  const int most = h_width(s) > 64 || !s.aligned_y ? 3 : 1;
  const std::int64_t reused = ceil_div<std::int64_t>(tokens_per_adapter(s), 64);
  while (c.log_run > 0 && c.log_run < most && steps > (10 * ctas << c.log_run) &&
         (h_width(s) <= 64 || (2 << c.log_run) <= reused)) {
    ++c.log_run;
  }
  return c;
}

std::int64_t prefill_tokens(const LoraShape& s) {
  constexpr std::int64_t kMoreTokens = 26, kMoreTokensRagged = 17;
  return s.ragged ? kMoreTokensRagged : kMoreTokens;
}

/// Tiles of 64, unless they would be mostly empty, or too few to fill the chip. (us, prefill
/// against decode behind one shrink: 374 tokens of 23 adapters, rank 64, qkv, 30 and 21; 4,468 of
/// 257, rank 128, 3,584 to 3,584 + 2 x 512, 427 and 407; 297 of 3, rank 128, 3,072 to 1,024, 16 and
/// 9; but 2,093 of 49, rank 128, 3,072 to 1,024, 32 and 38.) Where adapters have ranks of their own
/// tiles may be emptier, as B, which a step copies once for all of its tokens, is about half of
/// what the host has to assume. (us, prefill and decode, ranks up to 64: 1,455 of 57, 1,024 to 2 x
/// 3,072, 26.4 and 30.7; 1,454 of 80, 2,048 to 512 + 2 x 128, 18.2 and 19.6; but 374 of 23, qkv,
/// 20.2 and 19.1; all of rank 64 6,619 of 384, 3,584 to 2 x 18,944, 860 and 748.)
bool suits_prefill(const LoraShape& s, const Machine& m) {
  if (h_width(s) > kExpandPrefillMaxRank || best_tile_tokens(s) != 64 ||
      prefill_smem(s) + kPrefillStaticSmem > m.max_smem) {
    return false;
  }
  const std::int64_t steps =
      max_tiles(s.num_tokens, s.num_adapters, 64) * column_blocks(s, kPrefillCols);
  return s.op != Op::kApply || (tokens_per_adapter(s) > prefill_tokens(s) && steps > m.sms);
}

}  // namespace mortar::lora
