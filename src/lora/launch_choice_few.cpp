// SPDX-License-Identifier: Apache-2.0
// What the CTAs of a small batch share: SMs, and the making of h from split-K partials.
#include <algorithm>

#include "lora/launch_choice.h"

namespace mortar::lora {

namespace {

/// Bytes of partials of a tile from which on a kernel of its own adds them: every CTA of expand
/// would. (us, that kernel and expand: 113 tokens of one adapter, rank 32, 14,336 to 4,096, 57 KB,
/// 7.8 and 8.5; but 6 of one, rank 64, 16,384 to 2 x 53,248, 49 KB, 12.9 and 11.4.)
constexpr std::int64_t kFinishBytes = 56 << 10;

/// Pieces of four ranks of a token that a CTA of expand has on its way at once, of kLeavesAtOnce
/// leaves each: HSum in cuda/h_sum.cuh.
constexpr std::int64_t kPieces = 64;

/// Rank rows that the decode shrink multiplies side by side, at most: its ring of short leaves.
const int kRowsAtOnce = decode_ring_rows(1);

/// Ranks from which on the decode expand has kernels whose clusters make h together.
constexpr int kLeastSharedRank = 33;

std::int64_t trips(const LoraShape& s) {
  return ceil_div(likely_tile(s) * h_width(s) / 4, kPieces);
}

bool decodes(const ExpandPlan& c) {
  return c.kernel == ExpandKernel::kDecode || c.kernel == ExpandKernel::kDirect;
}
std::int64_t expand_ctas(const LoraShape& s, const ExpandPlan& c) {
  return max_tiles(s.num_tokens, s.num_adapters, 16) *
         ceil_div<std::int64_t>(s.sum_widths(), c.cols);
}

/// Whether a CTA of expand is to have an SM for itself, behind so many of shrink.
bool alone(const LoraShape& s, const Machine& m, std::int64_t shrink_ctas, const ExpandPlan& c) {
  constexpr std::int64_t kShrinkPerSm = 4;  // as many as fit
  const std::int64_t ctas = expand_ctas(s, c);
  return 2 * ctas <= m.sms && ctas + shrink_ctas / kShrinkPerSm <= m.sms;
}

}  // namespace

bool shrink_fits(const LoraShape& s, const Machine& m, int rows, int chunks, const ExpandPlan& c) {
  const std::int64_t shrinks = decode_shrink_ctas(s, rows, chunks), expands = expand_ctas(s, c);
  return shrinks + (alone(s, m, shrinks, c) ? expands : ceil_div(expands, kExpandPerSm)) <= m.sms;
}

bool both_fit(const LoraShape& s, const Machine& m, int rows, int chunks, const ExpandPlan& c) {
  constexpr int kShrink = 64, kExpand = 152, kDenseExpand = 128, kSm = 512;  // registers
  const bool dense = c.kernel == ExpandKernel::kDirect || c.per_sm == kDenseExpandPerSm;
  return decode_shrink_ctas(s, rows, chunks) * kShrink +
             expand_ctas(s, c) * (dense ? kDenseExpand : kExpand) <=
         std::int64_t{kSm} * m.sms;
}

std::int64_t likely_tile(const LoraShape& s) {
  return std::min<std::int64_t>(16, tokens_per_adapter(s));
}

std::int64_t even_tiles(const LoraShape& s) {
  const std::int64_t even = used_adapters(s) * ceil_div<std::int64_t>(tokens_per_adapter(s), 16);
  return std::min(max_tiles(s.num_tokens, s.num_adapters, 16), even);
}

std::int64_t expected_tiles(const LoraShape& s) {
  const std::int64_t most = max_tiles(s.num_tokens, s.num_adapters, 16);
  return std::min(most, (2 * even_tiles(s) + most) / 3);
}

bool knows_tiles(const LoraShape& s) {
  constexpr std::int64_t kFewAdapters = 4;
  return used_adapters(s) <= kFewAdapters && s.num_tokens > 16;
}

/// (us on an H100: 126 tokens of one adapter, rank 16, 3,584 to 2 x 18,944, 304 CTAs 11.4, 400, of
/// which some come last, 12.8; 54 of one, 8,192 to 2 x 28,672, 304 CTAs 8.8, 224 9.6; 321 of one,
/// rank 8, 1,024 to 2,048 + 2 x 1,024, 168 CTAs 5.9, 336 6.3; but 30 of one, rank 16, 28,672 to
/// 8,192, 64 CTAs 7.3, 128 of half a stage 7.0; 162 of two, 8,192 to 2 x 28,672, fewer CTAs of more
/// columns 26.5 and 23.8. On an H200 159 of two, 16,384 to 16,384, 48 of them without an
/// adapter, 512 columns 7.6, 768, of which some SMs had two CTAs and others one, 8.6.)
void fit_round(const LoraShape& s, const Machine& m, ExpandPlan& c) {
  constexpr int kStage = 256, kMostCols = 1024, kMostRank = 16;
  if (!knows_tiles(s) || s.max_rank > kMostRank) return;
  const std::int64_t tiles = even_tiles(s);  // of few adapters there are hardly more
  if (tiles * column_blocks(s, kStage) < m.sms) return;
  for (int cols = kStage; cols <= kMostCols; cols += kStage) {
    if (2 * tiles * column_blocks(s, cols) > 5 * m.sms) continue;
    c.cols = cols;
    c.block_cols = kStage;
    return;
  }
}

/// Up to rank 32 CTAs of four blocks of B and more, four an SM in fewer registers; above, three of
/// these, which leave room for those of the next shrink. (us: 11 tokens of 22 adapters, rank 32,
/// 4,096 to 2 x 14,336, 640 columns, 3.8 CTAs an SM, 7.2, 896 8.5; 13 of 29, 3,584 to 2 x 18,944,
/// 10.0 and 11.4; 32 of 32, gate_up, rank 16, 1,792 columns 15.1, 2,560 16.4; 25 of 178, ranks up
/// to 64, 2,048 to 2,048, 128 columns 4.1, 256 4.4; but 67 of 6, rank 32, 5,120 to 2 x 13,824, 10.3
/// and 9.1. Three an SM in more registers: 13 of 274, rank 32, qkv, 8.1 and 6.1; 32 of 32, rank 16,
/// 512 columns 10.3, 768 9.1.)
void fit_many(const LoraShape& s, const Machine& m, ExpandPlan& c) {
  constexpr int kFewRanks = 32, kMostRank = 64, kMostCols = 4096, kLongBlocks = 4;
  constexpr double kThree = 3.2;  // CTAs an SM; as a rule there are fewer tiles than may be
  constexpr std::int64_t kFewTiles = 4, kManyTiles = 112;
  const std::int64_t tiles = max_tiles(s.num_tokens, s.num_adapters, 16);
  const bool low = s.max_rank <= kFewRanks;
  if (knows_tiles(s) || s.num_tokens > kSmallTileTokens || s.max_rank > kMostRank ||
      !runs_dense(s) || c.per_sm != 0 || tiles >= kManyTiles || (!low && tiles <= kFewTiles)) {
    return;
  }
  const int block = s.max_rank <= 16 ? 256 : 128;
  const double per_sm = low ? kDenseExpandPerSm : kThree;
  int cols = low ? kLongBlocks * block : block;
  while (cols <= kMostCols &&
         static_cast<double>(tiles * column_blocks(s, cols)) > per_sm * m.sms) {
    cols += block;
  }
  if (cols > kMostCols || cols >= c.cols) return;
  c.cols = cols;
  c.block_cols = block;
  c.per_sm = kDenseExpandPerSm;
}

std::int64_t decode_shrink_ctas(const LoraShape& s, int rows, int chunks) {
  return max_tiles(s.num_tokens, s.num_adapters, 16) *
         ceil_div<std::int64_t>(s.hidden, kDecodeK * chunks) * ceil_div(s.rank_rows(), rows);
}

bool shares_h(const LoraShape& s, const Machine& m, const ShrinkPlan& shrink,
              const ExpandPlan& expand) {
  return s.op == Op::kApply && m.arch == 90 && s.aligned_y && h_width(s) >= kLeastSharedRank &&
         shrink.partials == Partials::kExpand && expand.kernel == ExpandKernel::kDecode;
}

/// A cluster takes 0.3 us longer to start than its CTAs alone, and as a whole: where a CTA would
/// wait for three trips to L2 or four, the clusters run at once, few of their CTAs are without
/// columns, and they do not read the partials too often either. (us on an H100, clusters of four
/// and CTAs alone: 51 tokens of 3 adapters, rank 64, 1,024 to 4,096, 4.3 and 5.6; 41 of 4, ranks up
/// to 64, 2,048 to 2,048 + 2 x 512, 5.0 and 6.4; but 113 of one, rank 32, 3,584 to 3,584 + 2 x 512,
/// 7.9 and 7.2; 74 of 16, rank 128, 3,584 to 2 x 18,944, 90 and 72. And a kernel that adds them: 31
/// of one, rank 64, 14,336 to 4,096, 5.9 and 6.7; but 52 of one, rank 64, 16,384 to 16,384, 9.7 and
/// 9.1. Clusters of eight: 5.0 where four take 5.0, but 24 where they take 20, 142 of 3, rank 64,
/// 8,192 to 10,240.)
int h_cluster(const LoraShape& s, const Machine& m, const ExpandPlan& c) {
  constexpr std::int64_t kMostReads = 6 << 20;
  constexpr int kAlone = 2;
  if (s.op != Op::kApply || m.arch != 90 || c.kernel != ExpandKernel::kDecode || !s.aligned_y ||
      h_width(s) < kLeastSharedRank ||
      trips(s) * ceil_div<std::int64_t>(num_leaves(s.hidden), kLeavesAtOnce) <= kAlone ||
      trips(s) > kExpandCluster) {
    return 1;
  }
  std::int64_t blocks = 0;
  for (int i = 0; i < s.num_slices; ++i) {
    blocks += round_up<std::int64_t>(ceil_div<std::int64_t>(s.widths[i], c.cols), kExpandCluster);
  }
  const bool fits = max_tiles(s.num_tokens, s.num_adapters, 16) * blocks <= 2 * m.sms &&
                    8 * blocks <= 9 * column_blocks(s, c.cols);
  return fits && partial_bytes(s) / s.num_slices * blocks <= kExpandCluster * kMostReads
             ? kExpandCluster
             : 1;
}

/// (us on an H100, above rank 128, expand and a kernel of its own: 7 tokens of 23 adapters, rank
/// 256, 1,024 to 512 + 2 x 256, 6.2 and 8.9; 2 of 336, rank 256, 3,072 to 1,024, 4.4 and 5.1; but 2
/// of 19, rank 512, 3,072 to 1,024, 7.8 and 6.8. More trips to L2 than a cluster has CTAs: 90 of
/// one, rank 128, 1,024 to 2 x 3,072, 8.1 and 7.0.)
Partials tile_partials(const LoraShape& s, const Machine& m, const ExpandPlan& expand) {
  if (h_cluster(s, m, expand) > 1) return Partials::kExpand;
  const std::int64_t bytes = likely_tile(s) * num_leaves(s.hidden) * h_width(s) * 4;
  const bool high = s.max_rank > kExpandPrefillMaxRank && (m.arch != 90 || trips(s) > 1);
  const bool many = m.arch == 90 && trips(s) > kExpandCluster;
  return high || many || bytes >= kFinishBytes ? Partials::kFinish : Partials::kExpand;
}

/// Where an adapter has several tiles, fewer CTAs of more rows, with an SM each, are faster than
/// two an SM or than chunks of K on wgmma. (us on an H100: 64 tokens of one adapter, qkv, rank 32,
/// 5.5 and 6.4, rank 16, 4.1 and 5.1; 31, rank 64, 14,336 to 4,096, 5.7 and 6.3; but 8 of 8, qkv,
/// rank 16, 4.4 and 4.3; one token, gate_up, rank 64, 3.8 and 3.7. Where a kernel adds partials, 49
/// of one, rank 128, 2,048 to 1,024, 5.3 and 6.8; on an H200 52 of one, rank 64, 16,384 to 16,384,
/// 64 rows 8.2, 32 8.7.)
int room_rows(const LoraShape& s, const Machine& m, const ExpandPlan& expand) {
  if (s.op != Op::kApply || tokens_per_adapter(s) <= 16 || !decodes(expand)) return 0;
  for (int rows = 16; rows <= kRowsAtOnce; rows += 16) {
    if (shrink_fits(s, m, rows, 1, expand)) return rows;
    if (rows >= s.rank_rows()) break;
  }
  return 0;
}

/// As many rows as stay in the ring and are multiplied at once, at most: ragged ranks have CTAs
/// that would stream for long. Of long K no fewer, where all CTAs run at once or nearly so, as
/// their chains of MMAs are long. (us, 64 rows and all: ragged ranks up to 64, 32 tokens of 32
/// adapters, qkv, 16.7 and 18.6; 209 of 51, 2,048 to 512 + 2 x 128, 10.6 and 14.5; 77 of 469, 1,024
/// to 2 x 768, 8.4 and 9.6; 740 of 84, 1,024 to 2,048 + 2 x 1,024, 20.2 and 22.4; but rank 64, 32
/// of 32, qkv, 25.7 and 22.2, 256 of 64 45.2 and 44.6. Of long K, 64 and 32: 6 of 12, ranks up to
/// 64, 18,944 to 3,584, 5.0 and 5.6; one token, 16,384 to 2 x 53,248, 5.4 and 6.4; but 15 of 18,
/// 18,944 to 3,584, 8.4 and 8.3; rank 64, 32 of 32, down, 27.7 and 26.0. Of very many rows, 32 and
/// all: 9 of 191, rank 512, 5,120 to 3 x 1,280, 71 and 85; 8 of 11, rank 256, 1,024 to 2,048 + 2 x
/// 1,024, 13.6 and 20.4. Rank 128 on an H100, 64 and 32: one of 199, 8,192 to 8,192 + 2 x 1,024,
/// 4.9 and 5.5; 6 of 4, 16,384 to 4,096 + 2 x 256, 14.9 and 16.9.) Ragged ranks of one slice leave
/// half of 64 rows empty. (On an H200, 32 and 64: 108 of 20, 3,584 to 3,584, 6.5 and 7.8; 83 of 228
/// 10.5 and 11.8; but of more tokens 218 of 9 8.9 and 8.3, of more CTAs 135 of 432 9.1 and 8.6.)
int shared_rows(const LoraShape& s, const Machine& m, std::int64_t ctas_per_tile) {
  constexpr int kManyRows = 192, kFewRows = 32, kLongRows = 48, kLongRank = 128, kMoreRows = 96;
  constexpr std::int64_t kHalfTile = 8;
  const std::int64_t tiles = max_tiles(s.num_tokens, s.num_adapters, 16), four = 4 * m.sms;
  const std::int64_t chunks = tiles * ceil_div<std::int64_t>(s.hidden, kDecodeK);
  const auto ctas = [&](int rows) { return chunks * ceil_div(s.rank_rows(), rows); };
  const bool small = s.num_tokens <= kSmallTileTokens;
  const bool at_once = small || (s.ragged && s.op == Op::kApply);
  int least = 16, most = at_once ? kRowsAtOnce : decode_most_rows(s, m);
  if (s.op == Op::kApply && leaf_size(s.hidden) == kDecodeK && s.rank_rows() > kLongRows) {
    const bool all_run = small && s.max_rank <= kLongRank && chunks <= four;
    most = all_run ? kRowsAtOnce : kFewRows;
    // CTAs of as many rows each. (us: 29 tokens of 78 adapters, rank 32, 8,192 to 2,048 + 2 x 256,
    // 48 rows and 48 13.1, 64 and 32 15.3.)
    if (all_run) {
      most = round_up(ceil_div(s.rank_rows(), ceil_div(s.rank_rows(), kRowsAtOnce)), 16);
      least = most;
    }
  } else if (s.rank_rows() > kManyRows) {
    most = s.max_rank <= kLongRank ? kRowsAtOnce : kFewRows;
  } else if (small && ctas(kRowsAtOnce) > four && ctas(kMoreRows) <= four) {
    most = std::min(kMoreRows, decode_most_rows(s, m));
  } else if (small && s.ragged && s.num_slices == 1 && tokens_per_adapter(s) <= kHalfTile &&
             ctas(kRowsAtOnce) > m.sms && ctas(kRowsAtOnce) <= four) {
    most = kFewRows;
  }
  // Where there are few tiles and leaves, rank rows are shared out as well: two CTAs per SM.
  const std::int64_t shares = std::clamp<std::int64_t>(
      2 * m.sms / std::max<std::int64_t>(tiles * ctas_per_tile, 1), 1, ceil_div(s.rank_rows(), 16));
  const auto own = static_cast<int>(ceil_div<std::int64_t>(s.rank_rows(), shares));
  return std::clamp(round_up(own, 16), least, most);
}

/// (Of 50 random problems on an H200 0.967 times as long. us on an H100, 16 or 32 rows and 64: 5 of
/// one, rank 128, three slices, 5,120 to 3 x 1,280, 5.6 and 4.5; one of 164, rank 128, 18,944 to
/// 3,584, 5.2 and 4.1; 11 of one, rank 256, 2,048 to 512 + 2 x 128, 7.4 and 6.3; but one of 72,
/// rank 128, 4,096 to 2 x 3,584, 3.6 and 3.95. Where fewer rows have an SM each: 15 of one, rank
/// 128, 3,584 to 4,096, 16 rows 5.0, 64 5.2.)
int own_sm_rows(const LoraShape& s, const Machine& m, int rows, const ExpandPlan& expand) {
  const int most = std::min(kRowsAtOnce, round_up(s.rank_rows(), 16));
  const bool pays = s.op == Op::kApply && most > rows && !shrink_fits(s, m, rows, 1, expand) &&
                    shrink_fits(s, m, most, 1, expand);
  return pays ? most : rows;
}

/// (us on an H100, these and wgmma before the same expand, rank 128: 72 tokens of 5 adapters,
/// 16,384 to 16,384 + 2 x 1,024, 53 and 42; 37 of 13, 4,096 to 1,024 + 2 x 256, 19.4 and 15.9; 78
/// of 5, 16,384 to 2 x 53,248, 81.9 and 79.9; but a token of each, 9 of 33, 4,096 to 2 x 3,584,
/// 11.6 and 15.2; 4 of 24, 16,384 to 16,384 + 2 x 1,024, 26.9 and 32.0; on an H200 126 of 6, 8,192
/// to 8,192 + 2 x 1,024, 37 and 24, but of more tokens 1,784 of 477, 768 to 1,024, 69 and 78.)
bool suits_wgmma_of_few(const LoraShape& s, const Machine& m, int rows) {
  constexpr std::int64_t kLeastTokens = 3, kRounds = 2, kPerSm = 4;  // of an adapter; CTAs
  constexpr int kLeastRank = 65;
  return s.op == Op::kApply && runs_wgmma(s, m) && s.num_tokens <= kSmallTileTokens &&
         s.max_rank >= kLeastRank && s.max_rank <= kExpandPrefillMaxRank &&
         tokens_per_adapter(s) >= kLeastTokens &&
         decode_shrink_ctas(s, rows, 1) > kRounds * kPerSm * m.sms;
}

namespace {

/// What a CTA of 128 threads takes of an SM: registers of a thread and bytes of shared memory, with
/// what the system keeps of it.
struct Footprint {
  int registers;
  std::int64_t smem;
};
constexpr int kSmRegisters = 512;  ///< an SM's, for each of 128 threads
constexpr std::int64_t kSystemSmem = 1024;

Footprint footprint(const LoraShape& s, const ShrinkPlan& c) {
  const bool at_once = c.rows > 32 && c.rows <= kRowsAtOnce;
  const bool few = leaf_size(s.hidden) == kDecodeK || c.per_sm == kDenseShrinkPerSm;
  return {few       ? 64
          : at_once ? 96
                    : 112,
          decode_smem(s.hidden, std::min(c.rows, s.rank_rows()), c.stages, c.leaves, c.x_tokens) +
              kDecodeStaticSmem + kSystemSmem};
}
Footprint footprint(const LoraShape& s, const ExpandPlan& c) {
  const std::int64_t pitch = h_width(s) <= 16   ? 16
                             : h_width(s) <= 32 ? 32
                             : h_width(s) <= 64 ? 64
                                                : 128;
  const std::int64_t blocks = std::min(c.stages, ceil_div(c.cols, c.block_cols));
  constexpr std::int64_t kStaticSmem = 1152;
  return {c.per_sm == kDenseExpandPerSm ? 128 : 152,
          (16 + blocks * c.block_cols) * pitch * 2 + kStaticSmem + kSystemSmem};
}

/// CTAs of one kind that find room beside so many of another, which lie evenly on all SMs: whole
/// ones of each SM, not a share of the chip's registers.
std::int64_t room_beside(const Machine& m, std::int64_t others, const Footprint& other,
                         const Footprint& own) {
  std::int64_t room = 0;
  const auto add = [&](std::int64_t on_sm, std::int64_t sms) {
    const std::int64_t registers = kSmRegisters - on_sm * other.registers;
    const std::int64_t smem = m.sm_smem - on_sm * other.smem;
    room += sms * std::max<std::int64_t>(0, std::min(registers / own.registers, smem / own.smem));
  };
  add(others / m.sms + 1, others % m.sms);
  add(others / m.sms, m.sms - others % m.sms);
  return room;
}

/// Whether the short CTAs of the decode expand are to run in fewer registers: only so they all find
/// room beside shrink's, and what finds none starts late. (us on an H200: 30 tokens of 15 adapters,
/// rank 16, qkv of 3,584, 4.8 and 7.0; 8 of 163, rank 64, 3,584 to 2 x 4,736, 5.4 and 7.3; 9 of
/// 413, rank 64, 1,024 to 2,048 + 2 x 1,024, 3.9 and 4.1; but 44 of 14, rank 64, 2,048 to 2 x
/// 2,048, 7.3 and 7.1; with room for three in four 44 of 325, rank 8, 3.9 and 3.7; of four blocks
/// 126 of one, rank 16, 12.4 and 9.9.)
bool suits_dense_expand(const LoraShape& s, const Machine& m, const ShrinkPlan& shrink,
                        const ExpandPlan& expand) {
  constexpr int kShortBlocks = 2;
  if (expand.kernel != ExpandKernel::kDecode || expand.per_sm != 0 || expand.cluster != 1 ||
      shrink.kernel != ShrinkKernel::kDecode || !runs_dense(s) || knows_tiles(s) ||
      expand.cols > kShortBlocks * expand.block_cols) {
    return false;
  }
  ExpandPlan dense = expand;
  dense.per_sm = kDenseExpandPerSm;
  dense.stages = decode_stages(s, dense, m);
  const std::int64_t ctas = expand_ctas(s, expand),
                     shrinks = decode_shrink_ctas(s, shrink.rows, shrink.leaves);
  const Footprint other = footprint(s, shrink);
  // A few that start late cost less than the fewer registers do.
  return 3 * ctas > 4 * room_beside(m, shrinks, other, footprint(s, expand)) &&
         ctas <= room_beside(m, shrinks, other, footprint(s, dense));
}

}  // namespace

std::int64_t decode_expand_per_sm(const LoraShape& s, const Machine& m, const ExpandPlan& c) {
  const Footprint own = footprint(s, c);
  return std::min<std::int64_t>(kSmRegisters / own.registers, m.sm_smem / own.smem);
}

namespace {

/// Whether the CTAs of the decode shrink are to run in fewer registers, for which they load
/// fragments of x anew in every stage: where there is one stage, and both kernels of a call have
/// more CTAs than the chip has registers for, so that expand's would start late. (us: 30 tokens of
/// 166 adapters, rank 4, qkv, 4.9 and 5.9; 59 of 104, 4,096 to 4,096, 5.0 and 5.9; 26 of 36, rank
/// 8, 2,048 to 2,048 + 2 x 512, 4.1 and 4.5; but with room for all 44 of 325, 3,072 to 1,024, 4.1
/// and 3.7; where few have none 134 of 16, 4,096 to 16,384, 9.8 and 7.5; and in two stages 31 of
/// 467, rank 16, 2,048 to 512 + 2 x 128, 4.6 and 4.1.)
bool suits_dense_shrink(const LoraShape& s, const Machine& m, const ShrinkPlan& shrink,
                        const ExpandPlan& expand) {
  constexpr int kOneStage = 16;
  constexpr int kShrink = 112, kExpand = 152, kDenseExpand = 128;
  constexpr double kAll = 1.03;
  if (shrink.rows > kOneStage || leaf_size(s.hidden) == kDecodeK) return false;
  const std::int64_t shrinks = decode_shrink_ctas(s, shrink.rows, shrink.leaves);
  const bool dense = expand.kernel == ExpandKernel::kDirect || expand.per_sm == kDenseExpandPerSm;
  const std::int64_t registers =
      shrinks * kShrink + expand_ctas(s, expand) * (dense ? kDenseExpand : kExpand);
  return shrinks > m.sms && static_cast<double>(registers) > kAll * kSmRegisters * m.sms;
}

}  // namespace

/// Gives the CTAs of a small batch an SM each. CTAs of later calls, which start early, then prepare
/// themselves on other SMs: beside them a CTA has to wait for its turn in everything. Expand takes
/// whole SMs where those of two calls fit the chip; shrink where both kernels of a call do, as what
/// does not fit starts late. (32 tokens of one adapter, us: qkv 3.4 against 3.8, gate_up 4.6
/// against 4.9, down 3.5 against 4.1; where shrink does not fit, four tokens of four adapters,
/// qkv, 4.5 against 3.5; where expand does not, 32 tokens of one adapter, gate_up, 7.6
/// against 4.9.)
void give_room(const LoraShape& s, const Machine& m, ShrinkPlan& shrink, ExpandPlan& expand) {
  if (!s.one_type || !shrink.split() || !decodes(expand)) return;
  if (shrink.partials == Partials::kExpand &&
      alone(s, m, decode_shrink_ctas(s, shrink.rows, shrink.leaves), expand)) {
    expand.per_sm = 1;
  }
  if (shrink.kernel != ShrinkKernel::kDecode) return;
  if (suits_dense_expand(s, m, shrink, expand)) {
    expand.per_sm = kDenseExpandPerSm;
    expand.stages = decode_stages(s, expand, m);
  }
  if (shrink_fits(s, m, shrink.rows, shrink.leaves, expand)) {
    shrink.per_sm = 1;
  } else if (suits_dense_shrink(s, m, shrink, expand)) {
    shrink.per_sm = kDenseShrinkPerSm;
  }
}

}  // namespace mortar::lora
