// SPDX-License-Identifier: Apache-2.0
// The logistic function by the fast exponential and division.
#pragma once

namespace mortar::device {

/// 1 / (1 + exp(-s)) from exp(-|s|), which never overflows. The fast exponential's error, 2 +
/// 1.2 |s| units of exp(-|s|), stays below one unit of the result's scale.
__device__ __forceinline__ float sigmoid(float s) {
  const float e = __expf(-fabsf(s));
  return __fdividef(s < 0 ? e : 1.0f, 1.0f + e);
}

}  // namespace mortar::device
