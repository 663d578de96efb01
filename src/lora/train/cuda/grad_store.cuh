// SPDX-License-Identifier: Apache-2.0
// How sums over rows become gradients, of any dtype and strides.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "device/convert.cuh"
#include "lora/train/cuda/grad_sum.h"
#include "lora/train/cuda/params.cuh"

namespace mortar::lora::train::cuda {

/// Four neighbours of a gradient as one access, where they lie dense and aligned.
__device__ __forceinline__ bool moves_as_vector(const Matrix& m, std::int64_t at,
                                                std::int64_t step) {
  return step == 1 &&
         (reinterpret_cast<std::uintptr_t>(m.data) + at * (m.dtype == DType::kFloat32 ? 4 : 2)) %
                 (kGradVector * (m.dtype == DType::kFloat32 ? 4 : 2)) ==
             0;
}

__device__ __forceinline__ void store_vector(const Matrix& m, std::int64_t at, bool adds,
                                             float4 v) {
  if (m.dtype == DType::kFloat32) {
    auto* to = reinterpret_cast<float4*>(static_cast<float*>(m.data) + at);
    if (adds) {
      const float4 old = __ldcg(to);
      v = make_float4(old.x + v.x, old.y + v.y, old.z + v.z, old.w + v.w);
    }
    *to = v;
    return;
  }
  auto* to = reinterpret_cast<uint2*>(static_cast<unsigned short*>(m.data) + at);
  const bool half = m.dtype == DType::kFloat16;
  if (adds) {
    const uint2 old = __ldcg(to);
    const auto two = [&](std::uint32_t word) {
      return half ? device::unpack2<__half>(word) : device::unpack2<__nv_bfloat16>(word);
    };
    const float2 low = two(old.x), high = two(old.y);
    v = make_float4(low.x + v.x, low.y + v.y, high.x + v.z, high.y + v.w);
  }
  *to = half ? make_uint2(device::pack2<__half>(v.x, v.y), device::pack2<__half>(v.z, v.w))
             : make_uint2(device::pack2<__nv_bfloat16>(v.x, v.y),
                          device::pack2<__nv_bfloat16>(v.z, v.w));
}

__device__ __forceinline__ float load_one(const Matrix& m, std::int64_t at) {
  if (m.dtype == DType::kFloat32) return __ldcg(static_cast<const float*>(m.data) + at);
  const unsigned short raw = __ldcg(static_cast<const unsigned short*>(m.data) + at);
  return m.dtype == DType::kFloat16 ? __half2float(__ushort_as_half(raw))
                                    : __uint_as_float(static_cast<unsigned>(raw) << 16);
}

/// Four sums, from column `c` of row `rank` of dA on, or (else) from column `rank` of row `c` of dB
/// on: those within `ranks` ranks and `columns` columns, added to what is there if asked.
__device__ __forceinline__ void store_grad(const Matrix& out, bool of_a, int rank, int ranks,
                                           std::int64_t c, std::int64_t columns, bool adds,
                                           const float4& v) {
  const std::int64_t step = out.col_stride;
  const std::int64_t at = (of_a ? rank : c) * out.row_stride + (of_a ? c : rank) * step;
  const std::int64_t left = of_a ? columns - c : ranks - rank;
  if (left >= kGradVector && moves_as_vector(out, at, step)) {
    store_vector(out, at, adds, v);
    return;
  }
  const float values[kGradVector] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < kGradVector; ++i) {
    if (i >= left) break;
    const float old = adds ? load_one(out, at + i * step) : 0.0f;
    device::store_from_float(out.data, out.dtype, at + i * step,
                             adds ? old + values[i] : values[i]);
  }
}

}  // namespace mortar::lora::train::cuda
