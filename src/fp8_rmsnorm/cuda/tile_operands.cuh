// SPDX-License-Identifier: Apache-2.0
// What a thread brings along for its part of a tile of aligned rows, and where that part lies.
#pragma once

#include <cstdint>

#include "core/int_math.h"
#include "device/vector.cuh"
#include "fp8_rmsnorm/cuda/tile.cuh"
#include "fp8_rmsnorm/cuda/words.cuh"

namespace mortar::fp8_rmsnorm::cuda {

/// Where a thread's part of a tile lies, from the last tile to the first.
class TileCursor {
 public:
  std::int64_t row0;
  int column0;

  __device__ __forceinline__ TileCursor(const ForwardParams& p)
      : across_(ceil_div(static_cast<int>(p.input.hidden), kTileColumns)) {
    const auto tiles = static_cast<unsigned>(p.plan.tile_plan.tiles);
    const auto across = static_cast<unsigned>(across_);
    left_ = static_cast<int>(tiles) - 1 - static_cast<int>(blockIdx.x);
    const unsigned index = left_ < 0 ? 0 : static_cast<unsigned>(left_);
    row0 = std::int64_t{index / across} * kTileRows;
    column0 = static_cast<int>(index % across) * kTileColumns;
    step_rows_ = static_cast<int>(gridDim.x / across) * kTileRows;
    step_columns_ = static_cast<int>(gridDim.x % across) * kTileColumns;
  }
  __device__ __forceinline__ bool valid() const { return left_ >= 0; }
  __device__ __forceinline__ void advance() {
    left_ -= static_cast<int>(gridDim.x);
    row0 -= step_rows_;
    column0 -= step_columns_;
    if (column0 < 0) {
      column0 += across_ * kTileColumns;
      row0 -= kTileRows;
    }
  }

 private:
  int across_, left_, step_rows_, step_columns_;
};

/// A thread's operands: x, and the words of its scales, of rstd and of one weight.
template <class T>
struct TileOperands {
  static constexpr int kElements = kPiece<T>, kPieces = 16 / kElements;
  uint4 raw[kThreadRows][kPieces];
  std::uint32_t scale[kThreadRows], rstd[kThreadRows];
  std::uint32_t weight = 0;

  __device__ __forceinline__ void load(const ForwardParams& p, const TileCursor& at, int c, int r) {
    const int hidden = static_cast<int>(p.input.hidden);
    const std::int64_t row = at.row0 + kThreadRows * r;
    const int left = static_cast<int>(min(p.input.rows - row, std::int64_t{kThreadRows}));
    const int column = at.column0 + c * kElements;
    if (left < kThreadRows || at.column0 + kTileColumns > hidden) {  // zeros outside
#pragma unroll
      for (int m = 0; m < kThreadRows; ++m) {
        scale[m] = rstd[m] = 0;
#pragma unroll
        for (int k = 0; k < kPieces; ++k) raw[m][k] = make_uint4(0, 0, 0, 0);
      }
    }
    const std::int64_t stride = p.input.x.row_stride * static_cast<std::int64_t>(sizeof(T));
    const char* x = static_cast<const char*>(p.input.x.data) + row * stride +
                    column * static_cast<int>(sizeof(T));
#pragma unroll
    for (int m = 0; m < kThreadRows; ++m, x += stride) {
#pragma unroll
      for (int k = 0; k < kPieces; ++k) {
        device::load_if(m < left && column + k * 8 * kElements < hidden, raw[m][k], x + k * 128);
      }
    }
    if constexpr (kIsFloat8<T>) {
      const bool narrow = narrow_scales(p);
      const std::int64_t bytes = narrow ? 2 : 4, step = p.input.x_scale.row_stride * bytes;
      const char* s = static_cast<const char*>(p.input.x_scale.data) + row * step +
                      (column >> log2_of(p.input.x_group)) * bytes;
#pragma unroll
      for (int m = 0; m < kThreadRows; ++m, s += step) {
        load_word_if(m < left && column < hidden, narrow, scale[m], s);
      }
    }
#pragma unroll
    for (int m = 0; m < kThreadRows; ++m) {
      load_word_if(p.norm && m < left, false, rstd[m], p.rstd + row + m);
    }
    int thread = static_cast<int>(threadIdx.x);
    asm volatile("" : "+r"(thread));  // its place is made anew, not kept for all tiles
    const int n = at.column0 + column_of_weight(thread);
    const bool narrow = p.weight.dtype != DType::kFloat32;
    load_word_if(p.norm && threadIdx.x < kTileColumns && n < hidden, narrow, weight,
                 static_cast<const char*>(p.weight.data) + n * (narrow ? 2 : 4));
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
