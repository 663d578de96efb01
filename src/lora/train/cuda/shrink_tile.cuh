// SPDX-License-Identifier: Apache-2.0
// What the kernels of h and ds for operands of any kind share (shrink.cu, shrink_float.cu): the
// weights of a thread block's rank columns, and where its sums go.
#pragma once

#include "core/int_math.h"
#include "lora/train/cuda/kernels.cuh"
#include "lora/train/cuda/stream.cuh"
#include "lora/train/cuda/tiles.cuh"

namespace mortar::lora::train::cuda {

/// Fetches columns [c, c + kColumns) of the weights whose columns of h are the kRanks of the launch
/// from `first_rank` on; zeros from `end` on and for ranks that a pair lacks. Places of slices
/// without a pair are left as they are. place(row, piece): where a piece of a rank's columns goes,
/// or, if rows are not ranks, of a column's ranks.
template <bool kSplit, int kRanks, int kColumns, class Place>
__device__ __forceinline__ void fetch_weights(const ShrinkParams& p, const Pairs& pairs,
                                              int first_rank, std::int64_t c, std::int64_t end,
                                              int plane_bytes, const Place& place) {
  for (int s = p.first_slice; s < p.first_slice + p.num_slices; ++s) {
    const int slice_begin = p.hidden.first[s] - p.first_hidden - first_rank;
    const int slice_ranks = (p.hidden.rank[s] + 7) / 8 * 8;
    if (slice_begin >= kRanks || slice_begin + slice_ranks <= 0) continue;
    const PairEntry& pair = pairs.slice(s);
    if (pair.rank == 0) continue;
    const Matrix& m = p.side == Side::kA ? pair.a : pair.b;
    const Matrix turned{m.data, m.col_stride, m.row_stride, m.dtype};
    Fetch f;
    f.async = p.weights.async;
    f.vectors = p.weights.vectors;
    f.parts = p.weights.parts;
    // Rows of ranks [r, c], or rows of columns [c, r].
    if (p.weights.rows_are_ranks) {
      constexpr int kPieces = kColumns / kPiece;
      f.m = p.side == Side::kA ? m : turned;
      for (int i = threadIdx.x; i < kRanks * kPieces; i += kThreads) {
        const int at = i / kPieces, own = i % kPieces, r = at - slice_begin;
        if (r < 0 || r >= slice_ranks) continue;
        fetch_piece<kSplit>(f, r < pair.rank ? r : -1, c + own * kPiece, end, 0xffu, place(at, own),
                            plane_bytes);
      }
    } else {
      constexpr int kPieces = kRanks / kPiece;
      f.m = p.side == Side::kB ? m : turned;
      for (int i = threadIdx.x; i < kColumns * kPieces; i += kThreads) {
        const int at = i / kPieces, own = i % kPieces, r = own * kPiece - slice_begin;
        if (r < 0 || r >= slice_ranks) continue;
        fetch_piece<kSplit>(f, c + at < end ? c + at : -1, r, pair.rank, 0xffu, place(at, own),
                            plane_bytes);
      }
    }
  }
}

/// Stores a warp's sums of 16 rows: its part's partials. `own_row`: of the tile, of a lane's first
/// sums; the others are those of the eighth row on.
template <int kRanks>
__device__ __forceinline__ void store_partials(const ShrinkParams& p, const RowTile& rows, int part,
                                               int first_rank, int own_row,
                                               const float (&sum)[kRanks / 2]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float* to = p.partials + part * p.rows.num_rows * p.hidden.width;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int at = own_row + 8 * half;
    if (at >= rows.count) continue;
    float* out = to + (rows.start + at) * p.hidden.width + p.first_hidden;
#pragma unroll
    for (int n = 0; n < kRanks / 8; ++n) {
      const int j = first_rank + 8 * n + lane % 4 * 2;
      if (j >= p.width) continue;
      *reinterpret_cast<float2*>(out + j) =
          make_float2(sum[4 * n + 2 * half], sum[4 * n + 2 * half + 1]);
    }
  }
}

}  // namespace mortar::lora::train::cuda
