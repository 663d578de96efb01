// SPDX-License-Identifier: Apache-2.0
// Split-K reduction: adding the float32 partials that the CTAs of a product left, one for each
// range of its summation axis, in an order that does not depend on who adds them.
#pragma once

#include <bit>
#include <cstdint>

#include "core/int_math.h"
#include "device/vector.cuh"

namespace mortar::device {

/// The least b such that n <= 2^b, of n > 0.
MORTAR_HOST_DEVICE inline int ceil_log2(int n) {
#if defined(__CUDA_ARCH__)
  return 32 - __clz(n - 1);
#else
  return std::bit_width(static_cast<unsigned>(n - 1));
#endif
}

/// The sum of four neighbouring columns over all partials: those of the first half of the summation
/// axis in order, those of the second half in order, then both halves. Even and odd lanes take a
/// half each; 2^log_owners lanes of a half have 8 (kBatches = 1) or 16 (2) partials each, in turn,
/// and pass the sum on. All their loads are in flight together: a loop that loads and adds would
/// wait for L2 once per partial. seek() may come long before load(), and load() before sum().
template <int kBatches>
struct SplitKSum {
  static constexpr int kLoads = 8;                ///< per batch
  static constexpr int kOwn = kBatches * kLoads;  ///< partials of a lane at once
  static constexpr int kMostLogOwners = 4;        ///< both halves in one warp
  unsigned stride;           ///< bytes; all partials together are fewer than 2^32
  int log_owners;            ///< lanes of a half
  int num = 0;               ///< partials of the half from this lane's on
  const char* at = nullptr;  ///< the columns in the first of these, 16-byte aligned
  uint4 v[kBatches][kLoads];

  __device__ __forceinline__ SplitKSum(std::int64_t partial_stride, int own_log = 0)
      : stride(static_cast<unsigned>(partial_stride * sizeof(float))), log_owners(own_log) {}

  /// With so many all partials are in flight at once, `middle` of them of the first half, as far
  /// as a warp has room for them.
  MORTAR_HOST_DEVICE static int log_owners_of(int middle) {
    const int log = ceil_log2(ceil_div(middle, kOwn));
    return log < kMostLogOwners ? log : kMostLogOwners;
  }
  /// Lanes that share columns.
  __device__ __forceinline__ int lanes() const { return 2 << log_owners; }

  /// Chooses this lane's partials: `first` points to the columns in the first of all, and the first
  /// `middle` are one half. Uniform over a warp but for `first` and where there is nothing to add.
  __device__ __forceinline__ void seek(const float* first, int num_partials, int middle) {
    const bool second = threadIdx.x % 2 == 1;
    const int skipped = static_cast<int>(threadIdx.x / 2 % (1u << log_owners)) * kOwn;
    num = (second ? num_partials - middle : middle) - skipped;
    at = reinterpret_cast<const char*>(first) +
         std::uint64_t{stride} * static_cast<unsigned>((second ? middle : 0) + skipped);
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

  /// After load(). Called by whole warps; `middle` as seek() has it. All lanes get the sum.
  __device__ __forceinline__ float4 sum(int middle) {
    float4 sum = make_float4(0, 0, 0, 0);
    const auto add = [&](const uint4(&from)[kLoads]) {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        sum = make_float4(sum.x + __uint_as_float(from[i].x), sum.y + __uint_as_float(from[i].y),
                          sum.z + __uint_as_float(from[i].z), sum.w + __uint_as_float(from[i].w));
      }
    };
    const auto add_own = [&] {
      add(v[0]);
      if constexpr (kBatches == 2) {
        if (num > kLoads) add(v[1]);
      }
    };
    const auto of_lane = [&](int lane) {
      return make_float4(
          __shfl_sync(0xffffffffu, sum.x, lane), __shfl_sync(0xffffffffu, sum.y, lane),
          __shfl_sync(0xffffffffu, sum.z, lane), __shfl_sync(0xffffffffu, sum.w, lane));
    };
    const int lane = static_cast<int>(threadIdx.x % 32), first = lane & (1 - lanes());
    int owner = first;  // the lane of this half that has the sum
    add_own();
#pragma unroll 1
    for (int base = kOwn; base < middle; base += kOwn) {
      if (log_owners > 0) sum = of_lane(owner);
      owner += 2;
      if (owner == first + lanes()) {  // the lanes' next partials
        owner = first;
        num -= kOwn << log_owners;
        at += std::uint64_t{stride} * static_cast<unsigned>(kOwn << log_owners);
        load();
      }
      add_own();
    }
    if (log_owners > 0) sum = of_lane(owner);
    // The sum of two values does not depend on their order.
    const auto both = [](float own) { return own + __shfl_xor_sync(0xffffffffu, own, 1); };
    return make_float4(both(sum.x), both(sum.y), both(sum.z), both(sum.w));
  }
};

}  // namespace mortar::device
