// SPDX-License-Identifier: Apache-2.0
// The ring and the sums of shrink_wgmma.cu where rank rows are float32 under a bfloat16 x.
//
// bytes  = 2 M K (x) + 4 K sum_a R_a (A of the adapters in use) + h
// FLOP   = 6 M K R: three products of parts
// 411 tokens of one adapter, K = 28,672, R = 256: 53 MB -> 12 us of DRAM, 18 GFLOP -> 28 us
// limit  : L2 and the tensor cores. A stage of 64 elements of K, T tiles of tokens and N rank rows:
//          6 N T clocks of tensor cores, 8 T + N / 4 KB of L2, and 20 N instructions of warps that
//          split A, once for all tiles. N = 96, T = 2: 1,150 clocks, 1,500 (at 27 bytes each), 500.
//          Where K is long and CTAs are few, trips to memory: 1,700 clocks a stage with the rows of
//          two on their way, 900 with seven. Where K is short, a CTA's start and end: some 12,000
// wrong  : short K, where CTAs start and end more than they multiply
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
  constexpr int kAhead = kGroups > 1 || Tr::kRows > 48 ? 1 : 2;
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

/// The same, where the float32 rows of several stages wait in shared memory: every thread copies
/// and splits 16 bytes of its own rows, so that no barrier lies between. x comes as early.
template <class Tr>
__device__ __forceinline__ void produce_ahead(const ShrinkParams& p, Shared<Tr>& shared,
                                              unsigned char* ring) {
  constexpr int kStep = Tr::kProducers / 16, kCount = Tr::kRows / kStep, kBatch = 4;
  // Pointers that are read together
  constexpr int kTogether = kCount % kBatch == 0 ? kBatch : kCount % 3 == 0 ? 3 : kCount;
  const int thread = static_cast<int>(threadIdx.x) - Tr::kConsumers;
  const int piece = thread % 8, row0 = thread / 8;    // 16 bytes of a row of x
  const int quad = thread % 16, first = thread / 16;  // 16 bytes of a rank row
  const Range r = range_of<Tr>(p);
  const std::uint32_t x_to =
      device::smem_address(ring) + Tr::kTokenRing + device::swizzled(row0, piece);
  unsigned char* const waiting = ring + Tr::kRowRing + thread * 16;
  unsigned char* const parts = ring + device::swizzled(first, quad / 2) + quad % 2 * 8;
  const void* const* tokens = shared.tokens + row0;
  const void* const* weights = shared.rows.weights + first;
  const auto copy_rows = [&](int slot, int step) {
    const int k = r.k_begin + step * kTileK + quad * 4, bytes = k < r.k_end ? 16 : 0;
    const std::uint32_t to = device::smem_address(waiting) + slot * Tr::kRowBytes;
#pragma unroll
    for (int base = 0; base < kCount; base += kTogether) {
      const float* row[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        row[i] = static_cast<const float*>(weights[(base + i) * kStep]);
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (row[i] == nullptr) continue;
        device::cp_async_16(to + (base + i) * Tr::kProducers * 16, row[i] + (bytes > 0 ? k : 0),
                            bytes);
      }
    }
  };
  const auto copy_x = [&](int slot, int step) {
    device::copy_swizzled<typename Tr::T, Tr::kTokens, Tr::kProducers>(
        tokens, x_to + slot * Tr::kTokenBytes, r.k_begin + step * kTileK + piece * 8, r.k_end);
  };
#pragma unroll 1
  for (int step = 0; step < Tr::kAhead; ++step) copy_rows(step, step);
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
    unsigned char* const to = parts + at.stage * Tr::kStageBytes;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const uint4 v =
          *reinterpret_cast<const uint4*>(waiting + slot * Tr::kRowBytes + i * Tr::kProducers * 16);
      const std::uint32_t words[4] = {v.x, v.y, v.z, v.w};
      std::uint32_t part[kSplitParts][2];
      device::split4<float>(words, part);
#pragma unroll
      for (int j = 0; j < kSplitParts; ++j) {
        *reinterpret_cast<uint2*>(to + j * Tr::kPlaneBytes + i * kStep * device::kSwizzleBytes) =
            make_uint2(part[j][0], part[j][1]);
      }
    }
    shared.full[at.stage].arrive();
    // The step that used this place of x has been multiplied: its parts' place was waited for.
    if (step + Tr::kAhead < r.num_steps) {
      copy_rows(slot, step + Tr::kAhead);
      copy_x(x_slot, step + Tr::kAhead);
    }
    device::cp_async_commit();
    if (++slot == Tr::kAhead) slot = 0;
    if (++x_slot == Tr::kTokenStages) x_slot = 0;
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
  // Where a thread has read x itself, it says so itself.
  const bool signals = Tr::kReadsTokens || threadIdx.x % 32 == 0;
  float4* const leaves = parked + Tr::kSumBytes / 16;
  const auto clear = [&] {
#pragma unroll
    for (float& v : total) v = 0;
  };
  clear();
  constexpr int kSteps = Tr::kRows <= 32 ? 4 : Tr::kRows <= 64 ? 2 : 1;
  constexpr int kAdds = kTileK / 16 / kSteps;  // of a step
  device::WgmmaPartSums<Tr::kRows, kSteps> sums;
  device::WgmmaRegisters<1> fragments[2][kSteps];  // of x, one half for the products in flight
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int row = static_cast<int>(threadIdx.x) / 32 % 4 * 16 + lane % 16;
  device::RingCursor<Tr::kStages> at;
  device::RingCursor<Tr::kTokenStages> x_at;
  int step = 0, last = -1;  // stage of the MMAs in flight
  const auto leave_last = [&] {
    if (last >= 0 && signals) shared.empty[last].arrive();
    last = -1;
  };
#pragma unroll 1
  for (int leaf = r.first; leaf < r.end; ++leaf) {
    const int leaf_end = min(r.num_steps, step + r.leaf / kTileK);
    int quarter = 0;
    clear();
#pragma unroll 1
    while (step < leaf_end) {
      const int quarter_end = min(leaf_end, step + quarter_steps);
      sums.begin();
      // `turn`: of the fragments, where a step is one addition: those of the last step may still be
      // read by its products.
      const auto multiply = [&](int turn) {
        shared.full[at.stage].wait(at.round & 1);
        device::fence_async_proxy();  // copies and parts came through the generic proxy
        const std::uint32_t stage = ring + at.stage * Tr::kStageBytes;
        const std::uint32_t x_stage =
            (Tr::kAhead > 0 ? ring + Tr::kTokenRing + x_at.stage * Tr::kTokenBytes : stage) +
            warpgroup * 64 * device::kSwizzleBytes;
        const auto x = device::wgmma_descriptor(x_stage);
        const auto a = device::wgmma_descriptor(stage + (Tr::kAhead > 0 ? 0 : Tr::kTokenBytes));
#pragma unroll
        for (int i = 0; i < kTileK / 16; i += kSteps) {
          if constexpr (Tr::kReadsTokens) {
            auto& own = fragments[(turn * kAdds + i / kSteps) % 2];
#pragma unroll
            for (int j = 0; j < kSteps; ++j) {
              device::ldmatrix_x4(own[j].part[0],
                                  x_stage + device::swizzled(row, 2 * (i + j) + lane / 16));
            }
            sums.template add<1, kSplitParts>(own, a + i * device::kDescriptorStep, kPlane);
          } else {
            device::WgmmaPlanes own[kSteps];
#pragma unroll
            for (int j = 0; j < kSteps; ++j) own[j] = {x + (i + j) * device::kDescriptorStep, 0};
            sums.template add<1, kSplitParts>(own, a + i * device::kDescriptorStep, kPlane);
          }
          if (i == 0) leave_last();
        }
        last = at.stage;
        ++step;
        at.next();
        x_at.next();
      };
#pragma unroll 1
      while (step < quarter_end) {
        multiply(0);
        if (kAdds == 1 && step < quarter_end) multiply(1);
      }
      sums.end();
      leave_last();
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
