// SPDX-License-Identifier: Apache-2.0
// Groups tokens by adapter: a stable counting sort and its tile lists, in one launch.
//
// sorted = argsort(token_adapter, stable), base tokens last     M tokens, L adapters
// bytes  = 4M (ids; past 256 a warp they are read again, from L2) + 4M (sorted)
//          + 8 C (L + 1) (histograms) + 16 (T16 + T64 + G) (lists) + 64 T16 + 256 T64 (tokens),
//          C = min(128, ceil(M / 256)) CTAs
// M=8192, L=16: 0.25 MB, so the floor (0.06 us) is nothing beside a grid barrier (1 us, none when
//          one CTA suffices) and three dependent trips to L2 (0.7 us each)
// limit  : latency; with many adapters a second barrier, between prefixes over CTAs and the scan
// wrong  : up to 2,048 tokens, and up to 16,384 on sm_90 (plan_small.cu)
// Each warp owns a run of tokens and a histogram in shared memory, so that ranks inside a warp
// come from its lanes alone and the order of tokens never depends on timing.
#include <cooperative_groups.h>

#include <algorithm>
#include <climits>

#include "core/int_math.h"
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "lora/cuda/backend.cuh"
#include "lora/cuda/plan_parts.cuh"

namespace mortar::lora::cuda {
namespace {

constexpr int kMaxThreads = 256;
constexpr int kAhead = 8;  ///< ids of a thread that are loaded together
/// Up to so many words of histograms every CTA adds all of them up for itself: reading them takes
/// less than the grid barrier that sharing the work would need.
constexpr std::int64_t kReadAll = 16 * 1024;

/// A warp's count of a bin.
struct WordCell {
  int* at;
  __device__ __forceinline__ int add(int n) const { return atomicAdd(at, n); }
  __device__ __forceinline__ int get() const { return *static_cast<volatile int*>(at); }
};

/// Loads of the histograms of CTAs [begin, end) for one bin, 16 in flight; visit(c, count).
template <class Visit>
__device__ __forceinline__ void each_chunk(const std::int32_t* cell, int bins, int begin, int end,
                                           Visit visit) {
  constexpr int kLoads = 16;
  for (int c0 = begin; c0 < end; c0 += kLoads) {
    int n[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      n[i] = c0 + i < end ? __ldcg(cell + static_cast<std::int64_t>(c0 + i) * bins) : 0;
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (c0 + i < end) visit(c0 + i, n[i]);
    }
  }
}

__global__ void __launch_bounds__(kMaxThreads, 1)
    plan_kernel(const __grid_constant__ PlanParams p) {
  // Shared memory: one histogram per warp, then five tables of L + 1 words.
  extern __shared__ int smem[];
  __shared__ int4 warp_sums[kMaxThreads / 32];
  __shared__ int bad_count, bad_first;
  const int num_cta_threads = blockDim.x, num_warps = num_cta_threads / 32;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int bins = p.num_adapters + 1;  // the last bin holds base tokens
  const int num_ctas = gridDim.x, cta = blockIdx.x;
  int* own_bins = smem + warp * bins;
  int* first_token = smem + num_warps * bins;
  int* first_tile16 = first_token + bins;
  int* first_tile64 = first_tile16 + bins;
  int* first_group = first_tile64 + bins;
  int* chunk_first = first_group + bins;                 // of this CTA's tokens within their bin
  std::int32_t* chunk_bins = p.plan + p.layout.scratch;  // [chunk][bin]
  std::int32_t* total_bins = chunk_bins + p.layout.num_chunks * bins;
  std::int32_t* chunk_bad = total_bins + bins;  // [chunk]{count, first}

  if (threadIdx.x == 0) {
    bad_count = 0;
    bad_first = INT_MAX;
  }
  for (int i = threadIdx.x; i < num_warps * bins; i += num_cta_threads) smem[i] = 0;
  for (int b = threadIdx.x; b < bins; b += num_cta_threads) first_token[b] = chunk_first[b] = 0;
  __syncthreads();
  device::pdl_wait();

  const int thread = cta * num_cta_threads + threadIdx.x, num_threads = num_ctas * num_cta_threads;
  clear_tile_tokens(p, 0, p.layout.scratch, thread, num_threads);

  // Count: every warp walks its tokens in order.
  const std::int64_t warp_first =
      (static_cast<std::int64_t>(cta) * num_warps + warp) * p.warp_tokens;
  const int num_bits = 32 - __clz(bins);
  int ids[kAhead];
  const auto is_bad = [&](int id) { return id < -1 || id >= p.num_adapters; };
  /// Takes the warp's tokens round by round: visit(token, id, bin, place in the warp's bin). Loads
  /// the ids, or takes those of the walk before.
  const auto walk = [&](bool load, auto visit) {
    for (int base = 0; base < p.warp_tokens; base += 32 * kAhead) {
      if (load) {
        load_ids(p.token_adapter, ids, [&](int i) {
          const int at = base + 32 * i + lane;
          const std::int64_t token = warp_first + at;
          return at < p.warp_tokens && token < p.num_tokens ? token : -1;
        });
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (base + 32 * i >= p.warp_tokens) break;
        const std::int64_t token = warp_first + base + 32 * i + lane;
        const bool live = token < p.num_tokens;
        const int id = ids[i];
        const int bin = !live ? -1 : id < 0 || is_bad(id) ? p.num_adapters : id;
        unsigned peers;
        const int place = enter_bin(bin, live, WordCell{own_bins + max(bin, 0)}, num_bits, &peers);
        if (live) visit(static_cast<std::int32_t>(token), id, bin, place);
      }
    }
  };
  walk(true, [&](std::int32_t token, int id, int, int) {
    if (!is_bad(id)) return;
    atomicAdd(&bad_count, 1);
    atomicMin(&bad_first, token);
  });
  __syncthreads();

  // Turn the warp histograms into prefixes over warps, and publish the CTA's totals.
  for (int b = threadIdx.x; b < bins; b += num_cta_threads) {
    int sum = 0;
    for (int w = 0; w < num_warps; ++w) {
      const int n = smem[w * bins + b];
      smem[w * bins + b] = sum;
      sum += n;
    }
    chunk_bins[static_cast<std::int64_t>(cta) * bins + b] = sum;
  }
  if (threadIdx.x == 0) {
    chunk_bad[2 * cta] = bad_count;
    chunk_bad[2 * cta + 1] = bad_first;
  }
  const auto grid_barrier = [&] {
    if (num_ctas > 1) {
      cooperative_groups::this_grid().sync();
    } else {
      __syncthreads();
    }
  };
  grid_barrier();

  // Totals of the bins and the CTA's own part of the prefixes over CTAs, to shared memory.
  if (static_cast<std::int64_t>(bins) * num_ctas <= kReadAll) {
    const int width = min(static_cast<int>(round_up(bins, 32)), num_cta_threads);
    const int parts = num_cta_threads / width, part = threadIdx.x / width;
    for (int b = threadIdx.x % width; b < bins && part < parts; b += width) {
      int total = 0, own = 0;
      each_chunk(chunk_bins + b, bins, part * num_ctas / parts, (part + 1) * num_ctas / parts,
                 [&](int c, int n) {
                   total += n;
                   if (c < cta) own += n;
                 });
      atomicAdd(first_token + b, total);
      atomicAdd(chunk_first + b, own);
    }
  } else {
    for (int b = thread; b < bins; b += num_threads) {
      int sum = 0;
      each_chunk(chunk_bins + b, bins, 0, num_ctas, [&](int c, int n) {
        chunk_bins[static_cast<std::int64_t>(c) * bins + b] = sum;
        sum += n;
      });
      total_bins[b] = sum;
    }
    grid_barrier();
    for (int b = threadIdx.x; b < bins; b += num_cta_threads) {
      first_token[b] = __ldcg(total_bins + b);
      chunk_first[b] = __ldcg(chunk_bins + static_cast<std::int64_t>(cta) * bins + b);
    }
  }
  __syncthreads();

  // Every CTA scans the totals for itself; a bin's total gives way to its first token.
  int4 before = make_int4(0, 0, 0, 0);  // tokens, tiles of 16 and of 64, groups
  for (int base = 0; base < bins; base += num_cta_threads) {
    const int b = base + threadIdx.x;
    const int n = b < bins ? first_token[b] : 0;
    const bool active = b < p.num_adapters;
    int4 total;
    const int4 first =
        exclusive_scan<kMaxThreads>(make_int4(n, active ? ceil_div(n, 16) : 0,
                                              active ? ceil_div(n, 64) : 0, active && n > 0),
                                    warp_sums, &total) +
        before;
    before = before + total;
    if (b < bins) {
      first_token[b] = first.x;
      first_tile16[b] = first.y;
      first_tile64[b] = first.z;
      first_group[b] = first.w;
    }
  }
  const int tiles16 = before.y, tiles64 = before.z, groups = before.w;
  __syncthreads();

  // Scatter: the walk of the count again, now with known places. A short one still knows its ids.
  walk(p.warp_tokens > 32 * kAhead, [&](std::int32_t token, int, int bin, int within) {
    const int start = first_token[bin], place = chunk_first[bin] + within;
    p.plan[p.layout.sorted + start + place] = token;
    if (bin == p.num_adapters) return;
    const int left = first_token[bin + 1] - start - place;
    const auto put = [&](std::int64_t tiles, std::int64_t tokens, int first_tile, int size) {
      p.plan[tokens + std::int64_t{first_tile} * size + place] = token;
      if (place % size != 0) return;  // the first token of a tile writes its entry
      put_entry(p.plan + tiles, first_tile + place / size, bin, start + place, min(left, size),
                place / size);
    };
    put(p.layout.tiles16, p.layout.tokens16, first_tile16[bin], 16);
    put(p.layout.tiles64, p.layout.tokens64, first_tile64[bin], 64);
  });

  // What is left of the lists, shared out over the grid.
  clear_list(p.plan + p.layout.tiles16, tiles16, static_cast<int>(p.layout.max_tiles16), thread,
             num_threads);
  clear_list(p.plan + p.layout.tiles64, tiles64, static_cast<int>(p.layout.max_tiles64), thread,
             num_threads);
  for (int a = thread; a < p.num_adapters; a += num_threads) {
    const int count = first_token[a + 1] - first_token[a];
    if (count > 0) {
      put_entry(p.plan + p.layout.groups, first_group[a], a, first_token[a], count, 0);
    }
  }
  if (cta == 0 && warp == 0) {
    int bad = 0, first = INT_MAX;
    for (int c = lane; c < num_ctas; c += 32) {
      bad += __ldcg(chunk_bad + 2 * c);
      first = min(first, __ldcg(chunk_bad + 2 * c + 1));
    }
    bad = __reduce_add_sync(0xffffffffu, bad);
    first = __reduce_min_sync(0xffffffffu, first);
    const int4 totals = make_int4(first_token[p.num_adapters], tiles16, tiles64, groups);
    if (lane == 0) write_header(p, totals, bad, first);
  }
  // The next kernel may start as soon as all CTAs have left and read the plan from L2 at once.
  __threadfence();
}

}  // namespace

// ---- host ---------------------------------------------------------------------------------------

namespace {

void plan_any(PlanParams p, Stream stream) {
  const std::int64_t bins = p.num_adapters + 1;
  // All CTAs meet at barriers, so there are never more than fit: one per SM always does.
  const std::int64_t ctas =
      std::min<std::int64_t>(p.layout.num_chunks, device::current_device().num_sms);
  // Fewer warps where their histograms would not fit (4,096 adapters below 200 KB of memory).
  const auto smem = [&](int threads) {
    return (threads / 32 + 5) * bins * static_cast<std::int64_t>(sizeof(int));
  };
  int threads = kMaxThreads;
  while (threads > 32 && !device::fits<plan_kernel>("lora_plan", smem(threads))) threads /= 2;
  p.warp_tokens = static_cast<int>(
      round_up<std::int64_t>(ceil_div<std::int64_t>(p.num_tokens, ctas * (threads / 32)), 32));
  device::Launch l;
  l.grid = dim3(static_cast<unsigned>(ctas));
  l.threads = static_cast<unsigned>(threads);
  l.smem = static_cast<std::size_t>(smem(threads));
  l.stream = stream;
  l.cooperative = ctas > 1;
  device::launch<plan_kernel>("lora_plan", l, p);
}

}  // namespace

void plan(const IdsView& token_adapter, std::int64_t num_tokens, std::int64_t num_adapters,
          std::int32_t* plan, Stream stream) {
  PlanParams p;
  p.token_adapter = token_adapter;
  p.plan = plan;
  p.layout = PlanLayout::make(num_tokens, num_adapters);
  p.num_tokens = num_tokens;
  p.num_adapters = static_cast<int>(num_adapters);
  if (plan_small(p, stream)) return;
  plan_any(p, stream);
}

void read_plan_header(const std::int32_t* plan, std::int32_t* header, Stream stream) {
  const auto s = static_cast<cudaStream_t>(stream.handle);
  device::cuda_check(cudaMemcpyAsync(header, plan, kPlanHeaderWords * sizeof(std::int32_t),
                                     cudaMemcpyDeviceToHost, s),
                     "lora_plan_report");
  device::cuda_check(cudaStreamSynchronize(s), "lora_plan_report");
}

}  // namespace mortar::lora::cuda
