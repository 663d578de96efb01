// SPDX-License-Identifier: Apache-2.0
// How a CTA that takes several tiles of 64 tokens finds them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "device/async_copy.cuh"
#include "lora/config.h"
#include "lora/cuda/params.cuh"

namespace mortar::lora::cuda {

/// Up to kTiles tiles, neighbours in the grouping and of one adapter; in shared memory.
template <int kTiles, int kThreads>
struct TileRun {
  int index;  ///< of the first tile in the list, with a plan
  Tile tile;  ///< all of them taken together
  int warp_leaders[kThreads / 32];

  /// Finds the run of this CTA, blockIdx.z, and of its tokens that in place threadIdx.x, as
  /// token() does. Called by the whole CTA; false past the last run. What it needs of the plan is
  /// on its way while a CTA does what it can `meanwhile`: a barrier follows that.
  template <class Meanwhile>
  __device__ __forceinline__ bool find(const GroupsView& g, const TileRange& range,
                                       std::int64_t num_adapters, int* own_token,
                                       Meanwhile&& meanwhile) {
    const int place = static_cast<int>(threadIdx.x);
    bool found;
    if (g.plan != nullptr && kTiles == 1) {
      found = find_tile_in_plan(g, range, num_adapters, own_token, meanwhile);
      __syncthreads();
      return found;
    }
    if (g.plan != nullptr) {
      found = find_in_plan(g, range, num_adapters, meanwhile);
    } else {
      meanwhile();
      Tile own;
      found = find_segment_tile<kTiles>(g, num_adapters, 64, blockIdx.z, &own);
      if (threadIdx.x == 0) tile = own;
      __syncthreads();
    }
    *own_token = found && place < tile.count ? token(g, range, place) : -1;
    return found;
  }

  /// A run of one tile is in its place of the list: it, its tokens and the plan's head come in one
  /// trip to memory.
  template <class Meanwhile>
  __device__ __forceinline__ bool find_tile_in_plan(const GroupsView& g, const TileRange& range,
                                                    std::int64_t num_adapters, int* own_token,
                                                    Meanwhile&& meanwhile) {
    const std::int64_t own = range.first + static_cast<std::int64_t>(blockIdx.z);
    const int4 head = __ldcg(reinterpret_cast<const int4*>(g.plan));
    const int4 entry = __ldcg(reinterpret_cast<const int4*>(g.plan + range.list) + own);
    if (threadIdx.x < 64) *own_token = __ldcg(g.plan + range.tokens + own * 64 + threadIdx.x);
    meanwhile();
    if (threadIdx.x == 0) {
      index = static_cast<int>(own);
      tile = {entry.x, entry.y, entry.z};
    }
    return is_plan_of(head, range, num_adapters) && own < head.w;
  }

  /// With a plan a run's first tile is the first of the launch or one whose ordinal is a multiple
  /// of kTiles. Every CTA counts such leaders before its own, so that live CTAs are neighbours in
  /// the grid and spread evenly over the SMs.
  template <class Meanwhile>
  __device__ __forceinline__ bool find_in_plan(const GroupsView& g, const TileRange& range,
                                               std::int64_t num_adapters, Meanwhile&& meanwhile) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int wanted = static_cast<int>(blockIdx.z);
    const int4 head = __ldcg(reinterpret_cast<const int4*>(g.plan));
    const auto* list = reinterpret_cast<const int4*>(g.plan + range.list) + range.first;
    // Tokens are read in the next trip to memory: the CTAs together have L2 fetch all of them.
    if (const int at = wanted * kTiles * 64 + static_cast<int>(threadIdx.x) * 32;
        threadIdx.x < kTiles * 2 && at < range.num * 64) {
      device::prefetch_l2(g.plan + range.tokens + std::int64_t{range.first} * 64 + at);
    }
    int before = 0;
    for (int base = 0; base < range.num && before <= wanted; base += kThreads) {
      const int i = base + static_cast<int>(threadIdx.x);
      int4 entry[kTiles];
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        entry[j] = i + j < range.num ? __ldcg(list + i + j) : make_int4(0, 0, 0, 0);
      }
      if (base == 0) meanwhile();
      const int part = entry[0].w % kTiles;
      const bool leads = entry[0].z > 0 && (part == 0 || i == 0);  // a count of 0 is no tile
      const unsigned leaders = __ballot_sync(0xffffffffu, leads);
      if (lane == 0) warp_leaders[warp] = __popc(leaders);
      __syncthreads();
      int place = before + __popc(leaders & ((1u << lane) - 1));
#pragma unroll
      for (int w = 0; w < kThreads / 32; ++w) {
        if (w < warp) place += warp_leaders[w];
        before += warp_leaders[w];
      }
      if (leads && place == wanted) {
        int count = entry[0].z;
#pragma unroll
        for (int j = 1; j < kTiles; ++j) {
          const bool same = entry[j].x == entry[0].x && entry[j].w == entry[0].w + j;
          if (part + j < kTiles && same) count += entry[j].z;
        }
        index = range.first + i;
        tile = {entry[0].x, entry[0].y, count};
      }
      __syncthreads();
    }
    return before > wanted && is_plan_of(head, range, num_adapters) && index < head.w;
  }

  /// The token in place `place`, below the count; -1 where a segment's table points outside the
  /// batch.
  __device__ __forceinline__ int token(const GroupsView& g, const TileRange& range,
                                       int place) const {
    if (g.plan == nullptr) return sorted_token(g, range, tile, place);
    return __ldcg(g.plan + range.tokens + std::int64_t{index} * 64 + place);
  }

  /// CTAs along z that suffice: of every adapter its tiles / kTiles, rounded up, and one more where
  /// the launch begins within a run.
  static std::int64_t most(const TileRange& range, std::int64_t num_adapters) {
    const std::int64_t groups = range.num_tokens < num_adapters ? range.num_tokens : num_adapters;
    const std::int64_t runs = (range.num + (kTiles - 1) * (groups + 1)) / kTiles;
    const std::int64_t all = max_tiles(range.num_tokens, num_adapters, 64 * kTiles);
    return std::min({runs, all + (range.first > 0 ? 1 : 0), std::int64_t{range.num}});
  }
};

}  // namespace mortar::lora::cuda
