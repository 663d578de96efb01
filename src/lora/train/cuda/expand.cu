// SPDX-License-Identifier: Apache-2.0
// y = base + h B^T and dx = ds A for float32 weights, by split-bf16: [M, R] by [R, C] for small R.
//
// Bytes: M C (twice with a base) + R C (per 128 rows, from L2) + M R. With M = 8192, C = 4096,
// R = 16 that is 134 MB of float32 outputs, 31.4 us at 4.28 TB/s. Bound by instructions: nothing is
// in flight while a tile is computed.
//
// A thread block makes 128 rows by 128 columns, eight warps 32 rows by 16 columns at a time, whose
// sums are one chain over the ranks of all slices in order. Ranks pass in blocks of 64; a single
// block is fetched once.
#include "core/check.h"
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "lora/train/cuda/kernels.cuh"

namespace mortar::lora::train::cuda {
namespace {

constexpr int kPlanes = 3;  ///< of bfloat16 parts
constexpr int kHiddenBytes = block_bytes(kTileRows);
constexpr int kWeightBytes = block_bytes(kTileColumns);  // also two blocks of 64 rows
constexpr int kSmem = kPlanes * (kHiddenBytes + kWeightBytes);
constexpr int kWarpRows = 32, kWarpColumns = 16;  ///< of a warp at a time
constexpr int kPasses = kTileColumns / (2 * kWarpColumns);

/// Fetches the rank columns [first, first + 64) of one pair: h, and the weights for `columns`.
__device__ inline void fetch_ranks(const ExpandParams& p, const RowTile& rows, int slice, int first,
                                   std::int64_t column, char* smem) {
  const PairEntry pair = p.pairs.get(rows.adapter, slice);
  const int pieces = ceil_div(min(pair.rank - first, kBlockColumns), 16) * 2;
  for (int i = threadIdx.x; i < kTileRows * pieces; i += kThreads) {
    const int at = i / pieces, piece = i % pieces;
    const std::int64_t row = at < rows.count ? row_at(p.rows, rows.start + at) : -1;
    const int j = p.hidden.first[slice] + first + piece * kPiece;
    fetch_piece<true>(p.h, row, j, p.hidden.first[slice] + pair.rank, 0xffu,
                      smem + piece_at(at, piece), kHiddenBytes);
  }
  char* weights = smem + kPlanes * kHiddenBytes;
  // As [r, wide] it is A, or B transposed.
  Fetch f;
  f.async = p.weights.async;
  f.vectors = p.weights.vectors;
  f.parts = p.weights.parts;
  const Matrix m = pair.weight(p.side == Side::kA);
  if ((p.side == Side::kA) == p.weights.rows_are_ranks) {
    f.m = m;
  } else {
    f.m = Matrix{m.data, m.col_stride, m.row_stride, m.dtype};
  }
  if (p.weights.rows_are_ranks) {
    for (int i = threadIdx.x; i < pieces * kPiece * 2 * kRowPieces; i += kThreads) {
      const int r = i / (2 * kRowPieces), piece = i % (2 * kRowPieces);
      char* block = weights + piece / kRowPieces * block_bytes(kBlockColumns);
      fetch_piece<true>(f, first + r < pair.rank ? first + r : -1, column + piece * kPiece,
                        p.columns, 0xffu, block + piece_at(r, piece % kRowPieces), kWeightBytes);
    }
  } else {
    for (int i = threadIdx.x; i < kTileColumns * pieces; i += kThreads) {
      const int at = i / pieces, piece = i % pieces;
      fetch_piece<true>(f, column + at < p.columns ? column + at : -1, first + piece * kPiece,
                        pair.rank, 0xffu, weights + piece_at(at, piece), kWeightBytes);
    }
  }
}

/// Rows of one thread: base plus sums, for two neighbouring columns.
template <class Total>
__device__ inline void store_two(const ExpandParams& p, std::int64_t row, std::int64_t column,
                                 unsigned keep, const Total& total) {
  const std::int64_t at = row * p.out.row_stride + column * p.out.col_stride;
  const std::int64_t base_at = row * p.base.row_stride + column * p.base.col_stride;
  const float v0 = keep & 1u ? total(0) : 0.0f, v1 = keep & 2u ? total(1) : 0.0f;
  if (p.pairs_of_columns && column + 1 < p.columns) {
    if (p.out.dtype == DType::kFloat32) {
      float2 v = make_float2(v0, v1);
      if (p.base.data != nullptr) {
        const float2 b =
            *reinterpret_cast<const float2*>(static_cast<const float*>(p.base.data) + base_at);
        v = make_float2(b.x + v0, b.y + v1);
      }
      *reinterpret_cast<float2*>(static_cast<float*>(p.out.data) + at) = v;
      return;
    }
    const bool half = p.out.dtype == DType::kFloat16;
    float2 v = make_float2(v0, v1);
    if (p.base.data != nullptr) {
      const std::uint32_t word = *reinterpret_cast<const std::uint32_t*>(
          static_cast<const unsigned short*>(p.base.data) + base_at);
      const float2 b = half ? device::unpack2<__half>(word) : device::unpack2<__nv_bfloat16>(word);
      v = make_float2(b.x + v0, b.y + v1);
    }
    *reinterpret_cast<std::uint32_t*>(static_cast<unsigned short*>(p.out.data) + at) =
        half ? device::pack2<__half>(v.x, v.y) : device::pack2<__nv_bfloat16>(v.x, v.y);
    return;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (column + i >= p.columns) break;
    float v = i == 0 ? v0 : v1;
    if (p.base.data != nullptr) v = element(p.base, row, column + i) + v;
    device::store_from_float(p.out.data, p.out.dtype, at + i * p.out.col_stride, v);
  }
}

/// The sums of a warp's 32 rows and columns from `column` on, all of them there, as pairs of
/// float32, with the base added.
template <class Total>
__device__ __forceinline__ void store_pairs(const ExpandParams& p, const RowTile& rows,
                                            int warp_row, std::int64_t column, const Total& total) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  column += lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < kWarpRows / 8; ++i) {
    const int at = warp_row + 8 * i + lane / 4;
    const std::int64_t row = at < rows.count ? row_at(p.rows, rows.start + at) : -1;
    if (row < 0) continue;
    float2 v[kWarpColumns / 8];
    if (p.base.data != nullptr) {
      const float* from = static_cast<const float*>(p.base.data) + row * p.base.row_stride + column;
#pragma unroll
      for (int n = 0; n < kWarpColumns / 8; ++n) {
        v[n] = *reinterpret_cast<const float2*>(from + 8 * n);
      }
#pragma unroll
      for (int n = 0; n < kWarpColumns / 8; ++n) {
        v[n] = make_float2(v[n].x + total(i, n, 0), v[n].y + total(i, n, 1));
      }
    } else {
#pragma unroll
      for (int n = 0; n < kWarpColumns / 8; ++n) {
        v[n] = make_float2(total(i, n, 0), total(i, n, 1));
      }
    }
    float* to = static_cast<float*>(p.out.data) + row * p.out.row_stride + column;
#pragma unroll
    for (int n = 0; n < kWarpColumns / 8; ++n) *reinterpret_cast<float2*>(to + 8 * n) = v[n];
  }
}

__global__ void __launch_bounds__(kThreads, 2)
    expand_kernel(const __grid_constant__ ExpandParams p) {
  extern __shared__ __align__(128) char smem[];
  device::pdl_begin(false);
  const int column_tiles = static_cast<int>((p.columns + kTileColumns - 1) / kTileColumns);
  const int tile = static_cast<int>(blockIdx.x) / column_tiles;
  const RowTile rows = row_tile(p.rows, tile, kTileRows, true);
  if (rows.count == 0) return;
  const std::int64_t column =
      std::int64_t{static_cast<int>(blockIdx.x) % column_tiles} * kTileColumns;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int warp_row = warp / 2 * kWarpRows;
  int blocks = 0;  // of ranks
  for (int s = p.first_slice; rows.adapter >= 0 && s < p.first_slice + p.num_slices; ++s) {
    blocks += ceil_div(p.pairs.get(rows.adapter, s).rank, kBlockColumns);
  }
#pragma unroll 1
  for (int pass = 0; pass < kPasses; ++pass) {
    const int warp_column = (pass * 2 + warp % 2) * kWarpColumns;
    Sums<__nv_bfloat16, true> sums[2][kWarpColumns / 8];
    for (int s = p.first_slice; rows.adapter >= 0 && s < p.first_slice + p.num_slices; ++s) {
      const int rank = p.pairs.get(rows.adapter, s).rank;
      for (int first = 0; first < rank; first += kBlockColumns) {
        if (pass == 0 || blocks > 1) {
          __syncthreads();
          fetch_ranks(p, rows, s, first, column, smem);
          device::cp_async_commit();
          device::cp_async_wait<0>();
          __syncthreads();
        }
        const std::uint32_t hidden = device::smem_address(smem);
        const std::uint32_t weights = hidden + kPlanes * kHiddenBytes;
        const int steps = ceil_div(min(rank - first, kBlockColumns), 16);
        for (int k = 0; k < steps; ++k) {
          std::uint32_t a[2][kPlanes][4];
#pragma unroll
          for (int m = 0; m < 2; ++m) {
#pragma unroll
            for (int plane = 0; plane < kPlanes; ++plane) {
              load_a(a[m][plane], hidden + plane * kHiddenBytes, warp_row + 16 * m, k);
            }
          }
#pragma unroll
          for (int n = 0; n < kWarpColumns; n += 16) {
            std::uint32_t low[kPlanes][2], high[kPlanes][2];
#pragma unroll
            for (int plane = 0; plane < kPlanes; ++plane) {
              std::uint32_t b[4];
              const int c = warp_column + n;
              std::uint32_t block = weights + plane * kWeightBytes;
              if (p.weights.rows_are_ranks) {
                block += c / kBlockColumns * block_bytes(kBlockColumns);
                load_b(b, block, c % kBlockColumns, k, false);
              } else {
                load_b(b, block, c, k, true);
              }
              low[plane][0] = b[0];
              low[plane][1] = b[1];
              high[plane][0] = b[2];
              high[plane][1] = b[3];
            }
#pragma unroll
            for (int m = 0; m < 2; ++m) {
              sums[m][n / 8].add(a[m], low, p.h.parts, p.weights.parts);
              sums[m][n / 8 + 1].add(a[m], high, p.h.parts, p.weights.parts);
            }
          }
        }
      }
    }
    if (p.out.dtype == DType::kFloat32 && p.pairs_of_columns && !p.masked &&
        column + kTileColumns <= p.columns) {
      store_pairs(p, rows, warp_row, column + warp_column,
                  [&](int i, int n, int which) { return sums[i / 2][n].total(i % 2 * 2 + which); });
      continue;
    }
    std::uint32_t threshold = 0;
    for (int s = p.first_slice; p.masked && rows.adapter >= 0 && s < p.first_slice + p.num_slices;
         ++s) {
      const PairEntry pair = p.pairs.get(rows.adapter, s);
      if (pair.rank > 0) threshold = pair.threshold;
    }
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = warp_row + 16 * m + 8 * half + lane / 4;
        const std::int64_t row = at < rows.count ? row_at(p.rows, rows.start + at) : -1;
        if (row < 0) continue;
#pragma unroll
        for (int n = 0; n < kWarpColumns / 8; ++n) {
          const std::int64_t c = column + warp_column + 8 * n;
          if (c + lane % 4 * 2 >= p.columns) continue;
          unsigned keep = 3u;
          if (threshold != 0) keep = keep_piece(p.mask, threshold, row, c) >> (lane % 4 * 2);
          store_two(p, row, c + lane % 4 * 2, keep,
                    [&](int i) { return sums[m][n].total(2 * half + i); });
        }
      }
    }
  }
}

}  // namespace

void expand(const ExpandParams& p, Stream stream) {
  if (expand_float(p, stream)) return;
  device::Launch l;
  l.grid =
      dim3(static_cast<unsigned>(ceil_div<std::int64_t>(p.columns, kTileColumns) * p.max_tiles));
  l.threads = kThreads;
  l.smem = kSmem;
  l.stream = stream;
  l.pdl = true;
  device::launch<expand_kernel>("lora_train", l, p);
}

}  // namespace mortar::lora::train::cuda
