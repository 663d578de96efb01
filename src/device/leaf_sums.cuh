// SPDX-License-Identifier: Apache-2.0
// The fixed tree by which a split sum is added: leaves in pairs, pairs in pairs, and so on. How
// many thread blocks share the leaves, each a power of two of neighbouring ones, changes no bit.
#pragma once

#include "device/cluster.cuh"

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

/// The upper part of the tree: the sum of what `parts` thread blocks have, a power of two.
template <int kMost>
__device__ __forceinline__ float4 sum_of_parts(float4 (&v)[kMost], int parts) {
#pragma unroll
  for (int step = 1; step < kMost; step *= 2) {
    if (step >= parts) break;
#pragma unroll
    for (int i = 0; i + step < kMost; i += 2 * step) {
      const float4 &a = v[i], &b = v[i + step];
      v[i] = make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
    }
  }
  return v[0];
}

/// The same where each thread block of a cluster has its part at `from` in its shared memory.
template <int kMost>
__device__ __forceinline__ float4 sum_in_cluster(const float* from, int parts) {
  float4 v[kMost];
#pragma unroll
  for (int other = 0; other < kMost; ++other) {
    if (other < parts) v[other] = *reinterpret_cast<const float4*>(in_cluster(from, other));
  }
  return sum_of_parts(v, parts);
}

}  // namespace mortar::device
