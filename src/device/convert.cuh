// SPDX-License-Identifier: Apache-2.0
// Conversions between float and the storage types.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "device/dtype_visitor.cuh"

namespace mortar::device {

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(__half v) { return __half2float(v); }
__device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }

/// Rounds to nearest even.
template <class T>
__device__ __forceinline__ T from_float(float v);
template <>
__device__ __forceinline__ float from_float<float>(float v) {
  return v;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float v) {
  return __float2half_rn(v);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float v) {
  return __float2bfloat16_rn(v);
}

/// Element `index` of an array whose dtype is known only at run time and checked before the launch.
__device__ __forceinline__ float load_as_float(const void* data, DType dtype, std::int64_t index) {
  return visit_checked_dtype(FloatDTypes(), dtype, [&](auto tag) {
    return to_float(static_cast<const typename decltype(tag)::type*>(data)[index]);
  });
}

__device__ __forceinline__ void store_from_float(void* data, DType dtype, std::int64_t index,
                                                 float v) {
  visit_checked_dtype(FloatDTypes(), dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    static_cast<T*>(data)[index] = from_float<T>(v);
  });
}

/// Two 16-bit elements in one register, the first in the low half. Kept as words, and not as arrays
/// of elements, because the compiler splits those into a register per element as soon as they are
/// loaded: that waits for the load and doubles the registers.
template <class T>
__device__ __forceinline__ std::uint32_t pack2(float low, float high);
template <>
__device__ __forceinline__ std::uint32_t pack2<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&v);
}
template <>
__device__ __forceinline__ std::uint32_t pack2<__half>(float low, float high) {
  const __half2 v = __floats2half2_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&v);
}

template <class T>
__device__ __forceinline__ float2 unpack2(std::uint32_t word);
template <>
__device__ __forceinline__ float2 unpack2<__nv_bfloat16>(std::uint32_t word) {
  return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
}
template <>
__device__ __forceinline__ float2 unpack2<__half>(std::uint32_t word) {
  return __half22float2(*reinterpret_cast<const __half2*>(&word));
}

}  // namespace mortar::device
