// SPDX-License-Identifier: Apache-2.0
// How the pairs of CTAs of expand_wide_walk.cu share all steps.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/int_math.h"
#include "lora/config.h"
#include "lora/cuda/params.cuh"
#include "lora/cuda/tile_pairs.cuh"

namespace mortar::lora::cuda::wide_walk {

MORTAR_HOST_DEVICE inline int all_blocks(const ExpandParams& p) {
  return p.block_start[p.weights.num_slices];
}

/// Blocks of a run that a CTA, or a pair of them, takes one after the other.
MORTAR_HOST_DEVICE inline int share_blocks(const ExpandParams& p) {
  return ceil_div(all_blocks(p), p.cluster);
}

/// That of Share, for a launch of so many CTAs; 0: runs in turns, and the device chooses it.
inline int stride_of(const ExpandParams& p, int ctas) {
  constexpr std::int64_t kStays = 12 << 20;
  const int size = p.two_parts ? 4 : 2;  // of an element of B
  if (std::int64_t{all_blocks(p)} * kWalkCols * p.h.width * size > kStays) return 0;
  // Some 1 KB of a row of y. (us on an H200: groups of 4 CTAs 43.8, of 12 45.1, of 132 47.4.)
  int stride = std::min(p.cluster > 1 ? 3 : 4, share_blocks(p));
  while (ctas / p.cluster % stride != 0) --stride;
  return stride;
}

/// How CTAs, or pairs of them, share all steps. Those of a run of tokens are its blocks of columns;
/// of a pair they are two blocks by two, or, of two runs that it takes at once, one by one.
/// `stride` neighbours are a group, whose members take the group's steps in turn. Groups share all
/// steps evenly; or, where B of a run is more than stays in L2, they take whole runs in turns:
/// those of one adapter then go over its columns side by side, so that B comes from memory once for
/// as many runs as there are groups. (us on an H200, such turns and evenly: 8,137 tokens of 3
/// adapters, rank 512, 29 MB of B, 637 and 755; but 12,494 of 47, 4 MB, 300 and 288.)
struct Share {
  int blocks;  ///< steps of a run
  bool in_turns;
  int stride, groups;
  int run, block;  ///< of the first step
  /// Steps, at most. All steps have rows of h and y of their own, so many bytes that no device has
  /// memory for 2^31 of them.
  int left;

  __device__ __forceinline__ Share(const ExpandParams& p, int own_stride, int runs)
      : blocks(share_blocks(p)), in_turns(own_stride == 0) {
    const int pairs = static_cast<int>(gridDim.x) / p.cluster;
    const int pair = static_cast<int>(blockIdx.x) / p.cluster;
    stride = in_turns ? stride_in_turns(runs, pairs) : own_stride;
    groups = pairs / stride;
    const int group = pair / stride, member = pair % stride;
    run = group;
    block = member;
    left = group < groups && member < blocks ? 1 << 30 : 0;
    if (!in_turns) {
      const int all = runs * blocks, own = ceil_div(all, groups);
      const int begin = group * own + member, end = min((group + 1) * own, all);
      run = begin / blocks;
      block = begin - run * blocks;
      left = begin < end ? ceil_div(end - begin, stride) : 0;
    }
    if (run >= runs) left = 0;
  }

 private:
  /// That of the fewest steps; a new h counts as half a step.
  __device__ __forceinline__ int stride_in_turns(int runs, int pairs) const {
    constexpr int kStrideBits = 8, kMost = (1 << (31 - kStrideBits)) - 1;
    int best = kMost << kStrideBits | 1;
#pragma unroll 1
    for (int own = static_cast<int>(threadIdx.x) % 32 + 1; own <= pairs; own += 32) {
      const std::int64_t rounds = ceil_div(runs, pairs / own);
      const auto cost = static_cast<int>(
          min(rounds * (2 * ceil_div(blocks, own) + 1), static_cast<std::int64_t>(kMost)));
      best = min(best, cost << kStrideBits | own);
    }
    return __reduce_min_sync(0xffffffffu, best) & ((1 << kStrideBits) - 1);
  }
};

}  // namespace mortar::lora::cuda::wide_walk
