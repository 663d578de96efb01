// SPDX-License-Identifier: Apache-2.0
// From the largest magnitude to a scale and to what values are multiplied with. Comparisons are
// such that a NaN passes through.
#pragma once

#include <bit>
#include <cstdint>

#include "core/dtype_visitor.h"
#include "fp8_rmsnorm/problem.h"

namespace mortar::fp8_rmsnorm {

inline constexpr float kLargestFloat = 0x1.fffffep127f;

/// The largest finite value of an 8-bit dtype.
inline float largest_value(DType dtype) {
  return visit_dtype<Float8DTypes>(dtype, "fp8_rmsnorm",
                                   [](auto tag) { return decltype(tag)::type::kLargest; });
}

/// max(amax, kLeastAmax) / largest, or the next power of two that is not below it.
MORTAR_HOST_DEVICE inline float scale_of(float amax, float largest, bool pow2) {
  const float scale = (amax <= kLeastAmax ? kLeastAmax : amax) / largest;
  const auto bits = std::bit_cast<std::uint32_t>(scale);
  if (!pow2 || bits >= 0x7f800000u) return scale;
  return std::bit_cast<float>((bits + 0x7fffffu) & 0x7f800000u);
}

/// COAT's: (amax + kLeastAmax) / largest to nearest even in bfloat16. That is the largest of the
/// scales of rows, each rounded, as rounding keeps order.
inline float compat_scale_of(float amax, float largest) {
  return to_float(from_float<BFloat16>((amax + kLeastAmax) / largest));
}

/// A factor that zeros survive: finite, or NaN.
MORTAR_HOST_DEVICE inline float finite_or_nan(float factor) {
  return factor > kLargestFloat ? kLargestFloat : factor;
}

/// What y is multiplied with: finite for scales down to the least subnormal, so that 0 stays 0.
MORTAR_HOST_DEVICE inline float inverse_of(float scale) { return finite_or_nan(1.0f / scale); }

}  // namespace mortar::fp8_rmsnorm
