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

/// The rank rows of a CTA as the store sees them, in shared memory.
template <int kRows>
struct Columns {
  /// Two neighbours of one word of h. Their scales are none of a zero row's.
  struct alignas(16) Pair {
    std::int64_t place;  ///< of the first, even; negative: nothing to store
    float scale[2];
  };
  Column one[kRows];
  Pair pair[kRows / 2];
  int irregular;  ///< some rows make no such pairs

  /// By one thread, a barrier before fill().
  __device__ __forceinline__ void begin() { irregular = 0; }
  /// Row i, by a thread each. A barrier must follow before use.
  __device__ __forceinline__ void fill(const RankRows<kRows>& rows, int i, bool raw) {
    one[i] = Column::of(rows, i, raw);
    if (i % 2 != 0) return;
    const Column c0 = one[i], c1 = Column::of(rows, i + 1, raw);
    constexpr int kPlain = Column::kStored | Column::kNotZero;
    const bool word = (c0.kind & Column::kBeforeNext) != 0 && (c0.kind & c1.kind & kPlain) == kPlain &&
                      c0.place % 2 == 0;
    pair[i / 2] = {word ? c0.place : -1, {c0.scale, c1.scale}};
    if (!word && ((c0.kind | c1.kind) & Column::kStored) != 0) irregular = 1;
  }
};

/// Stores one or two values; two as one word where they are neighbours in h and lie in one.
template <class H>
__device__ __forceinline__ void store_two(H* h, const Column& c0, const Column& c1, float v0,
                                          float v1) {
  v0 = (c0.kind & Column::kNotZero) != 0 ? v0 * c0.scale : 0.0f;
  v1 = (c1.kind & Column::kNotZero) != 0 ? v1 * c1.scale : 0.0f;
  if ((c0.kind & Column::kStored) != 0) h[c0.place] = device::from_float<H>(v0);
  if ((c1.kind & Column::kStored) != 0) h[c1.place] = device::from_float<H>(v1);
}

/// Stores a thread's sums: rows of h at `base` (negative: none) of its two tokens, columns 8 j +
/// lane % 4 * 2 and the next, counted from `first`, a multiple of 8.
template <class H, int kCount, int kRows>
__device__ __forceinline__ void store_sums(const HView& h, const std::int64_t (&base)[2],
                                           const Columns<kRows>& columns, int first,
                                           const float (&sum)[kCount]) {
  H* const data = static_cast<H*>(h.data);
  first += static_cast<int>(threadIdx.x) % 4 * 2;
  const bool words = reinterpret_cast<std::uintptr_t>(data) % (2 * sizeof(H)) == 0 &&
                     h.row_stride % 2 == 0 && h.slab_stride % 2 == 0;
  if (words && columns.irregular == 0) {
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      const auto pair = columns.pair[first / 2 + 4 * j];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (base[i] < 0 || pair.place < 0) continue;
        const float v0 = sum[4 * j + 2 * i] * pair.scale[0];
        const float v1 = sum[4 * j + 2 * i + 1] * pair.scale[1];
        *reinterpret_cast<device::Pack<H, 2>*>(data + base[i] + pair.place) = {
            device::from_float<H>(v0), device::from_float<H>(v1)};
      }
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
    const Column c0 = columns.one[first + 8 * j], c1 = columns.one[first + 8 * j + 1];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (base[i] < 0) continue;
      store_two(data + base[i], c0, c1, sum[4 * j + 2 * i], sum[4 * j + 2 * i + 1]);
    }
  }
}

/// The same for the dtype that h has.
template <int kCount, int kRows>
__device__ __forceinline__ void store_sums_any(const HView& h, const std::int64_t (&base)[2],
                                               const Columns<kRows>& columns, int first,
                                               const float (&sum)[kCount]) {
  if (h.dtype == DType::kFloat32) {
    store_sums<float>(h, base, columns, first, sum);
  } else if (h.dtype == DType::kBFloat16) {
    store_sums<__nv_bfloat16>(h, base, columns, first, sum);
  } else {
    store_sums<__half>(h, base, columns, first, sum);
  }
}

}  // namespace mortar::lora::cuda
