// SPDX-License-Identifier: Apache-2.0
// The largest magnitudes of the columns of a thread's part of a tile, and of a warp's.
#pragma once

#include "device/reduce.cuh"
#include "fp8_rmsnorm/cuda/tile.cuh"

namespace mortar::fp8_rmsnorm::cuda {

/// The largest |y| of a thread's rows, as bits, in each of the four columns of quad k of its
/// pieces. Rounding keeps order, so the weight of a column is multiplied with once; but not where
/// it is infinite, as 0 times it is a NaN: there(m) says whether row m of the thread's is one.
template <class T, class There>
__device__ __forceinline__ void largest_of_rows(const uint4 (&raw)[kThreadRows], int k,
                                                const float (&factor)[kThreadRows],
                                                const float4& weights, bool infinite,
                                                const There& there, std::uint32_t (&most)[4]) {
  const float by[4] = {weights.x, weights.y, weights.z, weights.w};
#pragma unroll
  for (int j = 0; j < 4; ++j) most[j] = 0;
#pragma unroll
  for (int m = 0; m < kThreadRows; m += 2) {
    float a[4], b[4];
    unpack4<T>(raw[m], k, a);
    unpack4<T>(raw[m + 1], k, b);
    if (infinite) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const std::uint32_t of_a = device::product_bits(a[j] * factor[m], by[j]);
        const std::uint32_t of_b = device::product_bits(b[j] * factor[m + 1], by[j]);
        most[j] = max(max(most[j], there(m) ? of_a : 0u), there(m + 1) ? of_b : 0u);
      }
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        most[j] = max(max(most[j], device::product_bits(a[j], factor[m])),
                      device::product_bits(b[j], factor[m + 1]));
      }
    }
  }
  if (infinite) return;
#pragma unroll
  for (int j = 0; j < 4; ++j) most[j] = device::product_bits(__uint_as_float(most[j]), by[j]);
}

/// Maxima over the four threads of a warp that have the same columns, of which each gets those of
/// one quad, in the place of quad 0. Each step halves what a thread has. Returns the quad.
__device__ __forceinline__ int scatter_quads(std::uint32_t (&most)[kThreadQuads][4], int r) {
  const bool odd = r % 2 != 0, upper = r / 2 % 2 != 0;
#pragma unroll
  for (int q = 0; q < 2; ++q) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const std::uint32_t sent = odd ? most[q][j] : most[q + 2][j];
      const std::uint32_t kept = odd ? most[q + 2][j] : most[q][j];
      most[q][j] = max(kept, __shfl_xor_sync(0xffffffffu, sent, 8));
    }
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const std::uint32_t sent = upper ? most[0][j] : most[1][j];
    const std::uint32_t kept = upper ? most[1][j] : most[0][j];
    most[0][j] = max(kept, __shfl_xor_sync(0xffffffffu, sent, 16));
  }
  return 2 * (r % 2) + r / 2 % 2;
}

}  // namespace mortar::fp8_rmsnorm::cuda
