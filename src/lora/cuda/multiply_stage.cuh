// SPDX-License-Identifier: Apache-2.0
// The products of shrink's stages on wgmma.
#pragma once

#include <cstdint>

#include "device/swizzle.cuh"
#include "device/wgmma.cuh"

namespace mortar::lora::cuda {

/// The products of a stage, 64 elements of K of 64 tokens and kRows rank rows, added to what is
/// there if it `adds`.
template <class T, int kRows, int kCount>
__device__ __forceinline__ void multiply_stage(float (&sum)[kCount], std::uint64_t x,
                                               std::uint64_t a, bool adds) {
#pragma unroll
  for (int i = 0; i < device::kSwizzleBytes / 2 / 16; ++i) {
    device::wgmma<T, kRows>(sum, x + i * device::kDescriptorStep, a + i * device::kDescriptorStep,
                            i > 0 || adds);
  }
}

}  // namespace mortar::lora::cuda
