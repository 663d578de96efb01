// SPDX-License-Identifier: Apache-2.0
// The columns of a tile, which lie by columns in shared memory, on their way to rows of q_t.
#pragma once

#include <cstdint>

#include "fp8_rmsnorm/cuda/tile.cuh"

namespace mortar::fp8_rmsnorm::cuda {

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

/// The first `count` bytes of v, fewer than 16, to p, which is a multiple of 16.
__device__ __forceinline__ void store_first_bytes(char* p, uint4 v, int count) {
  if (count & 8) {
    *reinterpret_cast<uint2*>(p) = make_uint2(v.x, v.y);
    p += 8;
    v.x = v.z;
    v.y = v.w;
  }
  if (count & 4) {
    *reinterpret_cast<std::uint32_t*>(p) = v.x;
    p += 4;
    v.x = v.y;
  }
  if (count & 2) {
    *reinterpret_cast<std::uint16_t*>(p) = static_cast<std::uint16_t>(v.x);
    p += 2;
    v.x >>= 16;
  }
  if (count & 1) *p = static_cast<char>(v.x);
}

/// The last `count` bytes of v, fewer than 16, to the end of the piece at p, a multiple of 16.
__device__ __forceinline__ void store_last_bytes(char* p, uint4 v, int count) {
  if (count & 8) {
    *reinterpret_cast<uint2*>(p + 8) = make_uint2(v.z, v.w);
  } else {
    p += 8;
    v.x = v.z;
    v.y = v.w;
  }
  if (count & 4) {
    *reinterpret_cast<std::uint32_t*>(p + 4) = v.y;
  } else {
    p += 4;
    v.x = v.y;
  }
  if (count & 2) {
    *reinterpret_cast<std::uint16_t*>(p + 2) = static_cast<std::uint16_t>(v.x >> 16);
  } else {
    p += 2;
    v.x >>= 16;
  }
  if (count & 1) p[1] = static_cast<char>(v.x >> 8);
}

/// Bytes shift to shift + 15 of low and the 16 bytes behind it; shift < 16.
__device__ __forceinline__ uint4 shift_bytes(const uint4& low, const uint4& high, unsigned shift) {
  const std::uint32_t in[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  std::uint32_t by_8[6], by_4[5], out[4];
#pragma unroll
  for (int i = 0; i < 6; ++i) by_8[i] = shift & 8 ? in[i + 2] : in[i];
#pragma unroll
  for (int i = 0; i < 5; ++i) by_4[i] = shift & 4 ? by_8[i + 1] : by_8[i];
#pragma unroll
  for (int i = 0; i < 4; ++i) out[i] = __funnelshift_r(by_4[i], by_4[i + 1], 8 * (shift & 3));
  return make_uint4(out[0], out[1], out[2], out[3]);
}

/// Stores columns of a tile that has its last rows together with the next tile, to rows of q_t that
/// begin anywhere: of each column the sectors that begin in its first p.walk.rows bytes, or before
/// the next tile's first; and the bytes before the first sector of a row, and behind its last.
/// Eight threads share a column: thread t has the t-th aligned piece of 16 bytes of it, made of two
/// pieces of the column where these are not aligned; then that of thread 0 begins before the
/// column.
template <int kElements>
__device__ __forceinline__ void store_overlapping_columns(const ForwardParams& p,
                                                          const unsigned char* transposed,
                                                          std::int64_t row0, int column0) {
  constexpr int kStep = kTileThreads / 8;
  int thread = static_cast<int>(threadIdx.x);
  asm volatile("" : "+r"(thread));  // what follows from it is made anew, not kept for all tiles
  const int piece = thread % 8, step = p.walk.rows;
  const std::int64_t stride = p.out.q_t.row_stride;
  const auto rows = static_cast<int>(min(p.input.rows - row0, std::int64_t{kTileRows}));
  int left = static_cast<int>(p.input.hidden) - column0 - thread / 8;  // columns
  char* to = static_cast<char*>(p.out.q_t.data) + (column0 + thread / 8) * stride + row0;
#pragma unroll 1
  for (int column = thread / 8; column < kTileColumns && left > 0;
       column += kStep, left -= kStep, to += kStep * stride) {
    const unsigned char* from = transposed + device::transposed_offset<kElements>(column, piece);
    const uint4 high = *reinterpret_cast<const uint4*>(from);
    uint4 low{};
    if (piece > 0) {
      low = *reinterpret_cast<const uint4*>(
          transposed + device::transposed_offset<kElements>(column, piece - 1));
    }
    constexpr unsigned kSector = TilesPlan::kSector;
    const unsigned before = -static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(to));
    const unsigned head = before % 16;
    const uint4 v = head == 0 ? high : shift_bytes(low, high, head);
    const int first = 16 * piece - static_cast<int>(-head % 16), there = rows - first;
    // The sectors of this tile, from its first byte.
    const auto begin = static_cast<int>(before % kSector);
    const int end = step + static_cast<int>((before - static_cast<unsigned>(step)) % kSector);
    if (first >= end || (first < begin && row0 > 0)) continue;
    if (first >= 0 && there >= 16) {
      __stcs(reinterpret_cast<uint4*>(to + first), v);
    } else if (first >= 0) {
      if (there > 0) store_first_bytes(to + first, v, there);
    } else if (there >= 16) {
      store_last_bytes(to + first, v, static_cast<int>(head));
    } else {  // fewer rows than the bytes before the first piece
      store_unaligned(to, high, rows);
    }
  }
}

/// Stores the columns of a tile to q_t, whose rows begin anywhere.
template <int kElements>
__device__ __forceinline__ void store_columns_of(const ForwardParams& p,
                                                 const unsigned char* transposed, std::int64_t row0,
                                                 int column0, bool whole) {
  char* q_t = static_cast<char*>(p.out.q_t.data) + column0 * p.out.q_t.row_stride + row0;
  const std::int64_t stride = p.out.q_t.row_stride;
  const int rows = static_cast<int>(min(p.input.rows - row0, std::int64_t{kTileRows}));
  const int columns = min(static_cast<int>(p.input.hidden) - column0, kTileColumns);
  if (!p.q_t_aligned) {
    store_shifted_columns<kElements>(transposed, q_t, stride, rows, columns);
  } else if (whole) {
    store_whole_columns<kElements>(transposed, q_t, stride);
  } else {
    store_aligned_columns<kElements>(transposed, q_t, stride, rows, columns);
  }
}

}  // namespace mortar::fp8_rmsnorm::cuda
