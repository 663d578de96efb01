// SPDX-License-Identifier: Apache-2.0
// Elements of matrices.
#pragma once

#include "kernel.h"

namespace emulator {

/// A pair of bfloat16 (kind 0) or float16 (kind 1) elements.
inline void unpack(u32 pair, u32 kind, double& low, double& high) {
  if (kind == 0) {
    low = BITS(f32, pair << 16);
    high = BITS(f32, pair & 0xffff0000u);
  } else {
    low = static_cast<float>(BITS(_Float16, static_cast<u16>(pair)));
    high = static_cast<float>(BITS(_Float16, static_cast<u16>(pair >> 16)));
  }
}

/// Every NaN that the device makes of floats has these bits.
inline u32 float_bits(float v) { return v != v ? 0x7fffffffu : BITS(u32, v); }

}  // namespace emulator
