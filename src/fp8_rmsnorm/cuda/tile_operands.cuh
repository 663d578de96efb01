// SPDX-License-Identifier: Apache-2.0
// What a thread brings along for its part of a tile of aligned rows, and where that part lies.
#pragma once

#include <cstdint>

#include "core/int_math.h"
#include "device/async_copy.cuh"
#include "device/cache_policy.cuh"
#include "fp8_rmsnorm/cuda/tile.cuh"
#include "fp8_rmsnorm/cuda/words.cuh"

namespace mortar::fp8_rmsnorm::cuda {

/// The first row and column of a tile.
struct TilePlace {
  std::int64_t row0;
  int column0;
};

/// The places of a CTA's tiles, from the last tile to the first.
class TileCursor : public TilePlace {
 public:
  __device__ __forceinline__ TileCursor(const ForwardParams& p) : walk_(&p.walk) {
    const unsigned back = blockIdx.x, across = static_cast<unsigned>(walk_->across);
    left_ = static_cast<int>(p.plan.tile_plan.tiles) - 1 - static_cast<int>(back);
    const auto up = static_cast<unsigned>(back * walk_->magic >> 32);
    row0 = std::int64_t{walk_->down - 1 - static_cast<int>(up)} * walk_->rows;
    column0 = static_cast<int>(across - 1 - (back - up * across)) * kTileColumns;
  }
  __device__ __forceinline__ bool valid() const { return left_ >= 0; }
  __device__ __forceinline__ void advance() {
    left_ -= static_cast<int>(gridDim.x);
    row0 -= walk_->step_down * walk_->rows;
    column0 -= walk_->step_across * kTileColumns;
    if (column0 < 0) {
      column0 += walk_->across * kTileColumns;
      row0 -= walk_->rows;
    }
  }

 private:
  const TileWalk* walk_;
  int left_;
};

/// The words of the scales of kThreadRows rows from `row` on, of which `count` are there.
template <bool kNarrow>
__device__ __forceinline__ void load_scales(const Input& in, std::int64_t row, int column,
                                            int count, std::uint32_t (&scale)[kThreadRows]) {
  constexpr int kBytes = kNarrow ? 2 : 4;
  const std::int64_t step = in.x_scale.row_stride * kBytes;
  const char* from = static_cast<const char*>(in.x_scale.data) + row * step +
                     (column >> log2_of(in.x_group)) * kBytes;
#pragma unroll
  for (int m = 0; m < kThreadRows; ++m, from += step) {
    load_word_if<kNarrow>(m < count, scale[m], from);
  }
}

/// A thread's operands: the words of its scales, of rstd and of one weight in registers, and its
/// pieces of x in a stage of shared memory, which it alone fills and reads.
template <class T>
struct TileOperands {
  static constexpr int kElements = kPiece<T>, kPieces = 16 / kElements;
  std::uint32_t scale[kThreadRows], rstd[kThreadRows];
  std::uint32_t weight = 0;
  /// rstd of a row that is not there: -0, which the product with its scale is, too.
  static constexpr std::uint32_t kNoRow = 0x80000000u;

  /// Bytes of a stage from one of a thread's pieces to its next.
  static constexpr int kStep = kTileThreads * 16;
  static constexpr int kStage = TilesPlan::stage_bytes(sizeof(T));
  static_assert(kStage == kThreadRows * kPieces * kStep);

  /// Asks for x of a tile: piece k of row m at (m * kPieces + k) * kStep behind `stage`, zeros
  /// where there is none. The thread has used what lay there, and nobody reads x again.
  __device__ __forceinline__ static void copy(const ForwardParams& p, const TilePlace& at, int c,
                                              int r, std::uint32_t stage) {
    const int hidden = static_cast<int>(p.input.hidden);
    const std::int64_t row = at.row0 + kThreadRows * r;
    const int left = static_cast<int>(min(p.input.rows - row, std::int64_t{kThreadRows}));
    const int column = at.column0 + c * kElements;
    const std::int64_t stride = p.input.x.row_stride * static_cast<std::int64_t>(sizeof(T));
    const char* x = static_cast<const char*>(p.input.x.data) + row * stride +
                    column * static_cast<int>(sizeof(T));
    const bool whole = left >= kThreadRows && at.column0 + kTileColumns <= hidden;
#pragma unroll
    for (int m = 0; m < kThreadRows; ++m, x += stride) {
#pragma unroll
      for (int k = 0; k < kPieces; ++k) {
        const std::uint32_t to = stage + (m * kPieces + k) * kStep;
        const bool there = whole || (m < left && column + k * 8 * kElements < hidden);
        const void* from = there ? x + k * 128 : p.input.x.data;
        device::cp_async_16(to, from, there ? 16 : 0, device::kEvictFirst);
      }
    }
  }

  /// Loads the words of a tile.
  __device__ __forceinline__ void load(const ForwardParams& p, const TileCursor& at, int c, int r) {
    const int hidden = static_cast<int>(p.input.hidden);
    const std::int64_t row = at.row0 + kThreadRows * r;
    const int left = static_cast<int>(min(p.input.rows - row, std::int64_t{kThreadRows}));
    const int column = at.column0 + c * kElements;
    if (left < kThreadRows || at.column0 + kTileColumns > hidden) {  // zeros outside
#pragma unroll
      for (int m = 0; m < kThreadRows; ++m) {
        scale[m] = 0;
        rstd[m] = kNoRow;
      }
    }
    if constexpr (kIsFloat8<T>) {
      const int there = column < hidden ? left : 0;
      if (narrow_scales(p)) {
        load_scales<true>(p.input, row, column, there, scale);
      } else {
        load_scales<false>(p.input, row, column, there, scale);
      }
    }
#pragma unroll
    for (int m = 0; m < kThreadRows; ++m) {
      load_word_if<false>(p.norm && m < left, rstd[m], p.rstd + row + m);
    }
    int thread = static_cast<int>(threadIdx.x);
    asm volatile("" : "+r"(thread));  // its place is made anew, not kept for all tiles
    const int n = at.column0 + column_of_weight(thread);
    const bool weighted = p.norm && threadIdx.x < kTileColumns && n < hidden;
    const char* weights = static_cast<const char*>(p.weight.data);
    if (p.weight.dtype == DType::kFloat32) {
      load_word_if<false>(weighted, weight, weights + n * 4);
    } else {
      load_word_if<true>(weighted, weight, weights + n * 2);
    }
  }

  /// The column of a tile whose weight lies at place i in shared memory.
  __device__ __forceinline__ static int column_of_weight(int i) {
    return column_of<kElements>(i / 4 % 8, i / 32) + i % 4;
  }
  __device__ __forceinline__ static bool narrow_scales(const ForwardParams& p) {
    return p.input.x_scale.dtype != DType::kFloat32;
  }
};

}  // namespace mortar::fp8_rmsnorm::cuda
