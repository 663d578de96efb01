// SPDX-License-Identifier: Apache-2.0
// The fixed tree by which sums over columns are added: kLeaves leaves of equal length (the last
// ones may be shorter or empty) in pairs, pairs in pairs, and so on. How many thread blocks share
// the leaves, each a power of two of neighbouring ones, changes no bit.
#pragma once

#include "device/leaf_sums.cuh"
#include "lora/train/cuda/config.h"

namespace mortar::lora::train::cuda {

using device::LeafSums;

/// The upper part of the tree: the sum of what `parts` thread blocks have.
template <class V, class Add>
__device__ __forceinline__ V sum_of_parts(V (&v)[kLeaves], int parts, const Add& add) {
#pragma unroll
  for (int step = 1; step < kLeaves; step *= 2) {
    if (step >= parts) break;
#pragma unroll
    for (int i = 0; i + step < kLeaves; i += 2 * step) v[i] = add(v[i], v[i + step]);
  }
  return v[0];
}

}  // namespace mortar::lora::train::cuda
