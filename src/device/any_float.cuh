// SPDX-License-Identifier: Apache-2.0
// Operands whose dtype a kernel is told at run time, so that one kernel serves all: it branches
// around its loops, by visit_checked_dtype() among the 16-bit types, by visit_float() where
// float32 and mixtures come in parts (parts.cuh).
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/int_math.h"
#include "device/parts.cuh"
#include "device/vector.cuh"

namespace mortar::device {

/// Throws unless `dtype` is one that a kernel may be told. On the host, before the launch.
template <class List>
void check_dtype(DType dtype, const char* op) {
  device::visit_dtype<List>(dtype, op, [](auto) {});
}

/// An element of either 16-bit type, where only its size counts.
using Bits16 = std::uint16_t;

/// A value of one of FloatDTypes, and of one of Float16DTypes.
struct AnyFloat {};
struct AnyFloat16 {
  Bits16 bits;
};
/// The most parts that any of them has.
template <>
inline constexpr int kParts<AnyFloat> = kParts<float>;
template <>
inline constexpr int kParts<AnyFloat16> = kParts<__half>;
template <class T>
inline constexpr bool kIsAny = std::is_same_v<T, AnyFloat> || std::is_same_v<T, AnyFloat16>;

/// visitor(TypeTag<T>()), in place of one of these with the type that `dtype` says.
template <class T, class Visitor>
__device__ __forceinline__ void visit_float(DType dtype, Visitor&& visitor) {
  if constexpr (std::is_same_v<T, AnyFloat>) {
    visit_checked_dtype(FloatDTypes(), dtype, visitor);
  } else if constexpr (std::is_same_v<T, AnyFloat16>) {
    visit_checked_dtype(Float16DTypes(), dtype, visitor);
  } else {
    visitor(TypeTag<T>());
  }
}
/// Parts of T, in place of one of these of what `dtype` says.
template <class T>
MORTAR_HOST_DEVICE constexpr int num_parts(DType dtype) {
  if constexpr (kIsAny<T>) {
    return dtype == DType::kFloat32   ? kParts<float>
           : dtype == DType::kFloat16 ? kParts<__half>
                                      : kParts<__nv_bfloat16>;
  } else {
    return kParts<T>;
  }
}
/// Bytes of an element of T, in place of AnyFloat of what `dtype` says.
template <class T>
MORTAR_HOST_DEVICE constexpr int float_bytes(DType dtype) {
  if constexpr (std::is_same_v<T, AnyFloat>) {
    return dtype == DType::kFloat32 ? 4 : 2;
  } else {
    return sizeof(T);
  }
}

/// 16 bytes of elements of `size` bytes, 4 or 2, of which the first `valid` are there; else zeros.
__device__ __forceinline__ uint4 load_piece(const char* p, int size, std::int64_t valid) {
  return size == 4 ? load_some<float, 4>(reinterpret_cast<const float*>(p), valid).piece(0)
                   : load_some<Bits16, 8>(reinterpret_cast<const Bits16*>(p), valid).piece(0);
}

}  // namespace mortar::device
