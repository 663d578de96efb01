// SPDX-License-Identifier: Apache-2.0
// y = base + h B^T and dx = ds A for more than 128 ranks, weights of one 16-bit type.
//
// y[m, n] = base[m, n] + sum_j h[m, j] W[j, n]        j ranks of all slices, in one chain
// bytes  = 2 M N (twice with a base) + 2 R N + 2 M R, the last two from L2: (1 / 128 + 1 / 256) of
//          2 M N R
// FLOP   = 2 M N R: 29 us at M = N = 4096, R = 512 at the 600 TFLOP/s of mma.sync
// limit  : tensor cores, and L2 beside them
// wrong  : up to 128 ranks the weights fit the registers (expand_stream.cu)
//
// A thread block makes 128 rows by 256 columns, a warp 64 by 64. Ranks pass in steps of 64 through
// a ring of four stages filled by cp.async. Rows of the weights' tile are columns in the order of
// real_column(), where ranks are dense; where columns are, each lane gets two neighbouring columns
// of a tile, and the lanes of a quad trade them for eight.
#include "core/check.h"
#include "device/convert.cuh"
#include "device/launch.cuh"
#include "device/mma.cuh"
#include "device/pdl.cuh"
#include "lora/cuda/backend.cuh"
#include "lora/cuda/store_sums.cuh"
#include "lora/train/cuda/expand_store.cuh"
#include "lora/train/cuda/kernels.cuh"
#include "lora/train/cuda/stream.cuh"
#include "lora/train/cuda/tiles.cuh"

namespace mortar::lora::train::cuda {
namespace {

constexpr int kRows = kTileRows, kColumns = kWideColumns;
constexpr int kWarpRows = 64, kWarpColumns = 64, kWarpsM = kRows / kWarpRows;
constexpr int kFragsM = kWarpRows / 16, kGroups = kWarpColumns / 32;
constexpr int kStepRanks = kBlockColumns;
constexpr int kHiddenBytes = block_bytes(kRows);
constexpr int kStageBytes = kHiddenBytes + block_bytes(kColumns);
constexpr int kWideStages = 4;
constexpr int kSmem = kWideStages * kStageBytes;
constexpr int kRowStep = kThreads / kRowPieces;  ///< rows of 8 pieces that the block copies at once
static_assert(kThreads == 32 * kWarpsM * (kColumns / kWarpColumns), "a warp has one tile");

/// Byte offset of a piece of a rank in a tile whose rows are ranks of kColumns columns.
__device__ __forceinline__ int rank_row_at(int rank, int piece) {
  return rank * kColumns * 2 + ((piece ^ (rank & 7)) << 4);
}

/// Column j of h: the pair's weights, turned to [column, rank] and beginning there, and how many
/// ranks of the next 8 it has.
__device__ __forceinline__ int find_ranks(const ExpandParams& p, const Pairs& pairs, int j,
                                          Matrix* m) {
  if (j >= p.width) return 0;
  const int s = slice_of(p.hidden, p.first_slice, p.num_slices, p.first_hidden + j);
  const PairEntry& pair = pairs.slice(s);
  const int first = p.first_hidden + j - p.hidden.first[s];
  *m = p.side == Side::kB ? pair.b
                          : Matrix{pair.a.data, pair.a.col_stride, pair.a.row_stride, pair.a.dtype};
  m->data = static_cast<unsigned short*>(m->data) + first * m->col_stride;
  return min(pair.rank - first, 8);
}

/// Eight elements in the given stride, of which the first `count` are there.
__device__ __forceinline__ uint4 gather_eight(const unsigned short* from, std::int64_t stride,
                                              int count) {
  std::uint32_t word[4];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const std::uint32_t v = i < count ? __ldcg(from + i * stride) : 0;
    word[i / 2] = i % 2 == 0 ? v : word[i / 2] | v << 16;
  }
  return make_uint4(word[0], word[1], word[2], word[3]);
}

/// Copies the weights of ranks [first, first + 64) for the tile's columns.
__device__ __forceinline__ void copy_weights(const ExpandParams& p, const Pairs& pairs,
                                             bool by_ranks, int first, std::int64_t column,
                                             char* to) {
  const void* nothing = p.h.m.data;
  if (by_ranks) {
    constexpr int kPieces = kColumns / 8;
    const int piece = threadIdx.x % kPieces;
    const std::int64_t c = column + 8 * piece;
    const int bytes =
        static_cast<int>(max(std::int64_t{0}, min(2 * (p.columns - c), std::int64_t{16})));
#pragma unroll
    for (int octet = 0; octet < kStepRanks / 8; ++octet) {
      static_assert(kThreads / kPieces == 8, "a copy of the block is 8 ranks");
      const int own = threadIdx.x / kPieces;
      Matrix m{};
      const bool there = own < find_ranks(p, pairs, first + 8 * octet, &m) && bytes > 0;
      const auto* from = static_cast<const unsigned short*>(m.data) + own * m.col_stride + c;
      device::cp_async_16(device::smem_address(to) + rank_row_at(8 * octet + own, piece),
                          there ? from : nothing, there ? bytes : 0);
    }
    return;
  }
  const int piece = threadIdx.x % kRowPieces;
  Matrix m{};
  const int ranks = find_ranks(p, pairs, first + 8 * piece, &m);
#pragma unroll
  for (int i = 0; i < kColumns / kRowStep; ++i) {
    const int n = static_cast<int>(threadIdx.x) / kRowPieces + i * kRowStep;
    const bool there = ranks > 0 && column + n < p.columns;
    const auto* from = static_cast<const unsigned short*>(m.data) + (column + n) * m.row_stride;
    char* at = to + piece_at(place_of_column(n), piece);
    if (p.weights.async || !there) {
      device::cp_async_16(device::smem_address(at), there ? from : nothing, there ? 2 * ranks : 0);
    } else {
      *reinterpret_cast<uint4*>(at) = gather_eight(from, m.col_stride, ranks);
    }
  }
}

/// Fragments b of two tiles of 8 columns, n from the warp's first, for a step of 16 ranks.
__device__ __forceinline__ void load_weights(std::uint32_t (&b)[4], std::uint32_t tile, int n,
                                             int step, bool by_ranks) {
  const int lane = threadIdx.x % 32, matrix = lane / 8;
  if (by_ranks) {
    const int rank = 16 * step + lane % 8 + matrix % 2 * 8;
    device::ldmatrix_x4_transposed(b, tile + rank_row_at(rank, n / 8 + matrix / 2));
  } else {
    device::ldmatrix_x4(b, tile + piece_at(n + lane % 8 + matrix / 2 * 8, 2 * step + matrix % 2));
  }
}

/// From two neighbouring columns of each of four tiles to eight neighbouring columns.
__device__ __forceinline__ void trade_columns(float (&sum)[4][4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    std::uint32_t word[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) word[j] = __float_as_uint(sum[j][i]);
    lora::cuda::transpose_quad(word);
#pragma unroll
    for (int j = 0; j < 4; ++j) sum[j][i] = __uint_as_float(word[j]);
  }
}

__global__ void __launch_bounds__(kThreads, 1)
    expand_wide_kernel(const __grid_constant__ ExpandParams p) {
  extern __shared__ __align__(1024) char smem[];
  __shared__ Pairs pairs;
  __shared__ Draws draws;
  __shared__ int row_of[kRows];
  device::pdl_begin(false);

  // Coordinates and guard
  const int panel = static_cast<int>(blockIdx.x) % p.plan.panels;
  const RowTile rows = row_tile(p.rows, static_cast<int>(blockIdx.x) / p.plan.panels, kRows, true);
  if (rows.count == 0) return;
  const std::int64_t column = std::int64_t{panel} * kColumns;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int warp_row = warp % kWarpsM * kWarpRows, warp_column = warp / kWarpsM * kWarpColumns;

  // Pointers
  for (int i = threadIdx.x; i < kRows; i += kThreads) {
    row_of[i] = i < rows.count ? static_cast<int>(row_at(p.rows, rows.start + i)) : -1;
  }
  if (p.masked && threadIdx.x == 0 && p.mask.rng != nullptr) draws.read(p.mask.rng);
  if (rows.adapter >= 0) pairs.fill(p.pairs, rows.adapter, p.first_slice, p.num_slices);
  __syncthreads();
  int ranks = 0;
  std::uint32_t threshold = 0;
  if (rows.adapter >= 0) {
    for (int s = p.first_slice; s < p.first_slice + p.num_slices; ++s) {
      const int rank = pairs.slice(s).rank;
      if (rank > 0) ranks = p.hidden.first[s] - p.first_hidden + rank;
    }
    if (p.masked) threshold = pairs.threshold(p.first_slice, p.num_slices);
  }
  const int steps = (ranks + kStepRanks - 1) / kStepRanks;
  const bool by_ranks = p.weights.async && p.weights.rows_are_ranks;

  // Load
  const auto load = [&](int step) {
    if (step < steps) {
      char* stage = smem + step % kWideStages * kStageBytes;
      const int piece = threadIdx.x % kRowPieces, j = step * kStepRanks + 8 * piece;
#pragma unroll
      for (int i = 0; i < kRows / kRowStep; ++i) {
        const int at = static_cast<int>(threadIdx.x) / kRowPieces + i * kRowStep, row = row_of[at];
        const bool there = row >= 0 && j < p.width;
        const auto* from = static_cast<const unsigned short*>(p.h.m.data);
        if (there) from += row * p.h.m.row_stride + p.first_hidden + j;
        device::cp_async_16(device::smem_address(stage) + piece_at(at, piece), from,
                            there ? 16 : 0);
      }
      copy_weights(p, pairs, by_ranks, step * kStepRanks, column, stage + kHiddenBytes);
    }
    device::cp_async_commit();
  };
#pragma unroll 1
  for (int step = 0; step < kWideStages - 1; ++step) load(step);

  // Compute
  float sum[kFragsM][kGroups][4][4] = {};
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    device::cp_async_wait<kWideStages - 2>();
    __syncthreads();
    load(step + kWideStages - 1);
    const std::uint32_t hidden = device::smem_address(smem + step % kWideStages * kStageBytes);
    const int live = min((ranks - step * kStepRanks + 15) / 16, kStepRanks / 16);
    device::visit_checked_dtype(Float16DTypes(), p.h.m.dtype, [&](auto type) {
      using T = typename decltype(type)::type;
#pragma unroll
      for (int k = 0; k < kStepRanks / 16; ++k) {
        if (k >= live) break;
        std::uint32_t a[kFragsM][4];
#pragma unroll
        for (int m = 0; m < kFragsM; ++m) load_a(a[m], hidden, warp_row + 16 * m, k);
#pragma unroll
        for (int n = 0; n < kWarpColumns; n += 16) {
          std::uint32_t b[4];
          load_weights(b, hidden + kHiddenBytes, warp_column + n, k, by_ranks);
#pragma unroll
          for (int m = 0; m < kFragsM; ++m) {
            device::mma_16816<T>(sum[m][n / 32][n % 32 / 8], a[m], b[0], b[1]);
            device::mma_16816<T>(sum[m][n / 32][n % 32 / 8 + 1], a[m], b[2], b[3]);
          }
        }
      }
    });
  }
  device::cp_async_wait<0>();
  __syncthreads();

  // Store
  const std::int64_t first_column = column + warp_column;
  const bool vectors = p.vectors && first_column + kWarpColumns <= p.columns;
  auto* own = reinterpret_cast<float*>(smem) + warp * kUnitRows * kWarpColumns;
#pragma unroll
  for (int m = 0; m < kFragsM; ++m) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      if (by_ranks) trade_columns(sum[m][g]);
      if (!vectors) {
        put_sums(own + 32 * g, kWarpColumns, sum[m][g]);
        continue;
      }
      const std::int64_t c = first_column + 32 * g + lane % 4 * 8;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const std::int64_t row = row_of[warp_row + 16 * m + 8 * half + lane / 4];
        if (row < 0) continue;
        float v[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = sum[m][g][i / 2][2 * half + i % 2];
        if (threshold != 0) drop_eight(p.mask, draws, threshold, static_cast<int>(row), c, v);
        if (p.base.data != nullptr) {
          const auto* base = static_cast<const unsigned short*>(p.base.data);
          add_eight(p.h.m.dtype,
                    __ldcg(reinterpret_cast<const uint4*>(base + row * p.base.row_stride + c)), v);
        }
        auto* to = static_cast<unsigned short*>(p.out.data) + row * p.out.row_stride + c;
        __stcs(reinterpret_cast<uint4*>(to), pack_eight(p.h.m.dtype, v));
      }
    }
    if (vectors) continue;
    __syncwarp();
    store_any<kWarpColumns>(p, row_of + warp_row + 16 * m, first_column, own, threshold, &draws);
    __syncwarp();
  }
}

}  // namespace

void expand_wide(const ExpandParams& p, Policy policy, Stream stream) {
  check(policy != Policy::kSplit && p.plan.tile_rows == kRows,
        "lora_train: no wide expand for these weights");
  device::Launch l;
  l.grid = dim3(static_cast<unsigned>(p.plan.panels * p.max_tiles));
  l.threads = kThreads;
  l.smem = kSmem;
  l.stream = stream;
  l.pdl = true;
  device::launch<expand_wide_kernel>("lora_train", l, p);
}

}  // namespace mortar::lora::train::cuda
