// SPDX-License-Identifier: Apache-2.0
// What the two planner kernels share.
#pragma once

#include <cstdint>

#include "lora/plan_layout.h"
#include "mortar/stream.h"

namespace mortar::lora::cuda {

/// Threads of a planner CTA, at most.
inline constexpr int kPlanThreads = 256;
/// Up to so many tokens one CTA compares them all with each other (plan_small.cu).
inline constexpr int kSmallPlanTokens = kPlanThreads;

struct PlanParams {
  const std::int32_t* token_adapter;
  std::int32_t* plan;
  PlanLayout layout;
  std::int64_t num_tokens;
  int num_adapters;
  int warp_tokens = 0;  ///< tokens per warp, a multiple of 32
};

__device__ __forceinline__ int4 operator+(int4 a, int4 b) {
  return make_int4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}
__device__ __forceinline__ int4 operator-(int4 a, int4 b) {
  return make_int4(a.x - b.x, a.y - b.y, a.z - b.z, a.w - b.w);
}

/// Exclusive prefix sums of four values per thread; *total gets the sums. Uses two barriers.
__device__ __forceinline__ int4 exclusive_scan(int4 value, int4* warp_sums, int4* total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int4 inclusive = value;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int4 other = make_int4(
        __shfl_up_sync(0xffffffffu, inclusive.x, d), __shfl_up_sync(0xffffffffu, inclusive.y, d),
        __shfl_up_sync(0xffffffffu, inclusive.z, d), __shfl_up_sync(0xffffffffu, inclusive.w, d));
    if (lane >= d) inclusive = inclusive + other;
  }
  if (lane == 31) warp_sums[warp] = inclusive;
  __syncthreads();
  int4 before = make_int4(0, 0, 0, 0), all = before;
#pragma unroll
  for (int w = 0; w < kPlanThreads / 32; ++w) {
    if (w * 32 >= blockDim.x) break;
    const int4 sum = warp_sums[w];
    if (w < warp) before = before + sum;
    all = all + sum;
  }
  __syncthreads();
  *total = all;
  return before + inclusive - value;
}

/// No place of a tile holds a token until the scatter puts one there. By all threads of the launch.
__device__ __forceinline__ void clear_tile_tokens(const PlanParams& p, int thread,
                                                  int num_threads) {
  for (std::int64_t i = p.layout.tokens16 + 4 * thread; i < p.layout.scratch;
       i += 4 * num_threads) {
    *reinterpret_cast<int4*>(p.plan + i) = make_int4(-1, -1, -1, -1);
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

/// For at most kSmallPlanTokens tokens.
void plan_small(const PlanParams& p, Stream stream);

}  // namespace mortar::lora::cuda
