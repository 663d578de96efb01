// SPDX-License-Identifier: Apache-2.0
// h as expand makes it from the split-K partials of shrink.
#pragma once

#include <cstdint>

#include "device/cluster.cuh"
#include "device/convert.cuh"
#include "device/split_k.cuh"
#include "lora/cuda/params.cuh"

namespace mortar::lora::cuda {

/// h of the tokens of a tile from the split-K partials of shrink, rounded to T in shared memory:
/// two lanes make four ranks of a token. The CTAs of a cluster make a part each, for all of them:
/// kThreads / 2 pieces are one trip to L2, and a CTA that makes all of h of 16 tokens and rank 64
/// takes four.
template <class T, class Ranks, int kThreads, bool kShared = false>
struct HSum {
  static constexpr int kLogQuads = Ranks::kLogPieces + 1;
  const ExpandParams& p;
  const Tile& tile;
  const int* tokens;
  int first_row, slice, rank;
  int part = 0, parts = 1;  ///< that this CTA makes, of so many
  device::SplitKSum<2> partials;

  __device__ __forceinline__ HSum(const ExpandParams& params, const Tile& t, const int* own_tokens,
                                  int own_slice, const SliceWeights& w)
      : p(params),
        tile(t),
        tokens(own_tokens),
        first_row(p.h.by_position ? first_position(p.groups, p.tiles) : 0),
        slice(own_slice),
        rank(w.rank),
        partials(p.h.slab_stride) {
    if constexpr (kShared) {
      parts = p.cluster;
      part = static_cast<int>(blockIdx.x) % parts;
    }
    seek(part * (kThreads / 2) + threadIdx.x / 2);
  }
  __device__ __forceinline__ static int place(int i) { return i >> kLogQuads; }
  __device__ __forceinline__ static int column(int i) { return (i & ((1 << kLogQuads) - 1)) * 4; }
  /// Finds the partials of piece i.
  __device__ __forceinline__ void seek(int i) {
    partials.num = 0;
    if (place(i) >= tile.count || column(i) >= rank) return;
    const int row = h_row(p.h, tile, first_row, place(i), tokens[place(i)]);
    if (row < 0) return;
    partials.seek(static_cast<const float*>(p.h.data) + slice * p.h.slice_stride +
                      row * p.h.row_stride + column(i),
                  p.h.num_slabs, static_cast<int>(first_leaves(p.h.num_slabs)));
  }
  /// After partials.load(). Called by whole warps.
  __device__ __forceinline__ void store(T* h_tile) {
    const int first = part * (kThreads / 2), lane = static_cast<int>(threadIdx.x) % 2;
    for (int base = first; place(base) < tile.count; base += parts * (kThreads / 2)) {
      const int i = base + static_cast<int>(threadIdx.x) / 2;
      if (base > first) {
        seek(i);
        partials.load();
      }
      const float4 v = partials.sum();
      const int r = column(i);
      if (lane >= parts || place(i) >= tile.count || r >= round_up(rank, 16)) continue;
      // What lies past the rank was never written.
      const uint2 words =
          make_uint2(device::pack2<T>(r < rank ? v.x : 0.0f, r + 1 < rank ? v.y : 0.0f),
                     device::pack2<T>(r + 2 < rank ? v.z : 0.0f, r + 3 < rank ? v.w : 0.0f));
      auto* const own = reinterpret_cast<uint2*>(h_tile + Ranks::place(place(i), r / 8) + r % 8);
      if constexpr (kShared) {
        for (int cta = lane; cta < parts; cta += 2) *device::in_cluster(own, cta) = words;
      } else {
        *own = words;
      }
    }
  }
};

}  // namespace mortar::lora::cuda
