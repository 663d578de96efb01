// SPDX-License-Identifier: Apache-2.0
// Operands of y and dx of float32 weights in bfloat16 parts, as wgmma takes them: weights as rows
// of six pieces of 16 bytes for an octet of ranks, and h or ds in registers.
#pragma once

#include <cstdint>

#include "device/swizzle.cuh"
#include "lora/train/cuda/part_columns.cuh"

namespace mortar::lora::train::cuda {

inline constexpr int kPartSteps = kPairCopies / 2;  ///< MMA steps of an octet

/// Writes the six pieces of an octet of ranks of a column, one of kColumns.
template <int kColumns>
__device__ __forceinline__ void store_pieces(unsigned char* to, int column, int octet,
                                             const float (&v)[8]) {
  constexpr int kBytes = kColumns * device::kSwizzleBytes;  // of eight pieces of all columns
  const PartWords two[4] = {{v[0], v[1]}, {v[2], v[3]}, {v[4], v[5]}, {v[6], v[7]}};
#pragma unroll
  for (int q = 0; q < kPairCopies; ++q) {
    const int piece = octet * kPairCopies + q;
    *reinterpret_cast<uint4*>(to + piece / 8 * kBytes + device::swizzled(column, piece % 8)) =
        make_uint4(two[0].weight[q], two[1].weight[q], two[2].weight[q], two[3].weight[q]);
  }
}

/// The first operand of an octet's steps: parts of two neighbouring ranks, of a row and of the one
/// eight below it.
__device__ __forceinline__ void split_hidden(const float2& row, const float2& below,
                                             std::uint32_t (&a)[kPartSteps][4]) {
  const PartWords low(row.x, row.y), high(below.x, below.y);
#pragma unroll
  for (int step = 0; step < kPartSteps; ++step) {
    a[step][0] = low.hidden[2 * step];
    a[step][1] = high.hidden[2 * step];
    a[step][2] = low.hidden[2 * step + 1];
    a[step][3] = high.hidden[2 * step + 1];
  }
}

}  // namespace mortar::lora::train::cuda
