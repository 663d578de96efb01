// SPDX-License-Identifier: Apache-2.0
// The choice of a type by a dtype at run time, and its last arm.
#include "core/dtype_visitor.h"

#include <gtest/gtest.h>

#include <string>
#include <type_traits>

#include "core/float_element.h"
#include "mortar/error.h"

namespace mortar {
namespace {

constexpr DType kAllDTypes[] = {DType::kFloat32, DType::kFloat16,    DType::kBFloat16,
                                DType::kInt32,   DType::kInt64,      DType::kUInt8,
                                DType::kFloat64, DType::kFloat8E4M3, DType::kFloat8E5M2};

/// 0 to 4 by the type that the visitor receives.
template <class List>
int index_of(DType dtype) {
  return visit_dtype<List>(dtype, "some_op", [](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (std::is_same_v<T, float>) return 0;
    if constexpr (std::is_same_v<T, Float16>) return 1;
    if constexpr (std::is_same_v<T, BFloat16>) return 2;
    if constexpr (std::is_same_v<T, Float8E4M3>) return 3;
    return 4;
  });
}

TEST(DTypeVisitor, GivesTheTypeOfEveryDTypeInItsList) {
  EXPECT_EQ(index_of<FloatDTypes>(DType::kFloat32), 0);
  EXPECT_EQ(index_of<FloatDTypes>(DType::kFloat16), 1);
  EXPECT_EQ(index_of<FloatDTypes>(DType::kBFloat16), 2);
  EXPECT_EQ(index_of<Float8DTypes>(DType::kFloat8E4M3), 3);
  EXPECT_EQ(index_of<Float8DTypes>(DType::kFloat8E5M2), 4);
}

TEST(DTypeVisitor, TypesHaveTheSizeOfTheirDType) {
  const auto size = [](DType dtype) {
    return visit_dtype<DTypeList<DType::kFloat32, DType::kFloat16, DType::kBFloat16,
                                 DType::kFloat8E4M3, DType::kFloat8E5M2>>(
        dtype, "some_op",
        [](auto tag) { return std::int64_t{sizeof(typename decltype(tag)::type)}; });
  };
  for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3,
                      DType::kFloat8E5M2}) {
    EXPECT_EQ(size(dtype), dtype_size(dtype)) << dtype_name(dtype);
  }
}

TEST(DTypeVisitor, ADTypeOutsideTheListThrowsAndTheVisitorIsNotCalled) {
  for (DType dtype : kAllDTypes) {
    if (dtype == DType::kFloat16 || dtype == DType::kBFloat16) continue;
    bool called = false;
    try {
      visit_dtype<Float16DTypes>(dtype, "some_op", [&](auto) { called = true; });
      ADD_FAILURE() << "nothing thrown for " << dtype_name(dtype);
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::kType);
      EXPECT_EQ(std::string(e.what()), std::string("some_op: dtype must be float16 or bfloat16, "
                                                   "got ") +
                                           dtype_name(dtype));
    }
    EXPECT_FALSE(called);
  }
}

TEST(DTypeVisitor, SingleElementsOfOtherDTypesThrow) {
  std::uint64_t data = 0;
  for (DType dtype : kAllDTypes) {
    if (dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBFloat16) continue;
    EXPECT_THROW(load_float(&data, dtype, 0), Error) << dtype_name(dtype);
    EXPECT_THROW(store_float(&data, dtype, 0, 1.0f), Error) << dtype_name(dtype);
    EXPECT_THROW(round_to(1.0f, dtype), Error) << dtype_name(dtype);
    EXPECT_EQ(data, 0u);
  }
}

}  // namespace
}  // namespace mortar
