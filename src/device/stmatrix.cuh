// SPDX-License-Identifier: Apache-2.0
// Results of matrix multiply to shared memory, eight rows of eight 16-bit elements at a time.
#pragma once

#include <cstdint>

#include "device/convert.cuh"

namespace mortar::device {

/// Stores four 8x8 matrices of 16-bit elements, of which a lane has two neighbours of row l / 4
/// each; lanes 8m .. 8m+7 give the row addresses of matrix m (sm_90 and newer).
__device__ __forceinline__ void stmatrix_x4(std::uint32_t row, const std::uint32_t (&r)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
#endif
}

/// Rounds and stores two neighbouring MMA tiles of 16 rows by 8 columns each: a thread's four sums
/// of the first, then those of the second. `row`: of stmatrix_x4(), in pieces of 8 columns.
template <class T>
__device__ __forceinline__ void store_rounded(std::uint32_t row, const float* sum) {
  std::uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = pack2<T>(sum[2 * i], sum[2 * i + 1]);
  stmatrix_x4(row, words);
}

}  // namespace mortar::device
