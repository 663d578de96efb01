// SPDX-License-Identifier: Apache-2.0
// The ring and the sums of shrink_wgmma.cu where rank rows are float32 under a bfloat16 x.
//
// bytes  = 2 M K (x) + 4 K sum_a R_a (A of the adapters in use) + h
// FLOP   = 4 M K R: two products of parts
// 411 tokens of one adapter, K = 28,672, R = 256: 53 MB -> 12 us of DRAM, 12 GFLOP -> 18 us
// limit  : L2, and the tensor cores. A stage of 64 elements of K, T tiles of tokens and N rank
//          rows: 4 N T clocks of tensor cores, 8 T + N / 4 KB of L2. N = 128, T = 2: 1,024 clocks,
//          1,800 (at 27 bytes each). Where K is long and CTAs are few, trips to memory
// wrong  : short K, where CTAs start and end more than they multiply
//
// The products and the order of their sums are those of shrink_parts.cu for two parts of a value: a
// quarter of a leaf is one chain.
#pragma once

#include <cstdint>

#include "device/async_copy.cuh"
#include "device/pdl.cuh"
#include "device/ring.cuh"
#include "device/swizzle.cuh"
#include "device/wgmma.cuh"
#include "lora/cuda/shrink_wgmma_traits.cuh"
#include "lora/cuda/split_rows.cuh"

namespace mortar::lora::cuda::wgmma_shrink {

/// Fills the ring: x by asynchronous copies, parts of rank rows through registers. Warpgroups fill
/// stages in turn, so that rows of one are on their way while the other splits its own. A thread
/// arrives at a stage twice, for either. What it writes becomes known to wgmma by the fence of
/// those who wait for it: one here would also wait for this thread's copies.
template <class Tr>
__device__ __forceinline__ void produce_parts(const ShrinkParams& p, Shared<Tr>& shared,
                                              unsigned char* ring) {
  constexpr int kThreads = Tr::kFillers, kGroups = Tr::kProducers / kThreads;
  const int group = (static_cast<int>(threadIdx.x) - Tr::kConsumers) / kThreads;
  const int thread = static_cast<int>(threadIdx.x) % kThreads;
  const int piece = thread % 8, row0 = thread / 8;  // 16 bytes of a row of x, and the first row
  const Range r = range_of<Tr>(p);
  const std::uint32_t to = device::smem_address(ring) + device::swizzled(row0, piece);
  const void* const* tokens = shared.tokens + row0;
  const void* const* weights = shared.rows.weights;
  // Rows of a thread's next stage or next two are on their way: 24 KB.
  static_assert(Tr::kRows <= 48, "more do not fit a thread's registers");
  constexpr int kAhead = kGroups > 1 ? 1 : 2;
  using Rows = SplitRows<Tr::kRows, kThreads>;
  Rows rows[2] = {Rows(thread, true), Rows(thread, true)};
  int k = r.k_begin + group * kTileK;
#pragma unroll
  for (int i = 0; i < kAhead; ++i) rows[i].load(weights, k + i * kGroups * kTileK, r.k_end);
  meet_cluster<Tr>();
  device::pdl_wait();
  device::RingCursor<Tr::kStages> at;
  for (int i = 0; i < group; ++i) at.next();
  const auto fill = [&](Rows& own, int step) {
    const int stage = at.stage * Tr::kStageBytes;
    if (step >= Tr::kStages) shared.empty[at.stage].wait((at.round - 1) & 1);
    device::copy_swizzled<typename Tr::T, Tr::kTokens, kThreads>(tokens, to + stage, k + piece * 8,
                                                                 r.k_end);
    shared.full[at.stage].arrive_after_copies();
    own.store_and_load(ring + stage + Tr::kTokenBytes, Tr::kPlaneBytes, weights,
                       k + kAhead * kGroups * kTileK, r.k_end);
    shared.full[at.stage].arrive();
    k += kGroups * kTileK;
#pragma unroll
    for (int i = 0; i < kGroups; ++i) at.next();
  };
#pragma unroll 1
  for (int step = group; step < r.num_steps; step += kGroups * kAhead) {
    fill(rows[0], step);
    if (kAhead == 2 && step + 1 < r.num_steps) fill(rows[1], step + 1);
  }
}

/// The same, where the float32 rows of several stages wait in shared memory. x comes as early.
template <class Tr>
__device__ __forceinline__ void produce_ahead(const ShrinkParams& p, Shared<Tr>& shared,
                                              unsigned char* ring) {
  const int thread = static_cast<int>(threadIdx.x) - Tr::kConsumers;
  const int piece = thread % 8, row0 = thread / 8;  // 16 bytes of a row of x
  const Range r = range_of<Tr>(p);
  const std::uint32_t x_to =
      device::smem_address(ring) + Tr::kTokenRing + device::swizzled(row0, piece);
  const void* const* tokens = shared.tokens + row0;
  const WaitingRows<Tr::kRows, Tr::kProducers> rows(thread, ring + Tr::kRowRing,
                                                    shared.rows.weights);
  const auto copy_x = [&](int slot, int step) {
    device::copy_swizzled<typename Tr::T, Tr::kTokens, Tr::kProducers>(
        tokens, x_to + slot * Tr::kTokenBytes, r.k_begin + step * kTileK + piece * 8, r.k_end);
  };
#pragma unroll 1
  for (int step = 0; step < Tr::kAhead; ++step) {
    rows.template copy<true>(step, r.k_begin + step * kTileK, r.k_end);
  }
  meet_cluster<Tr>();
  device::pdl_wait();
#pragma unroll 1
  for (int step = 0; step < Tr::kAhead; ++step) {
    copy_x(step, step);
    device::cp_async_commit();
  }
  device::RingCursor<Tr::kStages> at;
  int slot = 0, x_slot = Tr::kAhead;  // of this step's rows, and of the x that is asked for
#pragma unroll 1
  for (int step = 0; step < r.num_steps; ++step, at.next()) {
    if (step >= Tr::kStages) shared.empty[at.stage].wait((at.round - 1) & 1);
    device::cp_async_wait<Tr::kAhead - 1>();
    rows.split(slot, ring + at.stage * Tr::kStageBytes, Tr::kPlaneBytes);
    shared.full[at.stage].arrive();
    // The step that used this place of x has been multiplied: its parts' place was waited for.
    if (step + Tr::kAhead < r.num_steps) {
      rows.template copy<true>(slot, r.k_begin + (step + Tr::kAhead) * kTileK, r.k_end);
      copy_x(x_slot, step + Tr::kAhead);
    }
    device::cp_async_commit();
    if (++slot == Tr::kAhead) slot = 0;
    if (++x_slot == Tr::kTokenStages) x_slot = 0;
  }
}

/// Sums of a consumer warpgroup over the CTA's part of K. A leaf is the sum of its quarters, each
/// of them one chain of steps. Share::kLeaf: leaves are given to `leave` one by one.
template <class Tr, class Leave>
__device__ __forceinline__ void consume_parts(const ShrinkParams& p, Shared<Tr>& shared,
                                              std::uint32_t ring, float (&total)[Tr::kSums],
                                              Leave&& leave) {
  const Range r = range_of<Tr>(p);
  const int warpgroup = static_cast<int>(threadIdx.x) / 128;
  const int quarter_steps = r.leaf / (4 * kTileK);
  const bool signals = threadIdx.x % 32 == 0;
  float sum[Tr::kSums], leaf_sum[Tr::kSums];
#pragma unroll
  for (int i = 0; i < Tr::kSums; ++i) sum[i] = total[i] = 0;
  device::RingCursor<Tr::kStages> at;
  device::RingCursor<Tr::kTokenStages> x_at;
  int step = 0;
#pragma unroll 1
  for (int leaf = r.first; leaf < r.end; ++leaf) {
    const int leaf_end = min(r.num_steps, step + r.leaf / kTileK);
#pragma unroll
    for (float& v : leaf_sum) v = 0;
#pragma unroll 1
    while (step < leaf_end) {
      const int quarter_end = min(leaf_end, step + quarter_steps);
      int last = -1;  // stage of the MMAs in flight
#pragma unroll 1
      for (; step < quarter_end; ++step, at.next(), x_at.next()) {
        shared.full[at.stage].wait(at.round & 1);
        device::fence_async_proxy();  // copies and parts came through the generic proxy
        device::wgmma_keep(sum);
        device::wgmma_fence();
        const std::uint32_t stage = ring + at.stage * Tr::kStageBytes;
        const std::uint32_t x_stage =
            Tr::kAhead > 0 ? ring + Tr::kTokenRing + x_at.stage * Tr::kTokenBytes : stage;
        const auto x = device::wgmma_descriptor(x_stage + warpgroup * 64 * device::kSwizzleBytes);
        const auto a = device::wgmma_descriptor(stage + (Tr::kAhead > 0 ? 0 : Tr::kTokenBytes));
#pragma unroll
        for (int i = 0; i < kTileK / 16; ++i) {
#pragma unroll
          for (int part = 0; part < kSplitParts; ++part) {
            device::wgmma<typename Tr::T, Tr::kRows>(
                sum, x + i * device::kDescriptorStep,
                a + i * device::kDescriptorStep + part * (Tr::kPlaneBytes / 16),
                i > 0 || part > 0 || last >= 0);
          }
        }
        device::wgmma_commit();
        if (last >= 0) {
          device::wgmma_wait<1>();
          if (signals) shared.empty[last].arrive();
        }
        last = at.stage;
      }
      device::wgmma_wait<0>();
      device::wgmma_keep(sum);
      if (signals) shared.empty[last].arrive();
#pragma unroll
      for (int i = 0; i < Tr::kSums; ++i) leaf_sum[i] += sum[i];
    }
    if constexpr (Tr::kShare == Share::kLeaf) {
#pragma unroll
      for (int i = 0; i < Tr::kSums; ++i) total[i] = leaf_sum[i];
      leave(leaf);
    } else {
#pragma unroll
      for (int i = 0; i < Tr::kSums; ++i) total[i] += leaf_sum[i];
    }
  }
}

}  // namespace mortar::lora::cuda::wgmma_shrink
