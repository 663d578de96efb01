// SPDX-License-Identifier: Apache-2.0
// Adding the partial sums that a split shrink left: one slab per leaf of K.
#pragma once

#include <cstdint>

#include "lora/cuda/params.cuh"

namespace mortar::lora::cuda {

/// Four neighbouring columns of all slabs. The loads of 16 slabs are in flight together: a loop that
/// loads and adds would wait for L2 once per slab. load() may come long before sum().
struct SlabSum {
  static constexpr int kLoads = 16;
  const float* slab;  ///< 16-byte aligned
  std::int64_t stride;
  int num;
  float4 v[kLoads];

  __device__ __forceinline__ SlabSum(const float* first, std::int64_t slab_stride, int num_slabs)
      : slab(first), stride(slab_stride), num(num_slabs) {}

  __device__ __forceinline__ void load(int base = 0) {
    const float* at = slab + base * stride;
    if (base + kLoads <= num) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i, at += stride) {
        v[i] = __ldcg(reinterpret_cast<const float4*>(at));
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      // Past the last slab the last one is read again and not used, so that no load is in a branch.
      v[i] = __ldcg(reinterpret_cast<const float4*>(at + min(i, num - 1 - base) * stride));
    }
  }

  /// After load().
  __device__ __forceinline__ float4 sum() {
    const int middle = static_cast<int>(first_leaves(num));
    float4 first = make_float4(0, 0, 0, 0), sum = first;
    const auto add = [&](const float4& u) {
      sum = make_float4(sum.x + u.x, sum.y + u.y, sum.z + u.z, sum.w + u.w);
    };
    if (num == kLoads) {
#pragma unroll
      for (int i = 0; i < kLoads / 2; ++i) add(v[i]);
      first = sum;
      sum = make_float4(0, 0, 0, 0);
#pragma unroll
      for (int i = kLoads / 2; i < kLoads; ++i) add(v[i]);
    } else {
      for (int base = 0; base < num; base += kLoads) {
        if (base > 0) load(base);
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
          if (base + i == middle) {
            first = sum;
            sum = make_float4(0, 0, 0, 0);
          }
          if (base + i < num) add(v[i]);
        }
      }
    }
    return make_float4(first.x + sum.x, first.y + sum.y, first.z + sum.z, first.w + sum.w);
  }
};

/// One column of all slabs, for kernels without vectors.
__device__ __forceinline__ float sum_slabs_scalar(const float* slab, std::int64_t stride, int num) {
  const int middle = static_cast<int>(first_leaves(num));
  float first = 0, sum = 0;
  for (int z = 0; z < num; ++z) {
    if (z == middle) {
      first = sum;
      sum = 0;
    }
    sum += __ldcg(slab + z * stride);
  }
  return first + sum;
}

}  // namespace mortar::lora::cuda
