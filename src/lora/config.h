// SPDX-License-Identifier: Apache-2.0
// Launch choices of LoRA on CUDA as data: the kernels, the tables of their shapes, and what a plan
// (launch_plan.h) gives to each. None of them changes a bit of a result.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/int_math.h"
#include "lora/problem.h"

namespace mortar::lora {

enum class ShrinkKernel {
  kDecode,
  kWgmma,
  kMma,
  kParts,
  kWalk,
  kStream,  ///< tiles of few tokens by persistent warps
};
enum class ExpandKernel {
  kDecode,
  kDirect,  ///< B straight into the fragments of the MMA
  kPrefill,
  kWide,
  kParts,
  kOne,   ///< of lora_apply, shrink and expand in one launch
  kBulk,  ///< low ranks of many tokens, by persistent CTAs
};
/// Who adds the split-K partials that shrink leaves, one for each leaf of K.
enum class Partials {
  kNone,    ///< there are none: a CTA or a cluster of shrink sums all of K
  kFinish,  ///< a kernel of its own, which writes h
  kExpand,  ///< every CTA of expand, as it reads them
};

/// How much of K a CTA of the wgmma shrink sums.
enum class Share {
  kAll,   ///< both halves of the leaves, the sums of the first one parked in shared memory
  kHalf,  ///< one of them, the other by the other CTA of a cluster
  kLeaf,  ///< leaves, whose sums it stores one by one
};

/// Shapes of shrink_wgmma.cu: rank rows and tiles of 64 tokens of a CTA, as many stages as the
/// shared memory of an SM holds, and CTAs per SM; of float32 weights, or of those of x's type.
/// Float32 rows wait to be split in registers, or, for longer trips to memory, in shared memory.
struct WgmmaShape {
  int rows, tiles, stages, per_sm;
  Share share;
  bool float_weights = false;
  int ahead = 0;  ///< stages whose float32 rows wait in shared memory; 0: one or two in registers
};
inline constexpr WgmmaShape kWgmmaShapes[] = {
    {48, 1, 14, 1, Share::kHalf},         {48, 2, 9, 1, Share::kHalf},
    {48, 3, 6, 1, Share::kHalf},          {96, 1, 10, 1, Share::kHalf},
    {96, 2, 6, 1, Share::kHalf},          {144, 2, 5, 1, Share::kHalf},
    {16, 1, 4, 4, Share::kLeaf},          {48, 2, 4, 2, Share::kLeaf},
    {96, 2, 6, 1, Share::kAll},           {144, 2, 4, 1, Share::kAll},
    {48, 1, 7, 2, Share::kHalf},          {96, 1, 4, 2, Share::kHalf},
    {64, 1, 6, 2, Share::kLeaf},          {64, 1, 6, 2, Share::kHalf},
    {64, 1, 13, 1, Share::kHalf},         {32, 1, 4, 1, Share::kHalf, true, 8},
    {48, 1, 5, 2, Share::kHalf, true},    {48, 2, 7, 1, Share::kHalf, true},
    {64, 1, 3, 1, Share::kHalf, true, 5}, {64, 2, 3, 1, Share::kHalf, true, 3},
    {64, 2, 3, 1, Share::kLeaf, true, 3}, {128, 2, 2, 1, Share::kHalf, true, 2},
};

/// CTAs of the wgmma shrink of one 16-bit type that share K, so many leaves each, both halves of K
/// apart; leaves such that they are shared out evenly, and the most.
inline std::int64_t wgmma_leaf_ctas(std::int64_t num, std::int64_t leaves) {
  const std::int64_t first = first_leaves(num);
  return ceil_div(first, leaves) + ceil_div(num - first, leaves);
}
inline bool are_even_leaves(std::int64_t num, std::int64_t leaves) {
  const std::int64_t first = first_leaves(num);
  return ceil_div(first, ceil_div(first, leaves)) == leaves;
}
inline std::int64_t most_wgmma_leaves(std::int64_t num) {
  return std::max<std::int64_t>(1, ceil_div<std::int64_t>(num, 4));
}
/// Partials that they leave: the CTA that begins a half of K adds its leaves up.
inline std::int64_t wgmma_partials(std::int64_t num, std::int64_t leaves) {
  return num - 2 * (leaves - 1);
}

/// Shapes of shrink_walk.cu, whose CTAs walk over units of 128 tokens: rank rows of a unit, and
/// stages of its ring.
struct WalkShape {
  int rows, stages;
};
inline constexpr WalkShape kWalkShapes[] = {{192, 5}, {128, 6}};
inline constexpr int kWalkTokens = 128;
inline constexpr int kWalkBoxRows = 64;   ///< rank rows of a box that the tensor copy engine brings
inline constexpr int kMostWalkers = 144;  ///< CTAs, each with room for sums in the workspace

/// Shapes of shrink_mma.cu: warps along tokens (16 each) and along rank rows, fragments of 8 rank
/// rows of a warp, stages.
struct MmaShape {
  int warps_tokens, warps_rows, frags, stages;
  constexpr int tokens() const { return 16 * warps_tokens; }
  constexpr int rows() const { return 8 * warps_rows * frags; }
  constexpr int smem() const { return stages * (tokens() + rows()) * 272; }
};
/// Three stages of 48 rows were as fast as six.
inline constexpr MmaShape kMmaShapes[] = {{1, 4, 1, 4}, {4, 2, 3, 3}, {4, 2, 6, 3}, {1, 2, 1, 6}};
inline constexpr int kNarrowMma = 3;  ///< the one of few rank rows

/// Stages of the ring of rank rows of the decode shrink. Fewer let more of its CTAs share an SM;
/// partials of K chunks of 256 elements alone have them.
inline constexpr int kDecodeStages = 4, kFewDecodeStages = 2;
/// CTAs of the decode shrink that an SM has registers for where they keep no fragments of x: of K
/// chunks of 256 elements and up to 32 rank rows.
inline constexpr int kDenseShrinkPerSm = 8, kDenseShrinkMaxRows = 32;

struct ShrinkPlan {
  ShrinkKernel kernel = ShrinkKernel::kMma;
  int shape = 0;  ///< row of kWgmmaShapes, kMmaShapes or kWalkShapes
  int tile_tokens = 16;
  int rows = 32;  ///< rank rows of a CTA
  Partials partials = Partials::kNone;
  int per_sm = 0;              ///< CTAs per SM, decode kernel; 0: as many as fit; or in fewer
                               ///< registers, kDenseShrinkPerSm; those that share warps, stream
  int stages = kDecodeStages;  ///< of its ring of rank rows: that, or kFewDecodeStages
  int leaves = 1;              ///< K chunks whose partials a CTA makes, kernels of parts, of wgmma,
                               ///< and the decode kernel
  int x_tokens = 16;           ///< of the decode kernel, whose x it holds at a time: 16 or 8

  bool split() const { return partials != Partials::kNone; }
  friend bool operator==(const ShrinkPlan&, const ShrinkPlan&) = default;
};

/// Shapes of expand_wide.cu: tiles of 64 tokens and columns of a CTA, stages of its ring, and CTAs
/// per SM; of float32 weights, or of those of y's type; and whether CTAs walk: as many as fit at
/// once over tiles and columns (expand_wide_walk.cu), or of low ranks and float32 weights over
/// tiles, with B kept (expand_wide_kept.cu).
struct WideShape {
  int tiles, cols, stages, per_sm;
  bool float_weights = false, walks = false;
  int ahead = 0;  ///< steps whose float32 rows of B wait in shared memory; 0: in registers
};
inline constexpr WideShape kWideShapes[] = {{1, 128, 4, 2},
                                            {2, 128, 3, 2},
                                            {1, 128, 2, 2, true},
                                            {2, 128, 2, 1, true, false, 2},
                                            {2, 128, 6, 1, false, true},
                                            {1, 128, 2, 2, true, true},
                                            {2, 128, 4, 1, false, true},
                                            {2, 128, 3, 1, true, true},
                                            {2, 128, 6, 1}};
/// Those of float32 weights: of one tile and of two.
inline constexpr int kWidePartsShape = 2, kWidePairPartsShape = 3;
static_assert(kWideShapes[kWidePartsShape].float_weights &&
              kWideShapes[kWidePartsShape].tiles == 1);
static_assert(kWideShapes[kWidePairPartsShape].float_weights);
/// Two tiles, of CTAs that have an SM each.
inline constexpr int kWideAloneShape = 8;
static_assert(kWideShapes[kWideAloneShape].per_sm == 1);
inline constexpr int kWideRoundedShape = 0;  ///< the one that rounds the caller's h of float32
inline constexpr int kWideWalkShape = 4, kWalkCols = 128;  ///< columns of its steps
static_assert(kWideShapes[kWideWalkShape].walks);
inline constexpr int kWideKeptShape = 5, kWideKeptMaxRank = 64;
static_assert(kWideShapes[kWideKeptShape].walks && kWideShapes[kWideKeptShape].float_weights);
/// Its CTAs take runs of up to 2^kMostKeptRun tiles.
inline constexpr int kMostKeptRun = 3;
/// CTAs walk as in kWideWalkShape, of ranks that leave room for y of steps ahead.
inline constexpr int kWideStagedShape = 6, kWideStagedMaxRank = 256;
static_assert(kWideShapes[kWideStagedShape].walks &&
              kWideShapes[kWideStagedShape].cols == kWideShapes[kWideWalkShape].cols);

/// The same of float32 weights, of ranks whose parts of h leave room for B.
inline constexpr int kWideWalkPartsShape = 7, kWideWalkPartsMaxRank = 256;
static_assert(kWideShapes[kWideWalkPartsShape].walks &&
              kWideShapes[kWideWalkPartsShape].float_weights &&
              kWideShapes[kWideWalkPartsShape].tiles == kWideShapes[kWideWalkShape].tiles &&
              kWideShapes[kWideWalkPartsShape].cols == kWalkCols);

/// Blocks of B in the ring of the decode expand, and above rank 32 where four CTAs share an SM.
inline constexpr int kDecodeExpandStages = 5, kDenseExpandStages = 3;

struct ExpandPlan {
  ExpandKernel kernel = ExpandKernel::kDecode;
  int shape = 0;  ///< row of kWideShapes
  int tile_tokens = 16;
  int cols = 128;                    ///< columns of a block: what a CTA takes at a time
  int block_cols = 128;              ///< columns whose B lies in a stage of the ring, decode kernel
  int stages = kDecodeExpandStages;  ///< of that ring
  int per_sm = 0;   ///< CTAs per SM; decode kernel: 0, as many as fit, or kDenseExpandPerSm
  int groups = 1;   ///< groups of columns that share an MMA step, direct kernel
  int cluster = 1;  ///< CTAs that make h from partials, decode kernel, or share B, persistent wide
  bool boxes = false;  ///< h and B come by the tensor copy engine, wide kernel of a step a CTA
  int log_run = 0;     ///< a CTA takes runs of 2^log_run tiles of a block, prefill kernel and the
                       ///< one that keeps B
  /// CTAs that run at once, decode kernel, where the device cuts columns so that those of the tiles
  /// that there are make one round (cuda/expand_tile.cuh); 0: it takes `cols`
  int round = 0;

  friend bool operator==(const ExpandPlan&, const ExpandPlan&) = default;
};

/// CTAs of an SM of the decode kernel in fewer registers, which ranks up to 128 have besides.
inline constexpr int kDenseExpandPerSm = 4, kDenseExpandMaxRank = 128;
/// Largest rank of expand_direct.cu, columns that its warps take at a time, and groups of columns
/// that share an MMA step there, of few tokens and such a share of that rank.
inline constexpr int kDirectMaxRank = 16, kDirectCols = 128, kDirectGroups = 4;
/// Two column blocks of B of a larger rank do not fit an SM beside y.
inline constexpr int kExpandPrefillMaxRank = 128;
/// Rank rows of a CTA of the shrink of parts: with partials, and where it walks over the leaves of
/// K and keeps totals of all its rows.
inline constexpr int kPartsMaxRows = 128, kPartsMaxTotals = 48;
inline constexpr int kDecodeK = 512;            ///< elements of K of a CTA of the decode shrink
inline constexpr int kDecodeMaxRows = 256;      ///< its rank rows
inline constexpr int kDecodeStaticSmem = 1024;  ///< its static shared memory, bytes, at most
inline constexpr int kPrefillCols = 128;        ///< columns of a step of the prefill expand

/// CTAs of a cluster of the decode shrink that holds all of K, each kDecodeK elements of it at a
/// time: as many as a leaf-ordered sum can use, up to what every device of sm_90 has room for.
inline int decode_cluster(std::int64_t hidden) {
  int ctas = 2;
  while (ctas < 8 && ctas * kDecodeK < hidden) ctas *= 2;
  return ctas;
}
/// How often each of them takes kDecodeK elements.
MORTAR_HOST_DEVICE inline int decode_turns(std::int64_t hidden, int ctas) {
  return static_cast<int>(
      std::max<std::int64_t>(1, ceil_div<std::int64_t>(hidden, std::int64_t{ctas} * kDecodeK)));
}
/// Rank rows in the ring of a CTA of the decode shrink.
inline int decode_ring_rows(std::int64_t hidden, int stages = kDecodeStages) {
  return stages * (leaf_size(hidden) == kDecodeK ? 32 : 16);
}
/// Bytes of shared memory for what is known of so many rank rows: address, place and scale.
MORTAR_HOST_DEVICE constexpr int decode_list_bytes(int rows) { return 20 * round_up(rows, 8); }
/// Dynamic shared memory of a CTA with so many rank rows that leaves partials of so many times
/// kDecodeK elements of K, bytes: x of so many tokens, and the ring. Fewer rows than the ring holds
/// take no more than they need.
inline int decode_smem(std::int64_t hidden, int rows, int stages, int turns = 1,
                       int x_tokens = 16) {
  const int ring = rows * turns <= decode_ring_rows(hidden, 1)
                       ? rows * turns
                       : std::min(decode_ring_rows(hidden, stages), round_up(rows, 8));
  return (x_tokens * turns + ring) * (kDecodeK + 8) * 2 + decode_list_bytes(rows);
}
/// Dynamic shared memory of a CTA with so many rank rows of such a cluster, bytes: x, the ring, and
/// all leaves of its tokens.
inline std::int64_t decode_cluster_smem(std::int64_t hidden, int rows) {
  const std::int64_t turns = decode_turns(hidden, decode_cluster(hidden));
  const std::int64_t sums = turns * (kDecodeK / leaf_size(hidden)) * 16 * rows * 4;
  const std::int64_t ring = std::min(decode_ring_rows(hidden), turns > 1 ? 4 * rows : rows);
  return (16 * turns + ring) * (kDecodeK + 8) * 2 + sums + decode_list_bytes(rows);
}

/// shrink_stream.cu: rank rows and tokens of a piece of work, threads of a CTA and tiles that it
/// can list, at most.
inline constexpr int kStreamRows = 16, kStreamTokens = 8;
inline constexpr int kStreamThreads = 512, kStreamTiles = 1024;
/// Shared memory of a warp of it with so many rank rows of all slices, bytes.
inline int stream_warp_smem(int rank_rows) {
  return (std::min(rank_rows, kStreamRows) + kStreamTokens) * (kDecodeK + 8) * 2;
}
/// Shared memory of the list of tiles, and the warps that fit an SM beside it such that a CTA of
/// expand still finds room there: it has its B on the way then when shrink ends. (us, six warps
/// and nine: 114 tokens of 50 adapters, ranks up to 64, 8,192 to 8,192, 19.0 and 22.2; 334 of 251,
/// rank 32, 3,584 to 4,096, 24.2 and 27.6; but 267 of 330, rank 8, three slices, 35.9 and 33.0.)
inline int stream_list_smem(int tiles) { return 16 * tiles; }
inline int stream_warps(int rank_rows, int tiles, int max_smem) {
  constexpr int kExpand = 56 << 10, kStatic = 1024;
  return std::min(kStreamThreads / 32, (max_smem - kExpand - kStatic - stream_list_smem(tiles)) /
                                           stream_warp_smem(rank_rows));
}

/// expand_bulk.cu: columns of a step, bytes from a token's y to the next one's in a stage (two lie
/// in unlike halves of all banks), stages of its ring at most, and CTAs of an SM.
inline constexpr int kBulkCols = 512, kBulkYPitch = 2 * kBulkCols + 64;
inline constexpr int kBulkMostStages = 6, kBulkPerSm = 2;
/// Bytes of a stage: y of 16 tokens, B of a step's columns, and rows of h.
constexpr int bulk_stage(int max_rank, int h_row) {
  return 16 * kBulkYPitch + kBulkCols * max_rank * 2 + 16 * h_row * 2;
}
/// Stages where that many CTAs share an SM of so much shared memory.
inline int bulk_stages(int max_rank, int h_row, int sm_smem) {
  constexpr int kStatic = 3 << 10;  // with what the system keeps
  return std::min(kBulkMostStages, (sm_smem / kBulkPerSm - kStatic) / bulk_stage(max_rank, h_row));
}

/// The one kernel of lora_apply: CTAs of a cluster, its largest rank, and columns of a CTA.
inline constexpr int kOneCluster = 8, kOneMaxRank = 64, kOneMaxCols = 512;
/// CTAs of it that an SM has registers for, and their static shared memory, bytes, at most.
inline constexpr int kOnePerSm = 3, kOneStaticSmem = 6144;
/// Turns that the CTAs of its clusters take at K.
MORTAR_HOST_DEVICE constexpr int one_turns(std::int64_t hidden) {
  return static_cast<int>(ceil_div<std::int64_t>(hidden, kOneCluster * kDecodeK));
}
/// The place that it has for the ranks of an adapter: 16, 32 or 64.
MORTAR_HOST_DEVICE constexpr int one_ranks(int max_rank) {
  return max_rank <= 16 ? 16 : max_rank <= 32 ? 32 : 64;
}
/// Shared memory of a CTA of it, bytes: sums of all leaves of K that it adds, x, A, B and h.
inline std::int64_t one_smem(std::int64_t hidden, int cols, int ranks) {
  return num_leaves(hidden) * std::max(2 * ranks, 64) * 4 +
         one_turns(hidden) * (16 + ranks) * (kDecodeK + 8) * 2 + (cols + 16) * ranks * 2;
}

/// Most tiles that `num_tokens` tokens can make: one token of every adapter and the rest in whole
/// tiles. A CTA too many is launched, looked up and waited for: 32 tokens of one adapter, qkv, take
/// 3.8 us in two tiles and 4.2 with room for a third.
inline std::int64_t max_tiles(std::int64_t num_tokens, std::int64_t num_adapters, int tile_tokens) {
  const std::int64_t groups = std::min(num_tokens, num_adapters);
  return (num_tokens - groups) / tile_tokens + groups;
}

/// Rows of 16 tokens along y and z of a grid: z is 1 up to 65,535 rows, the most of y. Batches that
/// have more are tiles of 64, so their number is a multiple of four.
struct TileRowGrid {
  unsigned y = 0, z = 1;
};
inline TileRowGrid tile_row_grid(int num_tiles, int tile_tokens) {
  TileRowGrid grid{static_cast<unsigned>(num_tiles) * static_cast<unsigned>(tile_tokens / 16), 1};
  for (; grid.y > 65535 && grid.y % 2 == 0; grid.y /= 2) grid.z *= 2;
  return grid;
}

}  // namespace mortar::lora
