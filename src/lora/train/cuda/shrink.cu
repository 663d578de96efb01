// SPDX-License-Identifier: Apache-2.0
// h = drop(x) A^T and ds = dy B, as split-K partials: [M, C] by [C, R] for small R.
//
// Operands of any strides and dtypes; shrink_stream.cu and shrink_float.cu are faster where they
// can be used, and have the same bits.
//
// Bytes: M C + R C (per 128 rows, from L2) + 4 parts M R, in elements of x. With M = 8192,
// C = 4096, R = 16 that is 67 MB, 15.7 us at 4.28 TB/s. Above 32 rank columns x is read again for
// every 32, mostly from L2.
//
// A thread block has 128 rows, up to 32 rank columns and some leaves of the columns, which pass in
// blocks of 64 through a ring of four stages. A warp has 16 rows; its sums are one chain over a
// leaf, and leaves are added by the tree of LeafSums.
#include <type_traits>

#include "core/check.h"
#include "device/dtype_visitor.cuh"
#include "device/launch.cuh"
#include "device/leaf_sums.cuh"
#include "lora/train/cuda/kernels.cuh"
#include "lora/train/cuda/shrink_tile.cuh"
#include "lora/train/cuda/stream.cuh"
#include "lora/train/cuda/tiles.cuh"

namespace mortar::lora::train::cuda {
namespace {

using device::cp_async_commit;
using device::cp_async_wait;

constexpr int kLevels = 2;  ///< of the tree of leaves: a thread block has half of them at most

template <bool kSplit, int kRanks>
struct ShrinkTile {
  static constexpr int kPlanes = kSplit ? 3 : 1;
  static constexpr int kDepth = kSplit ? 1 : kStages;
  static constexpr int kWideBytes = block_bytes(kTileRows);
  static constexpr int kWeightBytes = block_bytes(kBlockColumns);  // 64 ranks or 64 columns
  static constexpr int kStageBytes = kPlanes * (kWideBytes + kWeightBytes);
  static constexpr int kSmem = kDepth * kStageBytes;
  static constexpr int kPiecesPerThread = kTileRows * kRowPieces / kThreads;
};

/// Thread blocks of an SM. Before sm_90 it has memory for one with several stages.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
template <bool kSplit>
constexpr int kBlocks = kSplit ? 2 : 1;
#else
template <bool kSplit>
constexpr int kBlocks = 2;
#endif

template <bool kSplit, int kRanks>
__global__ void __launch_bounds__(kThreads, kBlocks<kSplit>)
    shrink_kernel(const __grid_constant__ ShrinkParams p) {
  using Tile = ShrinkTile<kSplit, kRanks>;
  using DTypes = std::conditional_t<kSplit, DTypeList<DType::kBFloat16>, Float16DTypes>;
  const DType dtype = kSplit ? DType::kBFloat16 : p.wide.m.dtype;  // that is multiplied
  extern __shared__ __align__(128) char smem[];
  __shared__ Pairs pairs;
  __shared__ int row_of[kTileRows];
  const RowTile rows = row_tile(p.rows, static_cast<int>(blockIdx.x), kTileRows, false);
  if (rows.count == 0) return;
  pairs.fill(p.pairs, rows.adapter, p.first_slice, p.num_slices);
  for (int i = threadIdx.x; i < kTileRows; i += kThreads) {
    row_of[i] = i < rows.count ? static_cast<int>(row_at(p.rows, rows.start + i)) : -1;
  }
  __syncthreads();
  const int part = blockIdx.y, first_rank = static_cast<int>(blockIdx.z) * kRanks;
  const int leaves = p.part_leaves;
  const std::int64_t begin = part * leaves * p.plan.leaf;
  const std::int64_t end = max(begin, min(begin + leaves * p.plan.leaf, p.columns));
  const int steps = static_cast<int>((end - begin + kBlockColumns - 1) / kBlockColumns);
  const int piece = threadIdx.x % kRowPieces;

  const std::uint32_t threshold = p.masked ? pairs.threshold(p.first_slice, p.num_slices) : 0;
  const auto place_of = [&](int i) {
    return static_cast<int>(threadIdx.x) / kRowPieces + i * (kThreads / kRowPieces);
  };
  const auto wide_at = [&](int i) { return piece_at(place_of(i), piece); };

  const auto fetch = [&](int step) {
    char* stage = smem + step % Tile::kDepth * Tile::kStageBytes;
    const std::int64_t c = begin + std::int64_t{step} * kBlockColumns;
#pragma unroll
    for (int i = 0; i < Tile::kPiecesPerThread; ++i) {
      const int row = row_of[place_of(i)];
      unsigned keep = 0xffu;
      if (threshold != 0 && row >= 0 && (kSplit || !p.wide.async)) {
        keep = keep_piece(p.mask, threshold, row, c + piece * kPiece);
      }
      fetch_piece<kSplit>(p.wide, row, c + piece * kPiece, end, keep, stage + wide_at(i),
                          Tile::kWideBytes);
    }
    char* weights = stage + Tile::kPlanes * Tile::kWideBytes;
    fetch_weights<kSplit, kRanks, kBlockColumns>(
        p, pairs, first_rank, c, end, Tile::kWeightBytes,
        [&](int at, int own) { return weights + piece_at(at, own); });
    cp_async_commit();
  };

  // Rank columns that no pair has hold zeros throughout.
  constexpr int kWords = Tile::kPlanes * Tile::kWeightBytes / 16;
  for (int i = threadIdx.x; i < Tile::kDepth * kWords; i += kThreads) {
    char* stage = smem + i / kWords * Tile::kStageBytes + Tile::kPlanes * Tile::kWideBytes;
    reinterpret_cast<uint4*>(stage)[i % kWords] = make_uint4(0, 0, 0, 0);
  }
  __syncthreads();

  const int warp_row = static_cast<int>(threadIdx.x) / 32 * 16;
  device::LeafSums<kRanks / 2, kLevels> tree;
  float sum[kRanks / 2];
#pragma unroll 1
  for (int step = 0; step < Tile::kDepth - 1; ++step) {
    if (step < steps) {
      fetch(step);
    } else {
      cp_async_commit();
    }
  }
  const int leaf_steps = static_cast<int>(p.plan.leaf / kBlockColumns);
  int step = 0;
#pragma unroll 1
  for (int leaf = 0; leaf < leaves; ++leaf) {
    Sums<__nv_bfloat16, kSplit> sums[kRanks / 8];
    const int leaf_end = min(steps, (leaf + 1) * leaf_steps);
    for (; step < leaf_end; ++step) {
      if constexpr (Tile::kDepth == 1) {
        __syncthreads();
        fetch(step);
      }
      cp_async_wait<Tile::kDepth == 1 ? 0 : Tile::kDepth - 2>();
      char* stage = smem + step % Tile::kDepth * Tile::kStageBytes;
      if (!kSplit && threshold != 0 && p.wide.async) {
        const std::int64_t c = begin + std::int64_t{step} * kBlockColumns + piece * kPiece;
#pragma unroll
        for (int i = 0; i < Tile::kPiecesPerThread; ++i) {
          const int row = row_of[place_of(i)];
          if (row < 0 || c >= end) continue;
          drop_in_place(stage + wide_at(i), keep_piece(p.mask, threshold, row, c));
        }
      }
      __syncthreads();
      if constexpr (Tile::kDepth > 1) {
        if (step + Tile::kDepth - 1 < steps) {
          fetch(step + Tile::kDepth - 1);
        } else {
          cp_async_commit();
        }
      }
      const std::uint32_t wide = device::smem_address(stage);
      const std::uint32_t weights = wide + Tile::kPlanes * Tile::kWideBytes;
      device::visit_checked_dtype(DTypes(), dtype, [&](auto type) {
        using T = typename decltype(type)::type;
#pragma unroll
        for (int k = 0; k < kBlockColumns / 16; ++k) {
          std::uint32_t a[Tile::kPlanes][4];
#pragma unroll
          for (int plane = 0; plane < Tile::kPlanes; ++plane) {
            load_a(a[plane], wide + plane * Tile::kWideBytes, warp_row, k);
          }
#pragma unroll
          for (int n = 0; n < kRanks; n += 16) {
            std::uint32_t low[Tile::kPlanes][2], high[Tile::kPlanes][2];
#pragma unroll
            for (int plane = 0; plane < Tile::kPlanes; ++plane) {
              std::uint32_t b[4];
              load_b(b, weights + plane * Tile::kWeightBytes, n, k, p.weights.rows_are_ranks);
              low[plane][0] = b[0];
              low[plane][1] = b[1];
              high[plane][0] = b[2];
              high[plane][1] = b[3];
            }
            if constexpr (kSplit) {
              sums[n / 8].add(a, low, p.wide.parts, p.weights.parts);
              sums[n / 8 + 1].add(a, high, p.wide.parts, p.weights.parts);
            } else {
              device::mma_16816<T>(sums[n / 8].sum, a[0], low[0][0], low[0][1]);
              device::mma_16816<T>(sums[n / 8 + 1].sum, a[0], high[0][0], high[0][1]);
            }
          }
        }
      });
    }
#pragma unroll
    for (int i = 0; i < kRanks / 2; ++i) sum[i] = sums[i / 4].total(i % 4);
    tree.add(leaf, sum);
  }

  store_partials<kRanks>(p, rows, part, first_rank, warp_row + threadIdx.x % 32 / 4, sum);
}

template <bool kSplit, int kRanks>
void launch_shrink(const ShrinkParams& p, Stream stream) {
  device::Launch l;
  l.grid = dim3(static_cast<unsigned>(p.max_tiles), p.plan.parts, ceil_div(p.width, kRanks));
  l.threads = kThreads;
  l.smem = ShrinkTile<kSplit, kRanks>::kSmem;
  l.stream = stream;
  device::launch<shrink_kernel<kSplit, kRanks>>("lora_train", l, p);
}

}  // namespace

void shrink(const ShrinkParams& p, Policy policy, Stream stream) {
  // Of 16 ranks half of a tile is zeros; copies bind it.
  if (policy != Policy::kSplit) return launch_shrink<false, 32>(p, stream);
  if (shrink_float(p, stream)) return;
  p.plan.ranks == 16 ? launch_shrink<true, 16>(p, stream) : launch_shrink<true, 32>(p, stream);
}

}  // namespace mortar::lora::train::cuda
