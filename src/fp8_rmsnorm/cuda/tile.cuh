// SPDX-License-Identifier: Apache-2.0
// A tile of 128 x 128 as the kernels of q_t share it out: eight threads have 16 columns each
// of the same four rows.
#pragma once

#include <cstdint>

#include "device/byte_transpose.cuh"
#include "device/launch.cuh"
#include "fp8_rmsnorm/config.h"
#include "fp8_rmsnorm/cuda/elements.cuh"
#include "fp8_rmsnorm/cuda/kernels.cuh"

namespace mortar::fp8_rmsnorm::cuda {

inline constexpr int kTileRows = TilesPlan::kRows, kTileColumns = TilesPlan::kColumns;
inline constexpr int kTileThreads = TilesPlan::kThreads, kTileWarps = kTileThreads / 32;
inline constexpr int kThreadRows = 4, kThreadQuads = 4;  ///< quads of columns
static_assert(kTileRows == kTileThreads / 8 * kThreadRows, "eight threads share a row");
static_assert(kTileColumns == 8 * 4 * kThreadQuads, "a thread has 16 columns");

/// Column of a tile at which quad k of thread c of a row begins: pieces of a row lie side by side
/// over the eight threads, so that each access of a warp is whole sectors.
template <int kElements>
__device__ __forceinline__ int column_of(int c, int k) {
  constexpr int kQuads = kElements / 4;
  return k / kQuads * (8 * kElements) + c * kElements + k % kQuads * 4;
}

struct SharedTile {
  float weights[kTileColumns];              ///< quad k of thread c at 4 * (8 k + c)
  float inverse[kTileWarps][kTileColumns];  ///< likewise: of the columns, for each warp's 16 rows
  std::uint32_t scratch[32];
  unsigned char transposed[kTileColumns * kTileRows];
};

/// Stores the columns of a whole tile to rows of q_t that are aligned, of which the first is `to`.
template <int kElements>
__device__ __forceinline__ void store_whole_columns(const unsigned char* transposed, char* to,
                                                    std::int64_t stride) {
  const int thread = static_cast<int>(threadIdx.x), piece = thread % 8;
  constexpr int kStep = kTileThreads / 8;
  to += thread / 8 * stride + piece * 16;
#pragma unroll
  for (int i = 0; i < kTileColumns / kStep; ++i, to += kStep * stride) {
    const int column = i * kStep + thread / 8;
    __stcs(reinterpret_cast<uint4*>(to),
           *reinterpret_cast<const uint4*>(transposed +
                                           device::transposed_offset<kElements>(column, piece)));
  }
}

/// Stores columns of a tile, `rows` bytes of each, to rows of q_t of which the first is `to`.
__device__ __forceinline__ void store_columns(const unsigned char* transposed, char* to,
                                              std::int64_t stride, int rows, int columns,
                                              int piece_columns, bool aligned) {
  const int thread = static_cast<int>(threadIdx.x);
  const auto piece_at = [&](int column, int piece) {
    return transposed + column * 128 + ((piece ^ (column / piece_columns)) & 7) * 16;
  };
  if (aligned) {
#pragma unroll
    for (int i = 0; i < kTileColumns * 8 / kTileThreads; ++i) {
      const int column = i * (kTileThreads / 8) + thread / 8, piece = thread % 8;
      if (column >= columns || piece * 16 >= rows) continue;
      const uint4 v = *reinterpret_cast<const uint4*>(piece_at(column, piece));
      char* p = to + column * stride + piece * 16;
      if (piece * 16 + 16 <= rows) {
        __stcs(reinterpret_cast<uint4*>(p), v);
      } else {
        store_unaligned(p, v, rows - piece * 16);
      }
    }
    return;
  }
  // A warp a column: lane l stores the aligned word that ends with byte 4 l + 3 - shift, from the
  // words l - 1 and l of the column; then the last bytes.
  const int lane = thread % 32;
#pragma unroll 1
  for (int column = thread / 32; column < columns; column += kTileWarps) {
    char* p = to + column * stride;
    const int shift = static_cast<int>(reinterpret_cast<std::uintptr_t>(p) % 4);
    const std::uint32_t word =
        *reinterpret_cast<const std::uint32_t*>(piece_at(column, lane / 4) + lane % 4 * 4);
    const std::uint32_t before = __shfl_up_sync(0xffffffffu, word, 1);
    const std::uint32_t out = shift == 0 ? word : __funnelshift_l(before, word, 8 * shift);
    const int first = 4 * lane - shift;  // of the column's bytes
    const bool whole = first >= 0 && first + 4 <= rows;
    if (whole) {
      __stcs(reinterpret_cast<std::uint32_t*>(p + first), out);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (first + i >= 0 && first + i < rows) p[first + i] = static_cast<char>(out >> (8 * i));
      }
    }
    if (lane == 31) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i >= 4 - shift && 124 + i < rows) p[124 + i] = static_cast<char>(word >> (8 * i));
      }
    }
  }
}

/// The grid of the plan, chained to the kernel before it.
inline device::Launch launch_of_tiles(const ForwardParams& p, Stream stream) {
  device::Launch launch;
  launch.threads = kTileThreads;
  launch.grid = dim3(static_cast<unsigned>(p.plan.tile_plan.grid));
  launch.stream = stream;
  launch.pdl = true;
  return launch;
}

}  // namespace mortar::fp8_rmsnorm::cuda
