// SPDX-License-Identifier: Apache-2.0
// Adding the partial sums that a split shrink left: one slab per leaf of K.
#pragma once

#include <cstdint>

#include "device/vector.cuh"
#include "lora/cuda/params.cuh"

namespace mortar::lora::cuda {

/// Four neighbouring columns of one half of the slabs: lanes 2i and 2i + 1 share a place and take a
/// half each. All loads of 16 slabs (kBatches = 1) or 32 (2) are in flight together: a loop that
/// loads and adds would wait for L2 once per slab. seek() may come long before load(), and load()
/// before sum().
template <int kBatches>
struct SlabSum {
  static constexpr int kLoads = 8;  ///< per batch
  unsigned stride;                  ///< bytes; all slabs together are fewer than 2^32
  int num = 0;                      ///< slabs of the half; 0: nothing to add
  const char* slab = nullptr;       ///< of the half's first slab, 16-byte aligned
  uint4 v[kBatches][kLoads];

  __device__ __forceinline__ SlabSum(std::int64_t slab_stride)
      : stride(static_cast<unsigned>(slab_stride * sizeof(float))) {}

  /// Chooses this lane's half of the slabs from `first` on.
  __device__ __forceinline__ void seek(const float* first, int num_slabs) {
    const int middle = static_cast<int>(first_leaves(num_slabs));
    const bool second = threadIdx.x % 2 == 1;
    num = second ? num_slabs - middle : middle;
    slab = reinterpret_cast<const char*>(first) + std::uint64_t{stride} * (second ? middle : 0);
  }
  /// Zeros past the last slab: adding them changes nothing.
  __device__ __forceinline__ void load_batch(uint4 (&to)[kLoads], unsigned base) {
#pragma unroll
    for (unsigned i = 0; i < kLoads; ++i) {
      to[i] = make_uint4(0, 0, 0, 0);
      device::load_if(static_cast<int>(base + i) < num, to[i],
                      slab + std::uint64_t{stride} * (base + i));
    }
  }
  __device__ __forceinline__ void load() {
    load_batch(v[0], 0);
    if constexpr (kBatches == 2) {
      if (num > kLoads) load_batch(v[1], kLoads);
    }
  }
  /// The same without a branch, past which the compiler adds the first batch before it loads the
  /// second.
  __device__ __forceinline__ void load_all() {
#pragma unroll
    for (int b = 0; b < kBatches; ++b) load_batch(v[b], b * kLoads);
  }

  /// After load(). Called by whole warps; both lanes get the sum of both halves.
  __device__ __forceinline__ float4 sum() {
    float4 sum = make_float4(0, 0, 0, 0);
    const auto add = [&](const uint4(&from)[kLoads]) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        sum = make_float4(sum.x + __uint_as_float(from[i].x), sum.y + __uint_as_float(from[i].y),
                          sum.z + __uint_as_float(from[i].z), sum.w + __uint_as_float(from[i].w));
      }
    };
    add(v[0]);
    if constexpr (kBatches == 2) {
      if (num > kLoads) add(v[1]);
    }
#pragma unroll 1
    for (int base = kBatches * kLoads; base < num; base += kLoads) {
      load_batch(v[0], base);
      add(v[0]);
    }
    // The sum of two values does not depend on their order.
    const auto both = [](float own) { return own + __shfl_xor_sync(0xffffffffu, own, 1); };
    return make_float4(both(sum.x), both(sum.y), both(sum.z), both(sum.w));
  }
};

}  // namespace mortar::lora::cuda
