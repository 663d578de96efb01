// SPDX-License-Identifier: Apache-2.0
// The arithmetic of a thread's part of a tile: 4 rows of 16 columns of y become codes, by rows in
// registers and by columns in shared memory.
#pragma once

#include "device/byte_transpose.cuh"
#include "fp8_rmsnorm/cuda/quantize.cuh"
#include "fp8_rmsnorm/cuda/tile.cuh"

namespace mortar::fp8_rmsnorm::cuda {

/// fl(y / scale) but for its lowest 8 bits, where y is rounded to bfloat16 and the scale is one,
/// with `inverse` = 1 / scale, a little above: then a quotient that lies halfway between two 8-bit
/// floats comes out exactly, and any other, 2^-13 of itself or more from there, on its side of it.
__device__ __forceinline__ float divide_bf16(float y, float inverse) {
  return __uint_as_float(__float_as_uint(__fmul_rn(y, inverse)) & 0xffffff00u);
}
/// The same of four values that are rounded to bfloat16 first.
__device__ __forceinline__ void divide_rounded(float (&y)[4], float inverse) {
#pragma unroll
  for (int j = 0; j < 4; j += 2) {
    const float2 rounded =
        device::unpack2<__nv_bfloat16>(device::pack2<__nv_bfloat16>(y[j], y[j + 1]));
    y[j] = divide_bf16(rounded.x, inverse);
    y[j + 1] = divide_bf16(rounded.y, inverse);
  }
}

/// y of four elements of a row, from z without its scale: `factor` is scale times rstd but for
/// COAT's chain, which multiplies by one after the other.
template <bool kCompat>
__device__ __forceinline__ void weigh(float (&y)[4], const float (&by)[4], float factor,
                                      float rstd) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if constexpr (kCompat) {
      y[j] = normalise(y[j], factor, rstd, by[j]);
    } else {
      y[j] = y[j] * factor * by[j];
    }
  }
}

/// Stores the codes of four rows by columns: those of the first column to `columns`, of the next
/// `pitch` bytes behind it.
__device__ __forceinline__ void store_columns(const std::uint32_t (&of_rows)[kThreadRows],
                                              unsigned char* columns, int pitch) {
  std::uint32_t of_columns[4];
  device::transpose_bytes_4x4(of_rows, of_columns);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    *reinterpret_cast<std::uint32_t*>(columns + j * pitch) = of_columns[j];
  }
}

/// Stores the codes of one piece of each of a thread's rows to q, from `row` and `column` on.
/// `whole`: none of the tile lies outside.
template <int kElements>
__device__ __forceinline__ void store_pieces(
    const ForwardParams& p, const std::uint32_t (&codes)[kThreadRows][kElements / 4],
    std::int64_t row, int column, bool whole) {
  char* q = static_cast<char*>(p.out.q.data) + row * p.out.q.row_stride + column;
#pragma unroll
  for (int m = 0; m < kThreadRows; ++m, q += p.out.q.row_stride) {
    const bool there = row + m < p.input.rows && column < p.input.hidden;
    if (whole || there) store_codes<kElements>(q, codes[m], kElements, true);
  }
}

}  // namespace mortar::fp8_rmsnorm::cuda
