// SPDX-License-Identifier: Apache-2.0
// dA = ds^T drop(x) and dB^T = h^T dy as partial sums over chunks of rows, for operands that are
// multiplied as sums of bfloat16 parts; those of one 16-bit type go through panel.cu.
//
// Bytes, of float32: 4 M C + 4 M R (per 128 columns, from L2) + 4 (M / chunk) R C. With M = 8192,
// C = 4096, R = 16 that is 134 MB, 31.4 us at 4.28 TB/s; six products of parts and the splitting
// bind it before memory does.
//
// A thread block has 128 columns, up to 32 ranks and one chunk of one adapter's rows, in steps of
// 64. Both operands lie as rows of the MMA's k and come by ldmatrix.trans. A warp has 16 columns;
// its sums are one chain over the chunk's rows in order.
#include "core/check.h"
#include "device/launch.cuh"
#include "lora/train/cuda/kernels.cuh"
#include "lora/train/cuda/outer_store.cuh"

namespace mortar::lora::train::cuda {
namespace {

struct OuterTile {
  static constexpr int kPlanes = 3;
  static constexpr int kBlockBytes = block_bytes(kStepRows);
  static constexpr int kWideBytes = kTileColumns / kBlockColumns * kBlockBytes;
  static constexpr int kSmem = kPlanes * (kWideBytes + kBlockBytes);
  static constexpr int kRowPiecesWide = kTileColumns / kPiece;
  static constexpr int kPiecesPerThread = kStepRows * kRowPiecesWide / kThreads;
  static constexpr int kRowStep = kThreads / kRowPiecesWide;
};

template <int kRanks>
__global__ void __launch_bounds__(kThreads, 2) outer_kernel(const __grid_constant__ OuterParams p) {
  using Tile = OuterTile;
  extern __shared__ __align__(128) char smem[];
  const int slot = blockIdx.y;
  const RowTile rows = row_tile(p.rows, slot, p.chunk_rows, false);
  if (rows.count == 0) return;
  const std::int64_t column = std::int64_t{blockIdx.x} * kTileColumns;
  const int first_rank = static_cast<int>(blockIdx.z) * kRanks;
  const int steps = (rows.count + kStepRows - 1) / kStepRows;
  const int piece = static_cast<int>(threadIdx.x) % Tile::kRowPiecesWide;
  const int first_row = static_cast<int>(threadIdx.x) / Tile::kRowPiecesWide;
  const std::int64_t c = column + piece * kPiece;
  std::uint32_t threshold = 0;
  for (int s = 0; p.masked && s < p.pairs.num_slices; ++s) {
    const PairEntry pair = p.pairs.get(rows.adapter, s);
    if (pair.rank > 0) threshold = pair.threshold;
  }
  const auto wide_at = [&](int i) {
    return piece / kRowPieces * Tile::kBlockBytes +
           piece_at(first_row + i * Tile::kRowStep, piece % kRowPieces);
  };
  const auto row_of = [&](int step, int i) {
    const int at = step * kStepRows + first_row + i * Tile::kRowStep;
    return at < rows.count ? row_at(p.rows, rows.start + at) : std::int64_t{-1};
  };

  const auto fetch = [&](int step) {
#pragma unroll
    for (int i = 0; i < Tile::kPiecesPerThread; ++i) {
      const std::int64_t row = row_of(step, i);
      unsigned keep = 0xffu;
      if (threshold != 0 && row >= 0) keep = keep_piece(p.mask, threshold, row, c);
      fetch_piece<true>(p.wide, row, c, p.columns, keep, smem + wide_at(i), Tile::kWideBytes);
    }
    char* narrow = smem + Tile::kPlanes * Tile::kWideBytes;
    for (int i = threadIdx.x; i < kStepRows * (kRanks / kPiece); i += kThreads) {
      const int at = i / (kRanks / kPiece), own = i % (kRanks / kPiece);
      const int position = step * kStepRows + at;
      const std::int64_t row =
          position < rows.count ? row_at(p.rows, rows.start + position) : std::int64_t{-1};
      fetch_piece<true>(p.s, row, p.first_hidden + first_rank + own * kPiece,
                        p.first_hidden + p.width, 0xffu, narrow + piece_at(at, own),
                        Tile::kBlockBytes);
    }
  };

  const int warp_column = static_cast<int>(threadIdx.x) / 32 * 16;
  Sums<__nv_bfloat16, true> sums[kRanks / 8];
  for (int step = 0; step < steps; ++step) {
    __syncthreads();
    fetch(step);
    __syncthreads();
    const std::uint32_t wide =
        device::smem_address(smem) + warp_column / kBlockColumns * Tile::kBlockBytes;
    const std::uint32_t narrow = device::smem_address(smem) + Tile::kPlanes * Tile::kWideBytes;
#pragma unroll
    for (int k = 0; k < kStepRows / 16; ++k) {
      std::uint32_t a[Tile::kPlanes][4];
#pragma unroll
      for (int plane = 0; plane < Tile::kPlanes; ++plane) {
        load_a_transposed(a[plane], wide + plane * Tile::kWideBytes, warp_column % kBlockColumns,
                          k);
      }
#pragma unroll
      for (int n = 0; n < kRanks; n += 16) {
        std::uint32_t low[Tile::kPlanes][2], high[Tile::kPlanes][2];
#pragma unroll
        for (int plane = 0; plane < Tile::kPlanes; ++plane) {
          std::uint32_t b[4];
          load_b(b, narrow + plane * Tile::kBlockBytes, n, k, false);
          low[plane][0] = b[0];
          low[plane][1] = b[1];
          high[plane][0] = b[2];
          high[plane][1] = b[3];
        }
        sums[n / 8].add(a, low, p.wide.parts, p.s.parts);
        sums[n / 8 + 1].add(a, high, p.wide.parts, p.s.parts);
      }
    }
  }

  store_outer<kRanks>(p, slot, column + warp_column, first_rank, sums);
}

template <int kRanks>
void launch_outer(const OuterParams& p, Stream stream) {
  device::Launch l;
  l.grid = dim3(static_cast<unsigned>(ceil_div<std::int64_t>(p.columns, kTileColumns)),
                static_cast<unsigned>(p.max_tiles), ceil_div(p.width, kRanks));
  l.threads = kThreads;
  l.smem = OuterTile::kSmem;
  l.stream = stream;
  device::launch<outer_kernel<kRanks>>("lora_train", l, p);
}

}  // namespace

void outer(const OuterParams& p, Stream stream) {
  if (outer_float(p, stream)) return;
  p.ranks == 16 ? launch_outer<16>(p, stream) : launch_outer<32>(p, stream);
}

}  // namespace mortar::lora::train::cuda
