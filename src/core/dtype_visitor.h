// SPDX-License-Identifier: Apache-2.0
// From a dtype at run time to a type at compile time: every choice among dtypes goes through here.
//
//   visit_dtype<FloatDTypes>(x.dtype, "lora_shrink", [&](auto tag) {
//     using T = typename decltype(tag)::type;
//     ...
//   });
//
// A dtype outside the list throws; no arm stands for "whatever else comes".
#pragma once

#include <initializer_list>

#include "core/float16.h"
#include "core/float8.h"
#include "mortar/tensor.h"

namespace mortar {

/// The dtypes that one choice allows.
template <DType... kAllowed>
struct DTypeList {};

using FloatDTypes = DTypeList<DType::kFloat32, DType::kFloat16, DType::kBFloat16>;
using Float16DTypes = DTypeList<DType::kFloat16, DType::kBFloat16>;
using Float8DTypes = DTypeList<DType::kFloat8E4M3, DType::kFloat8E5M2>;

/// What a visitor receives: a type, and no value of it.
template <class T>
struct TypeTag {
  using type = T;
};

/// The type that stands for a dtype in host memory.
template <DType kDType>
struct HostTypeOf;
template <>
struct HostTypeOf<DType::kFloat32> {
  using type = float;
};
template <>
struct HostTypeOf<DType::kFloat16> {
  using type = Float16;
};
template <>
struct HostTypeOf<DType::kBFloat16> {
  using type = BFloat16;
};
template <>
struct HostTypeOf<DType::kFloat8E4M3> {
  using type = Float8E4M3;
};
template <>
struct HostTypeOf<DType::kFloat8E5M2> {
  using type = Float8E5M2;
};
template <DType kDType>
using HostType = typename HostTypeOf<kDType>::type;

/// Throws "<op>: dtype must be float32 or ..., got ...".
[[noreturn, gnu::cold]] void fail_dtype(const char* op, std::initializer_list<DType> allowed,
                                        DType dtype);

namespace detail {

template <template <DType> class TypeOf, DType kFirst, DType... kRest, class Visitor, class Fail>
decltype(auto) visit_next(DType dtype, Visitor& visitor, const Fail& fail_last) {
  if (dtype != kFirst) {
    if constexpr (sizeof...(kRest) > 0) {
      return visit_next<TypeOf, kRest...>(dtype, visitor, fail_last);
    } else {
      fail_last();
    }
  }
  return visitor(TypeTag<typename TypeOf<kFirst>::type>());
}

}  // namespace detail

/// visitor(TypeTag<TypeOf<dtype>::type>()), and its result, if the list holds `dtype`; otherwise
/// throws a type error that begins with `op`.
template <template <DType> class TypeOf, DType... kAllowed, class Visitor>
decltype(auto) visit_dtype_as(DTypeList<kAllowed...>, DType dtype, const char* op,
                              Visitor&& visitor) {
  return detail::visit_next<TypeOf, kAllowed...>(dtype, visitor,
                                                 [&] { fail_dtype(op, {kAllowed...}, dtype); });
}

/// The same with the types of host memory. Device code has its own in device/dtype_visitor.cuh.
template <class List, class Visitor>
decltype(auto) visit_dtype(DType dtype, const char* op, Visitor&& visitor) {
  return visit_dtype_as<HostTypeOf>(List(), dtype, op, visitor);
}

}  // namespace mortar
