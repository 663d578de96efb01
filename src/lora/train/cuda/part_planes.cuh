// SPDX-License-Identifier: Apache-2.0
// Operands of y and dx of float32 weights in bfloat16 parts, as wgmma takes them: weights in planes
// of shared memory, h or ds in registers. Of the six products of part_columns.cuh's octets an MMA
// step has two, which its planes have as neighbours: of the parts of a weight the third and the
// first, the first and the second, the second and the whole of the first.
#pragma once

#include <cstdint>

#include "lora/train/cuda/part_columns.cuh"

namespace mortar::lora::train::cuda {

inline constexpr int kPartPlanes = 4;  ///< of an octet of ranks: third, first, second, whole
inline constexpr int kPartSteps = kPairCopies / 2;  ///< MMA steps of an octet
/// A plane has 16 bytes, an octet of ranks, for each column.
constexpr int part_plane_bytes(int columns) { return 16 * columns; }

#ifdef __CUDACC__

/// The parts of eight values, packed: those of a value that is not finite are its first alone.
struct EightParts {
  uint4 whole, first, second, third;  ///< `first`: zeros for what is not finite

  __device__ __forceinline__ explicit EightParts(const float (&v)[8]) {
    std::uint32_t part[4][3];
    float zero = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      device::split2(v[2 * i], v[2 * i + 1], part[i]);
      zero = fmaf(v[2 * i], 0.0f, fmaf(v[2 * i + 1], 0.0f, zero));
    }
    whole = first = make_uint4(part[0][0], part[1][0], part[2][0], part[3][0]);
    second = make_uint4(part[0][1], part[1][1], part[2][1], part[3][1]);
    third = make_uint4(part[0][2], part[1][2], part[2][2], part[3][2]);
    if (zero == 0) return;
    const PartWords two[4] = {{v[0], v[1]}, {v[2], v[3]}, {v[4], v[5]}, {v[6], v[7]}};
    first = make_uint4(two[0].weight[0], two[1].weight[0], two[2].weight[0], two[3].weight[0]);
    second = make_uint4(two[0].sum[1], two[1].sum[1], two[2].sum[1], two[3].sum[1]);
    third = make_uint4(two[0].sum[2], two[1].sum[2], two[2].sum[2], two[3].sum[2]);
  }
};

/// Writes an octet of ranks of a column to its planes. `to`: in the first one.
template <int kPlaneBytes>
__device__ __forceinline__ void store_planes(unsigned char* to, const float (&v)[8]) {
  const EightParts parts(v);
  *reinterpret_cast<uint4*>(to) = parts.third;
  *reinterpret_cast<uint4*>(to + kPlaneBytes) = parts.first;
  *reinterpret_cast<uint4*>(to + 2 * kPlaneBytes) = parts.second;
  *reinterpret_cast<uint4*>(to + 3 * kPlaneBytes) = parts.whole;
}

/// Matrix descriptor of two planes from `address` on, without a swizzle: 8 columns lie together,
/// and so do the next 8; the next 8 of the depth are the next plane.
template <int kPlaneBytes>
__device__ __forceinline__ std::uint64_t planes_descriptor(std::uint32_t address) {
  constexpr std::uint64_t kGroup = part_plane_bytes(8) / 16, kPlane = kPlaneBytes / 16;
  return kGroup << 32 | kPlane << 16 | (address & 0x3ffff) >> 4;
}

/// The other operand of the steps of an octet's planes: parts of two neighbouring ranks of h or ds,
/// of a row and of the one eight below it.
__device__ __forceinline__ void split_hidden(const float2& row, const float2& below,
                                             std::uint32_t (&a)[kPartSteps][4]) {
  // By what the weights' parts meet: the columns of PartWords that have these.
  constexpr int kColumns[kPartSteps][2] = {{1, 0}, {3, 2}, {4, 5}};
  const PartWords low(row.x, row.y), high(below.x, below.y);
#pragma unroll
  for (int step = 0; step < kPartSteps; ++step) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      a[step][2 * i] = low.hidden[kColumns[step][i]];
      a[step][2 * i + 1] = high.hidden[kColumns[step][i]];
    }
  }
}

#endif

}  // namespace mortar::lora::train::cuda
