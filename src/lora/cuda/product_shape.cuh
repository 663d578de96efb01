// SPDX-License-Identifier: Apache-2.0
// Shapes of product.cu and product_split.cu: tiles, the ring of stages in shared memory, and the
// units of work that clusters have.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/int_math.h"
#include "device/barrier.cuh"
#include "device/convert.cuh"
#include "device/quad_transpose.cuh"
#include "device/ring.cuh"
#include "device/swizzle.cuh"
#include "device/tensor_copy.cuh"
#include "device/wgmma.cuh"
#include "lora/cuda/product.h"
#include "lora/train/cuda/params.cuh"

namespace mortar::lora::cuda::product {

using device::Major;

inline constexpr int kWarpgroup = 128, kConsumers = 2 * kWarpgroup,
                     kThreads = kConsumers + kWarpgroup;
inline constexpr int kBlockBytes =
    kProductStep * device::kSwizzleBytes;           ///< 64 rows of 64 elements
inline constexpr int kRingBytes = 200 * 1024;       ///< at most
inline constexpr int kStoreRingBytes = 226 * 1024;  ///< at most, with the tile that is stored
inline constexpr int kBarrierBytes = 512;           ///< of these, at most

/// Where the rows of segments begin, and their tiles: those of a cluster, or chunks of the depth,
/// counted through all segments. One entry more than there are segments says where the last one
/// ends.
struct Segments {
  int row[kMostProductPairs + 1], tile[kMostProductPairs + 1];
  int end[kMostProductPairs + 1], chunk;  ///< where these cut the depth
};

/// Either 16-bit type: a kernel's warps part by the one that its parameters name, before their
/// loops.
struct AnyFloat16 {};

/// kLevels: of the tree of leaves that a thread holds; of those kParked in shared memory, as two
/// sets of 64 sums and 64 more are too many for its registers. kSplit: the thread blocks of a
/// cluster have the same rows and share the depth; else they have neighbouring rows and share b.
/// kDrops: dropout on a. kByColumns: a tile has half of the rows, and the two warpgroups have
/// columns of their own. The sums of a wide tile then fit the registers, and the thread blocks of a
/// cluster send each other half as much. kDefers: a rounded tile waits in registers until the next
/// one is multiplied (Outgoing). T: the operands' type, or AnyFloat16 of kernels that pass it to
/// what computes.
template <class T_, int kColumns_, Major kA_, Major kB_, ProductEnd kEnd_, int kLevels_,
          bool kSplit_ = false, bool kDrops_ = false, bool kByColumns_ = false,
          bool kDefers_ = false>
struct Shape {
  using T = T_;
  static constexpr int kColumns = kColumns_, kLevels = kLevels_;
  static constexpr bool kSplit = kSplit_, kDrops = kDrops_;
  static constexpr int kSharers = kSplit ? 1 : kProductCluster;  ///< of b's stages
  static constexpr int kArrivals = kSharers * kConsumers / 32;   ///< that free a stage
  static constexpr int kParked = kColumns == 128 && kLevels == 2 ? 1 : 0;
  /// Leaves are added one after the other, and the sum waits in memory (Params::partials) while the
  /// next one is multiplied: of a tile whose sums take the registers, and of any number of leaves.
  static constexpr bool kCarries =
      kEnd_ == ProductEnd::kStore && kA_ == Major::kRows && kLevels == 0;
  static constexpr Major kA = kA_, kB = kB_;
  static constexpr ProductEnd kEnd = kEnd_;
  static constexpr bool kByColumns = kByColumns_;
  static_assert(!kByColumns || kSplit, "clusters that share b have all rows");
  static constexpr int kRows = kByColumns ? kProductRows / 2 : kProductRows;
  static constexpr int kMmaColumns = kByColumns ? kColumns / 2 : kColumns;
  static constexpr int kSums = kMmaColumns / 2;                     ///< of a thread
  static constexpr int kRowsBytes = kRows * device::kSwizzleBytes;  ///< a's part of a stage
  /// What an MMA reads of b: all of its columns, or blocks of 64 of them.
  static constexpr int kMmaBytes = kB_ == Major::kDepth ? kMmaColumns * device::kSwizzleBytes
                                                        : (kMmaColumns + 63) / 64 * kBlockBytes;
  static constexpr int kStageBytes = kRowsBytes + kColumns / kMmaColumns * kMmaBytes;
  /// Warps of the copying thread's warpgroup add partial sums of another kernel.
  static constexpr bool kAddsBeside = kEnd == ProductEnd::kStore && kA == Major::kDepth && !kSplit;
  /// Segments cut the depth, not rows.
  static constexpr bool kCutsDepth = kA == Major::kRows && kEnd == ProductEnd::kPartials;
  /// Dropout on what is stored.
  static constexpr bool kDropsStored = kAddsBeside;
  /// Of a thread; all three warpgroups have 504 together, what the kernel starts with.
  static constexpr int kProducerRegisters = kAddsBeside ? 72 : kByColumns ? 56 : 40;
  static constexpr int kConsumerRegisters = (504 - kProducerRegisters) / 2;
  /// The base's tile comes as one stage more, which it fills.
  static constexpr bool kBase = kEnd == ProductEnd::kStore && kColumns == kProductRows && !kSplit;
  static constexpr bool kDefers = kDefers_;
  static constexpr int kParkedBytes = kParked * kConsumers * kSums * 4;
  /// 128 columns of the rounded tile on their way out, blocks of 64 rows and columns; or the sums
  /// that the thread blocks of a cluster send each other.
  static constexpr int kSumsPitch = kColumns;  ///< floats
  static constexpr int kTileBytes =
      kEnd == ProductEnd::kPartials ? 0 : kRows * (kSplit ? kColumns * 4 : 128 * 2);
  static constexpr int kStages = ((kTileBytes > 0 ? kStoreRingBytes : kRingBytes) - kTileBytes -
                                  kParkedBytes - kBarrierBytes) /
                                 kStageBytes;
  static constexpr int kSmem = kStages * kStageBytes + kTileBytes + kParkedBytes +
                               2 * kStages * static_cast<int>(sizeof(device::Mbarrier)) +
                               static_cast<int>(sizeof(Segments));
};

/// Output columns that share b.
struct Group {
  int first_tile;
  std::int64_t first_column;
};

struct Params {
  CUtensorMap a[kMostProductPairs], b[kMostProductPairs], base_map, out_map;
  int steps[kMostProductPairs];    ///< of each b's depth; 0: none
  int columns[kMostProductPairs];  ///< of a group that each b has, if pairs make columns
  int live[kMostProductPairs];     ///< of these, columns that are b's rows, if `scaled`; or values
  float factor[kMostProductPairs];
  Group groups[kMostProductPairs];
  const std::int32_t* offsets;
  lora::train::cuda::RowCut chunk;  ///< where segments cut the depth
  std::int64_t depth;               ///< the same: all of it
  int segments, pairs;
  int num_groups, tiles, parts, part_steps, leaf_steps, leaves, units;
  int tile_rows;  ///< of clusters that share the depth
  DType dtype;
  bool early, scaled, adds_copies;
  bool forms;  ///< ProductEnd::kForms, which has no shapes of its own
  std::int64_t rows;
  float* partials;  ///< or (Shape::kCarries) the sums of tiles, [tile][kSums / 4][kConsumers][4]
  std::int64_t part_stride, row_stride, column_stride;
  void* out;
  bool by_boxes;  ///< tiles leave through out_map
  const void* base;
  std::int64_t out_stride;
  void *sum_columns, *pair_columns;
  const std::int64_t* rng;  ///< of dropout on a, or (Shape::kDropsStored) on what is stored
  std::int64_t mask_columns, mask_first;
  std::uint32_t thresholds[kMostProductPairs];
  lora::train::cuda::GradSum beside;
};

/// Which tile of columns a unit has, and which rows and part. The next unit of a cluster is found
/// without a division: that takes some 100 clocks, in which nothing is multiplied.
struct UnitPlace {
  int tile, rest;

  __device__ __forceinline__ UnitPlace(const Params& p, int index) {
    const bool one = p.tiles == 1;
    rest = one ? index : index / p.tiles;
    tile = one ? 0 : index - rest * p.tiles;
  }
  /// Goes on by `by`, as a place.
  __device__ __forceinline__ void advance(const Params& p, const UnitPlace& by) {
    tile += by.tile;
    rest += by.rest;
    if (tile < p.tiles) return;
    tile -= p.tiles;
    ++rest;
  }
};

/// A thread block's part of unit `index`: rows `row` to `end` - 1 and the columns of a tile up to
/// `columns`, of which b `first_b` and (if pairs are summed) the next ones have the operands. Steps
/// are counted from `depth` on, of which a segment's chunk has `depths` elements.
template <class S>
struct Unit {
  int row, end, group, first_b, column, columns, part, first_step, steps;
  int depth = 0, depths = 0;

  __device__ __forceinline__ Unit(const Params& p, const Segments& segments, int index)
      : Unit(p, segments, UnitPlace(p, index)) {}
  __device__ __forceinline__ Unit(const Params& p, const Segments& segments,
                                  const UnitPlace& place) {
    const bool one = S::kSplit || p.parts == 1;
    const int own = static_cast<int>(blockIdx.y), tile = place.tile, rest = place.rest;
    end = static_cast<int>(p.rows);
    if constexpr (S::kCutsDepth) {
      if (p.offsets != nullptr) {
        cut_depth(p, segments, tile, rest);
        return;
      }
    }
    part = S::kSplit ? own : (one ? 0 : rest % p.parts);
    int tile_of_rows = one ? rest : rest / p.parts, segment = 0, first_row = 0;
    if (!S::kCutsDepth && p.offsets != nullptr) {
      while (segment + 1 < p.segments && tile_of_rows >= segments.tile[segment + 1]) ++segment;
      tile_of_rows -= segments.tile[segment];
      first_row = segments.row[segment];
      end = segments.row[segment + 1];
    }
    row = first_row +
          (S::kSplit ? tile_of_rows * p.tile_rows : (tile_of_rows * S::kSharers + own) * S::kRows);
    group = 0;
    while (group + 1 < p.num_groups && tile >= p.groups[group + 1].first_tile) ++group;
    column = (tile - p.groups[group].first_tile) * S::kColumns;
    first_b = segment * p.pairs + group;
    columns = p.columns[first_b];
    first_step = part * p.part_steps;
    int all = p.steps[first_b];
    if (p.num_groups == 1) {
      for (int i = 1; i < p.pairs; ++i) all += p.steps[first_b + i];
    }
    steps = column < columns ? max(0, min(p.part_steps, all - first_step)) : 0;
  }

  /// Rows of the output by a chunk of a segment's depth.
  __device__ __forceinline__ void cut_depth(const Params& p, const Segments& segments, int tile,
                                            int rest) {
    const int chunks = segments.tile[p.segments];
    part = rest % chunks;
    row = (rest / chunks * S::kSharers + static_cast<int>(blockIdx.y)) * S::kRows;
    group = first_b = first_step = 0;
    while (first_b + 1 < p.segments && part >= segments.tile[first_b + 1]) ++first_b;
    column = tile * S::kColumns;
    columns = p.columns[first_b];
    depth = segments.row[first_b] + (part - segments.tile[first_b]) * segments.chunk;
    depths = min(segments.chunk, segments.end[first_b] - depth);
    steps = column < columns ? (depths + kProductStep - 1) / kProductStep : 0;
  }
};

/// Segments that cut the depth, and their chunks, by all threads of a block.
template <class S>
__device__ __forceinline__ int find_chunks(const Params& p, Segments* to) {
  namespace train = lora::train::cuda;
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < 32) {
    const train::RowGroups rows{p.offsets, nullptr, nullptr, nullptr, p.depth, p.segments};
    const train::RowTile own = train::lane_group(rows);
    const int chunk = train::rows_of(rows, p.chunk, false, own);
    int tiles = (own.count + chunk - 1) / chunk;
    if (thread <= p.segments) {
      to->row[thread] = static_cast<int>(own.start);
      to->end[thread] = static_cast<int>(own.start) + own.count;
    }
    for (int step = 1; step <= kMostProductPairs; step *= 2) {
      const int before = __shfl_up_sync(0xffffffffu, tiles, step);
      if (thread >= step) tiles += before;
    }
    if (thread < p.segments) to->tile[thread + 1] = min(tiles, p.parts);
    if (thread == 0) to->tile[0] = 0, to->chunk = chunk;
  }
  __syncthreads();
  return to->tile[p.segments] * (p.units / p.parts);
}

/// The segments, by all threads of a block. Gives the units of all of them.
template <class S>
__device__ __forceinline__ int find_segments(const Params& p, Segments* to) {
  if (p.offsets == nullptr) return p.units;
  if constexpr (S::kCutsDepth) return find_chunks<S>(p, to);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread <= p.segments) {
    const std::int64_t row = __ldcg(p.offsets + thread);
    to->row[thread] = static_cast<int>(min(max(row, std::int64_t{0}), p.rows));
  }
  __syncthreads();
  if (thread == 0) {
    constexpr int kRows = S::kSharers * S::kRows;
    int tiles = 0;
    for (int i = 0; i < p.segments; ++i) {
      to->tile[i] = tiles;
      tiles += (max(to->row[i + 1] - to->row[i], 0) + kRows - 1) / kRows;
    }
    to->tile[p.segments] = tiles;
  }
  __syncthreads();
  return to->tile[p.segments] * p.tiles * (S::kSplit ? 1 : p.parts);
}

template <class S>
struct Ring {
  std::uint32_t stages, tile;  ///< `tile`: kTileBytes
  float4* parked;              ///< [kSums / 4][kConsumers]
  device::Mbarrier *full, *empty;
  Segments* segments;
  device::RingCursor<S::kStages> at;

  __device__ __forceinline__ explicit Ring(unsigned char* smem)
      : stages(device::smem_address(smem)),
        tile(stages + S::kStages * S::kStageBytes),
        parked(reinterpret_cast<float4*>(smem + S::kStages * S::kStageBytes + S::kTileBytes)),
        full(reinterpret_cast<device::Mbarrier*>(smem + S::kStages * S::kStageBytes +
                                                 S::kTileBytes + S::kParkedBytes)),
        empty(full + S::kStages),
        segments(reinterpret_cast<Segments*>(empty + S::kStages)) {}
  /// By one thread; a fence must follow.
  __device__ __forceinline__ void init_barriers() const {
    for (int i = 0; i < S::kStages; ++i) {
      full[i].init(1);
      empty[i].init(S::kArrivals);
    }
  }
  __device__ __forceinline__ std::uint32_t stage() const {
    return stages + at.stage * S::kStageBytes;
  }
};

/// Rounds a row's sums of four neighbouring MMA tiles of 8 columns, of which a thread has pairs:
/// lanes of a quad trade these for eight neighbouring columns each.
template <class T>
__device__ __forceinline__ void round_row(std::uint32_t (&words)[4], const float* sum) {
#pragma unroll
  for (int j = 0; j < 4; ++j) words[j] = device::pack2<T>(sum[4 * j], sum[4 * j + 1]);
  device::transpose_quad(words);
}

/// Waits for the other threads of one of the two warpgroups that multiply, at named barrier 1 or 2.
__device__ __forceinline__ void meet_warpgroup(int warpgroup) {
  if (warpgroup == 0) {
    device::named_barrier<1, kWarpgroup>();
  } else {
    device::named_barrier<2, kWarpgroup>();
  }
}

/// Frees a stage, in all thread blocks that share it: one lane of each warp that has read it.
template <class S>
__device__ __forceinline__ void release(const Ring<S>& ring, int stage) {
  if (stage < 0 || threadIdx.x % 32 != 0) return;
  if constexpr (S::kSharers == 1) {
    ring.empty[stage].arrive();
  } else {
#pragma unroll
    for (int rank = 0; rank < S::kSharers; ++rank) ring.empty[stage].arrive_in_cluster(rank);
  }
}

}  // namespace mortar::lora::cuda::product
