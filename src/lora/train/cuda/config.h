// SPDX-License-Identifier: Apache-2.0
// The launch plan of LoRA training on CUDA: a pure function of sizes and dtypes, so that bits
// depend on sizes alone and never on the device.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>

#include "core/int_math.h"
#include "lora/train/cuda/leaves.h"
#include "lora/train/cuda/part_plan.h"
#include "lora/train/cuda/product_plan.h"
#include "lora/train/cuda/row_cut.h"
#include "lora/train/cuda/shrink_time.h"
#include "mortar/tensor.h"

namespace mortar::lora::train::cuda {

inline constexpr int kThreads = 256;      ///< of every product kernel: eight warps
inline constexpr int kTileColumns = 128;  ///< of expand and outer
inline constexpr int kWideColumns = 256;  ///< of expand for more than 128 ranks
inline constexpr int kStepRows = 64;      ///< rows of outer's pipeline steps
inline constexpr int kMostRanks = 64;     ///< rank columns of a thread block
inline constexpr int kFloatChunk = 128;   ///< columns of the weights that shrink_float.cu has
/// Stages of a pipeline: 4 of 18 to 24 KB, two thread blocks an SM, keep about 100 KB in flight.
inline constexpr int kStages = 4;
/// Thread blocks that a product kernel should have: two for each of the 132 SMs of an H200, and a
/// fixed number, as the summation tree follows from it.
inline constexpr std::int64_t kWantedBlocks = 256;

/// Precision policy: operands of one 16-bit type as they are, or all as sums of bfloat16 parts
/// (split-bf16).
enum class Policy { kFloat16, kBFloat16, kSplit };

constexpr Policy policy_of(DType a, DType b) {
  if (a == b && a == DType::kBFloat16) return Policy::kBFloat16;
  if (a == b && a == DType::kFloat16) return Policy::kFloat16;
  return Policy::kSplit;
}

/// bfloat16 parts that a dtype is the sum of.
constexpr int parts_of(DType dtype) {
  return dtype == DType::kFloat32 ? 3 : (dtype == DType::kFloat16 ? 2 : 1);
}

inline constexpr int kExpandFixedRows = 50;  ///< of the streaming expand: 0.8 us

/// What launch choices depend on beside sizes. No bit of a result does.
struct Machine {
  int sms = 132;
  bool clusters = true;   ///< of thread blocks: sm_90 and newer
  bool products = false;  ///< lora/cuda/product.cu, sm_90 alone, and it takes the operands
};

/// Ranks of the widest kernel whose weights stay in registers.
inline constexpr int kMostStreamRanks = 128;
constexpr int stream_ranks(int width) {
  return width <= 16 ? 16 : width <= 32 ? 32 : width <= 64 ? 64 : kMostStreamRanks;
}
/// Levels of the tree of leaves that a thread of the streaming shrink holds, in tiles of so many
/// rows: what 128 registers allow for sums (64 where two thread blocks share an SM).
constexpr int stream_levels(int ranks, int rows) {
  return ranks == 128 || (ranks == 32 && rows == 128) || (ranks == 64 && rows == 64) ? 2 : 3;
}
/// Whether it has tiles of so many rows, of 32, 64 and 128. By ShrinkTime those of 32 rows take no
/// longer than of 64 with up to 32 ranks, and less with 128; of 64 ranks and more those of 128 rows
/// would save 0.4 % on average (2,000 random problems, without dropout; with it nothing).
constexpr bool stream_has(int ranks, int rows) {
  return rows == 32 || (rows == 64 && ranks == 64) || (rows == 128 && ranks <= 32);
}
/// Its stages, of 64 columns of the rows and of the weights: as many as let two thread blocks share
/// an SM, or one where the sums leave no registers for two.
constexpr int stream_stage(int ranks, int rows) { return (rows + ranks) * kBlockColumns * 2; }
constexpr int stream_blocks(int ranks, int rows) {
  if (rows == 32) return ranks <= 32 ? 4 : 2;
  return ranks == 128 ? 1 : 2;
}
constexpr int stream_stages(int ranks, int rows) {
  return std::min(8, 200 * 1024 / stream_blocks(ranks, rows) / stream_stage(ranks, rows));
}

/// Ranks of float32 weights up to which y is made by the stream that splits them itself: of 32 its
/// warps wait for their MMAs. 2048 x 5120 x 13824, rank 32, forward on an H100: 72 us, by products
/// of columns of parts 57.
inline constexpr int kMostSplitRanks = 16;
/// Tiles of expand_parts.cu, and ranks whose parts of weights its shared memory holds.
inline constexpr int kPartsRows = 64, kPartsColumns = 256, kMostPartsRanks = 64;
inline constexpr std::int64_t kMostPartsRows = std::int64_t{1} << 24;
/// Columns of h's parts that a rank has in this stream, of the six that are multiplied.
inline constexpr int kStreamCopies = 4;

/// One product of M rows with a reduction over columns: h or ds.
struct ShrinkPlan {
  bool stream = false;   ///< shrink_stream.cu, else shrink.cu
  bool fused = false;    ///< a cluster adds its sums, else partials are left for reduce.cu
  bool product = false;  ///< lora/cuda/product.cu
  bool floats = false;   ///< shrink_float.cu, if its shared memory fits
  bool boxes = false;    ///< shrink_boxes.cu, if it takes the operands, before that
  int rows = kTileRows;
  int ranks = 16;           ///< rank columns of a thread block
  int leaves = kLeaves;     ///< of the columns
  int parts = 1;            ///< thread blocks that share the leaves of a tile: 1, 2, 4 or 8
  int per_sm = 0;           ///< thread blocks that may share an SM; 0: as many as fit
  int chunk = kFloatChunk;  ///< of shrink_float.cu
  std::int64_t leaf = kBlockColumns;
};

/// One product with a reduction over ranks: y or dx.
struct ExpandPlan {
  enum class Kernel { kStream, kWide, kSplit, kProduct, kParts };
  /// expand_stream.cu, expand_wide.cu, expand.cu, lora/cuda/product.cu or expand_parts.cu
  Kernel kernel = Kernel::kSplit;
  int ranks = 16;                   ///< that its kernel has room for
  int row_warps = 1;                ///< warps of a thread block that share columns
  int panels = 1;                   ///< thread blocks side by side
  int tile_rows = kTileRows;        ///< of several adapters the fewest, where at_once > 0
  int tile_columns = kTileColumns;  ///< of a product
  int at_once = 0;                  ///< RowCut's, of the streaming expand
  bool splits = false;              ///< the stream splits float32 weights itself
  int blocks = 0;                   ///< thread blocks of expand_parts.cu, which share all tiles

  MORTAR_HOST_DEVICE constexpr RowCut cut() const {
    return {tile_rows, 16 * row_warps, panels, at_once, kExpandFixedRows};
  }
};

/// One sum over rows under split-bf16: dA or dB.
struct OuterPlan {
  int ranks = 16;
  int chunk_rows = kStepRows;  ///< rows of a partial sum, whole steps
};

constexpr int ranks_of(int width, Policy policy) {
  const int most = policy == Policy::kSplit ? 32 : kMostRanks;
  return std::min(most, width <= 16 ? 16 : (width <= 32 ? 32 : 64));
}

/// Rank columns of a thread block whose partials go through memory.
inline constexpr int kMostUnfusedRanks = 32;
/// Thread blocks that share a tile where partials go through memory: enough blocks for the device,
/// and few enough that partials stay small beside x.
constexpr int unfused_parts(std::int64_t rows, int width, int leaves = kLeaves) {
  if (leaves < kLeaves) return leaves;
  const std::int64_t tiles = std::max<std::int64_t>(ceil_div<std::int64_t>(rows, kTileRows), 1) *
                             std::max(ceil_div(width, kMostUnfusedRanks), 1);
  int parts = 2;
  while (parts < kLeaves && parts * tiles < kWantedBlocks) parts *= 2;
  return parts;
}

/// The time of a launch is taken for that of the busiest SM: its thread blocks' bytes at its share
/// of the DRAM's rate, of which a lone block may reach less than all, and what each block costs to
/// start and to end. Bytes from L2 count for 0.6 of those from DRAM.
inline constexpr double kSmBytesPerUs = 32400, kL2Weight = 0.6, kBlockUs = 0.8;
constexpr double time_of(std::int64_t blocks_of_sm, double block_bytes, double rate) {
  return static_cast<double>(blocks_of_sm) * (block_bytes / (kSmBytesPerUs * rate) + kBlockUs);
}
/// Microseconds that split-K partials take, written and read, with the launch that adds them.
constexpr double partials_us(std::int64_t rows, int width, int parts) {
  return 1.5 + 8.0 * parts * static_cast<double>(rows) * width / 5e6;
}

/// Whether products are considered: fewer rows than a thread block's would leave most of it idle.
constexpr bool takes_products(std::int64_t rows, int width, int least, std::int64_t adapters,
                              const Machine& machine) {
  return machine.products && width >= least &&
         rows >= std::max<std::int64_t>(adapters, 1) * lora::cuda::kProductRows;
}
/// Rows that products multiply: each of several adapters leaves half of a cluster's tile empty.
constexpr std::int64_t product_rows(std::int64_t rows, std::int64_t adapters) {
  return rows + adapters * lora::cuda::kProductRows;
}

/// h or ds by a product.
inline ShrinkPlan product_shrink(std::int64_t columns, const ProductCut& cut,
                                 int leaves = kLeaves) {
  ShrinkPlan plan;
  plan.product = true;
  plan.fused = leaves == 1 || cut.split;
  plan.leaves = leaves;
  plan.rows = cut.rows;
  plan.ranks = cut.columns;
  plan.parts = cut.parts;
  plan.leaf = leaf_columns(columns, leaves);
  return plan;
}

/// `dense`: operands in rows that cp.async takes, not kSplit. `beside`: ds, which dB comes beside.
/// `shares_dy`: BackwardPlan's.
inline ShrinkPlan choose_shrink(std::int64_t rows, std::int64_t columns, int width,
                                std::int64_t adapters, bool masked, bool dense,
                                ShrinkOperands operands, const Machine& machine,
                                bool beside = false, int slices = 1, bool shares_dy = false) {
  const bool part_columns = operands == ShrinkOperands::kPartColumns;
  ShrinkPlan plan;
  plan.leaves = leaves_of(rows, columns, width, adapters, masked, beside, operands);
  plan.leaf = leaf_columns(columns, plan.leaves);
  plan.stream = dense && columns <= std::int64_t{1} << 30;
  plan.fused = plan.stream && machine.clusters && !part_columns;
  plan.ranks = std::min(stream_ranks(width), kMostUnfusedRanks);
  plan.parts = unfused_parts(rows, width, plan.leaves);
  if (!plan.stream || !machine.clusters) return plan;
  const int least_ranks = part_columns ? kLeastPartProductRanks : kLeastProductRanks;
  // Slices have a tile each, and a tile of 192 columns would be mostly empty. Dropout is theirs
  // that store h; of 16-bit operands of one slice alone, as each tile draws anew. (us of a forward
  // on an H100, 4096 x 4096, q/k/v of 64 ranks, by the stream / by products: 95 / 112.)
  const bool one_tile = part_columns && width <= (slices == 1 ? kMostPartTile : kMostPartTile / 2);
  const bool drops = part_columns ? one_tile : slices == 1;
  const bool products =
      dense && (!masked || drops) && takes_products(rows, width, least_ranks, adapters, machine);
  std::optional<BesideRowSums> with_sums;
  if (beside && products && !part_columns && adapters == 0) {
    with_sums.emplace(rows, columns, width, machine.sms);
  }
  const auto product = [&] {
    const std::int64_t own = product_rows(rows, adapters);
    if (one_tile) {
      return cut_part_shrink(own, columns, width, plan.leaves, machine.sms, beside);
    }
    if (masked) {
      return cut_split_shrink(own, columns, width, plan.leaves, machine.sms, Alone{}, 0, kDrawUs);
    }
    const ProductCut cut =
        with_sums ? cut_leaves(own, columns, width, plan.leaves, true, machine.sms, *with_sums)
                  : cut_leaves(own, columns, width, plan.leaves, !part_columns, machine.sms);
    return beside || adapters > 0 ? cut : half_tiles(cut, own, width, plan.leaves, machine.sms);
  };
  if (products && plan.leaves < kLeaves) {
    return product_shrink(columns, launch_tile(product(), width), plan.leaves);
  }
  if (products && one_tile && beside && shares_dy && !masked) {
    const ProductCut half = cut_part_shrink_beside(rows, columns, width, plan.leaves, machine.sms);
    if (half.parts > 0) return product_shrink(columns, half);
  }
  // Of several adapters few have the largest rank: blocks of 64 ranks that one lacks cost little.
  plan.ranks = std::min(stream_ranks(width), adapters > 1 ? 64 : kMostStreamRanks);
  const std::int64_t blocks_of_ranks = ceil_div(std::max(width, 1), plan.ranks);
  double least = 0;
  for (const int tile : {128, 64, 32}) {
    if (!stream_has(plan.ranks, tile)) continue;
    const int fewest = std::max(plan.leaves >> stream_levels(plan.ranks, tile), 1);
    for (int parts = fewest; parts <= plan.leaves; parts *= 2) {
      // Blocks that share a tile are a cluster, or go apart.
      const int together = plan.fused ? parts : 1;
      const std::int64_t clusters = (ceil_div<std::int64_t>(rows, tile) + adapters / 2) *
                                    blocks_of_ranks * (parts / together);
      const ShrinkTime time{plan.ranks, tile, masked};
      for (int per_sm = 1; per_sm <= stream_blocks(plan.ranks, tile); ++per_sm) {
        const std::int64_t steps = plan.leaves / parts * plan.leaf / kBlockColumns;
        const double us = time.us(clusters, together, per_sm, steps, machine.sms) +
                          (plan.fused ? 0 : partials_us(rows, width, parts));
        if (least > 0 && us >= least) continue;
        least = us;
        plan.rows = tile;
        plan.parts = parts;
        plan.per_sm = per_sm;
      }
    }
  }
  if (!products) return plan;
  const ProductCut cut = product();
  if (masked && !part_columns) {
    return cut.us < kMaskedStreamTime * least ? product_shrink(columns, cut) : plan;
  }
  if (with_sums) least = (*with_sums)(least, machine.sms);
  return cut.us - (part_columns && !cut.split ? kProductAheadUs : kSplitAheadUs) < least
             ? product_shrink(columns, cut)
             : plan;
}

/// Columns of a warp of the streaming expand.
constexpr int expand_warp_columns(int ranks) { return ranks <= 64 ? 64 : 32; }

/// Plans as one line, for messages and benchmarks.
inline std::string describe(const ShrinkPlan& plan) {
  return std::string(plan.product  ? "product"
                     : plan.stream ? "stream"
                     : plan.boxes  ? "float32 by boxes"
                     : plan.floats ? "float32"
                                   : "any strides") +
         ", " + std::to_string(plan.rows) + " rows, " + std::to_string(plan.ranks) + " ranks, " +
         (plan.leaves == 1 ? "one chain"
                           : std::to_string(plan.parts) +
                                 (plan.fused ? " blocks in a cluster" : " split-K partials") +
                                 ", leaves of " + std::to_string(plan.leaf));
}
inline std::string describe(const ExpandPlan& plan) {
  if (plan.kernel == ExpandPlan::Kernel::kProduct) {
    return "product, tiles of " + std::to_string(plan.tile_rows) + " rows by " +
           std::to_string(plan.tile_columns) + " columns, " + std::to_string(plan.panels) +
           " panels";
  }
  if (plan.kernel == ExpandPlan::Kernel::kParts) {
    return "float32 weights split on their way, " + std::to_string(plan.ranks) + " ranks, " +
           std::to_string(plan.panels) + " panels, " + std::to_string(plan.blocks) + " blocks";
  }
  constexpr const char* kNames[] = {"stream", "wide", "split-bf16"};
  return std::string(kNames[static_cast<int>(plan.kernel)]) + ", " +
         (plan.at_once > 0 ? "at least " : "") + std::to_string(plan.tile_rows) + " rows, " +
         std::to_string(plan.ranks) + " ranks, " + std::to_string(plan.row_warps) +
         " warps a column, " + std::to_string(plan.panels) + " panels";
}

/// Rows are cut until there are enough thread blocks; a chunk of fewer than 256 rows would leave
/// more bytes of partial sums than it reads at rank 64.
constexpr OuterPlan choose_outer(std::int64_t rows, std::int64_t columns, int width) {
  OuterPlan plan;
  plan.ranks = ranks_of(width, Policy::kSplit);
  const std::int64_t tiles =
      std::max<std::int64_t>(ceil_div<std::int64_t>(columns, kTileColumns), 1) *
      std::max(ceil_div(width, plan.ranks), 1);
  const std::int64_t wanted = std::max<std::int64_t>(kWantedBlocks / tiles, 1);
  const std::int64_t chunk =
      round_up<std::int64_t>(ceil_div(std::max<std::int64_t>(rows, 1), wanted), kStepRows);
  plan.chunk_rows = static_cast<int>(std::max<std::int64_t>(chunk, rows <= 1024 ? 128 : 256));
  return plan;
}

}  // namespace mortar::lora::train::cuda
