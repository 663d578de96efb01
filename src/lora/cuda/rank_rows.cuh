// SPDX-License-Identifier: Apache-2.0
// The rank rows of an adapter's slices taken as one list, so that shrink reads x once for all of
// them and every adapter costs its own ranks only.
#pragma once

#include <cstdint>

#include "lora/cuda/params.cuh"

namespace mortar::lora::cuda {

/// Rows [first, first + kRows) of the list, in shared memory.
template <int kRows>
struct RankRows {
  const void* weights[kRows];  ///< row of A; null: a padding row, whose h is zero
  std::int64_t place[kRows];   ///< element offset of the row's column in h
  float scale[kRows];
  int count;

  /// Called by the whole CTA; a barrier must follow before use.
  __device__ __forceinline__ void fill(const ShrinkParams& p, int adapter, int first) {
    const int size = p.weights.dtype == DType::kFloat32 ? 4 : 2;
    for (int i = threadIdx.x; i < kRows; i += blockDim.x) {
      int before = 0, slice = -1, own_first = 0, own_rank = 0;
      for (int s = 0; s < p.weights.num_slices; ++s) {
        const int rank = min(p.weights.rank(adapter, s), p.h.width);
        const int listed = p.pad ? p.h.width : rank;
        if (first + i >= before && first + i < before + listed) {
          slice = s;
          own_first = before;
          own_rank = rank;
        }
        before += listed;
      }
      weights[i] = nullptr;
      place[i] = 0;
      scale[i] = 0;
      if (slice >= 0) {
        const SliceWeights w = p.weights.get(adapter, slice);
        const int r = first + i - own_first;
        if (r < own_rank) weights[i] = static_cast<const char*>(w.a) + r * w.a_row_stride * size;
        place[i] = slice * p.h.slice_stride + r;
        scale[i] = p.scale * w.scale;
      }
      if (i == 0) count = max(0, min(before - first, kRows));
    }
  }
};

/// CTAs past the tiles write zeros to the rows of h whose entry in p.zero_rows is no adapter.
__device__ __forceinline__ void zero_base_rows(const ShrinkParams& p) {
  constexpr int kRowsPerCta = 64;
  const std::int64_t block = static_cast<std::int64_t>(blockIdx.z) - p.tiles.num;
  if (p.zero_rows == nullptr || block < 0 || blockIdx.x != 0 || blockIdx.y != 0) return;
  for (int i = 0; i < kRowsPerCta; ++i) {
    const std::int64_t row = block * kRowsPerCta + i;
    if (row >= p.tiles.num_tokens) return;
    const int id = p.zero_rows[row];
    if (id >= 0 && id < p.weights.num_adapters) continue;
    for (int c = threadIdx.x; c < p.weights.num_slices * p.h.width; c += blockDim.x) {
      const std::int64_t at =
          c / p.h.width * p.h.slice_stride + row * p.h.row_stride + c % p.h.width;
      device::store_from_float(p.h.data, p.h.dtype, at, 0.0f);
    }
  }
}

/// CTAs along z: tiles, and then the rows to zero.
inline unsigned shrink_depth(const ShrinkParams& p) {
  const std::int64_t zero_blocks =
      p.zero_rows == nullptr ? 0 : ceil_div<std::int64_t>(p.tiles.num_tokens, 64);
  return static_cast<unsigned>(p.tiles.num + zero_blocks);
}

/// Grid of a shrink kernel: rank rows, leaves of K, tiles.
inline dim3 shrink_grid(const ShrinkParams& p, const ShrinkConfig& c) {
  const int rows = p.weights.num_slices * (p.pad ? p.h.width : p.weights.max_rank);
  return dim3(static_cast<unsigned>(ceil_div(rows, c.tile_rows)),
              static_cast<unsigned>(p.h.num_slabs), shrink_depth(p));
}

}  // namespace mortar::lora::cuda
