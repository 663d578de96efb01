// SPDX-License-Identifier: Apache-2.0
// Where the sums over rows of outer.cu, outer_float.cu and outer_boxes.cu go.
#pragma once

#include "lora/train/cuda/kernels.cuh"
#include "lora/train/cuda/tiles.cuh"

namespace mortar::lora::train::cuda {

/// outer_boxes.cu: as outer_float(), by wgmma; of float32 ds or h and one adapter alone, on sm_90a.
bool outer_boxes(const OuterParams& p, Stream stream);

/// Stores a warp's sums of 16 columns from `column` on as partials of chunk `slot`.
template <int kRanks>
__device__ __forceinline__ void store_outer(const OuterParams& p, int slot, std::int64_t column,
                                            int first_rank,
                                            const Sums<__nv_bfloat16, true> (&sums)[kRanks / 8]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const bool of_a = p.side == Side::kA;
  const std::int64_t stride = of_a ? grad_stride(p.columns) : 1;
  float* to = p.partials + slot * p.width * (of_a ? stride : p.columns);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::int64_t own = column + lane / 4 + 8 * half;
    if (own >= p.columns) continue;
#pragma unroll
    for (int n = 0; n < kRanks / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int j = first_rank + 8 * n + lane % 4 * 2 + i;
        if (j < p.width) to[j * stride + own * (of_a ? 1 : p.width)] = sums[n].total(2 * half + i);
      }
    }
  }
}

}  // namespace mortar::lora::train::cuda
