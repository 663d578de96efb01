// SPDX-License-Identifier: Apache-2.0
// Kernel parameters of the LoRA backend, and how a CTA finds its tile of tokens.
#pragma once

#include <cstdint>

#include "lora/problem.h"

namespace mortar::lora::cuda {

/// Where shrink leaves h and expand finds it.
///
/// Element (slab, s, row, r) lies at slab * slab_stride + s * slice_stride + row * row_stride + r.
/// `row` is the token, or (by_position) its place in the grouping, counted from the first tile of
/// the launch. With several slabs (one per leaf of K) the elements are raw float32 partial sums:
/// who reads them adds them as leaf_size in problem.h says. lora_apply's own h has no scales in it:
/// expand applies these to its finished sums.
struct HView {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  std::int64_t slab_stride = 0, slice_stride = 0, row_stride = 0;
  int num_slabs = 1;
  int width = 0;        ///< columns per slice
  bool raw = false;     ///< split-K partial sums, scales still to be applied
  bool vector = false;  ///< rows of 16-bit elements that start at multiples of 16 bytes
  /// Rows of any dtype do, and have whole pieces of eight columns up to the largest rank.
  bool rows_by_16 = false;
  bool by_position = false;  ///< of lora_apply with a plan
  bool own = false;          ///< lora_apply's
};

/// The tiles of one launch.
struct TileRange {
  std::int64_t num_tokens = 0;
  std::int64_t list = 0;    ///< word offset of the tile list in the plan
  std::int64_t tokens = 0;  ///< word offset of the tiles' tokens
  int tile_tokens = 16;
  int first = 0;  ///< tile of blockIdx 0
  int num = 0;    ///< upper bound of tiles in this launch
};

/// What every block reads lies together: the first block of an SM finds no line of parameters in
/// the constant cache. Weights are last, most of which are slices that are not there.
struct ShrinkParams {
  RowsView x;
  HView h;
  GroupsView groups;
  TileRange tiles;
  float scale = 1;         ///< of a caller's h
  bool pad = false;        ///< write zeros from an adapter's rank to h.width
  bool vector = false;     ///< K, x and A allow 16-byte accesses throughout
  int rows_per_cta = 0;    ///< rank rows, decode kernel
  bool early = false;      ///< weights and groups may be read before pdl_wait()
  bool two_parts = false;  ///< float32 weights count as the sum of two parts
  IdsView zero_rows;
  WeightsView weights;
};

struct ExpandParams {
  RowsView y;
  HView h;
  GroupsView groups;
  TileRange tiles;
  std::int64_t offset = 0;
  float scale = 1;  ///< with lora_apply's own h
  bool add_inputs = true;
  bool early = false;     ///< weights and groups may be read before pdl_wait()
  int cols = 0;           ///< columns of a block: what a CTA takes at a time
  int block_cols = 0;     ///< columns of B per stage of the ring, decode kernel
  int stages = 0;         ///< blocks of B in the ring, decode kernel
  int per_sm = 0;         ///< CTAs that share an SM's memory; 0: as many as fit; decode kernel
  int cluster = 1;        ///< CTAs that make h of partials, decode kernel, or share B, wide one
  int groups_a_step = 1;  ///< groups of columns that share an MMA step, direct kernel
  int round = 0;          ///< CTAs that run at once, where those share the columns: ExpandPlan
  int log_run = 0;        ///< a CTA takes runs of 2^log_run tiles of a block: ExpandPlan
  int block_start[kLoraMaxSlices + 1] = {};  ///< first column block of each slice
  bool two_parts = false;  ///< float32 weights and h count as the sum of two parts
  bool vector_y = false;   ///< every row and block of y is 16-byte aligned and whole
  bool b_by_8 = false;     ///< rows of B start at multiples of 8 bytes, not of 16
  bool b_boxes = false;    ///< the tensor copy engine takes B
  WeightsView weights;
};

/// Of the one kernel of lora_apply: expand's, whose `cols` are those of a cluster, and x.
struct ApplyParams {
  ExpandParams expand;
  RowsView x;
};

/// Runs of kTiles tiles of 2^log_tile tokens that so many tokens of an adapter make: shifts and a
/// constant, as eight divisions would be more instructions than all else in a look-up for which
/// everyone waits. (ceil_div would overflow near 2^31.)
template <int kTiles = 1>
MORTAR_HOST_DEVICE constexpr int runs_of_tokens(int count, int log_tile) {
  return count == 0 ? 0 : ((count - 1) >> log_tile) / kTiles + 1;
}

/// A run of tokens of one adapter: sorted[start .. start + count).
struct Tile {
  int adapter = -1;
  int start = 0;
  int count = 0;
};

#if defined(__CUDACC__)

/// Tokens of a segment; 0 where its entries are no segment of the batch. A count that is too long
/// is cut.
__device__ __forceinline__ int segment_tokens(const GroupsView& g, std::int64_t num_adapters,
                                              int id, int start, int count) {
  if (id < 0 || id >= num_adapters || count <= 0 || start < 0 || start >= g.num_sorted) return 0;
  return static_cast<int>(min(static_cast<std::int64_t>(count), g.num_sorted - start));
}

/// Run `index` of the segment form, of kTiles tiles of tile_tokens (a power of two): every warp
/// scans the segments, so all threads agree. A lane takes several at a time, so that the segments
/// of most engines are one trip to memory.
template <int kTiles = 1>
__device__ __forceinline__ bool find_segment_tile(const GroupsView& g, std::int64_t num_adapters,
                                                  int tile_tokens, int index, Tile* tile) {
  constexpr int kPerLane = 4;
  const int log_tile = 31 - __clz(tile_tokens), run_tokens = kTiles * tile_tokens;
  const int lane = threadIdx.x % 32;
  int before = 0;
  for (int base = 0; base < g.num_segments; base += 32 * kPerLane) {
    int ids[kPerLane], counts[kPerLane], starts[kPerLane];
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      const int i = base + lane * kPerLane + j;
      const bool there = i < g.num_segments;
      ids[j] = there ? g.ids[i] : -1;
      starts[j] = there ? g.starts[i] : 0;
      counts[j] = there ? g.counts[i] : 0;
    }
    int own = 0;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      counts[j] = segment_tokens(g, num_adapters, ids[j], starts[j], counts[j]);
      own += runs_of_tokens<kTiles>(counts[j], log_tile);
    }
    int last = own;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, last, d);
      if (lane >= d) last += other;
    }
    int k = index - before - (last - own);  // among the lane's own
    const unsigned hit = __ballot_sync(0xffffffffu, k >= 0 && k < own);
    if (hit != 0) {
      int id = -1, start = 0, count = 0;
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) {
        const int runs = runs_of_tokens<kTiles>(counts[j], log_tile);
        if (k >= 0 && k < runs) {
          id = ids[j];
          start = starts[j] + k * run_tokens;
          count = min(counts[j] - k * run_tokens, run_tokens);
        }
        k -= runs;
      }
      const int source = __ffs(hit) - 1;
      tile->adapter = __shfl_sync(0xffffffffu, id, source);
      tile->start = __shfl_sync(0xffffffffu, start, source);
      tile->count = __shfl_sync(0xffffffffu, count, source);
      return true;
    }
    before += __shfl_sync(0xffffffffu, last, 31);
  }
  return false;
}

/// Whether the plan whose first words are `head` was made for this batch.
__device__ __forceinline__ bool is_plan_of(const int4& head, const TileRange& range,
                                           std::int64_t num_adapters) {
  static_assert(kPlanNumTokens == 0 && kPlanNumAdapters == 1 && kPlanNumTiles16 == 2 &&
                    kPlanNumTiles64 == 3 && kPlanEntryWords == 4,
                "the first four words of the plan, and an entry, are read as vectors");
  return head.x == range.num_tokens && head.y == num_adapters;
}

/// Tile `index` of the grouping; false past the last one. Uniform over the CTA.
__device__ __forceinline__ bool find_tile(const GroupsView& g, const TileRange& range,
                                          std::int64_t num_adapters, int index, Tile* tile) {
  if (g.plan == nullptr) {
    return find_segment_tile(g, num_adapters, range.tile_tokens, index, tile);
  }
  // The header and the tile are loaded together: one latency. The list has room for `index`
  // (the host bounds the grid), so the load is safe even when the tile does not exist.
  const int4 head = __ldcg(reinterpret_cast<const int4*>(g.plan));
  const int4 entry = __ldcg(reinterpret_cast<const int4*>(g.plan + range.list) + index);
  const int num_tiles = range.tile_tokens == 16 ? head.z : head.w;
  tile->adapter = entry.x;
  tile->start = entry.y;
  tile->count = entry.z;
  return is_plan_of(head, range, num_adapters) && index < num_tiles;
}

/// The same for a CTA of several warps: its first one looks through segments for all, as the
/// instructions of the others would only delay its neighbours. With segments this is a barrier.
__device__ __forceinline__ bool find_cta_tile(const GroupsView& g, const TileRange& range,
                                              std::int64_t num_adapters, int index, Tile* tile) {
  if (g.plan != nullptr) return find_tile(g, range, num_adapters, index, tile);
  __shared__ Tile found;
  __shared__ bool live;
  if (threadIdx.x < 32) {
    Tile own;
    const bool there = find_segment_tile(g, num_adapters, range.tile_tokens, index, &own);
    if (threadIdx.x == 0) {
      found = own;
      live = there;
    }
  }
  __syncthreads();
  *tile = found;
  return live;
}

/// Token in place `i` of tile `index`, as the plan lists it; needs nothing of the tile itself, so
/// it may be loaded together with it. Meaningless for segments and for tiles that do not exist.
__device__ __forceinline__ int early_token(const GroupsView& g, const TileRange& range, int index,
                                           int i) {
  return g.plan != nullptr ? __ldcg(g.plan + range.tokens + index * range.tile_tokens + i) : -1;
}

/// The tile's token in place `i`, from the sorted batch; -1 past its count, and where the caller's
/// own index table points outside the batch.
__device__ __forceinline__ int sorted_token(const GroupsView& g, const TileRange& range,
                                            const Tile& tile, int i) {
  if (i >= tile.count) return -1;
  const int token = __ldcg(g.sorted + tile.start + i);
  return token >= 0 && token < range.num_tokens ? token : -1;
}
/// The same, if `early` is what early_token gave.
__device__ __forceinline__ int tile_token(const GroupsView& g, const TileRange& range,
                                          const Tile& tile, int i, int early) {
  // The plan has -1 past a tile's count.
  return g.plan != nullptr ? early : sorted_token(g, range, tile, i);
}

/// Place in the grouping from which by_position rows are counted; only Mortar's own h has such
/// rows, and only plans lead to one.
__device__ __forceinline__ int first_position(const GroupsView& g, const TileRange& range) {
  return range.first == 0 ? 0 : __ldcg(g.plan + range.list + kPlanEntryWords * range.first + 1);
}

/// Row of h that belongs to place i of a tile whose token is `token`; -1: none.
__device__ __forceinline__ int h_row(const HView& h, const Tile& tile, int first, int i,
                                     int token) {
  if (token < 0) return -1;
  return h.by_position ? tile.start - first + i : token;
}

#endif

}  // namespace mortar::lora::cuda
