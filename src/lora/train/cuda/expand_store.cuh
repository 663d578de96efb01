// SPDX-License-Identifier: Apache-2.0
// How sums of the MMA become y or dx: eight neighbouring columns of a row at a time where vectors
// fit, else one element at a time through shared memory.
#pragma once

#include <cstdint>

#include "device/convert.cuh"
#include "device/dtype_visitor.cuh"
#include "lora/train/cuda/kernels.cuh"
#include "lora/train/cuda/stream.cuh"
#include "lora/train/cuda/tiles.cuh"

namespace mortar::lora::train::cuda {

inline constexpr int kUnitRows = 16;  ///< rows of an MMA

/// Column in its group of 32 that is column c of the MMA's tile j: so a lane's sums of four tiles
/// are 8 neighbouring columns, those from lane % 4 * 8 on.
__device__ __forceinline__ int real_column(int j, int c) { return c / 2 * 8 + 2 * j + c % 2; }

/// The other way round: where the column n of a tile lies if its groups' fragments follow each
/// other, 8 rows each.
__device__ __forceinline__ int place_of_column(int n) {
  return n / 32 * 32 + n % 8 / 2 * 8 + n % 32 / 8 * 2 + n % 2;
}

/// Zeros in place of the dropped ones of eight sums.
__device__ __forceinline__ void drop_sums(const OctetDraw& draw, std::uint32_t threshold,
                                          float (&v)[8]) {
  const uint4 keep = keep_words(draw, threshold);
  const std::uint32_t word[4] = {keep.x, keep.y, keep.z, keep.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = (word[i / 2] >> (i % 2 * 16) & 1u) != 0 ? v[i] : 0.0f;
}

/// Index of columns [c, c + 8) of a row among all octets.
__device__ __forceinline__ std::uint64_t octet_of(const MaskParams& m, int row, std::int64_t c) {
  return static_cast<std::uint64_t>(row * m.columns + m.first + c) / 8;
}

/// Zeros in place of the dropped ones of columns [c, c + 8).
__device__ __forceinline__ void drop_eight(const MaskParams& m, const Draws& draws,
                                           std::uint32_t threshold, int row, std::int64_t c,
                                           float (&v)[8]) {
  if (threshold >= kDropAll) {
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = 0;
    return;
  }
  drop_sums(draw_octet(draws, octet_of(m, row, c)), threshold, v);
}

/// Of one of the two 16-bit types.
__device__ __forceinline__ void add_eight(DType dtype, const uint4& base, float (&v)[8]) {
  const std::uint32_t word[4] = {base.x, base.y, base.z, base.w};
  device::visit_checked_dtype(Float16DTypes(), dtype, [&](auto type) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 two = device::unpack2<typename decltype(type)::type>(word[i]);
      v[2 * i] = two.x + v[2 * i];
      v[2 * i + 1] = two.y + v[2 * i + 1];
    }
  });
}
template <class T>
__device__ __forceinline__ uint4 pack_eight(const float (&v)[8]) {
  return make_uint4(device::pack2<T>(v[0], v[1]), device::pack2<T>(v[2], v[3]),
                    device::pack2<T>(v[4], v[5]), device::pack2<T>(v[6], v[7]));
}
__device__ __forceinline__ uint4 pack_eight(DType dtype, const float (&v)[8]) {
  return device::visit_checked_dtype(Float16DTypes(), dtype, [&](auto type) {
    return pack_eight<typename decltype(type)::type>(v);
  });
}

/// Puts a lane's sums of a group of 32 columns where store_any() reads them, in rows of `pitch`.
__device__ __forceinline__ void put_sums(float* to, int pitch, const float (&sum)[4][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    auto* at = reinterpret_cast<float4*>(to + (lane / 4 + 8 * half) * pitch + lane % 4 * 8);
    at[0] =
        make_float4(sum[0][2 * half], sum[0][2 * half + 1], sum[1][2 * half], sum[1][2 * half + 1]);
    at[1] =
        make_float4(sum[2][2 * half], sum[2][2 * half + 1], sum[3][2 * half], sum[3][2 * half + 1]);
  }
}

/// Stores 16 rows of a warp's columns one element at a time, whatever the dtypes and strides; their
/// sums lie in shared memory.
template <int kColumns>
__device__ __noinline__ void store_any(const ExpandParams& p, const int* row_of,
                                       std::int64_t column, const float* sums,
                                       std::uint32_t threshold, const Draws* draws) {
  const std::int64_t c = column + threadIdx.x % 32;
#pragma unroll 1
  for (int i = 0; i < kUnitRows * kColumns / 32; ++i) {
    const int at = i / (kColumns / 32), skip = i % (kColumns / 32) * 32;
    const std::int64_t row = row_of[at], own = c + skip;
    if (row < 0 || own >= p.columns) continue;
    float v = sums[at * kColumns + skip + threadIdx.x % 32];
    const std::int64_t index = row * p.mask.columns + p.mask.first + own;
    if (threshold != 0 && !keeps(draws->seed, draws->offset, index, threshold)) v = 0;
    if (p.base.data != nullptr) v = element(p.base, row, own) + v;
    device::store_from_float(p.out.data, p.out.dtype,
                             row * p.out.row_stride + own * p.out.col_stride, v);
  }
}

}  // namespace mortar::lora::train::cuda
