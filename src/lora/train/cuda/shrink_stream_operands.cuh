// SPDX-License-Identifier: Apache-2.0
// Shapes of shrink_stream.cu, the copies of its operands into the ring of stages, and the fragments
// that are read from there.
#pragma once

#include <algorithm>
#include <cstdint>

#include "device/async_copy.cuh"
#include "device/mma.cuh"
#include "lora/train/cuda/kernels.cuh"
#include "lora/train/cuda/stream.cuh"
#include "lora/train/cuda/tiles.cuh"

namespace mortar::lora::train::cuda::shrink_operands {

inline constexpr int kStepColumns = kBlockColumns;

template <int kRanks_, int kRows_>
struct Shape {
  static constexpr int kRanks = kRanks_, kRows = kRows_;
  static constexpr int kWarpRows = 16;
  static constexpr int kWarpsM = kRows / kWarpRows;
  static constexpr int kWarpRanks = std::min(kRanks, 32);
  static constexpr int kWarpsN = kRanks / kWarpRanks;
  /// With few ranks there are registers to spread copies and the draws of dropout over more warps
  /// than multiply.
  static constexpr int kThreads =
      32 * std::max(kWarpsM * kWarpsN, kRanks == 16 ? std::min(8, kRows / 8) : 0);
  static constexpr bool kSpareWarps = kThreads > 32 * kWarpsM* kWarpsN;
  static constexpr int kFragsM = kWarpRows / 16, kFragsN = kWarpRanks / 8;
  static constexpr int kSums = kFragsM * kFragsN * 4;
  static constexpr int kLevels = stream_levels(kRanks, kRows);
  static constexpr int kMinBlocks = std::min(stream_blocks(kRanks, kRows), kRanks == 16 ? 4 : 2);

  static constexpr int kWideBytes = block_bytes(kRows);
  static constexpr int kStageBytes = stream_stage(kRanks, kRows);
  static constexpr int kStages = stream_stages(kRanks, kRows);
  static constexpr int kPitch = kRanks + 8;  ///< floats of a row of partial sums
  static constexpr int kSmem = kStages * kStageBytes;
  static_assert(kSmem >= kRows * kPitch * 4, "partial sums fit the ring");
  static constexpr int kWideCopies = kRows * kRowPieces / kThreads;
  static constexpr int kWeightCopies = (kRanks * kRowPieces + kThreads - 1) / kThreads;
};

/// Eight ranks that lie side by side in h.
struct Octet {
  float factor;
  int ranks;  ///< that the pair has
};

/// What a thread block looks up, in shared memory: registers are short.
template <class S>
struct Table {
  const char* wide[S::kRows];  ///< rows of x, from the first column of the thread block on
  int row[S::kRows];           ///< -1: none (and x is read from the tile's first row instead)
  Octet octets[S::kRanks / 8];
  Pairs pairs;
  Draws draws;
};

/// Asks for the lines of the thread block's first steps in L2, as many as the ring has room for.
template <class S>
__device__ __forceinline__ void ask(const ShrinkParams& p, const Table<S>& table, int first_rank,
                                    std::int64_t begin) {
  constexpr int kSteps = std::min(S::kStages - 1, kRowPieces);
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % kRowPieces;  // a step of some rows
  const bool there = lane < kSteps && begin + lane * kStepColumns < p.columns;
#pragma unroll 1
  for (int row = thread / kRowPieces; there && row < S::kRows; row += S::kThreads / kRowPieces) {
    device::prefetch_l2(table.wide[row] + lane * kStepColumns * 2);
  }
  // Weights of the first slice.
  const int j = p.first_hidden + first_rank;
  const int s = slice_of(p.hidden, p.first_slice, p.num_slices, j);
  const PairEntry& pair = table.pairs.slice(s);
  const Matrix& m = p.side == Side::kA ? pair.a : pair.b;
  const std::int64_t rank_stride = p.side == Side::kA ? m.row_stride : m.col_stride;
  const std::int64_t column_stride = p.side == Side::kA ? m.col_stride : m.row_stride;
  const int own = j - p.hidden.first[s], ranks = min(pair.rank - own, S::kRanks);
  const auto* from = static_cast<const unsigned short*>(m.data) + own * rank_stride;
  if (p.weights.rows_are_ranks) {
#pragma unroll 1
    for (int r = thread / kRowPieces; there && r < ranks; r += S::kThreads / kRowPieces) {
      device::prefetch_l2(from + r * rank_stride + (begin + lane * kStepColumns) * column_stride);
    }
  } else if (ranks > 0) {
#pragma unroll 1
    for (std::int64_t c = begin + thread; c < min(begin + kSteps * kStepColumns, p.columns);
         c += S::kThreads) {
      device::prefetch_l2(from + c * column_stride);
    }
  }
}

/// Pieces of 16 bytes that a thread copies at every step.
template <class S, bool kRowsAreRanks>
struct Copies {
  static constexpr int kOctets = S::kRanks / 8;
  static constexpr int kRowStep = S::kThreads / kRowPieces;
  static constexpr bool kAllCopyWeights = S::kRanks * kRowPieces % S::kThreads == 0;
  const char* const* wide;  ///< of the thread's first row
  int offset;               ///< of the next piece in its row of x, bytes
  int wide_at, weight_at;
  const char* weight[S::kWeightCopies];
  std::int64_t weight_step;            ///< bytes
  int weight_bytes[S::kWeightCopies];  ///< that there are; zeros fill the rest of a piece

  __device__ __forceinline__ Copies(const ShrinkParams& p, const Table<S>& table, int first_rank,
                                    std::int64_t begin) {
    const int thread = static_cast<int>(threadIdx.x), piece = thread % kRowPieces;
    wide = table.wide + thread / kRowPieces;
    offset = piece * 16;
    wide_at = piece_at(thread / kRowPieces, piece);
    weight_at =
        S::kWideBytes +
        (kRowsAreRanks ? wide_at : rank_piece_at<S::kRanks>(thread / kOctets, thread % kOctets));
    weight_step = kStepColumns * 2;
#pragma unroll
    for (int i = 0; i < S::kWeightCopies; ++i) {
      const int item = thread + i * S::kThreads;
      const int rank = kRowsAreRanks ? item / kRowPieces : item % kOctets * 8;
      weight[i] = table.wide[0];
      weight_bytes[i] = 0;
      if (item >= S::kRanks * kRowPieces || first_rank + rank >= p.width) continue;
      const int j = p.first_hidden + first_rank + rank;
      const int s = slice_of(p.hidden, p.first_slice, p.num_slices, j);
      const PairEntry& pair = table.pairs.slice(s);
      const int own = j - p.hidden.first[s];
      if (own >= pair.rank) continue;
      const Matrix& m = p.side == Side::kA ? pair.a : pair.b;
      const std::int64_t rank_stride = p.side == Side::kA ? m.row_stride : m.col_stride;
      const std::int64_t column_stride = p.side == Side::kA ? m.col_stride : m.row_stride;
      const std::int64_t c = begin + (kRowsAreRanks ? piece * kPiece : item / kOctets);
      weight[i] = reinterpret_cast<const char*>(static_cast<const unsigned short*>(m.data) +
                                                own * rank_stride + c * column_stride);
      weight_bytes[i] = kRowsAreRanks ? 16 : 2 * min(pair.rank - own, 8);
      if (!kRowsAreRanks) weight_step = kStepColumns * 2 * column_stride;
    }
  }

  /// Copies the next step, before whose end lie `left` columns.
  __device__ __forceinline__ void issue(std::uint32_t stage, int left) {
    const int bytes = max(0, min(16, 2 * left - static_cast<int>(threadIdx.x) % kRowPieces * 16));
    const char* from[S::kWideCopies];
#pragma unroll
    for (int i = 0; i < S::kWideCopies; ++i) from[i] = wide[i * kRowStep] + offset;
#pragma unroll
    for (int i = 0; i < S::kWideCopies; ++i) {
      device::cp_async_16(stage + wide_at + i * kRowStep * kBlockRowBytes, from[i], bytes);
    }
    offset += kStepColumns * 2;
#pragma unroll
    for (int i = 0; i < S::kWeightCopies; ++i) {
      const int item = static_cast<int>(threadIdx.x) + i * S::kThreads;
      if (!kAllCopyWeights && item >= S::kRanks * kRowPieces) continue;
      const int there = kRowsAreRanks ? min(bytes, weight_bytes[i])
                                      : (item / kOctets < left ? weight_bytes[i] : 0);
      device::cp_async_16(stage + weight_at + i * S::kThreads * 16, weight[i], there);
      weight[i] += weight_step;
    }
  }
};

/// Where a lane's rows of the fragments lie in a stage. Steps of 16 columns, and of 16 ranks where
/// ranks are dense, change only bits of the piece's number, which commute with the swizzle.
template <class S, bool kRowsAreRanks>
struct Fragments {
  std::uint32_t wide, weight;

  __device__ __forceinline__ Fragments(int warp_row, int warp_rank) {
    const int lane = threadIdx.x % 32, matrix = lane / 8;
    wide = piece_at(warp_row + lane % 16, lane / 16);
    weight = S::kWideBytes;
    weight += kRowsAreRanks
                  ? piece_at(warp_rank + lane % 8 + matrix / 2 * 8, matrix % 2)
                  : rank_piece_at<S::kRanks>(lane % 8 + matrix % 2 * 8, warp_rank / 8 + matrix / 2);
  }
  __device__ __forceinline__ void load_wide(std::uint32_t (&a)[4], std::uint32_t stage, int m,
                                            int step) const {
    device::ldmatrix_x4(a, ((stage + wide) ^ (step * 32)) + m * 16 * kBlockRowBytes);
  }
  __device__ __forceinline__ void load_weight(std::uint32_t (&b)[4], std::uint32_t stage, int n,
                                              int step) const {
    if constexpr (kRowsAreRanks) {
      device::ldmatrix_x4(b, ((stage + weight) ^ (step * 32)) + n * 8 * kBlockRowBytes);
    } else {
      device::ldmatrix_x4_transposed(b, ((stage + weight) ^ (n * 16)) + step * 16 * 2 * S::kRanks);
    }
  }
};

}  // namespace mortar::lora::train::cuda::shrink_operands
