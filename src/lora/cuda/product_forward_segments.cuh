// SPDX-License-Identifier: Apache-2.0
// The shape of product_forward_segments.cu, its parameters, which adapters' rows a tile has, and
// how stages are copied.
#pragma once

#include <cstdint>

#include "device/ring.cuh"
#include "device/swizzle.cuh"
#include "lora/cuda/product_forward.h"
#include "lora/cuda/product_shape.cuh"

namespace mortar::lora::cuda::forward_segments {

using namespace product;

/// Warps that draw and load, which have stages in turns, and the one that copies.
inline constexpr int kHelpers = 7, kCopyAt = kConsumers + 32 * kHelpers,
                     kSegmentThreads = kCopyAt + 32;
inline constexpr int kAheadSteps = 3;  ///< asked for before the wait

/// kRanks: 32, also of two adapters, or 64. A stage has 64 columns of x and of the A of one or two
/// adapters, or 128 columns of B. kShare: columns of B that share a row of 128 bytes.
template <class T_, int kRanks_, int kShare_>
struct SegmentShape {
  using T = T_;
  static constexpr int kRanks = kRanks_, kShare = kShare_, kAdapters = kRanks == 32 ? 2 : 1;
  static constexpr int kLines = kForwardColumns / kShare;
  // As the products' shapes say it, for what they share.
  static constexpr int kRows = kForwardRows, kColumns = kRanks, kSumsPitch = kColumns;
  static constexpr int kMmaColumns = kColumns / 2, kSums = kMmaColumns / 2;
  static constexpr int kABytes = kRanks * device::kSwizzleBytes;  ///< of an adapter
  static constexpr int kStageBytes = kBlockBytes + kAdapters * kABytes;
  static_assert(kStageBytes == kForwardColumns * device::kSwizzleBytes);
  /// Two blocks of 64 rows and columns of each warpgroup, on their way out.
  static constexpr int kOutBytes = 4 * kBlockBytes;
  static constexpr int kHiddenBytes = kBlockBytes, kSumBytes = kRows * kRanks * 4;
  static constexpr int kStages =
      (kStoreRingBytes - kHiddenBytes - kOutBytes - kSumBytes) / kStageBytes;
  static constexpr int kHiddenAt = kStages * kStageBytes, kOutAt = kHiddenAt + kHiddenBytes;
  static constexpr int kSumsAt = kOutAt + kOutBytes, kSmem = kSumsAt + kSumBytes;
};

struct SegmentParams {
  CUtensorMap x, base, y, a[kMostProductPairs], b[kMostProductPairs];
  const unsigned short *x_data, *a_data[kMostProductPairs];
  std::int64_t x_stride, a_stride[kMostProductPairs];
  /// B of an adapter, if threads load it, as its rows are no whole pieces of 16 bytes.
  const unsigned short* b_data[kMostProductPairs];
  std::int64_t b_stride[kMostProductPairs];
  bool by_fours[kMostProductPairs];  ///< as pieces of 8 bytes
  int rank[kMostProductPairs];
  float factor[kMostProductPairs];
  std::uint32_t threshold[kMostProductPairs];  ///< of dropout on x
  const std::int32_t* offsets;                 ///< null: all rows are of adapter 0
  int segments;
  const std::int64_t* rng;  ///< of dropout; null: none
  std::int64_t mask_columns, mask_first;
  std::int64_t rows, out_columns;
  int tiles, tile_rows;
  int parts, leaves, leaf_steps, part_steps, steps;
  int column_tiles;  ///< of y
  __device__ __forceinline__ bool helps() const { return rng != nullptr || loads; }
  bool adds_base, loads;
  unsigned short* h;
  int h_columns;
  std::int64_t h_stride;
  unsigned short* y_data;
  std::int64_t y_stride;
};

/// Stages, of which x's are full, then ready, as those that draw have been there.
template <class S>
struct Barriers {
  device::Mbarrier full[S::kStages], ready[S::kStages], empty[S::kStages], received, came;

  /// `helps`: other warps must have passed a stage, too, before it is empty again.
  __device__ __forceinline__ void init(bool helps) {
    for (int i = 0; i < S::kStages; ++i) {
      full[i].init(1);
      ready[i].init(1);
      empty[i].init(kConsumers / 32 + (helps ? kHelpers : 0));
    }
    received.init(1);
    came.init(1);
    device::Mbarrier::fence_init();
  }
};

/// Rows `row` to `row + count - 1`: the first `cut` are of `adapter`, the others of `next`.
struct Tile {
  int row, count, cut, adapter, next;
  bool whole;  ///< all rows of the box that begins at `row`
  __device__ __forceinline__ bool two() const { return cut < count; }
  __device__ __forceinline__ int adapters() const { return two() ? 2 : 1; }
  __device__ __forceinline__ int owner(int at) const { return at < cut ? adapter : next; }
};

/// Where the rows of segments begin, and their tiles, if each has tiles of its own. One entry more
/// than there are segments says where the last one ends.
struct Rows {
  int first[kMostProductPairs + 1], tile[kMostProductPairs + 1];
  bool apart;

  /// By the first warp: a barrier must follow. Segments have tiles of their own if these, of which
  /// the last ones are not full, are no more than run at once.
  __device__ __forceinline__ void read(const SegmentParams& p) {
    const int lane = static_cast<int>(threadIdx.x);
    if (lane >= 32) return;
    int row = lane == 0 ? 0 : static_cast<int>(p.rows);
    if (p.offsets != nullptr && lane <= p.segments) {
      row = min(max(__ldcg(p.offsets + lane), 0), static_cast<int>(p.rows));
    }
    for (int step = 1; step < 32; step *= 2) {  // they do not fall
      const int before = __shfl_up_sync(0xffffffffu, row, step);
      if (lane >= step) row = max(row, before);
    }
    const int next = __shfl_down_sync(0xffffffffu, row, 1);
    int tiles = lane < p.segments ? (next - row + p.tile_rows - 1) / p.tile_rows : 0;
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(0xffffffffu, tiles, step);
      if (lane >= step) tiles += before;
    }
    if (lane <= p.segments) first[lane] = row;
    if (lane < p.segments) tile[lane + 1] = tiles;
    if (lane == 0) tile[0] = 0;
    if (lane == 31) apart = p.segments > 1 && tiles <= static_cast<int>(gridDim.x);
  }
};

/// Walks over the tiles of a cluster: of segments apart, or windows of p.tile_rows rows, in pieces
/// of two adapters where a window has more. The same for all threads of the cluster.
struct Walk {
  const Rows& rows;
  int index = static_cast<int>(blockIdx.x), row = 0, end = 0;

  __device__ __forceinline__ explicit Walk(const Rows& r) : rows(r) {}

  __device__ __forceinline__ bool next(const SegmentParams& p, Tile* tile) {
    return rows.apart ? next_apart(p, tile) : next_window(p, tile);
  }
  __device__ __forceinline__ bool next_apart(const SegmentParams& p, Tile* tile) {
    if (index >= rows.tile[p.segments]) return false;
    int s = 0;
    while (rows.tile[s + 1] <= index) ++s;
    tile->adapter = tile->next = s;
    const int end = rows.first[s + 1];
    tile->row = rows.first[s] + (index - rows.tile[s]) * p.tile_rows;
    // The last tile begins so much earlier that it is full: some rows are made twice, with the same
    // bits. Not onto a base, which may be where y is.
    const int full = end - p.tile_rows;
    if (!p.adds_base && full >= rows.first[s]) tile->row = min(tile->row, full);
    tile->count = tile->cut = min(p.tile_rows, end - tile->row);
    tile->whole = tile->count == p.tile_rows || tile->row + tile->count == p.rows;
    index += static_cast<int>(gridDim.x);
    return true;
  }
  __device__ __forceinline__ bool next_window(const SegmentParams& p, Tile* tile) {
    for (;;) {
      if (row >= end) {
        if (index >= p.tiles) return false;
        row = index * p.tile_rows;
        end = static_cast<int>(min(std::int64_t{row} + p.tile_rows, p.rows));
        index += static_cast<int>(gridDim.x);
      }
      int s = 0;
      while (s < p.segments && rows.first[s + 1] <= row) ++s;
      row = s < p.segments ? max(row, rows.first[s]) : end;
      if (row >= end) continue;
      tile->row = row;
      tile->adapter = tile->next = s;
      int last = min(rows.first[s + 1], end);
      tile->cut = last - row;
      while (s < p.segments && rows.first[s + 1] <= last) ++s;
      if (last < end && s < p.segments) {
        tile->next = s;
        last = min(rows.first[s + 1], end);
      }
      tile->count = last - row;
      tile->whole = last == end && (tile->count == p.tile_rows || last == p.rows);
      row = last;
      return true;
    }
  }
};

/// What a thread block has of the depth and of y's columns.
struct Part {
  int first_step, steps, columns;
  __device__ __forceinline__ explicit Part(const SegmentParams& p) {
    const int part = static_cast<int>(blockIdx.y);
    first_step = part * p.part_steps;
    steps = max(0, min(p.part_steps, p.steps - first_step));
    columns = (p.column_tiles - part + p.parts - 1) / p.parts;
  }
  /// Of y, of tile `i` of the thread block's.
  __device__ __forceinline__ int column(const SegmentParams& p, int i) const {
    return (i * p.parts + static_cast<int>(blockIdx.y)) * kForwardColumns;
  }
};

/// Copies the stages of x and A, then of B and the base; by one thread.
template <class S>
__device__ __forceinline__ void copy_stages(const SegmentParams& p, Walk walk, std::uint32_t smem,
                                            Barriers<S>& bars) {
  const Part part(p);
  device::RingCursor<S::kStages> at;
  const auto next = [&](int bytes) {
    bars.empty[at.stage].wait((at.round & 1) ^ 1);
    bars.full[at.stage].arrive_and_expect(bytes);
    return bars.full + at.stage;
  };
  const auto stage = [&] { return smem + at.stage * S::kStageBytes; };
  for (Tile tile; walk.next(p, &tile);) {
    for (int i = 0; i < part.steps; ++i, at.next()) {
      const int depth = (part.first_step + i) * kProductStep;
      const int adapters = S::kAdapters > 1 ? tile.adapters() : 1;
      device::Mbarrier* full = next(p.tile_rows * device::kSwizzleBytes + adapters * S::kABytes);
      device::copy_box_once(stage(), p.x, depth, tile.row, full);
      device::copy_box(stage() + kBlockBytes, p.a[tile.adapter], depth, 0, full);
      if (adapters > 1) {
        device::copy_box(stage() + kBlockBytes + S::kABytes, p.a[tile.next], depth, 0, full);
      }
    }
    for (int i = 0; i < part.columns; ++i) {
      const int column = part.column(p, i);
      for (int k = 0; k < tile.adapters(); ++k, at.next()) {
        const int adapter = k == 0 ? tile.adapter : tile.next;
        if (p.b_data[adapter] != nullptr) continue;
        device::Mbarrier* full = next(S::kLines * device::kSwizzleBytes);
        device::copy_box(stage(), p.b[adapter], 0, column / S::kShare, full);
      }
      if (!p.adds_base) continue;
      device::Mbarrier* full = next(2 * p.tile_rows * device::kSwizzleBytes);
      device::copy_box(stage(), p.base, column, tile.row, full);
      device::copy_box(stage() + kBlockBytes, p.base, column + 64, tile.row, full);
      at.next();
    }
  }
}

}  // namespace mortar::lora::cuda::forward_segments
