// SPDX-License-Identifier: Apache-2.0
// How the warps of a persistent kernel share pieces of work, of which tiles have unlike numbers: a
// CTA lists in shared memory how many pieces the tiles before each have. CTAs take every n-th
// piece, of n that run at once, and the warps of a CTA whichever of its pieces is next.
#pragma once

#include <cstdint>

#include "device/prefix_sum.cuh"
#include "lora/cuda/params.cuh"

namespace mortar::lora::cuda {

/// A tile of up to 16 tokens and the largest rank of its adapter.
struct ListedTile {
  Tile tile;
  int rank = 0;
  int index = 0;  ///< of the tile
  int piece = 0;  ///< of the tile's; -1: there is none
};

/// The rank of a slice of an adapter whose largest is `rank`.
__device__ __forceinline__ int slice_rank(const WeightsView& w, int adapter, int rank, int slice,
                                          int width) {
  const int own = w.table != nullptr ? w.rank(adapter, slice) : min(rank, w.slices[slice].rank);
  return min(own, width);
}

template <int kMostThreads>
struct TileList {
  int4* entries;  ///< {adapter, start, count and 256 times the rank, pieces before}
  int* taken;     ///< pieces that warps of the CTA have taken, in shared memory
  int tiles, pieces;

  /// Lists the tiles of a plan; pieces_of(adapter, rank, count): those of a tile. Called by the
  /// whole CTA.
  template <class Pieces>
  __device__ __forceinline__ TileList(const GroupsView& g, const TileRange& range,
                                      const WeightsView& w, int4* list, Pieces pieces_of)
      : entries(list) {
    __shared__ int4 warp_sums[kMostThreads / 32];
    __shared__ int counter;
    taken = &counter;
    if (threadIdx.x == 0) counter = 0;
    const int4 head = __ldcg(reinterpret_cast<const int4*>(g.plan));
    tiles = is_plan_of(head, range, w.num_adapters) ? min(head.z, range.num) : 0;
    const int per_thread = ceil_div(tiles, static_cast<int>(blockDim.x));
    const int first = static_cast<int>(threadIdx.x) * per_thread;
    const int last = min(first + per_thread, tiles);
    const auto* from = reinterpret_cast<const int4*>(g.plan + range.list);
    const auto* ranks = w.table == nullptr ? w.ranks : nullptr;
    int own = 0;
#pragma unroll 2
    for (int i = first; i < last; ++i) {
      const int4 entry = __ldcg(from + i);
      const int rank = ranks != nullptr ? max(0, min(ranks[entry.x], w.max_rank)) : w.max_rank;
      list[i] = make_int4(entry.x, entry.y, entry.z + rank * 256, own);
      own += pieces_of(entry.x, rank, entry.z);
    }
    int4 total;
    const int before =
        device::exclusive_scan<kMostThreads>(make_int4(own, 0, 0, 0), warp_sums, &total).x;
    for (int i = first; i < last; ++i) list[i].w += before;
    pieces = total.x;
    __syncthreads();
  }

  /// The next piece for a warp. Called by the whole warp.
  __device__ __forceinline__ ListedTile next() const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    int i = 0;
    if (lane == 0) i = atomicAdd(taken, 1);
    i = static_cast<int>(blockIdx.x) + __shfl_sync(0xffffffffu, i, 0) * static_cast<int>(gridDim.x);
    ListedTile found;
    found.piece = -1;
    if (i >= pieces) return found;
    // The last tile with no more pieces before it: among every n-th, then among those n.
    const int step = ceil_div(tiles, 32);
    const auto before = [&](int tile) { return tile < tiles && entries[tile].w <= i; };
    const int base = (__popc(__ballot_sync(0xffffffffu, before(lane * step))) - 1) * step;
    found.index = base + __popc(__ballot_sync(0xffffffffu, lane < step && before(base + lane))) - 1;
    const int4 entry = entries[found.index];
    found.tile = {entry.x, entry.y, entry.z & 255};
    found.rank = entry.z >> 8;
    found.piece = i - entry.w;
    return found;
  }
};

}  // namespace mortar::lora::cuda
