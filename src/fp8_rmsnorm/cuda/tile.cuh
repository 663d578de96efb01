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

/// transposed_offset() a multiple of 32 columns behind one of the first 32, of the same piece: they
/// differ in the upper bits of what the piece is swizzled with.
template <int kElements>
__device__ __forceinline__ int offset_behind(int first, int columns) {
  return columns * kTileRows + (first ^ columns / kElements % 8 * 16);
}

/// Stores the columns of a whole tile to rows of q_t that are aligned, of which the first is `to`.
template <int kElements>
__device__ __forceinline__ void store_whole_columns(const unsigned char* transposed, char* to,
                                                    std::int64_t stride) {
  int thread = static_cast<int>(threadIdx.x);
  asm volatile("" : "+r"(thread));  // what follows from it is made anew, not kept for all tiles
  constexpr int kStep = kTileThreads / 8;
  const int piece = thread % 8;
  to += thread / 8 * stride + piece * 16;
  const int first = device::transposed_offset<kElements>(thread / 8, piece);
#pragma unroll
  for (int i = 0; i < kTileColumns / kStep; ++i, to += kStep * stride) {
    __stcs(
        reinterpret_cast<uint4*>(to),
        *reinterpret_cast<const uint4*>(transposed + offset_behind<kElements>(first, i * kStep)));
  }
}

/// Stores columns of a tile, `rows` bytes of each, to rows of q_t that are aligned, of which the
/// first is `to`.
template <int kElements>
__device__ __forceinline__ void store_aligned_columns(const unsigned char* transposed, char* to,
                                                      std::int64_t stride, int rows, int columns) {
  int thread = static_cast<int>(threadIdx.x);
  asm volatile("" : "+r"(thread));  // what follows from it is made anew, not kept for all tiles
  constexpr int kStep = kTileThreads / 8;
  const int piece = thread % 8, first = device::transposed_offset<kElements>(thread / 8, piece);
#pragma unroll
  for (int i = 0; i < kTileColumns / kStep; ++i) {
    const int column = i * kStep + thread / 8;
    if (column >= columns || piece * 16 >= rows) continue;
    const uint4 v =
        *reinterpret_cast<const uint4*>(transposed + offset_behind<kElements>(first, i * kStep));
    char* p = to + column * stride + piece * 16;
    if (piece * 16 + 16 <= rows) {
      __stcs(reinterpret_cast<uint4*>(p), v);
    } else {
      store_unaligned(p, v, rows - piece * 16);
    }
  }
}

/// Stores columns of a tile, `rows` bytes of each, to rows of q_t that begin anywhere, of which the
/// first is `to`. A warp has 16 columns. Lane l stores the l-th aligned word of each, made of the
/// words l and l + 1 of the column.
template <int kElements>
__device__ __forceinline__ void store_shifted_columns(const unsigned char* transposed, char* to,
                                                      std::int64_t stride, int rows, int columns) {
  constexpr unsigned kColumns = kTileColumns / kTileWarps, kBatch = 4;
  unsigned thread = threadIdx.x;
  asm volatile("" : "+r"(thread));  // what follows from it is made anew, not kept for all tiles
  const unsigned lane = thread % 32, first_column = thread / 32 * kColumns;
  char* next = to + first_column * stride;
  int left = columns - static_cast<int>(first_column);
#pragma unroll 1
  for (unsigned base = first_column; base < first_column + kColumns; base += kBatch) {
    const unsigned char* column = transposed + base * kTileRows + lane % 4 * 4;
#pragma unroll
    for (unsigned i = 0; i < kBatch; ++i, next += stride, --left) {
      // Batches lie within the columns that are swizzled alike.
      static_assert(kElements % kBatch == 0);
      const unsigned piece = (lane / 4 ^ base / kElements) % 8;
      const std::uint32_t word =
          *reinterpret_cast<const std::uint32_t*>(column + i * kTileRows + piece * 16);
      const std::uint32_t after = __shfl_down_sync(0xffffffffu, word, 1);
      const unsigned head = -static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(next)) % 4;
      const int first = static_cast<int>(4 * lane + head);  // of the column's bytes
      if (left > 0 && first <= rows - 4) {
        __stcs(reinterpret_cast<std::uint32_t*>(next + first),
               __funnelshift_r(word, after, 8 * head));
      }
    }
  }
  // Up to three bytes before the words and as many behind them: half a warp each.
  const unsigned column = first_column + lane % kColumns;
  if (static_cast<int>(column) >= columns) return;
  char* p = to + column * stride;
  const unsigned all = static_cast<unsigned>(rows);
  const unsigned head = min(-static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(p)) % 4, all);
  const unsigned first = lane < kColumns ? 0 : all - (all - head) % 4;
  const unsigned end = lane < kColumns ? head : all;
  const unsigned char* from = transposed + column * kTileRows;
#pragma unroll
  for (unsigned i = 0; i < 3; ++i) {
    const unsigned at = first + i, piece = (at / 16 ^ column / kElements) % 8;
    if (at < end) p[at] = static_cast<char>(from[piece * 16 + at % 16]);
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
