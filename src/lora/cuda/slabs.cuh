// SPDX-License-Identifier: Apache-2.0
// Adding the partial sums that a split shrink left: one slab per leaf of K.
#pragma once

#include <cstdint>

#include "lora/cuda/params.cuh"

namespace mortar::lora::cuda {

/// Four neighbouring columns of one half of the slabs: lanes 2i and 2i + 1 share a place and take a
/// half each. All loads of up to 16 slabs are in flight together: a loop that loads and adds would
/// wait for L2 once per slab. load() may come long before sum().
struct SlabSum {
  static constexpr int kLoads = 8;  ///< per batch; two batches are loaded ahead
  const float* slab = nullptr;      ///< of the half's first slab, 16-byte aligned
  std::int64_t stride;
  int num;  ///< slabs of the half
  float4 v[2][kLoads];

  __device__ __forceinline__ SlabSum(std::int64_t slab_stride) : stride(slab_stride), num(0) {}

  /// Chooses this lane's half of the slabs from `first` on.
  __device__ __forceinline__ void seek(const float* first, int num_slabs) {
    const int middle = static_cast<int>(first_leaves(num_slabs));
    const bool second = threadIdx.x % 2 == 1;
    slab = first + (second ? middle * stride : 0);
    num = second ? num_slabs - middle : middle;
    if (num == 0) slab = nullptr;
  }
  __device__ __forceinline__ void load_batch(float4 (&to)[kLoads], int base) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      // Past the last slab the last one is read again and not used, so that no load is in a branch.
      to[i] = __ldcg(reinterpret_cast<const float4*>(slab + min(base + i, num - 1) * stride));
    }
  }
  __device__ __forceinline__ void load() {
    if (slab == nullptr) return;
    load_batch(v[0], 0);
    if (num > kLoads) load_batch(v[1], kLoads);
  }

  /// After load(). Called by whole warps; both lanes get the sum of both halves.
  __device__ __forceinline__ float4 sum() {
    float4 sum = make_float4(0, 0, 0, 0);
    const auto add = [&](const float4(&from)[kLoads], int base) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        if (base + i >= num) break;
        sum =
            make_float4(sum.x + from[i].x, sum.y + from[i].y, sum.z + from[i].z, sum.w + from[i].w);
      }
    };
    if (slab != nullptr) {
      add(v[0], 0);
      if (num > kLoads) add(v[1], kLoads);
      for (int base = 2 * kLoads; base < num; base += kLoads) {
        load_batch(v[0], base);
        add(v[0], base);
      }
    }
    // The sum of two values does not depend on their order.
    const auto both = [](float own) { return own + __shfl_xor_sync(0xffffffffu, own, 1); };
    return make_float4(both(sum.x), both(sum.y), both(sum.z), both(sum.w));
  }
};

}  // namespace mortar::lora::cuda
