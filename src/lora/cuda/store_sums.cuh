// SPDX-License-Identifier: Apache-2.0
// Sums of wgmma on their way to h: between the CTAs of a cluster, and to the rows of h.
#pragma once

#include <cstdint>

#include "device/convert.cuh"
#include "lora/cuda/params.cuh"
#include "lora/cuda/rank_rows.cuh"

namespace mortar::lora::cuda {

/// A thread's sums to shared memory and back, 16 bytes of all kThreads side by side.
template <int kThreads, int kCount>
__device__ __forceinline__ void put_sums(float4* to, const float (&sum)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    to[i / 4 * kThreads + threadIdx.x] = make_float4(sum[i], sum[i + 1], sum[i + 2], sum[i + 3]);
  }
}
template <int kThreads, int kCount>
__device__ __forceinline__ void add_sums(float (&sum)[kCount], const float4* from) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    const float4 v = from[i / 4 * kThreads + threadIdx.x];
    sum[i] += v.x;
    sum[i + 1] += v.y;
    sum[i + 2] += v.z;
    sum[i + 3] += v.w;
  }
}

/// A rank row as the store sees it.
struct alignas(16) Column {
  std::int64_t place;  ///< element offset in a row of h
  float scale;
  int kind;
  static constexpr int kStored = 1, kNotZero = 2, kBeforeNext = 4;  ///< next in h, too

  template <int kRows>
  static __device__ __forceinline__ Column of(const RankRows<kRows>& rows, int i, bool raw) {
    Column c{rows.place[i], raw ? 1.0f : rows.scale[i], 0};
    if (i < rows.count) c.kind |= kStored;
    if (rows.weights[i] != nullptr) c.kind |= kNotZero;
    if (i + 1 < rows.count && rows.place[i + 1] == c.place + 1) c.kind |= kBeforeNext;
    return c;
  }
};

/// Stores one or two values; two as one word where they are neighbours in h and lie in one.
template <class H>
__device__ __forceinline__ void store_two(H* h, const Column& c0, const Column& c1, float v0,
                                          float v1) {
  v0 = (c0.kind & Column::kNotZero) != 0 ? v0 * c0.scale : 0.0f;
  v1 = (c1.kind & Column::kNotZero) != 0 ? v1 * c1.scale : 0.0f;
  H* at = h + c0.place;
  if ((c0.kind & Column::kBeforeNext) != 0 &&
      reinterpret_cast<std::uintptr_t>(at) % (2 * sizeof(H)) == 0) {
    *reinterpret_cast<device::Pack<H, 2>*>(at) = {device::from_float<H>(v0),
                                                  device::from_float<H>(v1)};
  } else {
    if ((c0.kind & Column::kStored) != 0) at[0] = device::from_float<H>(v0);
    if ((c1.kind & Column::kStored) != 0) h[c1.place] = device::from_float<H>(v1);
  }
}

/// Stores a thread's sums: rows of h at `base` (negative: none) of its two tokens, columns 8 j +
/// lane % 4 * 2 and the next of `columns`.
template <class H, int kCount>
__device__ __forceinline__ void store_sums(void* data, const std::int64_t (&base)[2],
                                           const Column* columns, const float (&sum)[kCount]) {
  constexpr int kBatch = 3;  // columns read together, or every one would wait for shared memory
  static_assert(kCount % (4 * kBatch) == 0, "sums come as whole batches");
  columns += threadIdx.x % 4 * 2;
#pragma unroll
  for (int j = 0; j < kCount / 4; j += kBatch) {
    Column c[kBatch][2];
#pragma unroll
    for (int i = 0; i < 2 * kBatch; ++i) c[i / 2][i % 2] = columns[(j + i / 2) * 8 + i % 2];
#pragma unroll
    for (int i = 0; i < 2 * kBatch; ++i) {
      if (base[i % 2] < 0) continue;
      const int at = 4 * (j + i / 2) + 2 * (i % 2);
      store_two(static_cast<H*>(data) + base[i % 2], c[i / 2][0], c[i / 2][1], sum[at],
                sum[at + 1]);
    }
  }
}

template <int kCount>
__device__ __forceinline__ void store_sums(const HView& h, const std::int64_t (&base)[2],
                                           const Column* columns, const float (&sum)[kCount]) {
  if (h.dtype == DType::kFloat32) {
    store_sums<float>(h.data, base, columns, sum);
  } else if (h.dtype == DType::kBFloat16) {
    store_sums<__nv_bfloat16>(h.data, base, columns, sum);
  } else {
    store_sums<__half>(h.data, base, columns, sum);
  }
}

}  // namespace mortar::lora::cuda
