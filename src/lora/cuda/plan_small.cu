// SPDX-License-Identifier: Apache-2.0
// Groups a decode batch by adapter: the plan of plan.cu for at most 256 tokens, by one CTA.
//
// sorted = argsort(token_adapter, stable), base tokens last     M tokens, L adapters
// bytes  = 4M (ids) + 4M (sorted) + 16 (T16 + T64 + G) (lists) + 64 T16 + 256 T64 (tokens)
// M=256, L=4096: 0.1 MB; compares M^2 = 65,536 pairs of tokens, 2 us of one SM's integer units
// limit  : latency: one trip to memory, then shared memory only, whatever L is
//
// A thread owns a token and compares its adapter with every other token's: how many are less gives
// its group's first place, how many equal ones stand before it its place within the group. A scan
// over places numbers tiles and groups.
#include <climits>

#include "core/int_math.h"
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "lora/cuda/plan_parts.cuh"

namespace mortar::lora::cuda {
namespace {

constexpr int kThreads = kSmallPlanTokens;

/// Place p of the sorted batch.
struct alignas(16) Place {
  int token, adapter, within, count;  ///< its place within its group, and the group's tokens
};

template <class Id>
__global__ void __launch_bounds__(kThreads, 1)
    plan_small_kernel(const __grid_constant__ PlanParams p) {
  __shared__ __align__(16) int adapters[kThreads];
  __shared__ Place places[kThreads];
  __shared__ int4 warp_sums[kThreads / 32];
  __shared__ int bad_count, bad_first;
  const int own = static_cast<int>(threadIdx.x), num = static_cast<int>(p.num_tokens);
  if (own == 0) {
    bad_count = 0;
    bad_first = INT_MAX;
  }
  __syncthreads();
  device::pdl_wait();

  const int id = own < num ? p.token_adapter.get<Id>(own) : -1;
  clear_tile_tokens(p, 0, p.layout.scratch, own, kThreads);
  const bool bad = id < -1 || id >= p.num_adapters;
  if (bad) {
    atomicAdd(&bad_count, 1);
    atomicMin(&bad_first, own);
  }
  // Base tokens come last, and after them what pads the batch to whole vectors.
  const int adapter = own >= num ? INT_MAX : id < 0 || bad ? p.num_adapters : id;
  adapters[own] = adapter;
  __syncthreads();

  // Compare
  int less = 0, within = 0, count = 0;
  for (int j = 0; j < num; j += 4) {
    const int4 four = *reinterpret_cast<const int4*>(adapters + j);
    const int others[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      less += others[k] < adapter;
      count += others[k] == adapter;
      within += others[k] == adapter && j + k < own;
    }
  }
  if (own < num) places[less + within] = {own, adapter, within, count};
  __syncthreads();

  // Number: thread p takes place p from here on.
  const Place at = own < num ? places[own] : Place{-1, INT_MAX, 0, 0};
  const bool active = at.adapter < p.num_adapters;
  const bool leads16 = active && at.within % 16 == 0, leads64 = active && at.within % 64 == 0;
  const bool leads = active && at.within == 0;
  int4 totals;
  const int4 before =
      exclusive_scan<kThreads>(make_int4(active, leads16, leads64, leads), warp_sums, &totals);
  if (own < num) p.plan[p.layout.sorted + own] = at.token;
  if (active) {
    // Tiles up to this place's own, less one.
    const int tile16 = before.y + leads16 - 1, tile64 = before.z + leads64 - 1;
    p.plan[p.layout.tokens16 + 16 * tile16 + at.within % 16] = at.token;
    p.plan[p.layout.tokens64 + 64 * tile64 + at.within % 64] = at.token;
    const auto put = [&](std::int64_t list, int index, int most, int ordinal) {
      put_entry(p.plan + list, index, at.adapter, own, min(at.count - at.within, most), ordinal);
    };
    if (leads16) put(p.layout.tiles16, tile16, 16, at.within / 16);
    if (leads64) put(p.layout.tiles64, tile64, 64, at.within / 64);
    if (leads) put(p.layout.groups, before.w, kThreads, 0);
  }
  clear_list(p.plan + p.layout.tiles16, totals.y, static_cast<int>(p.layout.max_tiles16), own,
             kThreads);
  clear_list(p.plan + p.layout.tiles64, totals.z, static_cast<int>(p.layout.max_tiles64), own,
             kThreads);
  if (own == 0) write_header(p, totals, bad_count, bad_first);
  // The next kernel may start as soon as the CTA has left and read the plan from L2 at once.
  __threadfence();
}

}  // namespace

// ---- host ---------------------------------------------------------------------------------------

void plan_small(const PlanParams& p, Stream stream) {
  device::Launch l;
  l.grid = dim3(1);
  l.threads = kThreads;
  l.stream = stream;
  p.token_adapter.wide ? device::launch<plan_small_kernel<std::int64_t>>("lora_plan", l, p)
                       : device::launch<plan_small_kernel<std::int32_t>>("lora_plan", l, p);
}

}  // namespace mortar::lora::cuda
