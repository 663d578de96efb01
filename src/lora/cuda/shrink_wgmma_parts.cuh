// SPDX-License-Identifier: Apache-2.0
// The ring and the sums of shrink_wgmma.cu where rank rows are float32 under a bfloat16 x.
//
// bytes  = 2 M K (x) + 4 K sum_a R_a (A of the adapters in use) + h
// FLOP   = 6 M K R: three products of parts
// 411 tokens of one adapter, K = 28,672, R = 256: 53 MB -> 12 us of DRAM, 18 GFLOP -> 28 us
// limit  : L2 and the tensor cores. A stage of 64 elements of K, T tiles of tokens and N rank rows:
//          6 N T clocks of tensor cores, 8 T + N / 4 KB of L2, and 20 N instructions of warps that
//          split A, once for all tiles. N = 96, T = 2: 1,150 clocks, 1,500 (at 27 bytes each), 500
// wrong  : one adapter of high rank and few tokens, whose CTAs do not fill the chip
//
// The products and the order of their sums are those of shrink_parts.cu.
#pragma once

#include <cstdint>

#include "device/async_copy.cuh"
#include "device/pdl.cuh"
#include "device/ring.cuh"
#include "device/swizzle.cuh"
#include "device/wgmma.cuh"
#include "device/wgmma_parts.cuh"
#include "lora/cuda/shrink_wgmma_traits.cuh"
#include "lora/cuda/split_rows.cuh"

namespace mortar::lora::cuda::wgmma_shrink {

/// Fills the ring: x by asynchronous copies, parts of rank rows through registers. A thread arrives
/// at a stage twice, for either.
template <class Tr>
__device__ __forceinline__ void produce_parts(const ShrinkParams& p, Shared<Tr>& shared,
                                              unsigned char* ring) {
  const int thread = static_cast<int>(threadIdx.x) - Tr::kConsumers;
  const int piece = thread % 8, row0 = thread / 8;  // 16 bytes of a row of x, and the first row
  const Range r = range_of<Tr>(p);
  const std::uint32_t to = device::smem_address(ring) + device::swizzled(row0, piece);
  const void* const* tokens = shared.tokens + row0;
  const void* const* weights = shared.rows.weights;
  // Rows of one stage or two are on their way: 24 KB.
  constexpr int kAhead = Tr::kRows > 48 ? 1 : 2;
  using Rows = SplitRows<Tr::kRows, kProducers>;
  Rows rows[2] = {Rows(thread, true), Rows(thread, true)};
#pragma unroll
  for (int i = 0; i < kAhead; ++i) rows[i].load(weights, r.k_begin + i * kTileK, r.k_end);
  device::pdl_wait();
  device::RingCursor<Tr::kStages> at;
  int k = r.k_begin;
  const auto fill = [&](Rows& own, int step) {
    const int stage = at.stage * Tr::kStageBytes;
    if (step >= Tr::kStages) shared.empty[at.stage].wait((at.round - 1) & 1);
    device::copy_swizzled<typename Tr::T, Tr::kTokens, kProducers>(tokens, to + stage,
                                                                   k + piece * 8, r.k_end);
    shared.full[at.stage].arrive_after_copies();
    own.store_and_load(ring + stage + Tr::kTokenBytes, Tr::kPlaneBytes, weights,
                       k + kAhead * kTileK, r.k_end);
    device::fence_async_proxy();
    shared.full[at.stage].arrive();
    k += kTileK;
    at.next();
  };
#pragma unroll 1
  for (int step = 0; step < r.num_steps; step += kAhead) {
    fill(rows[0], step);
    if (kAhead == 2 && step + 1 < r.num_steps) fill(rows[1], step + 1);
  }
}

/// Sums of a consumer warpgroup over the CTA's part of K. A leaf is the sum of four quarters: that
/// of the first two waits in shared memory, and with Share::kHalf the sum of the leaves before it
/// behind that.
template <class Tr>
__device__ __forceinline__ void consume_parts(const ShrinkParams& p, Shared<Tr>& shared,
                                              std::uint32_t ring, float4* parked,
                                              float (&total)[Tr::kSums]) {
  constexpr std::uint64_t kPlane = Tr::kPlaneBytes / 16;
  const Range r = range_of<Tr>(p);
  const int warpgroup = static_cast<int>(threadIdx.x) / 128;
  const int quarter_steps = r.leaf / (4 * kTileK);
  const bool signals = threadIdx.x % 32 == 0;
  float4* const leaves = parked + Tr::kSumBytes / 16;
  const auto clear = [&] {
#pragma unroll
    for (float& v : total) v = 0;
  };
  clear();
  device::WgmmaPartSums<Tr::kRows> sums;
  device::RingCursor<Tr::kStages> at;
  int step = 0;
#pragma unroll 1
  for (int leaf = r.first; leaf < r.end; ++leaf) {
    const int leaf_end = min(r.num_steps, step + r.leaf / kTileK);
    int quarter = 0;
    clear();
#pragma unroll 1
    while (step < leaf_end) {
      const int quarter_end = min(leaf_end, step + quarter_steps);
      sums.begin();
#pragma unroll 1
      for (; step < quarter_end; ++step, at.next()) {
        shared.full[at.stage].wait(at.round & 1);
        device::fence_async_proxy();  // copies and parts came through the generic proxy
        const std::uint32_t stage = ring + at.stage * Tr::kStageBytes;
        const auto x = device::wgmma_descriptor(stage + warpgroup * 64 * device::kSwizzleBytes);
        const auto a = device::wgmma_descriptor(stage + Tr::kTokenBytes);
#pragma unroll
        for (int i = 0; i < kTileK / 16; ++i) {
          sums.template add<1, kSplitParts>(x + i * device::kDescriptorStep, 0,
                                            a + i * device::kDescriptorStep, kPlane);
        }
        if (signals) shared.empty[at.stage].arrive();
      }
#pragma unroll
      for (int i = 0; i < Tr::kSums; ++i) total[i] += sums.total(i);
      if (++quarter == 2) {
        put_sums<Tr::kConsumers>(parked, total);
        clear();
      }
    }
    if (quarter >= 2) add_sums<Tr::kConsumers>(total, parked);
    if constexpr (Tr::kShare == Share::kHalf) {
      if (leaf > r.first) add_sums<Tr::kConsumers>(total, leaves);
      if (leaf + 1 < r.end) put_sums<Tr::kConsumers>(leaves, total);
    }
  }
}

}  // namespace mortar::lora::cuda::wgmma_shrink
