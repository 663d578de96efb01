// SPDX-License-Identifier: Apache-2.0
// The weights as the rows kernel reads them.
#pragma once

#include "fp8_rmsnorm/cuda/elements.cuh"
#include "fp8_rmsnorm/cuda/kernels.cuh"

namespace mortar::fp8_rmsnorm::cuda {

/// Float32 weights by the quads of a piece: quad k of piece i at k * pieces + i, so that adjacent
/// threads read adjacent 16 bytes.
template <int kElements>
__device__ __forceinline__ void store_weights(const ForwardParams& p, float* to, int pieces,
                                              int first, int step) {
  for_weights(p.weight, p.weight_offset, 0, static_cast<int>(p.input.hidden), pieces * kElements,
              first, step, [&](int n, float w) {
                const int piece = n / kElements, quad = n % kElements / 4;
                to[(quad * pieces + piece) * 4 + n % 4] = w;
              });
}

}  // namespace mortar::fp8_rmsnorm::cuda
