// SPDX-License-Identifier: Apache-2.0
// h as expand makes it from the split-K partials of shrink.
#pragma once

#include <bit>
#include <cstdint>

#include "device/cluster.cuh"
#include "device/convert.cuh"
#include "device/split_k.cuh"
#include "lora/cuda/params.cuh"

namespace mortar::lora::cuda {

/// h of the tokens of a tile from the split-K partials of shrink, rounded to T in shared memory:
/// two lanes and more, as far as the CTA has them, make four ranks of a token, a piece. The CTAs of
/// a cluster make a part each, for all of them: kThreads / 2 pieces are one trip to L2, and a CTA
/// that makes all of h of 16 tokens and rank 64 takes four.
template <class T, class Ranks, int kThreads, bool kShared = false>
struct HSum {
  static constexpr int kLogPairs = std::bit_width(static_cast<unsigned>(kThreads / 2)) - 1;
  /// Whether the CTA has lanes for all pieces of 16 tokens.
  static constexpr bool kOnce = !kShared && 16 << (Ranks::kLogPieces + 1) <= kThreads / 2;
  const ExpandParams& p;
  const Tile& tile;
  const int* tokens;
  int first_row, slice, rank;
  int part = 0, parts = 1;  ///< that this CTA makes, of so many
  int log_part = 0;         ///< pieces of a CTA of the cluster at once, at most
  device::SplitKSum<2> partials;

  __device__ __forceinline__ HSum(const ExpandParams& params, const Tile& t, const int* own_tokens,
                                  int own_slice, const SliceWeights& w, T* h_tile)
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
    const int log_parts = kShared ? device::ceil_log2(parts) : 0;
    const int log_pieces = device::ceil_log2(tile.count << log_quads());
    partials.log_owners =
        max(0, min(kLogPairs + log_parts - log_pieces, partials.log_owners_of(middle())));
    if (kShared) log_part = max(0, log_pieces - log_parts);
    seek(first() + own());
    // Zeros behind ranks of less than a whole MMA step; the other pieces are made with theirs.
    const int quad = static_cast<int>(threadIdx.x) % 4, row = static_cast<int>(threadIdx.x) / 4;
    if (p.h.raw && row < tile.count && quad >> log_quads() != 0) {
      *reinterpret_cast<uint2*>(h_tile + Ranks::place(row, quad / 2) + quad % 2 * 4) =
          make_uint2(0, 0);
    }
  }
  __device__ __forceinline__ int middle() const {
    return static_cast<int>(first_leaves(p.h.num_slabs));
  }
  /// Pieces of a token; in a cluster those of whole MMA steps.
  __device__ __forceinline__ int log_quads() const {
    return max(device::ceil_log2(ceil_div(rank, 4)), kShared ? 2 : 0);
  }
  /// Pieces that the CTA makes at once.
  __device__ __forceinline__ int log_trip() const {
    const int most = kLogPairs - partials.log_owners;
    return kShared ? min(most, log_part) : most;
  }
  /// The CTA's first piece; of the pieces from there on, the one that this thread makes.
  __device__ __forceinline__ int first() const { return part << log_trip(); }
  __device__ __forceinline__ int own() const {
    return static_cast<int>(threadIdx.x / 2) >> partials.log_owners;
  }
  __device__ __forceinline__ int place(int i) const { return i >> log_quads(); }
  __device__ __forceinline__ int column(int i) const { return (i & ((1 << log_quads()) - 1)) * 4; }
  __device__ __forceinline__ uint2* piece_of(T* h_tile, int i) const {
    const int r = column(i);
    return reinterpret_cast<uint2*>(h_tile + Ranks::place(place(i), r / 8) + r % 8);
  }
  /// Finds the partials of piece i.
  __device__ __forceinline__ void seek(int i) {
    partials.num = 0;
    if (place(i) >= tile.count || column(i) >= rank || (kShared && own() >> log_trip() != 0))
      return;
    const int row = h_row(p.h, tile, first_row, place(i), tokens[place(i)]);
    if (row < 0) return;
    partials.seek(static_cast<const float*>(p.h.data) + slice * p.h.slice_stride +
                      row * p.h.row_stride + column(i),
                  p.h.num_slabs, middle());
  }
  /// After partials.load(). Called by whole warps.
  __device__ __forceinline__ void store(T* h_tile) {
    const int lane = static_cast<int>(threadIdx.x) & (partials.lanes() - 1);
    for (int base = first(); kOnce || place(base) < tile.count; base += parts << log_trip()) {
      const int i = base + own();
      if (!kOnce && base > first()) {
        seek(i);
        partials.load();
      }
      const float4 v = partials.sum(middle());
      const int r = column(i);
      const bool mine = lane < parts && place(i) < tile.count && r < round_up(rank, 16) &&
                        (!kShared || own() >> log_trip() == 0);
      // What lies past the rank was never written.
      const uint2 words =
          make_uint2(device::pack2<T>(r < rank ? v.x : 0.0f, r + 1 < rank ? v.y : 0.0f),
                     device::pack2<T>(r + 2 < rank ? v.z : 0.0f, r + 3 < rank ? v.w : 0.0f));
      if (mine) {
        if constexpr (kShared) {
          for (int cta = lane; cta < parts; cta += partials.lanes()) {
            *device::in_cluster(piece_of(h_tile, i), cta) = words;
          }
        } else {
          *piece_of(h_tile, i) = words;
        }
      }
      if (kOnce) break;
    }
  }
};

}  // namespace mortar::lora::cuda
