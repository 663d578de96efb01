// SPDX-License-Identifier: Apache-2.0
// The fixed tree by which sums over columns are added: kLeaves leaves of equal length (the last
// ones may be shorter or empty) in pairs, pairs in pairs, and so on. How many thread blocks share
// the leaves, each a power of two of neighbouring ones, changes no bit.
#pragma once

#include "lora/train/cuda/config.h"

namespace mortar::lora::train::cuda {

/// The part of the tree that one thread walks, for kCount sums, of at most 2^kLevels leaves.
template <int kCount, int kLevels>
struct LeafSums {
  float held[kLevels > 0 ? kLevels : 1][kCount];

  /// Adds leaf `i`, counted from the thread's first. After the last of 2^n leaves `leaf` is the sum
  /// of all.
  __device__ __forceinline__ void add(int i, float (&leaf)[kCount]) {
#pragma unroll
    for (int level = 0; level < kLevels; ++level) {
      const bool second = (i >> level & 1) != 0;
#pragma unroll
      for (int n = 0; n < kCount; ++n) {
        if (second) {
          leaf[n] = held[level][n] + leaf[n];
        } else {
          held[level][n] = leaf[n];
        }
      }
      if (!second) return;
    }
  }
};

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
