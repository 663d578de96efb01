// SPDX-License-Identifier: Apache-2.0
// The dtype visitor with the types of device memory (core/dtype_visitor.h says how to use it).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cassert>

#include "core/dtype_visitor.h"

namespace mortar::device {

/// The type that stands for a dtype in device memory: CUDA's own where arithmetic needs it, the
/// host's for the 8-bit floats, which only conversions look into.
template <DType kDType>
struct DeviceTypeOf {
  using type = HostType<kDType>;
};
template <>
struct DeviceTypeOf<DType::kFloat16> {
  using type = __half;
};
template <>
struct DeviceTypeOf<DType::kBFloat16> {
  using type = __nv_bfloat16;
};
/// Named apart from mortar::DeviceType, which tells processors apart.
template <DType kDType>
using StorageType = typename DeviceTypeOf<kDType>::type;

template <class List, class Visitor>
decltype(auto) visit_dtype(DType dtype, const char* op, Visitor&& visitor) {
  return visit_dtype_as<DeviceTypeOf>(List(), dtype, op, visitor);
}

/// The same inside a kernel, which cannot throw: the host must have checked the dtype against the
/// list before the launch. Debug builds assert it; the last type takes no compare.
template <DType kFirst, DType... kRest, class Visitor>
__device__ __forceinline__ decltype(auto) visit_checked_dtype(DTypeList<kFirst, kRest...>,
                                                              DType dtype, Visitor&& visitor) {
  if constexpr (sizeof...(kRest) > 0) {
    if (dtype != kFirst) return visit_checked_dtype(DTypeList<kRest...>(), dtype, visitor);
  } else {
    assert(dtype == kFirst);
  }
  return visitor(TypeTag<StorageType<kFirst>>());
}

}  // namespace mortar::device
