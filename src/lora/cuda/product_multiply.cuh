// SPDX-License-Identifier: Apache-2.0
// The sums of product.cu and product_split.cu: stages of the ring through wgmma, leaf by leaf.
#pragma once

#include "device/leaf_sums.cuh"
#include "device/wgmma.cuh"
#include "lora/cuda/product_drop.cuh"
#include "lora/cuda/product_shape.cuh"

namespace mortar::lora::cuda::product {

/// Adds leaf `i` of a unit to the tree of its leaves. After the last one `sum` is the sum of all.
template <class S, class Tree>
__device__ __forceinline__ void add_leaf(Tree* tree, float4* parked, int i,
                                         float (&sum)[S::kSums]) {
  tree->add(i, sum);
  if constexpr (S::kParked > 0) {
    constexpr int kLeaves = 1 << (S::kLevels - S::kParked);  // whose sum is parked
    if (i % kLeaves != kLeaves - 1) return;
    float4* own = parked + threadIdx.x;
    const bool second = i / kLeaves % 2 != 0;
#pragma unroll
    for (int n = 0; n < S::kSums / 4; ++n) {
      float* v = sum + 4 * n;
      if (second) {
        const float4 first = own[n * kConsumers];
        v[0] = first.x + v[0], v[1] = first.y + v[1], v[2] = first.z + v[2], v[3] = first.w + v[3];
      } else {
        own[n * kConsumers] = make_float4(v[0], v[1], v[2], v[3]);
      }
    }
  }
}

/// Puts zeros past a chunk's end, where its last step has the next segment's rows, into a stage:
/// into both operands, as neither may bring NaN to the other's zeros. By both warpgroups.
template <class S>
__device__ __forceinline__ void clear_past(int left, std::uint32_t stage) {
  constexpr int kVectors = kProductStep * device::kSwizzleBytes / 16;  // of a block
  const int thread = static_cast<int>(threadIdx.x), first = left * device::kSwizzleBytes / 16;
  auto* const to = static_cast<uint4*>(__cvta_shared_to_generic(stage));
  for (int i = thread; i < S::kStageBytes / 16; i += kConsumers) {
    if (i % kVectors >= first) to[i] = make_uint4(0, 0, 0, 0);
  }
  device::fence_async_proxy();
  device::named_barrier<3, kConsumers>();
}

/// Adds leaf `leaf` of a unit to those before it, which wait in memory. Each thread reads what it
/// has written itself.
template <class S>
__device__ __forceinline__ void carry_leaf(const Params& p, const Unit<S>& unit, int leaf,
                                           float (&sum)[S::kSums]) {
  constexpr int kVectors = S::kSums / 4;
  const std::int64_t tile = unit.row / S::kRows * p.tiles + unit.column / S::kColumns;
  float4* own = reinterpret_cast<float4*>(p.partials) + tile * kVectors * kConsumers + threadIdx.x;
  if (leaf > 0) {
#pragma unroll
    for (int n = 0; n < kVectors; ++n) {
      const float4 before = __ldcg(own + n * kConsumers);
      float* v = sum + 4 * n;
      v[0] = before.x + v[0], v[1] = before.y + v[1];
      v[2] = before.z + v[2], v[3] = before.w + v[3];
    }
  }
  if (leaf + 1 < p.leaves) {
#pragma unroll
    for (int n = 0; n < kVectors; ++n) {
      const float* v = sum + 4 * n;
      __stcg(own + n * kConsumers, make_float4(v[0], v[1], v[2], v[3]));
    }
  }
}

/// The sums of a unit, a part of the depth. `meanwhile(step)`: while a step's products run. (A
/// branch by type beside each step's MMAs would take up to 7 % of a call.)
template <class S, class T = typename S::T, class Meanwhile>
__device__ __forceinline__ void multiply(const Params& p, const Unit<S>& unit, Ring<S>* ring,
                                         float (&sum)[S::kSums], const Meanwhile& meanwhile) {
  const std::uint32_t warpgroup = threadIdx.x / kWarpgroup;
  const std::uint32_t own_rows = S::kByColumns ? 0 : warpgroup * kBlockBytes;
  const std::uint32_t own_columns = S::kRowsBytes + (S::kByColumns ? warpgroup * S::kMmaBytes : 0);
  device::LeafSums<S::kSums, S::kLevels - S::kParked> tree;
  [[maybe_unused]] lora::train::cuda::Draws draws;
  if constexpr (S::kDrops) draws.read(p.rng);
  int step = 0;
#pragma unroll 1
  for (int leaf = 0; leaf < p.leaves; ++leaf) {
    const int end = min(unit.steps, (leaf + 1) * p.leaf_steps);
    if (step >= end) {
#pragma unroll
      for (int i = 0; i < S::kSums; ++i) sum[i] = 0;
    }
    int last = -1;  // stage of the MMAs in flight
#pragma unroll 1
    for (; step < end; ++step, ring->at.next()) {
      ring->full[ring->at.stage].wait(ring->at.round & 1);
      if constexpr (S::kCutsDepth) {
        const int left = unit.depths - step * kProductStep;
        if (unit.depths > 0 && left < kProductStep) clear_past<S>(left, ring->stage());
      }
      if constexpr (S::kDrops) {
        drop_stage(p, draws, p.thresholds[unit.first_b], unit, step, ring->stage());
      }
      const auto a = device::wgmma_descriptor(ring->stage() + own_rows, kBlockBytes);
      const auto b = device::wgmma_descriptor(ring->stage() + own_columns, kBlockBytes);
      device::wgmma_keep(sum);
      device::wgmma_fence();
#pragma unroll
      for (int i = 0; i < kProductStep / 16; ++i) {
        device::wgmma<T, S::kMmaColumns, S::kA, S::kB>(sum, a + i * device::descriptor_step(S::kA),
                                                       b + i * device::descriptor_step(S::kB),
                                                       i > 0 || last >= 0);
      }
      device::wgmma_commit();
      meanwhile(step);
      device::wgmma_wait<1>();
      release(*ring, last);
      last = ring->at.stage;
    }
    device::wgmma_wait<0>();
    device::wgmma_keep(sum);
    release(*ring, last);
    add_leaf<S>(&tree, ring->parked, leaf, sum);
    if constexpr (S::kCarries) carry_leaf(p, unit, leaf, sum);
  }
}

template <class S, class T = typename S::T>
__device__ __forceinline__ void multiply(const Params& p, const Unit<S>& unit, Ring<S>* ring,
                                         float (&sum)[S::kSums]) {
  multiply<S, T>(p, unit, ring, sum, [](int) {});
}

/// Sums times their b's factor; zeros in columns past its rows, where the copies' zeros may have
/// met Inf or NaN.
template <class S>
__device__ __forceinline__ void scale_sums(const Params& p, const Unit<S>& unit,
                                           float (&sum)[S::kSums]) {
  const float factor = p.factor[unit.first_b];
#pragma unroll
  for (float& v : sum) v *= factor;
  const int live = p.live[unit.first_b] - unit.column;
  if (live >= S::kColumns) return;
  const int column = static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
  for (int i = 0; i < S::kSums; ++i) {
    if (i / 4 * 8 + column + i % 2 >= live) sum[i] = 0;
  }
}

}  // namespace mortar::lora::cuda::product
