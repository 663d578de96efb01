// SPDX-License-Identifier: Apache-2.0
// Adding the partial sums that a split shrink left, in slab order.
#pragma once

#include <cstdint>

#include "lora/cuda/params.cuh"

namespace mortar::lora::cuda {

/// Four neighbouring columns of all slabs, from `slab` on (16-byte aligned). The loads of eight
/// slabs are in flight together: a loop that loads and adds would wait for L2 once per slab.
__device__ __forceinline__ float4 sum_slabs(const float* slab, std::int64_t stride, int num) {
  constexpr int kLoads = 8;
  float4 sum = make_float4(0, 0, 0, 0);
  for (int base = 0; base < num; base += kLoads) {
    float4 u[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      // Past the last slab the last one is read again and not used, so that no load is in a branch.
      const int z = min(base + i, num - 1);
      u[i] = __ldcg(reinterpret_cast<const float4*>(slab + z * stride));
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const bool there = base + i < num;
      sum.x = there ? sum.x + u[i].x : sum.x;
      sum.y = there ? sum.y + u[i].y : sum.y;
      sum.z = there ? sum.z + u[i].z : sum.z;
      sum.w = there ? sum.w + u[i].w : sum.w;
    }
  }
  return sum;
}

}  // namespace mortar::lora::cuda
