// SPDX-License-Identifier: Apache-2.0
// Operand tiles in shared memory: blocks of 64 16-bit columns, rows of 128 bytes whose 16-byte
// pieces are swizzled (piece ^ row % 8), so that ldmatrix meets no bank twice.
//
// Operands come from any strides. Of one 16-bit type they are copied as they are, by cp.async where
// a piece lies dense and aligned, else element by element; under split-bf16 they are split into one
// to three planes of bfloat16 parts on the way. Both fill the same places, so the bits of a product
// do not depend on how its operands lay in memory.
#pragma once

#include <cstdint>

#include "device/async_copy.cuh"
#include "device/convert.cuh"
#include "device/mma.cuh"
#include "device/parts.cuh"
#include "lora/train/cuda/params.cuh"

namespace mortar::lora::train::cuda {

inline constexpr int kPiece = 8;  ///< 16-bit elements of 16 bytes
inline constexpr int kRowPieces = kBlockColumns / kPiece;
inline constexpr int kBlockRowBytes = 2 * kBlockColumns;

/// Bytes of a block of so many rows.
constexpr int block_bytes(int rows) { return rows * kBlockRowBytes; }

/// Byte offset of a piece in its block.
__device__ __forceinline__ int piece_at(int row, int piece) {
  return row * kBlockRowBytes + ((piece ^ (row & 7)) << 4);
}

/// Pieces can be copied by cp.async: dense, aligned, of 16-bit elements.
inline bool copies_async(const Matrix& m) {
  return m.col_stride == 1 && m.row_stride % kPiece == 0 && dtype_size(m.dtype) == 2 &&
         reinterpret_cast<std::uintptr_t>(m.data) % 16 == 0;
}

/// One element as 32 raw bits of float32.
__device__ __forceinline__ float element(const Matrix& m, std::int64_t row, std::int64_t column) {
  const std::int64_t at = row * m.row_stride + column * m.col_stride;
  if (m.dtype == DType::kFloat32) return static_cast<const float*>(m.data)[at];
  const unsigned short raw = static_cast<const unsigned short*>(m.data)[at];
  return m.dtype == DType::kFloat16 ? __half2float(__ushort_as_half(raw))
                                    : __uint_as_float(static_cast<unsigned>(raw) << 16);
}

/// Dropout of a wide operand: element (row, c) has index row * columns + first + c.
struct MaskParams {
  const std::int64_t* rng;
  std::int64_t columns, first;
};

/// Bit j: element c + j of the row is kept.
__device__ inline unsigned keep_piece(const MaskParams& m, std::uint32_t threshold,
                                      std::int64_t row, std::int64_t c) {
  if (threshold == 0) return 0xffu;
  if (threshold >= kDropAll) return 0;
  const auto seed = static_cast<std::uint64_t>(__ldcg(m.rng));
  const auto offset = static_cast<std::uint64_t>(__ldcg(m.rng + 1));
  const std::uint64_t index = static_cast<std::uint64_t>(row * m.columns + m.first + c);
  const int shift = static_cast<int>(index % kMaskGroup);
  unsigned bits = keep_bits(seed, offset, index / kMaskGroup, threshold);
  if (shift > kMaskGroup - kPiece) {
    bits |= keep_bits(seed, offset, index / kMaskGroup + 1, threshold) << kMaskGroup;
  }
  return bits >> shift & 0xffu;
}

/// Zeros in place of dropped elements of a piece that lies in shared memory.
__device__ __forceinline__ void drop_in_place(void* at, unsigned keep) {
  uint4 v = *static_cast<uint4*>(at);
  const auto halves = [&](int j) {
    return (keep >> j & 1u ? 0xffffu : 0u) | (keep >> (j + 1) & 1u ? 0xffff0000u : 0u);
  };
  v.x &= halves(0);
  v.y &= halves(2);
  v.z &= halves(4);
  v.w &= halves(6);
  *static_cast<uint4*>(at) = v;
}

/// A piece is one or two aligned 16-byte words.
inline bool loads_vectors(const Matrix& m) {
  return m.col_stride == 1 && m.row_stride * dtype_size(m.dtype) % 16 == 0 &&
         reinterpret_cast<std::uintptr_t>(m.data) % 16 == 0;
}

/// How an operand's pieces are fetched.
struct Fetch {
  Matrix m;
  bool async;    ///< copies_async()
  bool vectors;  ///< loads_vectors()
  int parts;     ///< planes: 1 for one 16-bit type
};

/// Elements [c, c + 8) of a row that are there and kept; zeros for the others.
__device__ inline void load_piece(const Fetch& f, std::int64_t row, std::int64_t c,
                                  std::int64_t end, unsigned keep, float (&v)[kPiece]) {
  if (f.vectors && c + kPiece <= end) {
    const std::int64_t at = row * f.m.row_stride + c;
    if (f.m.dtype == DType::kFloat32) {
      const auto* from = reinterpret_cast<const float4*>(static_cast<const float*>(f.m.data) + at);
      const float4 low = from[0], high = from[1];
      v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w;
      v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
    } else {
      const auto* from = static_cast<const unsigned short*>(f.m.data) + at;
      const uint4 words = *reinterpret_cast<const uint4*>(from);
      const std::uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 two = f.m.dtype == DType::kFloat16 ? device::unpack2<__half>(word[j])
                                                        : device::unpack2<__nv_bfloat16>(word[j]);
        v[2 * j] = two.x;
        v[2 * j + 1] = two.y;
      }
    }
#pragma unroll
    for (int j = 0; j < kPiece; ++j) v[j] = (keep >> j & 1u) != 0 ? v[j] : 0.0f;
    return;
  }
#pragma unroll
  for (int j = 0; j < kPiece; ++j) {
    v[j] = c + j < end && (keep >> j & 1u) != 0 ? element(f.m, row, c + j) : 0.0f;
  }
}

/// Fetches elements [c, c + 8) of a row, of which those from `end` on and all of row -1 are zeros,
/// to `to` (and to the planes behind it).
template <bool kSplit>
__device__ inline void fetch_piece(const Fetch& f, std::int64_t row, std::int64_t c,
                                   std::int64_t end, unsigned keep, char* to, int plane_bytes) {
  const bool there = row >= 0 && c < end;
  if constexpr (!kSplit) {
    if (f.async) {
      const auto* from = static_cast<const unsigned short*>(f.m.data);
      const int bytes = there ? static_cast<int>(2 * min(end - c, std::int64_t{kPiece})) : 0;
      if (there) from += row * f.m.row_stride + c;
      device::cp_async_16(device::smem_address(to), from, bytes);
      return;
    }
  }
  float v[kPiece] = {};
  if (there) load_piece(f, row, c, end, keep, v);
  if constexpr (kSplit) {
    std::uint32_t word[4][3];
#pragma unroll
    for (int j = 0; j < 4; ++j) device::split2(v[2 * j], v[2 * j + 1], word[j]);
#pragma unroll
    for (int plane = 0; plane < 3; ++plane) {
      if (plane >= f.parts) break;
      *reinterpret_cast<uint4*>(to + plane * plane_bytes) =
          make_uint4(word[0][plane], word[1][plane], word[2][plane], word[3][plane]);
    }
  } else if (f.m.dtype == DType::kFloat16) {
    *reinterpret_cast<uint4*>(to) =
        make_uint4(device::pack2<__half>(v[0], v[1]), device::pack2<__half>(v[2], v[3]),
                   device::pack2<__half>(v[4], v[5]), device::pack2<__half>(v[6], v[7]));
  } else {
    using B = __nv_bfloat16;
    *reinterpret_cast<uint4*>(to) =
        make_uint4(device::pack2<B>(v[0], v[1]), device::pack2<B>(v[2], v[3]),
                   device::pack2<B>(v[4], v[5]), device::pack2<B>(v[6], v[7]));
  }
}

/// Fragment a [16 x 16] of the MMA from a block whose rows are the MMA's rows.
__device__ __forceinline__ void load_a(std::uint32_t (&a)[4], std::uint32_t block, int row,
                                       int step) {
  const int lane = threadIdx.x % 32;
  device::ldmatrix_x4(a, block + piece_at(row + lane % 16, 2 * step + lane / 16));
}

/// The same from a block whose rows are the MMA's k: a^T lies there.
__device__ __forceinline__ void load_a_transposed(std::uint32_t (&a)[4], std::uint32_t block,
                                                  int column, int step) {
  const int lane = threadIdx.x % 32, matrix = lane / 8;
  const int row = 16 * step + lane % 8 + matrix / 2 * 8;
  device::ldmatrix_x4_transposed(a, block + piece_at(row, column / kPiece + matrix % 2));
}

/// Fragments of b [16 x 16], two tiles of 8 columns from `column` on: {b0, b1} of the first, then
/// of the second. `rows_are_columns`: the rows of the block are the MMA's columns, else its k.
__device__ __forceinline__ void load_b(std::uint32_t (&b)[4], std::uint32_t block, int column,
                                       int step, bool rows_are_columns) {
  const int lane = threadIdx.x % 32, matrix = lane / 8;
  if (rows_are_columns) {
    const int row = column + lane % 8 + matrix / 2 * 8;
    device::ldmatrix_x4(b, block + piece_at(row, 2 * step + matrix % 2));
  } else {
    const int row = 16 * step + lane % 8 + matrix % 2 * 8;
    device::ldmatrix_x4_transposed(b, block + piece_at(row, column / kPiece + matrix / 2));
  }
}

/// Sums of 16 x 8 tiles: one chain for one 16-bit type, PartSums under split-bf16.
template <class T, bool kSplit>
struct Sums;
template <class T>
struct Sums<T, false> {
  float sum[4] = {};
  __device__ __forceinline__ void add(const std::uint32_t (&a)[1][4],
                                      const std::uint32_t (&b)[1][2], int, int) {
    device::mma_16816<T>(sum, a[0], b[0][0], b[0][1]);
  }
  __device__ __forceinline__ float total(int i) const { return sum[i]; }
};
template <class T>
struct Sums<T, true> {
  device::PartSums parts;
  /// Planes past an operand's parts hold nothing: they are left out.
  __device__ __forceinline__ void add(const std::uint32_t (&a)[3][4],
                                      const std::uint32_t (&b)[3][2], int parts_a, int parts_b) {
    float step[4];
    device::product_16816(step, a[0], b[0]);
#pragma unroll
    for (int i = 0; i < 3; ++i) {
#pragma unroll
      for (int j = 0; j < 3; ++j) {
        if (i + j > 0 && i + j <= 2 && i < parts_a && j < parts_b) {
          device::mma_16816<__nv_bfloat16>(parts.rest, a[i], b[j][0], b[j][1]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) parts.first[i] += step[i];
  }
  __device__ __forceinline__ float total(int i) const { return parts.total(i); }
};

}  // namespace mortar::lora::train::cuda
