// SPDX-License-Identifier: Apache-2.0
// Which kernel of each pass suits a problem, and in which shape.
#include "lora/launch_choice.h"

#include <algorithm>
#include <iterator>

namespace mortar::lora {
namespace {

/// Tokens times ranks from which on tiles of 64 pay for fewer tokens than that. (200 tokens of one
/// adapter, qkv: rank 64 11.8 us against 12.4, rank 128 16.7 against 34.5; but 128 tokens, rank 64,
/// 11.9 against 9.8.)
constexpr std::int64_t kHeavyRanks = 12000;

/// Above rank 128 fewer, where an adapter has so many tokens, and so many elements of A, of which
/// those of float32 count twice. (us on an
/// H100, tiles of 64 and of 16: 63 tokens of one adapter, rank 256, 28,672 to 8,192, 18.9 and 36.9;
/// qkv, 32 of one 12.2 and 13.9, 48 of two 13.9 and 20.8, 40 of one, rank 512, 17.8 and 32.5; but
/// 40 of one, rank 512, 1,024 to 1,024, 11.5 and 8.6. Float32 adapters, as heavy as those of 16
/// bits: qkv, 200 of one, rank 64, 16.7 and 27.4, rank 256, 54 and 125; on an H200 59 of one, rank
/// 512, 5,120 to 2 x 13,824, 44.5 and 104; 28 of one, 1,024 to 2,048 + 2 x 1,024, 18.7 and 37.0.)
constexpr std::int64_t kHighRanks = 7000, kHighTokens = 24, kHighWeights = 1 << 20;

/// Tokens of an adapter, and those times ranks, up to which tiles of 16 pay for more tokens than
/// that: tiles of 64 would be mostly empty. (512 tokens, gate_up, rank 16: 256 adapters 140 us
/// against 401, 21 adapters 36 against 42, 16 adapters 36 against 33. In parts, 1,024 tokens, down:
/// 128 adapters 84 us against 123, 64 adapters 54 against 68, 32 adapters 44 against 43.)
constexpr std::int64_t kLightTokens = 26, kLightPartsTokens = 17, kLightRanks = 1100;

constexpr std::int64_t kLightBatch = 16 * 1024;  ///< more were not measured

/// Bytes of weights that all tiles of 16 together read, and tokens, up to which they pay too: two
/// kernels in place of three, or of two that start later. (us on an H100, tiles of 16 and of 64:
/// 449 tokens of 7 adapters, rank 4, 3,072 to 1,024, 1 MB, 4.9 and 10.7; 820 of 20, rank 8, 2,048
/// to 2,048, 4 MB, 6.2 and 9.6; 492 of 6, ranks up to 16, 4,096 to 4,096, 8 MB, 7.1 and 10.2; 327
/// of 2, rank 64, 768 to 1,024, 5 MB, 5.2 and 6.2; but 465 of one, rank 32, 8,192 to 2,048, 20 MB,
/// 11.3 and 11.3; 1,180 of 18, rank 32, 2,048 to 1,024, 13 MB, 11.8 and 10.7. On an H100 1,219 of
/// 15, rank 8, 1,024 to 2 x 3,072, 15.9 and 17.5; 1,437 of 12, 512 to 2,048, 6.2 and 9.4.)
constexpr std::int64_t kLightReads = 12 << 20, kLightReadTokens = 2048;

/// Bytes of weights that all tiles of so many tokens together read.
std::int64_t weight_reads(const LoraShape& s, int tile_tokens) {
  return 2 * max_tiles(s.num_tokens, s.num_adapters, tile_tokens) * s.max_rank *
         (s.num_slices * s.hidden + s.sum_widths());
}

/// Whether tiles of 16 read so little.
bool reads_little(const LoraShape& s) {
  return s.op == Op::kApply && s.one_type && s.num_tokens <= kLightReadTokens &&
         weight_reads(s, 16) <= kLightReads;
}

/// Bytes that tiles of 64 have to save of these, and a third of them, to pay for few tokens: so
/// many of an adapter, of low ranks more than a tile of 64 in all and as many as their expand
/// takes, above rank 128 of large A. (us, tiles of 64 and of 16: rank 128, 33 tokens of one
/// adapter, qkv, 9 MB, 6.9 and 8.8; 30, 28,672 to 8,192, 9 MB, 9.3 and 12.0; 53, 8,192 to 2 x
/// 7,168, 24 MB, 8.9 and 11.8; but 35 of two, 5,120 to 2 x 13,824, 13.3 and 12.3. Rank 256, 53 of
/// 3, 1,024 to 2,048 + 2 x 1,024, 11 MB, 8.0 and 14.4; 17 of one, 8,192 to 10,240, 9 MB, 13.3 and
/// 18.5; but 60 of one, 2,048 to 8,192, 9.1 and 8.4. Rank 512, 17 of one, 28,672 to 8,192, 38 MB,
/// 21.0 and 31.9; but 13 of one, 3,584 to 3,584, 12.3 and 9.1; 25 of 3, 2,048 to 2,048, 4 MB, 12.9
/// and 9.5. Rank 64, 93 of one, 3,584 to 2 x 18,944, 23 MB, 11.8 and 13.8; 210 of 8, 5,120 to 3 x
/// 5,120, 18.8 and 23.8; but 60 of one, 3,584 to 2 x 18,944, 10.2 and 9.0. Rank 32, 253 of 3,
/// 18,944 to 3,584, 15 MB, 9.6 and 13.1; but 174 of 8, 16,384 to 16,384, 16.5 and 15.9.)
constexpr std::int64_t kSavedReads = 15 << 19, kSavedLowReads = 14 << 20, kLargeA = 3 << 18;
constexpr std::int64_t kSavingTokens = 24, kSavingHighTokens = 14;

/// Elements of B from which on a CTA of the decode kernel has long to stream.
constexpr std::int64_t kLongStream = 16 * 1024;

/// Columns that a CTA of it takes at most: there may be far fewer tiles than the host has to
/// assume. (us on an H100: 1,260 tokens of 468 adapters, Zipf, ranks up to 64, 13,312 to 16,384,
/// all 16,384 columns 351, 4,096 299; 2,109 of 127, rank 64, 16,384 to 16,384, 5,504 columns 250,
/// 4,096 240; but 256 of 64, rank 16, 4,096 to 2 x 14,336, 4,864 columns 41.9, 3,584 47.5; of very
/// many tiles of such ranks 0.67 to 0.95 times as long.)
constexpr std::int64_t kMostDecodeCols = 4096;
constexpr int kFewRanks = 32;  // up to which few tiles take as many as they like
/// Bytes of y and B of a CTA whose tile is full, where there is hardly more than a round of CTAs.
/// (us: 2,879 tokens of 163 adapters, rank 16, 5,120 to 5,120, 2,560 columns 61.3, 1,024 54.7;
/// 2,605 of 115, 4,096 to 4,096, 2,048 columns 34.5, 1,024 30.9; but of tiles of six tokens 1,477
/// of 227, 18,944 to 3,584, 1,792 columns 71.6, 1,024 75.0; of two rounds on an H100 1,024 of 64,
/// rank 32, gate_up, 3,584 columns 103.1, 896 108.4.)
constexpr std::int64_t kFullTileBytes = 100 << 10;
/// Columns from which on CTAs of ranks 65 to 128 have long to stream.
constexpr std::int64_t kLongBlocks = 1024;

/// Columns up to which CTAs of a second round are short.
constexpr int kMostShortCols = 3072;

/// Tiles from which on CTAs of the decode expand are many and short: those that come last leave
/// fewer SMs idle. (us, two or three CTAs an SM and five: 230 tokens of 135 adapters, rank 4, 5,120
/// to 2 x 13,824, 71 and 54; 1,308 of 110, rank 4, 1,024 to 2 x 3,072, 21 and 18; 1,024 of 64,
/// gate_up, rank 32, 95 and 83; but 39 of 4, rank 64, 16,384 to 2 x 53,248, 31 and 33.)
constexpr std::int64_t kManyTiles = 112;

}  // namespace

std::int64_t used_adapters(const LoraShape& s) {
  return std::max<std::int64_t>(1, std::min(s.num_tokens, s.num_adapters));
}
std::int64_t tokens_per_adapter(const LoraShape& s) {
  return ceil_div(s.num_tokens, used_adapters(s));
}

bool saves_reads(const LoraShape& s) {
  const std::int64_t reads = weight_reads(s, 16), saved = reads - weight_reads(s, 64);
  const std::int64_t tokens = tokens_per_adapter(s);
  if (s.op != Op::kApply || !s.one_type || 3 * saved < reads) return false;
  if (s.max_rank <= 64) {
    return s.num_tokens > 64 && tokens > prefill_tokens(s) && saved >= kSavedLowReads;
  }
  const bool high = s.max_rank > kExpandPrefillMaxRank;
  return saved >= kSavedReads &&
         (high ? tokens > kSavingHighTokens && s.rank_rows() * s.hidden >= kLargeA
               : tokens > kSavingTokens);
}

int best_tile_tokens(const LoraShape& s) {
  const std::int64_t tokens = tokens_per_adapter(s);
  if (s.num_tokens <= kSmallTileTokens) {
    const bool heavy =
        s.num_tokens > 64 && tokens >= 32 && s.num_tokens * s.max_rank >= kHeavyRanks;
    const bool high = s.max_rank > kExpandPrefillMaxRank && tokens >= kHighTokens &&
                      s.num_tokens * s.max_rank >= kHighRanks &&
                      s.rank_rows() * s.hidden * (s.one_type ? 1 : 2) >= kHighWeights;
    return (s.one_type || s.float_weights) && (heavy || high || saves_reads(s)) ? 64 : 16;
  }
  if (reads_little(s) || light_parts(s)) return 16;
  // Without partials a CTA of tiles of 16 walks over all of K.
  const int ranks = s.max_rank > kExpandPrefillMaxRank ? 64 : s.max_rank;
  const int walk = partials_are_light(s) || s.hidden <= 4096 ? 1 : 2;
  const bool light = tokens <= (s.one_type ? kLightTokens : kLightPartsTokens) &&
                     walk * tokens * ranks <= kLightRanks;
  return light && s.num_tokens <= kLightBatch ? 16 : 64;
}

int even_cols(const LoraShape& s, std::int64_t cols, int multiple) {
  constexpr std::int64_t kMostCols = 1 << 24;  // counted in 32 bits; longer streams gain nothing
  cols = std::clamp<std::int64_t>(cols, 1, kMostCols);  // slices may have none
  const std::int64_t blocks =
      std::max<std::int64_t>(1, (5 * s.max_width() + 3 * cols) / (5 * cols));
  const std::int64_t even = std::max<std::int64_t>(1, ceil_div(s.max_width(), blocks));
  return static_cast<int>(round_up<std::int64_t>(even, multiple));
}

std::int64_t column_blocks(const LoraShape& s, int cols) {
  std::int64_t blocks = 0;
  for (int i = 0; i < s.num_slices; ++i) blocks += ceil_div<std::int64_t>(s.widths[i], cols);
  return blocks;
}

namespace {

ShrinkPlan prefill_shrink(const LoraShape& s, const Machine& m) {
  if (runs_wgmma(s, m)) return sm90_shrink(s, m);
  ShrinkPlan c;
  c.tile_tokens = 64;
  // Splitting fills the chip; without need it only writes and reads partials.
  const std::int64_t ctas =
      max_tiles(s.num_tokens, s.num_adapters, 128) * ceil_div(s.rank_rows(), 192);
  if (num_leaves(s.hidden) > 1 && partials_are_light(s) && partials_fit(s) && 4 * ctas < m.sms) {
    c.partials = Partials::kFinish;
  }
  constexpr int kNarrow = 1, kWide = 2;
  c.kernel = ShrinkKernel::kMma;
  c.shape = s.rank_rows() > 48 && kMmaShapes[kWide].smem() + kMmaStaticSmem <= m.max_smem ? kWide
                                                                                          : kNarrow;
  c.rows = kMmaShapes[c.shape].rows();
  return c;
}

/// CTAs of the decode shrink that share an SM, by registers or by its memory.
std::int64_t decode_per_sm(const LoraShape& s, const Machine& m, int rows, int stages) {
  constexpr std::int64_t kMost = 4, kSystem = 1024;
  const int smem = decode_smem(s.hidden, std::min(rows, s.rank_rows()), stages);
  return std::min(kMost, m.sm_smem / (smem + kDecodeStaticSmem + kSystem));
}

/// Fewer stages of the ring where that lets more CTAs share an SM and the others did not run at
/// once: a few that come last take as long as all before them. (us a call behind a matrix product
/// on an H100, two stages and four: 256 tokens of 64 adapters, rank 16, qkv, 22.5 and 25.4.) CTAs
/// of 64 rows, two an SM, where even four were too few. (Ragged ranks, 32 tokens of 32 adapters,
/// qkv, 16.4 and 17.0; 209 of 51, 2,048 to 512 + 2 x 128, 10.5 and 10.8; but 67 of 61, rank 32, 7.6
/// and 7.1, 167 of 10 6.9 and 5.4.)
int decode_ring_stages(const LoraShape& s, const Machine& m, int rows) {
  constexpr int kManyRows = 64;
  const std::int64_t ctas = decode_shrink_ctas(s, rows, 1);
  const std::int64_t most = decode_per_sm(s, m, rows, kDecodeStages);
  const std::int64_t fewer = decode_per_sm(s, m, rows, kFewDecodeStages);
  const bool small = s.num_tokens <= kSmallTileTokens;
  const std::int64_t round = (small && rows == kManyRows ? fewer : most) * m.sms;
  const bool suits = leaf_size(s.hidden) < kDecodeK && (small || rows <= kManyRows) &&
                     ctas > round && fewer > most;
  return suits ? kFewDecodeStages : kDecodeStages;
}

}  // namespace

ShrinkPlan decode_shrink(const LoraShape& s, const Machine& m) {
  ShrinkPlan c;
  // Above rank 128 a kernel adds partials. Without them there is one kernel less, and CTAs walk
  // over all of K: as fast where SMs have one or two of them. (us, without and with: 9 tokens of
  // 191 adapters, rank 512, 5,120 to 3 x 1,280, 62 and 71; 23 of 5, 4,096 to 2 x 3,584, 34 and 39;
  // on an H100 21 of 14, rank 256, 1,024 to 2 x 3,072, 27.6 and 31.7; but rank 128, 47 of 334,
  // 5,120 to 3 x 1,280, 97 and 83.)
  const std::int64_t walks = max_tiles(s.num_tokens, s.num_adapters, 16) *
                             ceil_div<std::int64_t>(s.rank_rows(), kMmaShapes[0].rows());
  const bool whole = s.max_rank > kExpandPrefillMaxRank && 4 * walks >= 5 * m.sms;
  if (!partials_are_light(s) || !partials_fit(s) || whole) {
    const ShrinkPlan walking = walking_shrink(s, m);
    if (walking.kernel != ShrinkKernel::kMma || !streams_own_ranks(s, m)) return walking;
    return stream_shrink(s, tile_partials(s, m, choose_expand(s, m)), stream_per_sm(s, m));
  }
  const ExpandPlan expand = choose_expand(s, m);
  c.partials = tile_partials(s, m, expand);
  if (!s.aligned_x) {
    c.rows = kMmaShapes[0].rows();
    return c;
  }
  if (const int rows = room_rows(s, m, expand); rows > 0) {
    c.kernel = ShrinkKernel::kDecode;
    c.rows = rows;
    take_chunks(s, m, expand, c);
    return c;
  }
  if (suits_leaves(s, m)) return leaf_shrink(s, m, c.partials);
  c.kernel = ShrinkKernel::kDecode;
  // A cluster holds K at once or not at all: chunks that its CTAs take in turn cost more than a
  // second kernel. (us, with lora_expand, in clusters and with partials: 8 tokens of 8 adapters,
  // rank 16, 14,336 to 4,096, 9.5 and 5.9; 32 tokens of one, qkv, 4.9 and 5.5.)
  const int cluster = decode_cluster(s.hidden);
  c.rows = shared_rows(s, m, cluster);
  if (decode_turns(s.hidden, cluster) == 1 && fits_clusters(s, m, c.rows)) {
    c.partials = Partials::kNone;
  } else {
    c.rows = shared_rows(s, m, ceil_div<std::int64_t>(s.hidden, kDecodeK));
    c.rows = std::max(c.rows, own_sm_rows(s, m, c.rows, expand));
    if (suits_wgmma_of_few(s, m, c.rows)) return wgmma_shrink(s, m);
    if (suits_stream(s, m, c)) return stream_shrink(s, c.partials, stream_per_sm(s, m));
    c.stages = decode_ring_stages(s, m, c.rows);
    take_chunks(s, m, expand, c);
  }
  return c;
}

int decode_most_rows(const LoraShape& s, const Machine& m) {
  const int smem = (16 + decode_ring_rows(s.hidden)) * (kDecodeK + 8) * 2 + kDecodeStaticSmem;
  return smem <= m.max_smem ? kDecodeMaxRows : 64;
}

bool fits_clusters(const LoraShape& s, const Machine& m, int rows) {
  const std::int64_t smem = decode_cluster_smem(s.hidden, rows) + kDecodeStaticSmem;
  if (s.op != Op::kShrink || m.arch != 90 || smem > m.max_smem) return false;
  const std::int64_t ctas = max_tiles(s.num_tokens, s.num_adapters, 16) *
                            ceil_div(s.rank_rows(), rows) * decode_cluster(s.hidden);
  return 8 * ctas <= 7 * std::min<std::int64_t>(4, m.sm_smem / (smem + 1024)) * m.sms;
}

int decode_stages(const LoraShape& s, const ExpandPlan& c, const Machine& m) {
  if (c.per_sm == kDenseExpandPerSm && h_width(s) > kFewRanks) return kDenseExpandStages;
  if (h_width(s) <= kExpandPrefillMaxRank) return kDecodeExpandStages;
  const int columns = std::min(3 * c.block_cols, c.cols);
  return (16 + columns) * kLoraMaxRank * 2 + 2048 <= m.max_smem ? 3 : 2;
}

bool runs_wgmma(const LoraShape& s, const Machine& m) {
  return m.arch == 90 && s.aligned_x && (s.one_type || (s.float_weights && s.op == Op::kApply));
}

bool decode_ring_fits(const LoraShape& s, const Machine& m, std::int64_t cols, int block_cols,
                      int stages) {
  if (h_width(s) <= 64 || h_width(s) > kExpandPrefillMaxRank) return true;
  const std::int64_t blocks =
      std::min<std::int64_t>(stages, ceil_div<std::int64_t>(cols, block_cols));
  return (16 + blocks * block_cols) * kExpandPrefillMaxRank * 2 + 2048 <= m.max_smem;
}

bool runs_dense(const LoraShape& s) { return s.aligned_y && h_width(s) <= kDenseExpandMaxRank; }

ExpandPlan decode_expand(const LoraShape& s, const Machine& m) {
  ExpandPlan c;
  c.kernel = ExpandKernel::kDecode;
  const std::int64_t tiles = max_tiles(s.num_tokens, s.num_adapters, 16);
  // As many CTAs as run at once (three per SM if each has long to stream), rather fewer, all with
  // as many columns. (256 tokens of 64 adapters, qkv: 16.7 us with 1,536 columns, 19.4 with 1,024.)
  const std::int64_t likely = std::min(s.num_tokens, tiles + tiles / 19);
  const int per_sm = likely >= kManyTiles ? 5 : 2;
  std::int64_t cols =
      std::max<std::int64_t>(1, ceil_div<std::int64_t>(s.sum_widths() * likely, per_sm * m.sms));
  if (per_sm == 2 && s.max_rank <= kFewRanks && cols * s.max_rank >= kLongStream) {
    cols = ceil_div<std::int64_t>(2 * cols, 3);
  }
  if (s.max_rank > kFewRanks || likely >= kManyTiles) cols = std::min(cols, kMostDecodeCols);
  // A stage of the ring is a block of B of 8 to 32 KB. A step takes some 0.7 us whatever its
  // columns, so wide blocks are better, as long as two CTAs fit an SM. (us, ranks 65 to 128, blocks
  // of 32 and of these widths: 74 tokens of 16 adapters, 3,584 to 2 x 18,944, 92 and 62; 112 of
  // one, 2,048 to 2,048 + 2 x 512, 10.2 and 8.0; 1,165 of 139, 8,192 to 8,192, 345 and 218.)
  // Of ranks 65 to 128 two of 128 columns, both in flight at once, let a third CTA fit the SM. (384
  // to 704 columns in narrow blocks, and 256 in these, on an H100: 32 tokens of 23 adapters, 1,024
  // to 2,048 + 2 x 1,024, 22.4 and 16.7; 11 of 12, 2,048 to 2 x 8,192, 18.0 and 15.1; 47 of 334,
  // 5,120 to 3 x 1,280, 93 and 84; but 1,344 columns in narrow blocks and 1,280 in blocks of 128,
  // 88 of 7, gate_up, 38.4 and 42.3.)
  const bool pair =
      s.max_rank > 64 && s.max_rank <= kExpandPrefillMaxRank && cols > 320 && cols < kLongBlocks;
  if (pair) cols = 256;
  if (s.max_rank <= 16) {
    c.block_cols = 256;
  } else if (s.max_rank <= 64 ||
             (s.max_rank <= 128 && cols <= 320 && decode_ring_fits(s, m, cols, 128))) {
    c.block_cols = 128;
  } else {
    c.block_cols = s.max_rank <= 128 ? 64 : 32;
  }
  // Four blocks of B of rank 64 are all in flight at once, and let a third CTA fit the SM. (32
  // tokens of 32 adapters, qkv: 22.3 us against 25.3, ragged ranks up to 64 17.6 against 21.3.)
  const std::int64_t resident_cols = 4 * c.block_cols;
  const std::int64_t resident = ceil_div<std::int64_t>(s.sum_widths(), resident_cols) * tiles;
  if (s.max_rank > 32 && s.max_rank <= 64 && resident > 2 * m.sms && resident <= 3 * m.sms) {
    cols = resident_cols;
  }
  // Of low ranks half a block, or one CTA for it. (us, of 128 columns and 256: 6 tokens of one
  // adapter, rank 8, 5,120 to 2 x 13,824, 3.6 and 3.7; but 44 of 325, 3,072 to 1,024, 256 columns
  // in halves of a block 4.3, in a whole one 4.0. Of ranks 17 to 64, 64 columns and 128: one token,
  // qkv of 3,584, 3.6 and 2.9; 146 of one, rank 32, 4,096 to 1,024 + 2 x 256, 6.6 and 6.0.)
  const int whole_block = c.block_cols;
  if (cols < whole_block && s.max_rank <= 16) c.block_cols = whole_block / 2;
  if (cols < whole_block && s.max_rank > 64 && 2 * cols <= whole_block) {
    c.block_cols = std::max(32, whole_block / 2);
  }
  c.cols = even_cols(s, cols, c.block_cols);
  if (c.cols % whole_block == 0) c.block_cols = whole_block;
  // Up to a quarter of a stage is no stage more, if the CTAs that makes more of run at once, too.
  // (us, 512 columns and 768: 24 tokens of 8 adapters, rank 16, 16,384 to 16,384, 5.2 and 6.2.)
  const int even = even_cols(s, cols, 1), whole = even / c.block_cols * c.block_cols;
  if (whole > 0 && 4 * (even - whole) <= c.block_cols &&
      column_blocks(s, whole) * tiles <= kExpandPerSm * m.sms) {
    c.cols = whole;
  }
  // (us, four CTAs an SM in place of three, both as wide: 512 tokens of 256 adapters, gate_up, rank
  // 16, 101 and 139; but one token, gate_up, 3.4 and 3.1.)
  if (likely >= kManyTiles && s.max_rank <= kFewRanks && runs_dense(s)) {
    c.per_sm = kDenseExpandPerSm;
    const bool full = s.num_tokens > kSmallTileTokens && tokens_per_adapter(s) >= 16;
    const std::int64_t round = kDenseExpandPerSm * m.sms,
                       most = kFullTileBytes / (64 + 2 * s.max_rank);
    if (full && 2 * tiles * column_blocks(s, c.cols) <= 3 * round) {
      c.cols = std::min(c.cols, even_cols(s, most, c.block_cols));
    }
  }
  if (s.max_rank > kFewRanks && runs_dense(s)) share_round(s, m, likely, c);
  fit_many(s, m, c);
  fit_round(s, m, c);
  // A round of three CTAs an SM and a few more take as long as two: then four in fewer registers.
  // (us on an H100, four and three: 110 tokens of 109 adapters, rank 16, 3,584 to 3,584 + 2 x 512,
  // 20.5 and 24.0; 110 of 144, rank 32, 4,736 to 3,584, 25.1 and 30.9; but with 256 CTAs 64 of 80,
  // rank 16, 18,944 to 3,584, 20.7 and 20.1; of long ones 86 of 81, gate_up, 6,912 columns, 42.0
  // and 40.0.)
  if (s.max_rank <= kFewRanks && s.num_tokens <= kSmallTileTokens && runs_dense(s) &&
      !knows_tiles(s) && c.cols <= kMostShortCols &&
      expected_tiles(s) * column_blocks(s, c.cols) >= kExpandPerSm * m.sms) {
    c.per_sm = kDenseExpandPerSm;
  }
  if (!s.aligned_y) c.block_cols = 32;  // two kernels for all ranks, whose blocks are narrow
  c.stages = decode_stages(s, c, m);
  // Blocks of a ring of fewer columns, before they were rounded up to whole ones.
  if (!decode_ring_fits(s, m, c.cols, c.block_cols, c.stages)) c.block_cols /= 2;
  return c;
}

ExpandPlan choose_expand(const LoraShape& s, const Machine& m) {
  if (!s.one_type) return choose_parts_expand(s, m);
  if (suits_bulk(s, m)) return bulk_expand(s, m);
  const bool direct = suits_direct(s);
  if (suits_wide_walk(s, m)) return wide_walk(s);
  if (ExpandPlan round; suits_round(s, m, round)) return round;
  if (!direct && suits_prefill(s, m)) return prefill_expand(s, m);
  if (suits_wide(s, m)) return step_expand(s, m);
  ExpandPlan c = direct ? choose_direct(s, m) : decode_expand(s, m);
  // Tiles of 64 tokens come in quarters: where tiles of 16 would be more than a grid has rows.
  if (max_tiles(s.num_tokens, s.num_adapters, 16) > 65535) c.tile_tokens = 64;
  return c;
}

ShrinkPlan choose_shrink(const LoraShape& s, const Machine& m) {
  if (!s.one_type) return choose_parts_shrink(s, m);
  if (suits_bulk(s, m)) return shrink_before_bulk(s, m);
  return best_tile_tokens(s) == 16 ? decode_shrink(s, m) : prefill_shrink(s, m);
}

}  // namespace mortar::lora
