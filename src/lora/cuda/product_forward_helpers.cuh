// SPDX-License-Identifier: Apache-2.0
// The warps of product_forward_segments.cu that neither multiply nor copy boxes: they drop elements
// of x, and bring rows of B that are no whole pieces of 16 bytes.
//
// A Philox block is 16 neighbouring elements, two pieces of 16 bytes: some 90 instructions, of
// which 20 come after the wait for the stage. A lane has eight of them in a stage.
#pragma once

#include "device/bulk_copy.cuh"
#include "device/thread_anew.cuh"
#include "lora/cuda/product_forward_segments.cuh"
#include "lora/train/cuda/keep.cuh"
#include "lora/train/cuda/stream.cuh"

namespace mortar::lora::cuda::forward_segments {

using lora::train::cuda::Draws;

/// Puts zeros in place of dropped elements of a stage of x, by a warp. It has drawn before it waits
/// for what they drop, so that it holds the stage as short as may be.
__device__ __forceinline__ void drop_stage(const SegmentParams& p, const Draws& draws,
                                           const Tile& tile, int step, unsigned char* stage,
                                           device::Mbarrier& full, std::uint32_t parity) {
  constexpr int kBlock = train::kMaskGroup, kQuarters = kProductStep / kBlock;
  constexpr int kRowStep = 32 / kQuarters, kRows = kForwardRows / kRowStep, kAtOnce = 2;
  const int lane = device::thread_anew() % 32;
  const int row = lane / kQuarters, quarter = lane % kQuarters;
  const std::int64_t blocks_of_row = p.mask_columns / kBlock;
  std::int64_t block =
      (tile.row + row) * blocks_of_row + p.mask_first / kBlock + step * kQuarters + quarter;
  const bool mixed = p.threshold[tile.adapter] != p.threshold[tile.next];
  train::cuda::Keep keep(p.threshold[tile.adapter]);
  uint2 kept[kRows][2];
#pragma unroll
  for (int first = 0; first < kRows; first += kAtOnce) {
    if (first * kRowStep >= tile.count) break;
#pragma unroll
    for (int i = first; i < first + kAtOnce; ++i, block += kRowStep * blocks_of_row) {
      const PhiloxWords all = train::cuda::draw_block(draws.seed, draws.offset, block);
      if (mixed) keep = train::cuda::Keep(p.threshold[tile.owner(row + i * kRowStep)]);
#pragma unroll
      for (int octet = 0; octet < 2; ++octet) {
        kept[i][octet] = keep.bits({{all.word[2 * octet], all.word[2 * octet + 1]}});
        asm volatile("" : "+r"(kept[i][octet].x), "+r"(kept[i][octet].y));  // drawn by now
      }
    }
  }
  full.wait(parity);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (i / kAtOnce * kAtOnce * kRowStep >= tile.count) break;
#pragma unroll
    for (int octet = 0; octet < 2; ++octet) {
      auto* v = reinterpret_cast<uint4*>(stage +
                                         device::swizzled(row + i * kRowStep, 2 * quarter + octet));
      *v = train::cuda::masked(*v, train::cuda::mask_words(kept[i][octet]));
    }
  }
  device::fence_async_proxy();
}

/// Copies 128 columns of an adapter's B, whose rows are whole pieces of 8 bytes, into a stage, with
/// zeros past its rank; by a warp, whose lanes have four ranks each.
template <class S>
__device__ __forceinline__ void copy_fours(const SegmentParams& p, int adapter, int column,
                                           std::uint32_t stage) {
  constexpr int kFours = S::kRanks / 4, kColumnStep = 32 / kFours;
  const int lane = device::thread_anew() % 32, four = lane % kFours;
  const int bytes = min(max(2 * (p.rank[adapter] - 4 * four), 0), 8);
  const std::int64_t stride = p.b_stride[adapter];
  const unsigned short* from =
      p.b_data[adapter] + (column + lane / kFours) * stride + (bytes > 0 ? 4 * four : 0);
#pragma unroll 8
  for (int c = lane / kFours; c < kForwardColumns; c += kColumnStep) {
    const bool there = column + c < p.out_columns;
    device::cp_async_8(stage + device::swizzled(c, four / 2) + four % 2 * 8,
                       there ? from : p.b_data[adapter], there ? bytes : 0);
    from += kColumnStep * stride;
  }
}

/// Loads 128 columns of an adapter's B into a stage, with zeros past its rank; by a warp, whose
/// lanes have four ranks each.
template <class S>
__device__ __forceinline__ void load_stage(const SegmentParams& p, int adapter, int column,
                                           unsigned char* stage) {
  constexpr int kFours = S::kRanks / 4, kColumnStep = 32 / kFours, kAtOnce = 8;
  const int lane = device::thread_anew() % 32, four = lane % kFours;
  const std::int64_t stride = p.b_stride[adapter];
  const int left = p.rank[adapter] - 4 * four;
#pragma unroll 1
  for (int first = lane / kFours; first < kForwardColumns; first += kAtOnce * kColumnStep) {
    uint2 v[kAtOnce];
    const unsigned short* from = p.b_data[adapter] + (column + first) * stride + 4 * four;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i, from += kColumnStep * stride) {
      v[i] = make_uint2(0, 0);
      if (column + first + i * kColumnStep >= p.out_columns) continue;
      const auto at = [&](int k) { return k < left ? std::uint32_t{__ldcg(from + k)} : 0; };
      v[i] = make_uint2(at(0) | at(1) << 16, at(2) | at(3) << 16);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      unsigned char* to = stage + device::swizzled(first + i * kColumnStep, four / 2);
      *reinterpret_cast<uint2*>(to + four % 2 * 8) = v[i];
    }
  }
  device::fence_async_proxy();
}

/// Drops elements of x and loads what no copy brings; by kHelpers warps.
template <class S>
__device__ __forceinline__ void help(const SegmentParams& p, Walk walk, unsigned char* smem,
                                     Barriers<S>& bars) {
  if (!p.helps()) return;
  const Part part(p);
  const bool first_lane = threadIdx.x % 32 == 0;
  device::RingCursor<S::kStages> at;
  const auto stage = [&] { return smem + at.stage * S::kStageBytes; };
  // All stages, and none is empty again before all helpers have passed it: a phase that is two
  // ahead or behind would be taken for the one that is waited for.
  const auto wait_empty = [&] {
    bars.empty[at.stage].wait((at.round & 1) ^ 1);
    __syncwarp();
    if (first_lane) bars.empty[at.stage].arrive();
  };
  int turn = (static_cast<int>(threadIdx.x) - kConsumers) / 32;  // 0: this warp's
  const auto next = [&] {
    at.next();
    turn = turn == 0 ? kHelpers - 1 : turn - 1;
  };
  // Copies have landed by the warp's next turn, which comes before the ring has been walked
  // through.
  static_assert(kHelpers < S::kStages);
  constexpr int kNone = -1;
  int landing = kNone;  // a stage
  const auto land = [&](int now) {
    if (landing != kNone) {
      now != kNone ? device::cp_async_wait<1>() : device::cp_async_wait<0>();
      device::fence_async_proxy();
      __syncwarp();
      if (first_lane) bars.full[landing].arrive();
    }
    landing = now;
  };
  Draws draws{};
  if (p.rng != nullptr) draws.read(p.rng);
  for (Tile tile; walk.next(p, &tile);) {
    for (int i = 0; i < part.steps; ++i, next()) {
      wait_empty();
      if (p.rng == nullptr || turn != 0) continue;
      drop_stage(p, draws, tile, part.first_step + i, stage(), bars.full[at.stage], at.round & 1);
      __syncwarp();
      if (first_lane) bars.ready[at.stage].arrive();
    }
    for (int i = 0; i < part.columns; ++i) {
      for (int k = 0; k < tile.adapters(); ++k, next()) {
        wait_empty();
        if (turn != 0) continue;
        const int adapter = k == 0 ? tile.adapter : tile.next;
        if (p.by_fours[adapter]) {
          copy_fours<S>(p, adapter, part.column(p, i), device::smem_address(stage()));
          device::cp_async_commit();
          land(at.stage);
          continue;
        }
        land(kNone);
        if (p.b_data[adapter] == nullptr) continue;
        load_stage<S>(p, adapter, part.column(p, i), stage());
        __syncwarp();
        if (first_lane) bars.full[at.stage].arrive();
      }
      if (!p.adds_base) continue;
      wait_empty();
      if (turn == 0) land(kNone);
      next();
    }
    land(kNone);
  }
}

}  // namespace mortar::lora::cuda::forward_segments
