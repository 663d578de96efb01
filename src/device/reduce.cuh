// SPDX-License-Identifier: Apache-2.0
// Reductions over adjacent lanes of a warp and over a thread block, in an order that depends on
// nothing but their width.
#pragma once

#include <cstdint>

namespace mortar::device {

/// Sum over groups of `width` adjacent lanes, a power of two up to 32, from the farthest lanes to
/// the nearest; every lane gets the same bits. All lanes of the warp take part.
__device__ __forceinline__ float sum_lanes(float v, int width) {
  for (int step = width / 2; step > 0; step /= 2) v += __shfl_xor_sync(0xffffffffu, v, step);
  return v;
}

/// Adds the upper half of kParts values to the lower, until one is left. The values are lost.
template <int kParts, int kMostParts>
__device__ __forceinline__ float add_halves(float (&part)[kMostParts]) {
  if constexpr (kParts > 1) {
#pragma unroll
    for (int i = 0; i < kParts / 2; ++i) part[i] += part[i + kParts / 2];
    return add_halves<kParts / 2>(part);
  }
  return part[0];
}

/// The bits of |v|. As unsigned integers they are ordered as the magnitudes are, with NaN above
/// all: a maximum of them keeps a NaN and does not depend on any order.
__device__ __forceinline__ std::uint32_t magnitude_bits(float v) {
  return __float_as_uint(v) & 0x7fffffffu;
}

/// The bits of |a b|, a NaN again above all: the maximum of three of them is one instruction.
__device__ __forceinline__ std::uint32_t product_bits(float a, float b) {
  return __float_as_uint(__fmul_rn(fabsf(a), fabsf(b)));
}

/// max(a, |b|), or NaN if either is.
__device__ __forceinline__ float max_magnitude(float a, float b) {
  float out;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(fabsf(b)));
  return out;
}

/// The largest of groups of `width` adjacent lanes.
__device__ __forceinline__ std::uint32_t max_lanes(std::uint32_t v, int width) {
  if (width == 32) return __reduce_max_sync(0xffffffffu, v);
  for (int step = width / 2; step > 0; step /= 2) {
    v = max(v, __shfl_xor_sync(0xffffffffu, v, step));
  }
  return v;
}

/// The largest of a thread block of whole warps; every thread gets it. `scratch`: 32 words of
/// shared memory, which no thread uses meanwhile.
__device__ __forceinline__ std::uint32_t max_block(std::uint32_t v, std::uint32_t* scratch) {
  v = max_lanes(v, 32);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = v;
  __syncthreads();
  const unsigned lane = threadIdx.x % 32;
  return max_lanes(lane < blockDim.x / 32 ? scratch[lane] : 0u, 32);
}

}  // namespace mortar::device
