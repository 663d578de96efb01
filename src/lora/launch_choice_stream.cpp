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

ShrinkPlan stream_shrink(const LoraShape& s, Partials partials, int per_sm) {
  ShrinkPlan c;
  c.kernel = ShrinkKernel::kStream;
  c.rows = std::min(s.rank_rows(), kStreamRows);
  c.partials = partials;
  c.per_sm = per_sm;
  return c;
}

/// (us on an H100, three CTAs of 64 threads an SM and two of 96: 184 tokens of 373 adapters, ragged
/// ranks, 4,736 to 3,584, 21.8 and 20.0; 104 of 460 17.2 and 18.5.)
int stream_most_per_sm(const LoraShape& s, const Machine& m) {
  constexpr int kMost = 3, kListed = 2;           // tiles that a thread lists in one trip to memory
  if (s.num_tokens > kSmallTileTokens) return 1;  // each CTA lists all tiles
  const auto tiles = static_cast<int>(max_tiles(s.num_tokens, s.num_adapters, 16));
  const int warps = stream_warps(s.rank_rows(), tiles, m.max_smem);
  int per_sm = kMost;
  while (warps % per_sm != 0 || (per_sm > 1 && tiles > kListed * 32 * warps / per_sm)) --per_sm;
  return per_sm;
}

namespace {

constexpr std::int64_t kFewTokens = 8, kRounds = 3, kShortRounds = 4;
/// CTAs of the decode shrink in a round.
std::int64_t round_of(const Machine& m) { return 4 * m.sms; }

/// Whether B is so many times as large as A.
bool is_long_expand(const LoraShape& s, int times) {
  return s.sum_widths() > times * s.num_slices * s.hidden;
}

/// Whether there may well be fewer rank rows than the host has to assume, or, of ranks that are one
/// piece of work, fewer tiles. (Rank 8 of three slices, two pieces, 93 of 160, 16,384 to 16,384 + 2
/// x 1,024, on an H100: one CTA an SM 25.3 us, three 28.2.)
bool may_be_fewer(const LoraShape& s) {
  return s.ragged || (s.rank_rows() <= kStreamRows && s.num_adapters > s.num_tokens);
}

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

/// CTAs of few warps start and end one by one as those of expand do, not when an SM has room for
/// all of them. (us on an H200, three CTAs of two warps and one of six: ragged ranks, 36 tokens of
/// 261 adapters, 8,192 to 8,192, 13.1 and 15.4; 50 of 259, 5,120 to 2 x 3,456, 17.2 and 19.0; 15 of
/// 11, 53,248 to 16,384, 18.8 and 20.2; 24 of 150, 8,192 to 2 x 7,168, 16.2 and 18.1; rank 16, 34
/// of 164, 16,384 to 16,384, 10.5 and 11.9; two of five and one of ten, rank 8, 111 of 334, 15.8
/// and 16.7; but rank 64, 21 of 13, 53,248 to 16,384, 34.3 and 32.7; rank 32, 74 of 7, 23.5 and
/// 22.9.) Not where expand is the longer part: those of its CTAs that find room beside large ones
/// have the first tiles, and start first. (Rank 16, 51 of 18, 16,384 to 2 x 53,248, 35.0 and 28.1.)
int stream_per_sm(const LoraShape& s, const Machine& m) {
  return may_be_fewer(s) && !is_long_expand(s, 1) ? stream_most_per_sm(s, m) : 1;
}

/// From some rounds of CTAs on: many are of tiles that may be and are not, or of rank rows that an
/// adapter does not have, and each waits for a place and for the plan. Of short chunks of K they
/// hold more rank rows. (us on an H200, persistent warps and CTAs: 296 tokens of 434 adapters,
/// ranks up to 64, 5,120 to 3 x 1,280, 34 rounds, 45.4 and 71.3; 84 of 84, 28,672 to 8,192, 18
/// rounds, 34.1 and 47.0; 114 of 50, 8,192 to 8,192, three rounds, 19.0 and 21.7; 159 of 132, rank
/// 64, qkv of 3,584, short chunks, five rounds, 53.4 and 56.0; but 249 of 99, rank 32, gate_up, 1.6
/// rounds, 72.4 and 58.1, as expand starts later; on an H100 256 of 64, rank 64, qkv, 3.5 rounds,
/// 62.7 and 59.7.)
///
/// From a little more than one round of what finds room at once where there may well be fewer rank
/// rows, or a token is likely to be alone in its tile. (36 of 261, ragged ranks, 13.1 and 14.7; 24
/// of 150, 8,192 to 2 x 7,168, 16.2 and 17.1; 50 of 259 17.2 and 19.0; 34 of 164, rank 16, 10.5 and
/// 12.7; but 46 of 11, ragged, 15.8 and 15.3; more bytes were not timed. On an H100 of three slices
/// 142 of 40, ragged, 34.9 and 36.2; 15 of 27, 15.3 and 17.5.) Ranks that are several pieces, which
/// read x anew, from some two rounds on. (Rank 16, on an H100: 22 of 60, 16,384 to 16,384 + 2 x
/// 1,024, 1.8 rounds, 17.3 and 15.9; 81 of 95, 8,192 to 8,192 + 2 x 1,024, 3.3 rounds, 21.8 and
/// 24.4.) And in front of an expand that is much longer, so that its CTAs of the first tiles, the
/// full ones, start first. (On an H100 51 of 18, rank 16, 16,384 to 2 x 53,248, 34.7 and 43.4; 33
/// of 49, rank 32, 36.1 and 37.9; but of an expand less than twice as long 49 of 230, rank 16,
/// 13,312 to 16,384, 23.2 and 22.3.)
bool suits_stream(const LoraShape& s, const Machine& m, const ShrinkPlan& c) {
  constexpr std::int64_t kMostBytes = 64 << 20, kMostPerSm = 8, kSystem = 1024;
  constexpr int kLeastRank = 9;  // of lower ranks CTAs take several K chunks
  if (!runs_stream(s, m) || tokens_per_adapter(s) > kFewTokens) return false;
  const bool long_chunks = leaf_size(s.hidden) == kDecodeK;
  // Of rank 128 as if CTAs had fewer rows than they have. (us on an H200, persistent warps and CTAs
  // of 64 rows: 8 of 26, 16,384 to 16,384 + 2 x 1,024, 24.0 and 27.4; 28 of 252, 5,120 to 2 x
  // 13,824, 78 and 83.)
  constexpr int kHighRank = 65, kFewRows = 32;
  const int cta_rows = s.max_rank < kHighRank ? c.rows : std::min(c.rows, kFewRows);
  const std::int64_t ctas = decode_shrink_ctas(s, cta_rows, 1);
  const std::int64_t rows = s.rank_rows() / (s.ragged ? 2 : 1);  // that there are
  const std::int64_t bytes = max_tiles(s.num_tokens, s.num_adapters, 16) * rows * s.hidden * 2;
  const bool alone = s.num_adapters > s.num_tokens;
  const bool fewer = s.ragged ? alone || s.num_slices > 1 : alone && s.max_rank <= kStreamRows;
  const bool waits = s.num_tokens <= kSmallTileTokens && is_long_expand(s, 2);
  if (long_chunks && s.max_rank >= kLeastRank && ((fewer && !is_long_expand(s, 1)) || waits) &&
      bytes <= kMostBytes) {
    const int smem = decode_smem(s.hidden, std::min(c.rows, s.rank_rows()), c.stages);
    const std::int64_t room =
        std::min(kMostPerSm, m.sm_smem / (smem + kDecodeStaticSmem + kSystem)) * m.sms;
    const bool pieces = !waits && !s.ragged && s.rank_rows() > kStreamRows;
    if (10 * ctas > (pieces ? 22 : 11) * room) return true;
  }
  return ctas / chunks_of_cta(s, m) > (long_chunks ? kRounds : kShortRounds) * round_of(m);
}

}  // namespace mortar::lora
