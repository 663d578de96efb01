// SPDX-License-Identifier: Apache-2.0
// y = base + h B^T and dx = ds A for up to 128 ranks, weights of one 16-bit type: a stream of rows.
//
// y[m, n] = base[m, n] + sum_j h[m, j] W[j, n]        j ranks of all slices, in one chain
// bytes  = 2 M N (twice with a base) + 2 R N + 2 M R, of which the last two come from L2
// FLOP   = 2 M N R: never the limit up to R = 128
// 8192 rows, N = 14336, R = 16: 235 MB, 55 us at 4.28 TB/s
// limit  : DRAM
// wrong  : more than 128 ranks (the weights no longer fit the registers)
//
// A warp keeps the weights of 64 columns (32 above rank 64) in registers for as long as its thread
// block lives and walks over the rows of a tile, 16 at a time. Columns: inside groups of 32, MMA
// fragment j takes columns 8 a + 2 j + b, so that a lane's results are 8 neighbouring columns, 16
// bytes. h passes through two stages of shared memory, the base through a ring of four pieces for
// each warp, whose threads read back what they copied themselves. Weights of any strides are
// fetched before the predecessor's end is awaited.
#include <algorithm>

#include "core/check.h"
#include "device/convert.cuh"
#include "device/launch.cuh"
#include "device/mma.cuh"
#include "device/pdl.cuh"
#include "lora/train/cuda/expand_store.cuh"
#include "lora/train/cuda/kernels.cuh"
#include "lora/train/cuda/stream.cuh"
#include "lora/train/cuda/tiles.cuh"

namespace mortar::lora::train::cuda {
namespace {

constexpr int kWarps = kThreads / 32;
constexpr int kUnits = 4;       ///< units of a warp in a step, which is a stage of h
constexpr int kBaseStages = 4;  ///< units of base in the ring

template <int kRanks>
struct Shape {
  static constexpr int kSteps = kRanks / 16;
  static constexpr int kGroups = expand_warp_columns(kRanks) / 32;
  static constexpr int kColumns = 32 * kGroups;
  static constexpr int kWeightBytes = kColumns * kRanks * 2;
  static constexpr int kUnitBytes = kUnitRows * kColumns * 2;
  /// A warp's memory: its weights on their way to registers, then its ring of base.
  static constexpr int kWarpBytes = std::max(kWeightBytes, kBaseStages* kUnitBytes);
  static_assert(kWarpBytes >= 2 * kUnitBytes, "float32 sums of a unit fit, where they are stored");
  static constexpr int stage_rows(int row_warps) { return kUnits * kUnitRows * row_warps; }
  static constexpr int smem(int row_warps) {
    return kWarps * kWarpBytes + 2 * stage_rows(row_warps) * (kRanks * 2 + 4);
  }
};

/// Weights of the warp's columns as fragments of the MMA: [group][step][tile].
template <class T, int kRanks>
struct Weights {
  using S = Shape<kRanks>;
  std::uint32_t b[S::kGroups][S::kSteps][4][2];

  __device__ __forceinline__ void load(const ExpandParams& p, const Pairs& pairs,
                                       std::int64_t column, char* smem) {
    const bool by_ranks = p.weights.async && p.weights.rows_are_ranks;
    by_ranks ? fetch_ranks(p, pairs, column, smem) : fetch_columns(p, pairs, column, smem);
    device::cp_async_commit();
    device::cp_async_wait<0>();
    __syncwarp();
    by_ranks ? take_ranks(smem) : take_columns(smem);
    __syncwarp();
  }

 private:
  static constexpr int kLogColumns = S::kColumns == 64 ? 3 : 2;  ///< pieces of a row of ranks

  /// Column `j` of h: the pair, whose weights are turned to [column, rank] and begin there, and how
  /// many ranks of the next 8 it has.
  __device__ __forceinline__ static int find(const ExpandParams& p, const Pairs& pairs, int j,
                                             Matrix* m) {
    if (j >= p.width) return 0;
    const int s = slice_of(p.hidden, p.first_slice, p.num_slices, p.first_hidden + j);
    const PairEntry& pair = pairs.slice(s);
    const int first = p.first_hidden + j - p.hidden.first[s];
    *m = p.side == Side::kB
             ? pair.b
             : Matrix{pair.a.data, pair.a.col_stride, pair.a.row_stride, pair.a.dtype};
    m->data = static_cast<unsigned short*>(m->data) + first * m->col_stride;
    return min(pair.rank - first, 8);
  }

  /// smem[place_of_column()][j] from weights of any strides.
  __device__ __forceinline__ static void fetch_columns(const ExpandParams& p, const Pairs& pairs,
                                                       std::int64_t column, char* smem) {
    constexpr int kPieces = kRanks / 8;
    const int piece = threadIdx.x % kPieces;
    Matrix m{};
    const int ranks = find(p, pairs, 8 * piece, &m);
    for (int n = threadIdx.x % 32 / kPieces; n < S::kColumns; n += 32 / kPieces) {
      char* to = smem + rank_piece_at<kRanks>(place_of_column(n), piece);
      const bool there = column + n < p.columns && ranks > 0;
      const auto* from = static_cast<const unsigned short*>(there ? m.data : p.h.m.data);
      if (there) from += (column + n) * m.row_stride;
      if (p.weights.async || !there) {
        device::cp_async_16(device::smem_address(to), from, there ? 2 * ranks : 0);
        continue;
      }
      std::uint32_t word[4];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const std::uint32_t v = i < ranks ? __ldcg(from + i * m.col_stride) : 0;
        word[i / 2] = i % 2 == 0 ? v : word[i / 2] | v << 16;
      }
      *reinterpret_cast<uint4*>(to) = make_uint4(word[0], word[1], word[2], word[3]);
    }
  }
  __device__ __forceinline__ void take_columns(const char* smem) {
    const int lane = threadIdx.x % 32, matrix = lane / 8;
#pragma unroll
    for (int g = 0; g < S::kGroups; ++g) {
#pragma unroll
      for (int k = 0; k < S::kSteps; ++k) {
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
          const int n = 32 * g + 8 * (j + matrix / 2) + lane % 8;
          std::uint32_t r[4];
          device::ldmatrix_x4(
              r, device::smem_address(smem) + rank_piece_at<kRanks>(n, 2 * k + matrix % 2));
          b[g][k][j][0] = r[0];
          b[g][k][j][1] = r[1];
          b[g][k][j + 1][0] = r[2];
          b[g][k][j + 1][1] = r[3];
        }
      }
    }
  }

  /// smem[j][column] from weights whose columns are dense.
  __device__ __forceinline__ static int rank_row_at(int j, int piece) {
    return j * S::kColumns * 2 + ((piece ^ device::swizzle<kLogColumns>(j)) << 4);
  }
  __device__ __forceinline__ static void fetch_ranks(const ExpandParams& p, const Pairs& pairs,
                                                     std::int64_t column, char* smem) {
    constexpr int kPieces = S::kColumns / 8, kRows = 32 / kPieces;
    const int piece = threadIdx.x % kPieces;
    const std::int64_t c = column + 8 * piece;
    for (int first = 0; first < kRanks; first += 8) {
      Matrix m{};
      const int ranks = find(p, pairs, first, &m);
#pragma unroll
      for (int j = threadIdx.x % 32 / kPieces; j < 8; j += kRows) {
        const bool there = j < ranks && c < p.columns;
        const auto* from = static_cast<const unsigned short*>(there ? m.data : p.h.m.data);
        if (there) from += j * m.col_stride + c;
        device::cp_async_16(device::smem_address(smem) + rank_row_at(first + j, piece), from,
                            there ? static_cast<int>(2 * min(p.columns - c, std::int64_t{8})) : 0);
      }
    }
  }
  __device__ __forceinline__ void take_ranks(const char* smem) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int g = 0; g < S::kGroups; ++g) {
#pragma unroll
      for (int k = 0; k < S::kSteps; ++k) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int n = 32 * g + real_column(j, lane / 4);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int rank = 16 * k + 8 * i + lane % 4 * 2;
            const auto value = [&](int r) -> std::uint32_t {
              return *reinterpret_cast<const unsigned short*>(smem + rank_row_at(r, n / 8) +
                                                              n % 8 * 2);
            };
            b[g][k][j][i] = value(rank) | value(rank + 1) << 16;
          }
        }
      }
    }
  }
};

template <class T, int kRanks>
__global__ void __launch_bounds__(kThreads, 2)
    expand_stream_kernel(const __grid_constant__ ExpandParams p) {
  using S = Shape<kRanks>;
  extern __shared__ __align__(1024) char smem[];
  __shared__ Pairs pairs;
  __shared__ Draws draws;

  // Coordinates
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int row_warps = p.plan.row_warps, column_warps = kWarps / row_warps;
  const int panel = static_cast<int>(blockIdx.x) % p.plan.panels;
  const int tile = static_cast<int>(blockIdx.x) / p.plan.panels;
  const std::int64_t column =
      (std::int64_t{panel} * column_warps + warp % column_warps) * S::kColumns;
  const int warp_row = warp / column_warps * kUnitRows;
  device::pdl_trigger();

  // Guard
  const RowTile rows = row_tile(p.rows, tile, p.plan.tile_rows, true);
  if (rows.count == 0) {
    device::pdl_wait();
    return;
  }

  // Weights
  char* own = smem + warp * S::kWarpBytes;
  Weights<T, kRanks> weights;
  std::uint32_t threshold = 0;
  int live_steps = 0;  // of 16 ranks
  if (rows.adapter >= 0) {
    pairs.fill(p.pairs, rows.adapter, p.first_slice, p.num_slices);
    __syncthreads();
    for (int s = p.first_slice; s < p.first_slice + p.num_slices; ++s) {
      const int rank = pairs.slice(s).rank;
      if (rank > 0) live_steps = (p.hidden.first[s] - p.first_hidden + rank + 15) / 16;
    }
    if (p.masked) threshold = pairs.threshold(p.first_slice, p.num_slices);
    weights.load(p, pairs, column, own);
  }
  device::pdl_wait();
  if (threshold != 0 && threshold < kDropAll && threadIdx.x == 0) draws.read(p.mask.rng);

  // Load
  const int stage_rows = S::stage_rows(row_warps);
  const int steps = (rows.count + stage_rows - 1) / stage_rows;
  char* hidden = smem + kWarps * S::kWarpBytes;
  auto* row_of = reinterpret_cast<int*>(hidden + 2 * stage_rows * kRanks * 2);
  constexpr int kPieces = kRanks / 8;
  // Where a lane's rows of the fragments lie; steps of 16 ranks change only bits of the piece's
  // number, which commute with the swizzle.
  const std::uint32_t hidden_lane =
      device::smem_address(hidden) + rank_piece_at<kRanks>(lane % 16, lane / 16);
  const auto load_hidden = [&](int step) {
    if (step >= steps) return;
    const int stage = step % 2 * stage_rows, first = step * stage_rows;
    for (int i = threadIdx.x; i < stage_rows * kPieces; i += kThreads) {
      const int at = i / kPieces, piece = i % kPieces;
      const int row =
          first + at < rows.count ? static_cast<int>(row_at(p.rows, rows.start + first + at)) : -1;
      if (piece == 0) row_of[stage + at] = row;
      const auto* from = static_cast<const unsigned short*>(p.h.m.data);
      const bool there = row >= 0 && piece < 2 * live_steps && 8 * piece < p.width;
      if (there) from += row * p.h.m.row_stride + p.first_hidden + 8 * piece;
      device::cp_async_16(
          device::smem_address(hidden + stage * kRanks * 2 + rank_piece_at<kRanks>(at, piece)),
          from, there ? 16 : 0);
    }
  };
  const bool vectors = p.vectors && column + S::kColumns <= p.columns;
  const bool reads_base = vectors && p.base.data != nullptr;
  const std::int64_t own_column = column + lane % 4 * 8;
  const auto base_at = [&](int unit, int g, int half) {
    return own + unit % kBaseStages * S::kUnitBytes + ((2 * g + half) * 32 + lane) * 16;
  };
  const auto load_base = [&](int unit) {
    const int first = unit * kUnitRows * row_warps + warp_row + lane / 4;
    if (!reads_base) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = first + 8 * half;
      if (at >= rows.count) continue;
      const std::int64_t row = row_at(p.rows, rows.start + at);
      if (row < 0) continue;
      const auto* from =
          static_cast<const unsigned short*>(p.base.data) + row * p.base.row_stride + own_column;
#pragma unroll
      for (int g = 0; g < S::kGroups; ++g) {
        device::cp_async_16(base_at(unit, g, half), from + 32 * g);
      }
    }
  };
  load_hidden(0);
  device::cp_async_commit();
#pragma unroll
  for (int unit = 0; unit < kBaseStages - 1; ++unit) {
    load_base(unit);
    device::cp_async_commit();
  }

  // Compute and store
  const bool keeps_any = threshold < kDropAll, draws_bits = threshold != 0 && keeps_any;
  const int units = steps * kUnits;
  for (int unit = 0; unit < units; ++unit) {
    if (unit % kUnits == 0) {
      device::cp_async_wait<kUnits - 1>();
      __syncthreads();
      load_hidden(unit / kUnits + 1);
    }
    load_base(unit + kBaseStages - 1);
    device::cp_async_commit();
    const int first = unit * kUnitRows * row_warps + warp_row;
    if (reads_base) device::cp_async_wait<kBaseStages - 1>();
    if (first >= rows.count) continue;
    const int stage = unit / kUnits % 2 * stage_rows;
    const int at = first % stage_rows;
    const std::uint32_t rows_at = hidden_lane + (stage + at) * kRanks * 2;
    int row[2];
    unsigned short* to[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      row[half] = row_of[stage + at + lane / 4 + 8 * half];
      to[half] =
          static_cast<unsigned short*>(p.out.data) + row[half] * p.out.row_stride + own_column;
    }
#pragma unroll
    for (int g = 0; g < S::kGroups; ++g) {
      float sum[4][4] = {};
#pragma unroll
      for (int k = 0; k < S::kSteps; ++k) {
        if (k >= live_steps) break;
        std::uint32_t a[4];
        device::ldmatrix_x4(a, rows_at ^ (k * 32));
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          device::mma_16816<T>(sum[j], a, weights.b[g][k][j][0], weights.b[g][k][j][1]);
        }
      }
      if (!vectors) {
        put_sums(reinterpret_cast<float*>(own) + 32 * g, S::kColumns, sum);
        continue;
      }
      OctetDraw draw[2];
      if (draws_bits) {
        draw_shared(draws, octet_of(p.mask, row[lane % 2], own_column + 32 * g) / 2, lane % 2 != 0,
                    draw);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float v[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = keeps_any ? sum[i / 2][2 * half + i % 2] : 0.0f;
        if (draws_bits) drop_sums(draw[half], threshold, v);
        if (reads_base) add_eight<T>(*reinterpret_cast<const uint4*>(base_at(unit, g, half)), v);
        const uint4 words = pack_eight<T>(v);
        if (row[half] >= 0) __stcs(reinterpret_cast<uint4*>(to[half] + 32 * g), words);
      }
    }
    if (!vectors) {
      __syncwarp();
      store_any<S::kColumns>(p, row_of + stage + at, column, reinterpret_cast<const float*>(own),
                             threshold, &draws);
      __syncwarp();
    }
  }
  device::cp_async_wait<0>();
}

template <class T, int kRanks>
void launch_stream(const ExpandParams& p, Stream stream) {
  device::Launch l;
  l.grid = dim3(static_cast<unsigned>(p.plan.panels * p.max_tiles));
  l.threads = kThreads;
  l.smem = Shape<kRanks>::smem(p.plan.row_warps);
  l.stream = stream;
  l.pdl = true;
  device::launch<expand_stream_kernel<T, kRanks>>("lora_train", l, p);
}

template <class T>
void launch_type(const ExpandParams& p, Stream stream) {
  switch (p.plan.ranks) {
    case 16:
      return launch_stream<T, 16>(p, stream);
    case 32:
      return launch_stream<T, 32>(p, stream);
    case 64:
      return launch_stream<T, 64>(p, stream);
    default:
      return launch_stream<T, 128>(p, stream);
  }
}

}  // namespace

void expand_stream(const ExpandParams& p, Policy policy, Stream stream) {
  check(policy != Policy::kSplit && p.width <= kMostStreamRanks,
        "lora_train: no stream of rows for these weights");
  if (policy == Policy::kBFloat16) return launch_type<__nv_bfloat16>(p, stream);
  launch_type<__half>(p, stream);
}

}  // namespace mortar::lora::train::cuda
