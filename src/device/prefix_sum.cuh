// SPDX-License-Identifier: Apache-2.0
// Prefix sums over the threads of a warp and of a CTA, of several values a thread at once.
#pragma once

namespace mortar::device {

__device__ __forceinline__ int4 operator+(int4 a, int4 b) {
  return make_int4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}
__device__ __forceinline__ int4 operator-(int4 a, int4 b) {
  return make_int4(a.x - b.x, a.y - b.y, a.z - b.z, a.w - b.w);
}
__device__ __forceinline__ int4 shuffle_up(int4 v, int d) {
  return make_int4(__shfl_up_sync(0xffffffffu, v.x, d), __shfl_up_sync(0xffffffffu, v.y, d),
                   __shfl_up_sync(0xffffffffu, v.z, d), __shfl_up_sync(0xffffffffu, v.w, d));
}

/// Inclusive prefix sums of a whole warp, of a V that has + and shuffle_up.
template <class V>
__device__ __forceinline__ V warp_inclusive_scan(V value) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const V other = shuffle_up(value, d);
    if (lane >= d) value = value + other;
  }
  return value;
}

/// Exclusive prefix sums of several values per thread (a V that has + and -, and shuffle_up) of a
/// CTA of at most kThreads; *total gets the sums. Uses two barriers.
template <int kThreads, class V>
__device__ __forceinline__ V exclusive_scan(V value, V* warp_sums, V* total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const V inclusive = warp_inclusive_scan(value);
  if (lane == 31) warp_sums[warp] = inclusive;
  __syncthreads();
  V before{}, all{};
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) {
    if (w * 32 >= blockDim.x) break;
    const V sum = warp_sums[w];
    if (w < warp) before = before + sum;
    all = all + sum;
  }
  __syncthreads();
  *total = all;
  return before + inclusive - value;
}

}  // namespace mortar::device
