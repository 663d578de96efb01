// SPDX-License-Identifier: Apache-2.0
// The weights as the rows kernel reads them.
#pragma once

#include "device/async_copy.cuh"
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

/// Float32 weights by piece in shared memory. A piece takes an odd number of quads, so that 8
/// threads that read the same quad of theirs meet in no bank.
template <int kElements>
struct SharedWeights {
  static constexpr int kQuads = kElements / 4, kPitch = held_weight_quads(kElements);

  /// Asks for the weights in L2. Every fourth CTA does: all of them ask the same few lines, which
  /// would answer one after the other (2048 x 4096 bfloat16, row scales, q alone: 8.8 us for 8.3).
  __device__ __forceinline__ static void prefetch(const ForwardParams& p, int pieces) {
    if (!p.norm || blockIdx.x % 4 != 0) return;
    const int bytes = pieces * kElements * (p.weight.dtype == DType::kFloat32 ? 4 : 2);
    for (int at = static_cast<int>(threadIdx.x) * 128; at < bytes; at += blockDim.x * 128) {
      device::prefetch_l2(static_cast<const char*>(p.weight.data) + at);
    }
  }

  /// All threads of a CTA bring weights + offset there for `pieces` pieces, eight loads in flight
  /// each; ones where there is no norm; zeros behind the end of a row, up to `end` pieces. The
  /// weights are aligned to 16 bytes. `meanwhile` is called once, when the first loads are on their
  /// way: what it asks for comes after them.
  template <class Meanwhile>
  __device__ __forceinline__ static void store(const ForwardParams& p, float4* to, int pieces,
                                               int end, const Meanwhile& meanwhile) {
    constexpr int kBatch = 8;
    const int threads = static_cast<int>(blockDim.x), first = static_cast<int>(threadIdx.x);
    const auto put = [&](int quad, float4 v) { to[quad / kQuads * kPitch + quad % kQuads] = v; };
    const int quads = pieces * kQuads;
    for (int quad = quads + first; quad < end * kQuads; quad += threads) put(quad, {});
    if (!p.norm) {
      meanwhile();
      for (int quad = first; quad < quads; quad += threads) put(quad, {1.0f, 1.0f, 1.0f, 1.0f});
      return;
    }
    const float offset = p.weight_offset;
    device::visit_checked_dtype(FloatDTypes(), p.weight.dtype, [&](auto tag) {
      using W = typename decltype(tag)::type;
      const W* weight = static_cast<const W*>(p.weight.data);
#pragma unroll 1
      for (int base = first; base - first < quads; base += kBatch * threads) {
        device::Vector<W, 4> raw[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int quad = base + i * threads;
          device::Word<4 * sizeof(W)> word{};
          device::load_if(quad < quads, word, weight + 4 * quad);
          raw[i].set_piece(0, word);
        }
        if (base == first) meanwhile();
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int quad = base + i * threads;
          if (quad >= quads) break;
          put(quad, {raw[i].get(0) + offset, raw[i].get(1) + offset, raw[i].get(2) + offset,
                     raw[i].get(3) + offset});
        }
      }
    });
  }
};

}  // namespace mortar::fp8_rmsnorm::cuda
