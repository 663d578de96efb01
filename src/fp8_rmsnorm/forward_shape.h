// SPDX-License-Identifier: Apache-2.0
// What the launch choices of the CUDA backend's forward depend on.
#pragma once

#include <bit>
#include <cstdint>

#include "mortar/fp8_rmsnorm.h"

namespace mortar::fp8_rmsnorm {

/// What a choice depends on besides the sizes.
struct GpuShape {
  int num_sms = 132;
  int max_smem = 227 << 10;  ///< bytes that a CTA may have
  bool clusters = true;      ///< CTAs may form clusters
  int l2_bytes = 50 << 20;
};

/// Sizes and kinds of a forward, or of a quantisation alone (`norm` false).
struct ForwardShape {
  std::int64_t rows = 0, hidden = 0;
  int x_bytes = 1;                     ///< of an element
  int x_group = 0, x_scale_bytes = 0;  ///< elements of x per scale, and bytes of one; or no scales
  bool norm = true;
  bool adds = false;  ///< a residual of x's type, of 16 bits
  Fp8Scaling scaling = Fp8Scaling::kTensor;
  int group = 128;
  bool given_scale = false, stochastic = false;
  bool q = true, q_t = false;
};

/// Power of two at or above n, for n of at least 1.
constexpr std::int64_t power_of_two_above(std::int64_t n) {
  return static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(n)));
}

}  // namespace mortar::fp8_rmsnorm
