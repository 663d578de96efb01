// SPDX-License-Identifier: Apache-2.0
// Float32 weights beside bfloat16 activations. A float32 value v is the exact sum of bfloat16 parts
// v0 + v1 + v2 (device/parts.cuh), so that
//
//   x A^T = x A0^T + x A1^T + x A2^T                      three columns of h for a rank
//   h B^T = sum of h_i B_j^T with i + j <= 2              six columns for a rank, summed over
//
// and the same of ds = dy B, dx = ds A, dA = ds^T x and dB = dy^T h. Written out like that they are
// products of bfloat16 with three or six times the ranks, for the kernels that bfloat16 weights
// have. What is left out of h B^T is at most 2^-21 of a product; of the others nothing.
//
// Columns of a rank: octets of ranks stay together, copy q of rank 8 o + i is column
// 8 (copies o + q) + i. So an adapter of few ranks has few columns, and they neighbour each other.
//
// Where a value is not finite, its first part times the other's first part alone says so: in all
// other columns it counts as zero, and lower sums are not added to a sum that is not finite.
#pragma once

#include <cstdint>

#include "device/parts.cuh"
#include "lora/train/cuda/params.cuh"

namespace mortar::lora::train::cuda {

inline constexpr int kSumCopies = 3;   ///< columns of a rank beside an operand of bfloat16
inline constexpr int kPairCopies = 6;  ///< of two operands in parts, which are summed over

/// Whether a product of float32 weights is made of columns of parts. `wide`: the dtype of the
/// operand or output that is not the weights'.
constexpr bool in_part_columns(DType wide, DType weight) {
  return wide == DType::kBFloat16 && weight == DType::kFloat32;
}

/// The first column of rank j, which begins a group of neighbours within an octet.
MORTAR_HOST_DEVICE constexpr int part_column(int j, int copies) {
  return j / 8 * 8 * copies + j % 8;
}

/// Columns from row to row of so many ranks' copies: whole sectors of L2, as boxes of rows that are
/// not, those of 8 ranks, take longer.
MORTAR_HOST_DEVICE constexpr int part_stride(int width, int copies) {
  return round_up(width * copies, 16);
}

/// Columns of h with so many copies of each rank.
inline HiddenColumns part_columns(const HiddenColumns& hidden, int copies) {
  HiddenColumns to = hidden;
  to.width *= copies;
  for (int s = 0; s < hidden.num_slices; ++s) {
    to.first[s] *= copies;
    to.rank[s] = round_up(hidden.rank[s], kHiddenGranule) * copies;
  }
  return to;
}

#ifdef __CUDACC__

/// The copies of two neighbouring ranks, packed: of a value beside bfloat16, of h (or ds) and of
/// weights where both are in parts. Small products come first in the sum over a rank's columns.
struct PartWords {
  std::uint32_t sum[kSumCopies], hidden[kPairCopies], weight[kPairCopies];

  __device__ __forceinline__ PartWords(float low, float high) {
    std::uint32_t part[3];
    device::split2(low, high, part);
    const auto finite = [](float v) { return fabsf(v) < __uint_as_float(0x7f800000u); };
    const std::uint32_t keep = (finite(low) ? 0xffffu : 0u) | (finite(high) ? 0xffff0000u : 0u);
    const std::uint32_t first = part[0] & keep, second = part[1] & keep, third = part[2] & keep;
    sum[0] = part[0], sum[1] = second, sum[2] = third;
    hidden[0] = third, weight[0] = first;
    hidden[1] = first, weight[1] = third;
    hidden[2] = second, weight[2] = second;
    hidden[3] = second, weight[3] = first;
    hidden[4] = first, weight[4] = second;
    hidden[5] = part[0], weight[5] = part[0];
  }
};

/// The sum of a rank's columns. Lower sums are left out where the first one is Inf or NaN.
__device__ __forceinline__ float sum_of_columns(float first, float second, float third) {
  return fabsf(first) < __uint_as_float(0x7f800000u) ? first + (second + third) : first;
}
__device__ __forceinline__ float4 sum_of_columns(const float4& a, const float4& b,
                                                 const float4& c) {
  return make_float4(sum_of_columns(a.x, b.x, c.x), sum_of_columns(a.y, b.y, c.y),
                     sum_of_columns(a.z, b.z, c.z), sum_of_columns(a.w, b.w, c.w));
}

/// The first `left` of four values, times a factor; zeros for the others.
__device__ __forceinline__ float4 scaled(const float4& v, float f, int left) {
  return make_float4(left > 0 ? f * v.x : 0, left > 1 ? f * v.y : 0, left > 2 ? f * v.z : 0,
                     left > 3 ? f * v.w : 0);
}

/// Copies of four neighbouring ranks, eight bytes each.
template <int kCopies, class Word>
__device__ __forceinline__ void store_copies(void* to, std::int64_t row, int width, int j,
                                             const Word& word) {
  if (to == nullptr) return;
  auto* at = static_cast<unsigned short*>(to) + row * part_stride(width, kCopies) +
             part_column(j, kCopies);
#pragma unroll
  for (int q = 0; q < kCopies; ++q) *reinterpret_cast<uint2*>(at + 8 * q) = word(q);
}

/// Four neighbouring values of h or ds in the forms that are wanted.
__device__ __forceinline__ void store_forms(void* h, void* sum_columns, void* pair_columns,
                                            std::int64_t row, int width, int j, const float4& v) {
  if (h != nullptr) *reinterpret_cast<float4*>(static_cast<float*>(h) + row * width + j) = v;
  if (sum_columns == nullptr && pair_columns == nullptr) return;
  const PartWords low(v.x, v.y), high(v.z, v.w);
  store_copies<kSumCopies>(sum_columns, row, width, j,
                           [&](int q) { return make_uint2(low.sum[q], high.sum[q]); });
  store_copies<kPairCopies>(pair_columns, row, width, j,
                            [&](int q) { return make_uint2(low.hidden[q], high.hidden[q]); });
}

#endif

}  // namespace mortar::lora::train::cuda
