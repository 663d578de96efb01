// SPDX-License-Identifier: Apache-2.0
// y of product_forward.cu where 2 or 4 rows of B, of 32 or 16 ranks, are one line of 128 bytes: the
// copy engine takes as long for a row of any length.
#pragma once

#include "device/convert.cuh"
#include "device/swizzle.cuh"
#include "device/wgmma.cuh"

namespace mortar::lora::cuda::product {

/// Multiplies h by 64 columns of B, of which kShare share a row in shared memory: an MMA has every
/// kShare-th column, and they have their sums one after the other.
template <class T, class S>
__device__ __forceinline__ void multiply_lines(std::uint64_t h, std::uint64_t b, float (&sum)[32]) {
  constexpr int kShare = S::kShare, kColumns = 64 / kShare, kSteps = 64 / 16 / kShare;
#pragma unroll
  for (int i = 0; i < kShare; ++i) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      device::wgmma<T, kColumns, device::Major::kDepth, device::Major::kDepth>(
          sum + i * kColumns / 2, h + k * device::kDescriptorStep,
          b + (i * kSteps + k) * device::kDescriptorStep, k > 0);
    }
  }
}

/// Rounds these sums into a block on its way out: a thread has 2 kShare neighbouring columns.
template <class T, class S>
__device__ __forceinline__ void put_lines(unsigned char* block, const float (&sum)[32]) {
  constexpr int kShare = S::kShare, kSums = 32 / kShare;  // of an MMA
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4,
            lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int j = 0; j < kSums / 4; ++j) {
      std::uint32_t words[kShare];
#pragma unroll
      for (int i = 0; i < kShare; ++i) {
        // Pairs of columns: kShare / 2 of the MMA's first column, and then of its second.
        const int column = i / (kShare / 2), first = i % (kShare / 2) * 2;
        const float* v = sum + first * kSums + 4 * j + 2 * half + column;
        words[i] = device::pack2<T>(v[0], v[kSums]);
      }
      const int row = 16 * warp + 8 * half + lane / 4;
      const int bytes = (8 * j + lane % 4 * 2) * kShare * 2;
      unsigned char* to = block + device::swizzled(row, bytes / 16) + bytes % 16;
      if constexpr (kShare == 4) {
        *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
      } else {
        *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
      }
    }
  }
}

}  // namespace mortar::lora::cuda::product
