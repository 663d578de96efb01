// SPDX-License-Identifier: Apache-2.0
// Split-K reduction: adding the float32 partials that the CTAs of a product left, one for each
// range of its summation axis, in an order that does not depend on who adds them.
#pragma once

#include <cstdint>

#include "device/vector.cuh"

namespace mortar::device {

/// The sum of four neighbouring columns over all partials: those of the first half of the summation
/// axis in order, those of the second half in order, then both halves. Lanes 2i and 2i + 1 share
/// the columns and take a half each. All loads of 16 partials (kBatches = 1) or 32 (2) are in
/// flight together: a loop that loads and adds would wait for L2 once per partial. seek() may come
/// long before load(), and load() before sum().
template <int kBatches>
struct SplitKSum {
  static constexpr int kLoads = 8;  ///< per batch
  unsigned stride;                  ///< bytes; all partials together are fewer than 2^32
  int num = 0;                      ///< partials of the half; 0: nothing to add
  const char* at = nullptr;         ///< the columns in the half's first partial, 16-byte aligned
  uint4 v[kBatches][kLoads];

  __device__ __forceinline__ SplitKSum(std::int64_t partial_stride)
      : stride(static_cast<unsigned>(partial_stride * sizeof(float))) {}

  /// Chooses this lane's half of the partials: `first` points to the columns in the first of them,
  /// and the first `middle` are one half.
  __device__ __forceinline__ void seek(const float* first, int num_partials, int middle) {
    const bool second = threadIdx.x % 2 == 1;
    num = second ? num_partials - middle : middle;
    at = reinterpret_cast<const char*>(first) + std::uint64_t{stride} * (second ? middle : 0);
  }
  /// Zeros past the last partial: adding them changes nothing.
  __device__ __forceinline__ void load_batch(uint4 (&to)[kLoads], unsigned base) {
#pragma unroll
    for (unsigned i = 0; i < kLoads; ++i) {
      to[i] = make_uint4(0, 0, 0, 0);
      load_if(static_cast<int>(base + i) < num, to[i], at + std::uint64_t{stride} * (base + i));
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

}  // namespace mortar::device
