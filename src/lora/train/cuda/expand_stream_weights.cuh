// SPDX-License-Identifier: Apache-2.0
// Shapes of expand_stream.cu, and how a warp gets its weights into registers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "device/async_copy.cuh"
#include "device/mma.cuh"
#include "lora/train/cuda/expand_store.cuh"
#include "lora/train/cuda/kernels.cuh"
#include "lora/train/cuda/stream.cuh"
#include "lora/train/cuda/tiles.cuh"

namespace mortar::lora::train::cuda::expand_operands {

inline constexpr int kWarps = kThreads / 32;
inline constexpr int kUnits = 4;       ///< units of a warp in a step, which is a stage of h
inline constexpr int kBaseStages = 4;  ///< units of base in the ring

/// `kRanks_`: columns of h. kParts: those are parts of a quarter as many ranks, and weights are
/// float32 (expand_stream_parts.cuh).
template <int kRanks_, bool kParts_ = false>
struct Shape {
  static constexpr int kRanks = kRanks_;
  static constexpr bool kParts = kParts_;
  using DTypes = std::conditional_t<kParts, DTypeList<DType::kBFloat16>, Float16DTypes>;
  static constexpr int kSteps = kRanks / 16;
  static constexpr int kGroups = expand_warp_columns(kRanks) / 32;
  static constexpr int kColumns = 32 * kGroups;
  static constexpr int kWeightBytes = kParts ? 0 : kColumns * kRanks * 2;
  static constexpr int kUnitBytes = kUnitRows * kColumns * 2;
  static_assert(kBaseStages >= 2, "float32 sums of a unit fit the ring, where they are stored");
  /// A warp's memory: its weights on their way to registers, then its ring of base or its sums. A
  /// lean block has neither, and fits an SM beside the kernel before it.
  __host__ __device__ static constexpr int warp_bytes(bool lean) {
    return lean || kWeightBytes > kBaseStages * kUnitBytes ? kWeightBytes
                                                           : kBaseStages * kUnitBytes;
  }
  __host__ __device__ static constexpr int stage_rows(int row_warps) {
    return kUnits * kUnitRows * row_warps;
  }
  static constexpr int smem(int row_warps, bool lean) {
    return kWarps * warp_bytes(lean) + 2 * stage_rows(row_warps) * (kRanks * 2 + 4);
  }
};

/// Weights of the warp's columns as fragments of the MMA: [group][step][tile].
template <int kRanks>
struct Weights {
  using S = Shape<kRanks>;
  std::uint32_t b[S::kGroups][S::kSteps][4][2];

  /// Adds to the sums of 16 rows and a group of 32 columns. `rows_at`: the lane's rows of h.
  template <class T>
  __device__ __forceinline__ void multiply(std::uint32_t rows_at, int g, int live_steps,
                                           float (&sum)[4][4]) const {
#pragma unroll
    for (int k = 0; k < S::kSteps; ++k) {
      if (k >= live_steps) break;
      std::uint32_t a[4];
      device::ldmatrix_x4(a, rows_at ^ (k * 32));
#pragma unroll
      for (int j = 0; j < 4; ++j) device::mma_16816<T>(sum[j], a, b[g][k][j][0], b[g][k][j][1]);
    }
  }

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

}  // namespace mortar::lora::train::cuda::expand_operands
