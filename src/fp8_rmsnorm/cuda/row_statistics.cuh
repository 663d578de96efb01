// SPDX-License-Identifier: Apache-2.0
// What one look at an aligned row in shared memory gives: its sum of squares, and its largest |y|.
#pragma once

#include "device/reduce.cuh"
#include "fp8_rmsnorm/cuda/held_row.cuh"
#include "fp8_rmsnorm/cuda/quantize.cuh"

namespace mortar::fp8_rmsnorm::cuda {

/// The thread's sum of squares, in the order of the tree over pieces; the largest |z w| of each of
/// its pieces, and of all.
template <class T, class Rows>
__device__ __forceinline__ float measure_row(const Rows& held, const HeldWeights<T>& weights,
                                             float (&of_pieces)[kHeld], float& most) {
  float sum[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int v = slot_at(i);
    sum[v] = of_pieces[v] = 0.0f;
    if (held.used(v)) {
      const uint4 raw = held.piece(v);
      const float scale = held.scale(v);
      float squares[4] = {};
      std::uint32_t largest[2] = {};
#pragma unroll
      for (int k = 0; k < kPiece<T> / 4; ++k) {
        float z[4];
        unpack4<T>(raw, k, z);
        const float4 w = weights.get(v, k);
#pragma unroll
        for (int j = 0; j < 4; ++j) squares[j] = __fmaf_rn(z[j], z[j], squares[j]);
        largest[0] =
            max(max(largest[0], device::product_bits(z[0], w.x)), device::product_bits(z[2], w.z));
        largest[1] =
            max(max(largest[1], device::product_bits(z[1], w.y)), device::product_bits(z[3], w.w));
      }
      sum[v] = (squares[0] + squares[1]) + (squares[2] + squares[3]);
      of_pieces[v] = __uint_as_float(max(largest[0], largest[1]));
      if constexpr (kIsFloat8<T>) {
        sum[v] = __fmul_rn(sum[v], scale * scale);  // not an FMA with the sum below
        of_pieces[v] *= scale;
      }
    }
    most = device::max_magnitude(most, of_pieces[v]);
    if (i % 2 == 1) sum[v - 4] += sum[v];
    if (i % 4 == 3) sum[v - 6] += sum[v - 4];
  }
  return sum[0] + sum[1];
}

/// The largest weight of all, for each thread of the CTA.
template <int kElements>
__device__ __forceinline__ float largest_of_weights(const float4* weights, int pieces,
                                                    std::uint32_t* scratch) {
  constexpr int kQuads = kElements / 4;
  float largest = 0.0f;
  for (int i = static_cast<int>(threadIdx.x); i < pieces * kQuads; i += blockDim.x) {
    const float4 w = weights[i / kQuads * SharedWeights<kElements>::kPitch + i % kQuads];
    largest = device::max_magnitude(device::max_magnitude(largest, w.x), w.y);
    largest = device::max_magnitude(device::max_magnitude(largest, w.z), w.w);
  }
  return __uint_as_float(device::max_block(device::magnitude_bits(largest), scratch));
}

/// Products of three factors, each rounded, lie within 2^-22 of the exact product, whatever the
/// order, as long as nothing leaves the normal range. So the largest y of COAT's roundings is among
/// those whose |z w| is at least this, where `most` is the largest |z w|. Outside a range in which
/// all is normal, every one is a candidate.
__device__ __forceinline__ float compat_candidates(float most, float rstd, float largest_weight) {
  const float least = most * fminf(rstd, 1.0f), weight = fmaxf(largest_weight, 1.0f);
  const bool normal = least >= 0x1p-60f * weight && weight <= 0x1p30f && most <= 0x1p60f;
  return normal ? most * (1.0f - 0x1p-20f) : 0.0f;
}

/// The largest |y| with COAT's roundings among the thread's pieces, or less where another thread of
/// the row has the row's largest. `most`: the largest |z w| of the row.
template <class T, class Rows>
__device__ __forceinline__ float compat_maximum(const Rows& held, const HeldWeights<T>& weights,
                                                const float (&of_pieces)[kHeld], float most,
                                                float rstd, float largest_weight) {
  const float least = compat_candidates(most, rstd, largest_weight);
  float largest = 0.0f;
#pragma unroll
  for (int v = 0; v < kHeld; ++v) {
    // Negated, so that a NaN is a candidate.
    if (!held.used(v) || fabsf(of_pieces[v]) < least) continue;
    const uint4 raw = held.piece(v);
    const float scale = held.scale(v);
#pragma unroll
    for (int k = 0; k < kPiece<T> / 4; ++k) {
      float z[4];
      unpack4<T>(raw, k, z);
      const float4 w = weights.get(v, k);
      largest = device::max_magnitude(largest, normalise(z[0], scale, rstd, w.x));
      largest = device::max_magnitude(largest, normalise(z[1], scale, rstd, w.y));
      largest = device::max_magnitude(largest, normalise(z[2], scale, rstd, w.z));
      largest = device::max_magnitude(largest, normalise(z[3], scale, rstd, w.w));
    }
  }
  return largest;
}

}  // namespace mortar::fp8_rmsnorm::cuda
