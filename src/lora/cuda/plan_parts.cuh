// SPDX-License-Identifier: Apache-2.0
// What the planner kernels share.
#pragma once

#include <climits>
#include <cstdint>

#include "core/dtype_visitor.h"
#include "device/prefix_sum.cuh"
#include "lora/problem.h"
#include "mortar/stream.h"

namespace mortar::lora::cuda {

/// Up to so many tokens one CTA counts them all (plan_small.cu).
inline constexpr int kCtaPlanTokens = 2 * 1024;
/// Up to so many tokens a cluster of CTAs does, on sm_90.
inline constexpr int kClusterPlanTokens = 16 * 1024;

struct PlanParams {
  IdsView token_adapter;
  std::int32_t* plan;
  PlanLayout layout;
  std::int64_t num_tokens;
  int num_adapters;
  int warp_tokens = 0;  ///< tokens per warp, a multiple of 32
  int cta_tokens = 0;   ///< tokens per CTA of a cluster
};

using device::exclusive_scan;
using device::operator+;

/// Which lanes have the same value of so many bits. (match.any takes 1.5 us for 32 different ones.)
__device__ __forceinline__ unsigned same_value(int value, int num_bits) {
  unsigned same = 0xffffffffu;
  for (int i = 0; i < num_bits; ++i) {
    const bool one = (value >> i & 1) != 0;
    const unsigned ones = __ballot_sync(0xffffffffu, one);
    same &= one ? ones : ~ones;
  }
  return same;
}

/// Ids of kNum tokens, INT_MIN where token(i) is negative. All loads are on their way together.
template <int kNum, class Token>
__device__ __forceinline__ void load_ids(const IdsView& from, int (&ids)[kNum],
                                         const Token& token) {
  const auto load = [&](auto tag) {
#pragma unroll
    for (int i = 0; i < kNum; ++i) {
      const std::int64_t at = token(i);
      ids[i] = at >= 0 ? from.get<typename decltype(tag)::type>(at) : INT_MIN;
    }
  };
  from.wide ? load(TypeTag<std::int64_t>()) : load(TypeTag<std::int32_t>());
}

/// Enters a warp's tokens into their bins, stably: returns the lane's place in its bin, and which
/// lanes share it. Lanes that are not live may have any bin that no live one has. A Cell is a
/// lane's bin: get() is the warp's tokens in it, and add(n), atomic, returns what they were before.
/// Called by the whole warp.
template <class Cell>
__device__ __forceinline__ int enter_bin(int bin, bool live, Cell cell, int num_bits,
                                         unsigned* peers) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const unsigned lower = (1u << lane) - 1;
  if (num_bits < 8) {  // lanes would queue up for a bin
    const int before = live ? cell.get() : 0;
    *peers = same_value(bin, num_bits);
    __syncwarp();
    if (live && (*peers & lower) == 0) cell.add(__popc(*peers));
    __syncwarp();
    return before + __popc(*peers & lower);
  }
  // Where there are many bins, few lanes share one: all but the last to come see that they do.
  const int before = live ? cell.add(1) : 0;
  __syncwarp();
  const int now = live ? cell.get() : 0;
  __syncwarp();
  unsigned left = __ballot_sync(0xffffffffu, live && now > before + 1);
  *peers = 1u << lane;
  if (2 * __popc(left) > num_bits) {
    *peers = same_value(bin, num_bits);
    left = 0;
  }
  while (left != 0) {
    const int shared = __shfl_sync(0xffffffffu, bin, __ffs(left) - 1);
    const unsigned equal = __ballot_sync(0xffffffffu, bin == shared);
    if (bin == shared) *peers = equal;
    left &= ~equal;
  }
  return now - __popc(*peers & ~lower);
}

/// No place of a tile holds a token until the scatter puts one there: of the words [begin, end) of
/// the plan, those of the tiles' tokens. By `num_threads` threads.
__device__ __forceinline__ void clear_tile_tokens(const PlanParams& p, std::int64_t begin,
                                                  std::int64_t end, int thread, int num_threads) {
  const std::int64_t last = min(end, p.layout.scratch);
  for (std::int64_t i = max(begin, p.layout.tokens16) + 4 * thread; i < last;
       i += 4 * num_threads) {
    *reinterpret_cast<int4*>(p.plan + i) = make_int4(-1, -1, -1, -1);
  }
}

/// Entry `index` of the list of groups or of tiles.
__device__ __forceinline__ void put_entry(std::int32_t* list, int index, int adapter, int start,
                                          int count, int ordinal) {
  *reinterpret_cast<int4*>(list + kPlanEntryWords * index) =
      make_int4(adapter, start, count, ordinal);
}

/// Entries [num, most) of a list: readers load an entry before they know whether it exists. By
/// `num_threads` threads.
__device__ __forceinline__ void clear_list(std::int32_t* list, int num, int most, int thread,
                                           int num_threads) {
  for (int t = num + thread; t < most; t += num_threads) {
    put_entry(list, t, 0, 0, 0, 0);
  }
}

/// By one thread. totals: tokens of adapters, tiles of 16 and of 64, groups; bad: ids outside
/// [-1, L), first: the first token that has one.
__device__ __forceinline__ void write_header(const PlanParams& p, const int4& totals, int bad,
                                             int first) {
  p.plan[kPlanNumTokens] = static_cast<int>(p.num_tokens);
  p.plan[kPlanNumAdapters] = p.num_adapters;
  p.plan[kPlanNumTiles16] = totals.y;
  p.plan[kPlanNumTiles64] = totals.z;
  p.plan[kPlanNumGroups] = totals.w;
  p.plan[kPlanNumActive] = totals.x;
  p.plan[kPlanNumOutOfRange] = bad;
  p.plan[kPlanFirstOutOfRange] = bad > 0 ? first : -1;
}

/// Makes the plan of a batch of few tokens; false, and nothing done, if it has too many, or the
/// device too little shared memory for so many adapters.
bool plan_small(const PlanParams& p, Stream stream);

}  // namespace mortar::lora::cuda
