// SPDX-License-Identifier: Apache-2.0
// Runs of up to two tiles of one adapter, over which CTAs walk; and which tokens the two CTAs of a
// cluster take. Two runs that are neighbours are taken at once, one by each CTA, and what is copied
// of the adapter's weights comes to both; of any other run the CTAs have the same tokens, and other
// weights.
#pragma once

#include <cstdint>

#include "lora/cuda/params.cuh"

namespace mortar::lora::cuda {

inline constexpr int kPair = 2, kRunTiles = 2;  ///< CTAs of a cluster, tiles of 64 tokens of a run

#if defined(__CUDACC__)

/// The tiles of a plan as runs: in its list those of an adapter are counted from 0 on.
struct RunList {
  const GroupsView& groups;
  const TileRange& range;
  int num;

  __device__ __forceinline__ const int4* at(int index) const {
    return reinterpret_cast<const int4*>(groups.plan + range.list) + index;
  }
  __device__ __forceinline__ int ordinal(int index) const { return __ldcg(&at(index)->w); }
  /// An entry; one of no adapter and no tokens, of ordinal 0, where there is none.
  __device__ __forceinline__ int4 entry(int index) const {
    return index >= 0 && index < num ? __ldcg(at(index)) : make_int4(-1, 0, 0, 0);
  }
  /// Whether a run begins with a tile.
  __device__ __forceinline__ bool leads(int index) const {
    return index < num && ordinal(index) % kRunTiles == 0;
  }
  /// The first tile of a run: of that `ahead` runs past the first one from `from` on. At least
  /// `num`: there is none. By a warp, 32 kLoads tiles a trip to memory.
  template <int kLoads>
  __device__ __forceinline__ int leader(int from, int ahead) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    for (int base = from; base < num; base += 32 * kLoads) {
      bool leads_run[kLoads];
#pragma unroll
      for (int j = 0; j < kLoads; ++j) leads_run[j] = leads(base + 32 * j + lane);
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        const unsigned leaders = __ballot_sync(0xffffffffu, leads_run[j]);
        const int before = __popc(leaders & ((1u << lane) - 1));
        const unsigned hit = __ballot_sync(0xffffffffu, leads_run[j] && before == ahead);
        if (hit != 0) return base + 32 * j + __ffs(hit) - 1;
        ahead -= __popc(leaders);
      }
    }
    return num;
  }
};

/// Where runs begin, by a warp: of the first tiles in one trip to memory, which does not wait until
/// it is known how many there are.
struct RunLeaders {
  static constexpr int kLoads = 8, kNear = 32 * kLoads;  ///< tiles looked at at once
  int ordinals[kLoads];
  unsigned near[kLoads];  ///< a bit for each of those tiles

  /// Asks for as many as there may be.
  __device__ __forceinline__ explicit RunLeaders(const RunList& most) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      ordinals[i] = 32 * i + lane < most.num ? most.ordinal(32 * i + lane) : 1;
    }
  }
  /// The runs of the tiles that there are.
  __device__ __forceinline__ int count(const RunList& tiles) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    int runs = 0;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const bool leads = 32 * i + lane < tiles.num && ordinals[i] % kRunTiles == 0;
      near[i] = __ballot_sync(0xffffffffu, leads);
      runs += __popc(near[i]);
    }
#pragma unroll 4
    for (int base = kNear; base < tiles.num; base += 32) {
      runs += __popc(__ballot_sync(0xffffffffu, tiles.leads(base + lane)));
    }
    return runs;
  }
  /// The first tile of a run.
  __device__ __forceinline__ int find(const RunList& tiles, int run) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    int first = -1;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const bool here = (near[i] >> lane & 1) != 0 && __popc(near[i] & ((1u << lane) - 1)) == run;
      const unsigned hit = __ballot_sync(0xffffffffu, here);
      if (hit != 0) first = 32 * i + __ffs(hit) - 1;
      run -= __popc(near[i]);
    }
    return first >= 0 ? first : tiles.leader<8>(kNear, run);
  }
};

/// How a pair takes a run: from the ordinals, among the tiles of their adapters, of its first tile
/// and of that kRunTiles further.
struct PairRun {
  bool both = false;    ///< the CTAs have a run each, this one and its neighbour
  bool second = false;  ///< of those this is the second one

  PairRun() = default;
  __device__ __forceinline__ PairRun(int ordinal, int later_ordinal) {
    constexpr int kBoth = kPair * kRunTiles;
    second = ordinal % kBoth == kRunTiles;
    both = second || later_ordinal % kBoth == kRunTiles;
  }
  /// Whether the tokens of a CTA are those of the other run.
  __device__ __forceinline__ bool of_other(int cta) const { return both && second != (cta == 1); }
};

#endif

}  // namespace mortar::lora::cuda
