// SPDX-License-Identifier: Apache-2.0
// The four lanes of an MMA's quad trade words: each has two neighbouring columns of some tiles, and
// gets eight neighbouring columns of one.
#pragma once

#include <cstdint>

namespace mortar::device {

/// Transposes a 4 x 4 matrix of words whose row q is held by lane q of a quad: afterwards w[c] of
/// lane q is what w[q] of lane c was.
__device__ __forceinline__ void transpose_quad(std::uint32_t (&w)[4]) {
#pragma unroll
  for (int d = 1; d < 4; d *= 2) {
    const bool upper = (threadIdx.x & d) != 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if ((k & d) != 0) continue;
      const std::uint32_t other = __shfl_xor_sync(0xffffffffu, upper ? w[k] : w[k + d], d);
      (upper ? w[k] : w[k + d]) = other;
    }
  }
}

}  // namespace mortar::device
