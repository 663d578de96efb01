// SPDX-License-Identifier: Apache-2.0
// What the two expand kernels on tensor cores share: column blocks, operands in shared memory and
// the product of a warp.
//
// h [tokens][ranks] and B [columns][ranks] lie in shared memory in rows of a power of two of 16-byte
// pieces, turned so that ldmatrix has no bank conflicts; what lies past an adapter's rank is zero up
// to a whole MMA step of 16.
#pragma once

#include "device/convert.cuh"
#include "device/mma.cuh"
#include "lora/cuda/params.cuh"

namespace mortar::lora::cuda {

/// Rows of ranks in shared memory. Eight neighbouring rows' pieces lie in different banks: rows that
/// share a line of 128 bytes do so anyway, and each line turns its pieces by one more.
struct RankTile {
  int log_pieces;

  MORTAR_HOST_DEVICE constexpr explicit RankTile(int rank) : log_pieces(1) {
    while (16 << log_pieces < 2 * rank) ++log_pieces;
  }
  MORTAR_HOST_DEVICE constexpr int pitch() const { return 8 << log_pieces; }  ///< elements

#if defined(__CUDACC__)
  __device__ __forceinline__ int turn(int row) const {
    return log_pieces >= 3 ? row & 7 : (row & 7) >> (3 - log_pieces);
  }
  /// Element of a piece of 8 ranks of a row.
  __device__ __forceinline__ int place(int row, int piece) const {
    return row * pitch() + (piece ^ turn(row)) * 8;
  }
#endif
};

/// Where real column c lies in shared memory: column 8a + 2j + b of a group of 32 goes to row
/// 8j + 2a + b, so that MMA fragment j's eight rows are neighbours.
__device__ __forceinline__ int permuted(int c) {
  return (c & ~31) | ((c & 6) << 2) | ((c >> 2) & 6) | (c & 1);
}

/// A run of columns of one slice.
struct Block {
  int slice = 0;
  std::int64_t first = 0;  ///< column within the slice
  std::int64_t y_col = 0;  ///< column of y
  int cols = 0;
};

__device__ __forceinline__ Block find_block(const ExpandParams& p, int index) {
  Block b;
  b.y_col = p.offset;
  while (b.slice + 1 < p.weights.num_slices && index >= p.block_start[b.slice + 1]) {
    b.y_col += p.weights.widths[b.slice++];
  }
  b.first = static_cast<std::int64_t>(index - p.block_start[b.slice]) * p.cols;
  b.y_col += b.first;
  b.cols =
      static_cast<int>(min(static_cast<std::int64_t>(p.cols), p.weights.widths[b.slice] - b.first));
  return b;
}

/// Bytes of a 16-byte piece of which `left` elements exist.
__device__ __forceinline__ int piece_bytes(int left) { return 2 * max(0, min(left, 8)); }

/// A thread's share of copying columns of B: always the same piece of every step-th row.
template <class T>
struct BCopy {
  const T* src;         ///< this thread's piece of its first row
  std::int64_t stride;  ///< elements between rows
  RankTile tile;
  int row0, step, piece, left;
  bool vector;  ///< rows start at multiples of 16 bytes

  __device__ __forceinline__ BCopy(const T* b, std::int64_t b_stride, int rank, int num_threads)
      : stride(b_stride), tile(rank) {
    piece = static_cast<int>(threadIdx.x) & ((1 << tile.log_pieces) - 1);
    row0 = static_cast<int>(threadIdx.x) >> tile.log_pieces;
    step = num_threads >> tile.log_pieces;
    left = rank - piece * 8;
    vector = device::is_aligned<T, 8>(b) && stride % 8 == 0;
    src = b + row0 * stride + (left > 0 ? piece * 8 : 0);
    if (piece * 8 >= round_up(rank, 16)) row0 = 1 << 20;  // no MMA step reads this piece
  }

  /// Rows [first, first + cols). Asynchronous if `vector`.
  __device__ __forceinline__ void block(T* b_tile, std::int64_t first, int cols) const {
    const T* at = src + first * stride;
    if (vector && step % 32 == 0) {
      // Columns 32 apart lie 32 rows apart.
      const int bytes = piece_bytes(left);
      std::uint32_t dst = device::smem_address(b_tile + tile.place(permuted(row0), piece));
      const std::int64_t at_step = step * stride;
      const int dst_step = step * tile.pitch() * 2;
#pragma unroll 4
      for (int c = row0; c < cols; c += step, at += at_step, dst += dst_step) {
        device::cp_async_16(dst, at, bytes);
      }
      return;
    }
    for (int c = row0; c < cols; c += step, at += step * stride) {
      T* dst = b_tile + tile.place(permuted(c), piece);
      if (vector) {
        device::cp_async_16(device::smem_address(dst), at, piece_bytes(left));
      } else {
        *reinterpret_cast<device::Pack<T, 8>*>(dst) = device::load_pack<T, 8>(at, left);
      }
    }
  }
};

/// Rows of h of a tile's tokens, from element `slice_at` on, rounded to T. Rows without a token stay
/// as they are: each row of the product depends on its own row of h alone. Asynchronous where h
/// holds aligned rows of T.
template <class T>
__device__ __forceinline__ void copy_h(const HView& h, const Tile& tile, const int* tokens,
                                       int first_row, std::int64_t slice_at, int rank, T* h_tile,
                                       int num_threads) {
  const RankTile ranks(rank);
  const int piece = static_cast<int>(threadIdx.x) & ((1 << ranks.log_pieces) - 1);
  const int left = rank - piece * 8;
  if (piece * 8 >= round_up(rank, 16)) return;
  for (int i = static_cast<int>(threadIdx.x) >> ranks.log_pieces; i < tile.count;
       i += num_threads >> ranks.log_pieces) {
    T* dst = h_tile + ranks.place(i, piece);
    const int row = h_row(h, tile, first_row, i, h.by_position ? 0 : tokens[i]);
    if (row < 0) continue;
    const std::int64_t at = slice_at + row * h.row_stride + (left > 0 ? piece * 8 : 0);
    if (h.vector) {
      device::cp_async_16(device::smem_address(dst), static_cast<const T*>(h.data) + at,
                          piece_bytes(left));
      continue;
    }
    std::uint32_t words[4];
    if (h.dtype == DType::kFloat32) {
      const auto lower = device::load_pack<float, 4>(static_cast<const float*>(h.data) + at, left);
      const auto upper = device::load_pack<float, 4>(
          static_cast<const float*>(h.data) + at + (left > 4 ? 4 : 0), left - 4);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        words[k] = device::pack2<T>(lower.v[2 * k], lower.v[2 * k + 1]);
        words[2 + k] = device::pack2<T>(upper.v[2 * k], upper.v[2 * k + 1]);
      }
    } else {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float low =
            2 * k < left ? device::load_as_float(h.data, h.dtype, at + 2 * k) : 0.0f;
        const float high =
            2 * k + 1 < left ? device::load_as_float(h.data, h.dtype, at + 2 * k + 1) : 0.0f;
        words[k] = device::pack2<T>(low, high);
      }
    }
    *reinterpret_cast<uint4*>(dst) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

/// Where a lane's ldmatrix rows begin, for 16 rows of h (the A operand of the MMA) and for two
/// fragments of 8 columns of B.
template <class T>
__device__ __forceinline__ std::uint32_t a_fragment_row(const T* h_tile, int pitch, int row) {
  return device::smem_address(h_tile + (row + threadIdx.x % 16) * pitch);
}
template <class T>
__device__ __forceinline__ std::uint32_t b_fragment_row(const T* b_tile, int pitch, int row) {
  const int lane = threadIdx.x % 32;
  return device::smem_address(b_tile + (row + lane / 16 * 8 + lane % 8) * pitch);
}

/// acc += h B^T for 16 tokens and kGroups * 32 columns.
template <class T, int kGroups>
__device__ __forceinline__ void multiply(float (&acc)[kGroups][4][4], std::uint32_t h_row,
                                         std::uint32_t b_row, const RankTile& ranks, int num_steps) {
  const int lane = threadIdx.x % 32, turn = ranks.turn(lane % 8);
  const std::uint32_t pair_bytes = 32 * ranks.pitch();
#pragma unroll 2
  for (int i = 0; i < num_steps; ++i) {
    const std::uint32_t h_at = h_row + ((2 * i + lane / 16) ^ turn) * 16;
    const std::uint32_t b_at = b_row + ((2 * i + lane / 8 % 2) ^ turn) * 16;
    std::uint32_t h[4], b[kGroups][2][4];
    device::ldmatrix_x4(h, h_at);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int j = 0; j < 2; ++j) device::ldmatrix_x4(b[g][j], b_at + (2 * g + j) * pair_bytes);
    }
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const std::uint32_t* at = &b[g][j / 2][j % 2 * 2];
        device::mma_16816<T>(acc[g][j], h, at[0], at[1]);
      }
    }
  }
}

/// Adds a lane's products, 8 columns of one group and one row, to y: in float32, rounded once.
template <class T>
__device__ __forceinline__ uint4 add_products(const uint4& y, const float (&acc)[4][4], int half,
                                              bool add_inputs) {
  const auto sum2 = [&](std::uint32_t old, const float(&delta)[4]) {
    const float2 v = device::unpack2<T>(old);
    return device::pack2<T>(add_inputs ? v.x + delta[half * 2] : delta[half * 2],
                            add_inputs ? v.y + delta[half * 2 + 1] : delta[half * 2 + 1]);
  };
  return make_uint4(sum2(y.x, acc[0]), sum2(y.y, acc[1]), sum2(y.z, acc[2]), sum2(y.w, acc[3]));
}

}  // namespace mortar::lora::cuda
