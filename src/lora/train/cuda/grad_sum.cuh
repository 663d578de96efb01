// SPDX-License-Identifier: Apache-2.0
// Partial sums of dA and dB added in order, by a kernel of their own or by threads that another one
// has to spare.
#pragma once

#include "lora/train/cuda/grad_store.cuh"
#include "lora/train/cuda/grad_sum.h"

namespace mortar::lora::train::cuda {

/// The sum of four neighbours over `count` partials that are `stride` floats apart, in order, of
/// which kLoads are in flight together.
template <int kLoads>
__device__ __forceinline__ float4 sum_in_order(const float* from, std::int64_t stride, int count) {
  float4 sum = make_float4(0, 0, 0, 0);
  for (int base = 0; base < count; base += kLoads) {
    float4 v[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      v[i] = make_float4(0, 0, 0, 0);
      if (base + i < count) {
        v[i] = __ldcg(reinterpret_cast<const float4*>(from + (base + i) * stride));
      }
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (base + i >= count) break;
      sum = make_float4(sum.x + v[i].x, sum.y + v[i].y, sum.z + v[i].z, sum.w + v[i].w);
    }
  }
  return sum;
}

/// Vectors `first`, `first + step` and so on of a gradient, kPlaces at a time, of which all
/// partials are in flight together, or (kPlaces = 1) kLoads at a time.
template <int kPlaces, int kLoads>
__device__ __forceinline__ void add_vectors(const GradSum& g, int first, int step) {
  const int vectors = (g.of_a ? g.dense : g.ranks) / kGradVector;  // of a line
  const int all = (g.of_a ? g.ranks : static_cast<int>(g.columns)) * vectors;
#pragma unroll 1
  for (int begin = first; begin < all; begin += kPlaces * step) {
    float4 v[kPlaces][kLoads];
#pragma unroll
    for (int i = 0; i < kPlaces; ++i) {
      const int place = begin + i * step, line = place / vectors;
      const float* from =
          g.partials + std::int64_t{line} * g.dense + (place - line * vectors) * kGradVector;
      if constexpr (kPlaces == 1) {
        v[0][0] = sum_in_order<kLoads>(from, g.stride, g.chunks);
      } else {
#pragma unroll
        for (int k = 0; k < kLoads; ++k) {
          v[i][k] = make_float4(0, 0, 0, 0);
          if (place < all && k < g.chunks) {
            v[i][k] = __ldcg(reinterpret_cast<const float4*>(from + k * g.stride));
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kPlaces; ++i) {
      const int place = begin + i * step, line = place / vectors;
      if (place >= all) break;
      float4 sum = v[i][0];
      if constexpr (kPlaces > 1) {
        sum = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int k = 0; k < kLoads; ++k) {
          if (k >= g.chunks) break;
          const float4& own = v[i][k];
          sum = make_float4(sum.x + own.x, sum.y + own.y, sum.z + own.z, sum.w + own.w);
        }
      }
      store_vector(g.out, line * g.out.row_stride + (place - line * vectors) * kGradVector, g.adds,
                   sum);
    }
  }
}

/// A share of a gradient: every `threads`-th of its vectors from `thread` on. Whatever its chunks,
/// a thread has eight loads in flight.
__device__ __forceinline__ void add_grad(const GradSum& g, int thread, int threads) {
  if (g.partials == nullptr || (g.adds && g.chunks == 0)) return;
  if (g.chunks <= 2) return add_vectors<4, 2>(g, thread, threads);
  if (g.chunks <= 4) return add_vectors<2, 4>(g, thread, threads);
  add_vectors<1, 8>(g, thread, threads);
}

}  // namespace mortar::lora::train::cuda
