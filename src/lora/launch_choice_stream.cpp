// SPDX-License-Identifier: Apache-2.0
// When shrink of tiles of few tokens is done by persistent warps: cuda/shrink_stream.cu.
#include <algorithm>

#include "lora/launch_choice.h"

namespace mortar::lora {

bool runs_stream(const LoraShape& s, const Machine& m) {
  constexpr std::int64_t kMostPieces = std::int64_t{1} << 30;
  const std::int64_t tiles = max_tiles(s.num_tokens, s.num_adapters, 16);
  if (m.arch < 90 || !s.one_type || !s.aligned_x || s.segments || tiles > kStreamTiles ||
      s.rank_rows() == 0 || s.hidden == 0 || !partials_fit(s)) {
    return false;
  }
  const std::int64_t pieces =
      2 * tiles * ceil_div(s.rank_rows(), kStreamRows) * ceil_div<std::int64_t>(s.hidden, kDecodeK);
  return pieces <= kMostPieces &&
         stream_warps(s.rank_rows(), static_cast<int>(tiles), m.max_smem) > 0;
}

ShrinkPlan stream_shrink(const LoraShape& s, Partials partials) {
  ShrinkPlan c;
  c.kernel = ShrinkKernel::kStream;
  c.rows = std::min(s.rank_rows(), kStreamRows);
  c.partials = partials;
  return c;
}

namespace {

constexpr std::int64_t kFewTokens = 8, kRounds = 3, kShortRounds = 4;
/// CTAs of the decode shrink in a round.
std::int64_t round_of(const Machine& m) { return 4 * m.sms; }

}  // namespace

/// (us, persistent warps, CTAs that sum all of K, and wgmma: 920 tokens of 298 adapters, Zipf,
/// ranks up to 64, 13,824 to 5,120, 77.1, 98.1 and 83.0; of short chunks, persistent warps and CTAs
/// that sum all of K, 2,616 of 229, 2,048 to 2,048, 36.1 and 34.1.)
bool streams_own_ranks(const LoraShape& s, const Machine& m) {
  return s.ragged && s.op == Op::kApply && leaf_size(s.hidden) == kDecodeK && runs_stream(s, m) &&
         tokens_per_adapter(s) <= kFewTokens &&
         partial_bytes(s) / 2 + finished_bytes(s) <= light_partials(s) &&
         decode_shrink_ctas(s, s.rank_rows(), 1) > kRounds * round_of(m);
}

/// From some rounds of CTAs on: many are of tiles that may be and are not, or of rank rows that an
/// adapter does not have, and each waits for a place and for the plan. Of short chunks of K they
/// hold more rank rows. (us on an H200, persistent warps and CTAs: 296 tokens of 434 adapters,
/// ranks up to 64, 5,120 to 3 x 1,280, 34 rounds, 45.4 and 71.3; 84 of 84, 28,672 to 8,192, 18
/// rounds, 34.1 and 47.0; 114 of 50, 8,192 to 8,192, three rounds, 19.0 and 21.7; 159 of 132, rank
/// 64, qkv of 3,584, short chunks, five rounds, 53.4 and 56.0; but 249 of 99, rank 32, gate_up, 1.6
/// rounds, 72.4 and 58.1, as expand starts later; on an H100 256 of 64, rank 64, qkv, 3.5 rounds,
/// 62.7 and 59.7.)
bool suits_stream(const LoraShape& s, const Machine& m, const ShrinkPlan& c) {
  const std::int64_t rounds = leaf_size(s.hidden) == kDecodeK ? kRounds : kShortRounds;
  return runs_stream(s, m) && tokens_per_adapter(s) <= kFewTokens &&
         decode_shrink_ctas(s, c.rows, 1) > rounds * round_of(m);
}

}  // namespace mortar::lora
