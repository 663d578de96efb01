// SPDX-License-Identifier: Apache-2.0
// When expand of low ranks is done by persistent CTAs, whose y the copy engine brings:
// cuda/expand_bulk.cu.
#include "lora/launch_choice.h"

namespace mortar::lora {

bool runs_bulk(const LoraShape& s, const Machine& m) {
  return m.arch == 90 && s.op == Op::kApply && s.one_type && s.aligned_y && s.b_runs &&
         !s.segments && s.max_rank > 0 && h_width(s) <= kDirectMaxRank &&
         max_tiles(s.num_tokens, s.num_adapters, 16) <= kMostMmaTiles &&
         bulk_expand(s, m).stages > 1;
}

ExpandPlan bulk_expand(const LoraShape& s, const Machine& m) {
  ExpandPlan c;
  c.kernel = ExpandKernel::kBulk;
  c.cols = kBulkCols;
  c.stages = bulk_stages(s.max_rank, static_cast<int>(h_width(s)) * s.num_slices, m.sm_smem);
  return c;
}

namespace {

bool has_light_partials(const LoraShape& s) { return partials_are_light(s) && partials_fit(s); }

/// Whether a CTA of shrink that sums all of K of a tile waits for its steps longer than all of them
/// read: x, and the rank rows of each tile, of which two in three are taken to be there. (us, all
/// of K in one CTA and what was chosen otherwise: 488 tokens of 484 adapters, rank 4, 4,096 to
/// 4,096, 23.1 and 14.2; on an H100 1,054 of 297, rank 16, 3,072 to 1,024, 18.4 and 17.0; 1,947 of
/// 348, rank 16, 14,336 to 4,096, 95.0 and 91.9; 753 of 271, rank 8, 2,048 to 2,048, 15.0 and 13.3;
/// but 2,089 of 214, rank 16, 2,048 to 1,024, 19.3 and 20.0; 435 of 210, rank 8, 1,024 to 2,048 + 2
/// x 1,024, 15.4 and 16.6; 1,209 of 441, rank 16, 2,048 to 2,048, 22.6 and 27.0.)
bool waits_for_steps(const LoraShape& s) {
  constexpr double kStepUs = 0.35, kBytesPerUs = 4.2e6 / 0.8, kShortUs = 1.5;  // bytes of L2
  const double steps = static_cast<double>(ceil_div<std::int64_t>(s.hidden, 128));
  const std::int64_t tiles = max_tiles(s.num_tokens, s.num_adapters, 16);
  const auto rows = static_cast<double>(2 * tiles * s.rank_rows() / 3 + s.num_tokens);
  return steps * kStepUs > 2 * static_cast<double>(s.hidden) * rows / kBytesPerUs + kShortUs;
}

/// Whether shrink would be on wgmma where there were no persistent expand. (us on an H100, this and
/// tiles of 16 before it: 2,048 tokens of 128 adapters, qkv, rank 16, 58.3 and 59.9.)
bool walks_on_wgmma(const LoraShape& s, const Machine& m) {
  return !has_light_partials(s) && walking_shrink(s, m).kernel == ShrinkKernel::kWgmma;
}

/// Bytes of x, y and the weights of adapters in use.
std::int64_t bytes_of_call(const LoraShape& s) {
  const std::int64_t weights = s.rank_rows() * s.hidden + s.max_rank * s.sum_widths();
  return 2 * s.num_tokens * (s.hidden + 2 * s.sum_widths()) + 2 * used_adapters(s) * weights;
}

/// (us on an H200, of more rank rows than 16, with 16 and 32 of them a CTA: 453 tokens of 239
/// adapters, Zipf, three slices of rank 16, K = 2,048, the call 14.3 and 17.0; 5,841 of 403, K =
/// 1,024, 38.8 and 34.8.)
ShrinkPlan bulk_shrink(const LoraShape& s, const Machine& m) {
  constexpr std::int64_t kPerSm = 4;
  ShrinkPlan c = mma_shrink(s);
  const int rows = kMmaShapes[kNarrowMma].rows();
  const std::int64_t narrow =
      max_tiles(s.num_tokens, s.num_adapters, 16) * ceil_div(s.rank_rows(), rows);
  if (2 * narrow <= 3 * kPerSm * m.sms) {  // as a rule there are fewer tiles than may be
    c.shape = kNarrowMma;
    c.rows = rows;
  }
  return c;
}

std::int64_t bytes_of_y(const LoraShape& s) { return 4 * s.num_tokens * s.sum_widths(); }
constexpr std::int64_t kLongBytes = 32 << 20;  // of y

/// Whether the expand is long enough for a kernel before it that adds the partials of K chunks,
/// where shrink would wait for its steps otherwise. (us on an H100, three kernels and two: 846
/// tokens of 71 adapters, rank 4, 5,120 to 3 x 5,120, 31.7 and 38.8; 911 of 53, rank 8, 3,584 to
/// 2 x 4,736, 21.2 and 22.7; 6,074 of 457, rank 8, 2,048 to 2,048, 47.4 and 49.4; but 4,383 of 403,
/// rank 8, 3,072 to 1,024, 36.3 and 35.2; 1,268 of 410, rank 4, 2,048 to 2 x 8,192, 51.0 and 50.7;
/// 488 of 484, rank 4, 4,096 to 4,096, 20.4 and 15.3; 1,308 of 110, rank 4, 1,024 to 2 x 3,072,
/// 18.0 and 15.9; behind persistent warps 2,548 of 421, rank 16, 3,072 to 1,024, 42.4 and 34.6. On
/// an H200, rank 16, where it takes the place of the slower decode kernel: 521 of 106, 8,192 to 2 x
/// 7,168, 42.2 and 47.7; 705 of 30, 8,192 to 8,192 + 2 x 1,024, 28.0 and 30.9; but 818 of 50, 5,120
/// to 5,120, 17.0 and 16.2.)
bool is_long(const LoraShape& s) {
  constexpr std::int64_t kLeastTokens = 9, kFewerTokens = 5, kFewerBytes = 24 << 20;
  const bool direct = s.max_rank <= kDirectRank;
  return tokens_per_adapter(s) >= (direct ? kLeastTokens : kFewerTokens) &&
         bytes_of_y(s) >= (direct ? kLongBytes : kFewerBytes);
}

constexpr std::int64_t kFewTokens = 45, kMostTokens = 64;  // of an adapter

/// Whether tiles of 64 tokens hold so few that shrink takes tiles of 16 and all of K.
bool sums_few(const LoraShape& s, const Machine& m) {
  return tokens_per_adapter(s) <= kFewTokens &&
         suits_mma(s, m, bulk_shrink(s, m), wgmma_shrink(s, m));
}

/// Rows of x and A that all CTAs of shrink copy, where tokens are shared out evenly.
std::int64_t copied_rows(const LoraShape& s, int tile_tokens) {
  const std::int64_t tiles = ceil_div<std::int64_t>(tokens_per_adapter(s), tile_tokens);
  return used_adapters(s) * tiles * s.rank_rows() + s.num_tokens;
}

/// Whether it takes tiles of 16 and K chunks, in place of such chunks on wgmma: of tiles of 64 that
/// are not full a CTA has little of its ring on its way. Not where they would copy A too often.
/// (us, both before this expand: 1,257 tokens of 32 adapters, rank 4, 16,384 to 16,384, 38.1 and
/// 45.0; 1,244 of 39, 8,192 to 8,192, 21.5 and 25.4; 948 of 21, 18,944 to 3,584, 23.5 and 25.1; but
/// 1,115 of 23, rank 16, 8,192 to 8,192, 25.7 and 24.2; 1,053 of 18, 7,168 to 8,192, 19.6 and 17.4;
/// 1,283 of 26, rank 8, 8,192 to 2 x 28,672, 81.1 and 78.1.)
bool takes_chunks_of_few(const LoraShape& s, const Machine& m, const ShrinkPlan& wgmma) {
  constexpr std::int64_t kNearlyFull = 48;  // tokens of an adapter
  return wgmma.split() && tokens_per_adapter(s) <= kNearlyFull && has_light_partials(s) &&
         4 * copied_rows(s, 16) <= 5 * copied_rows(s, 64) && !may_add_chunks(s, m);
}

/// Of tiles of 16, whether a CTA of shrink sums all of K, or a kernel adds the partials of chunks.
bool sums_whole(const LoraShape& s) { return !has_light_partials(s) || !waits_for_steps(s); }

/// Whether rank rows are so many that tiles of 64, half full as they are, take K sooner than tiles
/// of 16 take long chunks of it: they leave no partials as a rule. (us on an H100, wgmma and the
/// decode kernel, rank 16: of 48 rows 705 tokens of 30 adapters, 8,192 to 8,192 + 2 x 1,024, 29.5
/// and 33.1; 900 of 60 45.8 and 50.8; 500 of 24, 16,384 to 16,384 + 2 x 1,024, 49.8 and 52.0; 600
/// of 40, 5,120 to 3 x 5,120, 33.9 and 34.6; but of 32 964 of 68, 5,120 to 2 x 13,824, 66.8 and
/// 66.3; of 16 1,257 of 32, rank 4, 16,384 to 16,384, 51.9 and 46.7; of short chunks 1,024 of 64,
/// 48 rows, 4,096 to 4,096 + 2 x 1,024, even 31.3 and 32.4, Zipf 35.7 and 33.6.)
bool has_many_rows(const LoraShape& s, const Machine& m) {
  constexpr int kManyRows = 33;
  return runs_wgmma(s, m) && s.rank_rows() >= kManyRows && leaf_size(s.hidden) == kDecodeK;
}

}  // namespace

/// Where shrink takes tiles of 16 tokens, too, as those of 64 would be mostly not full, and they
/// have so many steps that they hide each other's trips to memory. (us on an H200, this and what
/// was chosen otherwise, with its shrink: 10,871 tokens of 317 adapters, Zipf, rank 4, 1,024 to 2 x
/// 3,072, 77 and 117; 8,896 of 414, 3,584 to 896 + 2 x 128, 55.0 and 64.4; 5,841 of 403, rank 16,
/// 1,024 to 512 + 2 x 256, 34.8 and 39.3; 453 of 239, rank 16, 2,048 to 512 + 2 x 128, 14.3 and
/// 16.5; on an H100 960 of 287, rank 16, 2,048 to 2 x 8,192, 91.6 and 104.5. These CTAs start later
/// than others: 927 of 85, Zipf, rank 4, 512 to 2,048, 12 MB, 8.2 and 6.7.) Behind a shrink on
/// wgmma where an adapter has about a tile of 64 or less, and y is long. (us on an H200, this and
/// the prefill kernel: 9,445 of 322, rank 8, 5,120 to 3 x 1,280, 87.8 and 107.6; 11,676 of 193,
/// 1,024 to 2,048 + 2 x 1,024, 58.3 and 66.0; 4,376 of 110, 8,192 to 8,192 + 2 x 1,024, 74.7 and
/// 78.5; 1,053 of 18, rank 16, 7,168 to 8,192, 17.4 and 18.2; but 1,115 of 23, 8,192 to 8,192, 24.2
/// and 23.9; of less y 4,624 of 160, rank 16, 1,024 to 512 + 2 x 256, 22.0 and 21.7; of more tokens
/// 4,884 of 51, rank 4, 16.4 and 15.5; 2,389 of 3, rank 16, 5,120 to 3 x 1,280, 20.4 and 19.0.)
bool suits_bulk(const LoraShape& s, const Machine& m) {
  constexpr std::int64_t kLeastBytes = 16 << 20;
  const std::int64_t tokens = tokens_per_adapter(s);
  if (!runs_bulk(s, m) || s.num_tokens <= kSmallTileTokens || tokens > kMostTokens ||
      bytes_of_call(s) < kLeastBytes) {
    return false;
  }
  if (best_tile_tokens(s) == 16) {
    return tokens <= kFewTokens && (sums_whole(s) ? !walks_on_wgmma(s, m) : is_long(s));
  }
  return runs_wgmma(s, m) && (sums_few(s, m) || bytes_of_y(s) >= kLongBytes ||
                              takes_chunks_of_few(s, m, wgmma_shrink(s, m)));
}

ShrinkPlan shrink_before_bulk(const LoraShape& s, const Machine& m) {
  if (best_tile_tokens(s) == 16) {
    if (sums_whole(s)) return bulk_shrink(s, m);
    return has_many_rows(s, m) ? wgmma_shrink(s, m) : decode_shrink(s, m);
  }
  if (sums_few(s, m)) return bulk_shrink(s, m);
  const ShrinkPlan wgmma = sm90_shrink(s, m);
  return takes_chunks_of_few(s, m, wgmma) ? decode_shrink(s, m) : wgmma;
}

}  // namespace mortar::lora
