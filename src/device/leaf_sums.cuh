// SPDX-License-Identifier: Apache-2.0
// The fixed tree by which a split sum is added: leaves in pairs, pairs in pairs, and so on.
#pragma once

namespace mortar::device {

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

}  // namespace mortar::device
