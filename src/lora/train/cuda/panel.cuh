// SPDX-License-Identifier: Apache-2.0
// What the kernels that sum over rows by panels of columns share: which part of the sums a thread
// block has, how its operands come, and where its partial sums go.
#pragma once

#include <algorithm>

#include "lora/train/cuda/kernels.cuh"
#include "lora/train/cuda/panel.h"
#include "lora/train/cuda/part_columns.cuh"
#include "lora/train/cuda/stream.cuh"

namespace mortar::lora::train::cuda {

/// Elements [c, c + 8) of a row in any strides to shared memory; zeros from `end` on, and where the
/// row is not `there`. Two at a time: this is the way of matrices that nobody laid out to be fast,
/// and its registers would be those of the fast one.
__device__ __forceinline__ void gather_piece(char* to, const Matrix& m, bool there,
                                             std::int64_t row, std::int64_t c, std::int64_t end) {
#pragma unroll 1
  for (int j = 0; j < kPiece; j += 2, c += 2) {
    std::uint32_t word = 0;
    if (there) {
      const auto* from = static_cast<const unsigned short*>(m.data) + row * m.row_stride;
      if (c < end) word = __ldcg(from + c * m.col_stride);
      if (c + 1 < end) word |= std::uint32_t{__ldcg(from + (c + 1) * m.col_stride)} << 16;
    }
    *reinterpret_cast<std::uint32_t*>(to + 2 * j) = word;
  }
}

/// The part of one thread block: a panel of one operand's columns, a group of rank columns, and a
/// chunk of one adapter's rows (of count 0: it has none). kWhole: of whole_sums.cu.
template <bool kWhole = false>
struct PanelPart {
  const PanelParams& p;
  int tile;  ///< the chunk, of all adapters' chunks
  int first_rank, panel;
  const PanelOperand* own;
  RowTile rows;
  std::int64_t column;
  /// Rank columns of the operand up to the last one of the adapter that has a gradient. In shared
  /// memory, as it is read at the end: for each group of kThreads, who see it after a barrier.
  int* live;
  std::uint32_t threshold = 0;

  __device__ __forceinline__ PanelPart(const PanelParams& params, int columns, int ranks,
                                       bool makes_ds, int* live_of_groups)
      : PanelPart(params, columns, ranks, makes_ds, live_of_groups, static_cast<int>(blockIdx.x),
                  static_cast<int>(blockIdx.y)) {}
  /// The same at a place in panel_grid().
  __device__ __forceinline__ PanelPart(const PanelParams& params, int columns, int ranks,
                                       bool makes_ds, int* live_of_groups, int x, int y)
      : p(params), tile(y), live(live_of_groups + threadIdx.x / kThreads) {
    find_panel(columns, ranks, x);
    if (first_rank < own->width) rows = row_tile(p.rows, tile, p.chunk, false);
    int end = 0;
    for (int s = 0; rows.count > 0 && s < p.pairs.num_slices; ++s) {
      const PairEntry pair = p.pairs.get(rows.adapter, s);
      if (pair.rank == 0) continue;
      if (p.masked) threshold = pair.threshold;
      const bool frozen = pair.grad(p.side == Side::kA).data == nullptr;
      if (s < own->slice || s >= own->slice + own->num_slices || (frozen && !makes_ds)) continue;
      end =
          p.copies * (p.hidden.first[s] + round_up(pair.rank, kHiddenGranule)) - own->first_hidden;
    }
    if (first_rank >= end) rows.count = 0;
    if (threadIdx.x % kThreads == 0) *live = end;
  }

  /// All rows of the only adapter. Parameters miss the constant cache one after the other: what
  /// follows from the pairs comes with the operand.
  __device__ __forceinline__ PanelPart(const PanelParams& params, int columns,
                                       int ranks) requires(kWhole)
      : p(params), tile(0), live(nullptr) {
    find_panel(columns, ranks, static_cast<int>(blockIdx.x));
    threshold = own->threshold;
    if (first_rank < own->live) rows = RowTile{0, 0, static_cast<int>(p.rows.num_rows)};
  }

  /// The operand and the columns of this thread block, and its rank columns.
  __device__ __forceinline__ void find_panel(int columns, int ranks, int x) {
    first_rank = x % p.groups * ranks;
    panel = x / p.groups;
    int o = 0;
    while (o + 1 < p.num_operands && panel >= p.operands[o + 1].first_panel) ++o;
    own = &p.operands[o];
    panel -= own->first_panel;
    column = std::int64_t{panel} * columns;
  }

  __device__ __forceinline__ MaskParams mask() const {
    return {kWhole ? own->rng : p.mask.rng, kWhole ? own->mask_columns : p.mask.columns,
            own->mask_first};
  }

  /// The row at place `at` of the chunk, or -1.
  __device__ __forceinline__ std::int64_t row_of(int at) const {
    return at < rows.count ? row_at(p.rows, rows.start + at) : std::int64_t{-1};
  }

  /// Asks for the first `most` rows in L2.
  template <int kColumns>
  __device__ __forceinline__ void ask(int most) const {
    constexpr int kLines = kColumns / kBlockColumns;
    const int count = own->async ? min(most, rows.count) * kLines : 0;
    const auto* from = static_cast<const unsigned short*>(own->wide.data) +
                       rows.start * own->wide.row_stride + column;
    for (int i = threadIdx.x; i < count; i += static_cast<int>(blockDim.x)) {
      const int c = i % kLines * kBlockColumns;
      if (column + c >= own->columns) continue;
      device::prefetch_l2(from + i / kLines * own->wide.row_stride + c);
    }
  }

  /// Fetches elements [c, c + 8) of kPieces rows from place `first` on, kRowStep apart, to to(i).
  /// Neighbouring rows that cp.async takes are one address and a stride; all others come one by one
  /// in a loop of few registers.
  template <int kPieces, int kRowStep, class To>
  __device__ __forceinline__ void fetch_wide(const To& to, int first, std::int64_t c) const {
    const bool edge = c < own->columns && c + kPiece > own->columns;
    if (own->async && p.rows.sorted == nullptr && !edge) {
      const int left = c < own->columns ? rows.count - first : 0;
      const auto* from = static_cast<const unsigned short*>(own->wide.data);
      if (left > 0) from += (rows.start + first) * own->wide.row_stride + c;
      const std::int64_t stride = left > 0 ? kRowStep * own->wide.row_stride : 0;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const bool there = i * kRowStep < left;
        device::cp_async_16(device::smem_address(to(i)), from + i * stride, there ? 2 * kPiece : 0);
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < kPieces; ++i) {
        const std::int64_t row = row_of(first + i * kRowStep);
        const bool there = row >= 0 && c < own->columns;
        if (own->async && !edge) {
          const auto* from = static_cast<const unsigned short*>(own->wide.data);
          if (there) from += row * own->wide.row_stride + c;
          device::cp_async_16(device::smem_address(to(i)), from, there ? 2 * kPiece : 0);
        } else {
          gather_piece(to(i), own->wide, there, row, c, own->columns);
        }
      }
    }
  }

  /// The rank columns of the narrow operand, of kRows rows from place `first` on, as a block.
  /// `thread` of kThreads.
  template <int kRows, int kRanks>
  __device__ __forceinline__ void fetch_narrow(char* to, int first, int thread) const {
    constexpr int kPieces = kRanks / kPiece, kRowStep = kThreads / kPieces;
    static_assert(kRowStep % 8 == 0, "A thread's pieces lie in one phase of the swizzle.");
    const int at = thread / kPieces;
    const int piece = thread % kPieces, j = first_rank + piece * kPiece;
    if (kRows < kRowStep && at >= kRows) return;
    const auto* from = static_cast<const unsigned short*>(p.s);
    const int left = j < own->width && own->sums != nullptr ? rows.count - first - at : 0;
    if (left > 0) from += own->first_hidden + j;
    char* place = to + piece_at(at, piece);
#pragma unroll
    for (int i = 0; i < (kRows + kRowStep - 1) / kRowStep; ++i) {
      const bool there = i * kRowStep < left;
      const std::int64_t row = there ? row_of(first + at + i * kRowStep) : -1;
      device::cp_async_16(device::smem_address(place + i * kRowStep * kBlockRowBytes),
                          row >= 0 ? from + row * p.hidden_width : from, row >= 0 ? 2 * kPiece : 0);
    }
  }

  /// The same of a whole operand, for a warp, as rows of kRanks rank columns.
  template <int kRows, int kRanks>
  __device__ __forceinline__ void fetch_ranks(char* to, int first) const {
    constexpr int kPieces = kRanks / kPiece;
    const auto* from = static_cast<const unsigned short*>(own->s) + own->first_hidden;
#pragma unroll
    for (int i = static_cast<int>(threadIdx.x) % 32; i < kRows * kPieces; i += 32) {
      const int at = i / kPieces, piece = i % kPieces, j = first_rank + piece * kPiece;
      const bool there = j < own->width && first + at < rows.count;
      device::cp_async_16(device::smem_address(to + rank_piece_at<kRanks>(at, piece)),
                          there ? from + std::int64_t{first + at} * p.hidden_width + j : from,
                          there ? 2 * kPiece : 0);
    }
  }

  /// Dropout of the kPieces pieces that fetch_wide() left at to(i), of rows kRowStep apart. The
  /// next thread has the next piece of each row, and with kPairs two rows share their draws.
  template <int kPieces, int kRowStep, bool kPairs, class To>
  __device__ __forceinline__ void drop(const To& to, const Draws& draws, int first,
                                       std::int64_t c) const {
    const MaskParams mask = this->mask();
    static_assert(kPieces % 2 == 0, "two rows share their draws");
    const bool whole = (mask.columns | mask.first) % kMaskGroup == 0 && threshold < kDropAll;
    if (!kPairs || !whole) {
#pragma unroll 1
      for (int i = 0; i < kPieces; ++i) {
        const std::int64_t row = row_of(first + i * kRowStep);
        if (row < 0 || c >= own->columns) continue;
        drop_in_place(to(i), keep_piece(mask, threshold, row, c));
      }
      return;
    }
    const int odd = static_cast<int>(threadIdx.x) % 2;
#pragma unroll 1
    for (int i = 0; i < kPieces; i += 2) {
      const std::int64_t index =
          row_of(first + (i + odd) * kRowStep) * mask.columns + mask.first + c;
      OctetDraw draw[2];
      draw_shared(draws, static_cast<std::uint64_t>(index) / kMaskGroup, odd != 0, draw);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        auto* at = reinterpret_cast<uint4*>(to(i + k));
        *at = masked(*at, keep_words(draw[k], threshold));
      }
    }
  }

  /// The draws of the same pieces, before they have landed, and their use: where whole groups of
  /// draws lie in a piece's row and some of its elements are kept.
  __device__ __forceinline__ bool draws_first() const {
    const MaskParams mask = this->mask();
    return threshold != 0 && threshold < kDropAll && (mask.columns | mask.first) % kMaskGroup == 0;
  }
  template <int kPieces, int kRowStep>
  __device__ __forceinline__ void draw(const Draws& draws, int first, std::int64_t c,
                                       OctetDraw (&draw)[kPieces]) const {
    const MaskParams mask = this->mask();
    const int odd = static_cast<int>(threadIdx.x) % 2;
#pragma unroll
    for (int i = 0; i < kPieces; i += 2) {
      const std::int64_t index =
          row_of(first + (i + odd) * kRowStep) * mask.columns + mask.first + c;
      OctetDraw two[2];
      draw_shared(draws, static_cast<std::uint64_t>(index) / kMaskGroup, odd != 0, two);
      draw[i] = two[0];
      draw[i + 1] = two[1];
    }
  }
  template <int kPieces, class To>
  __device__ __forceinline__ void drop_drawn(const To& to, const OctetDraw (&draw)[kPieces]) const {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      auto* at = reinterpret_cast<uint4*>(to(i));
      *at = masked(*at, keep_words(draw[i], threshold));
    }
  }

  /// Adds kParts parts of kRows rows of ds, from place `first` on, and leaves the sums in the
  /// panel's partial. A part's rows are kStride floats apart. `thread` of kThreads.
  template <int kRows, int kRanks, int kParts, int kStride>
  __device__ __forceinline__ void store_ds(const float* parts, int first, int thread) const {
    float* to = p.ds +
                (std::int64_t{panel} * p.rows.num_rows + rows.start + first) * p.hidden_width +
                own->first_hidden;
    const int end = *live;
    for (int i = thread; i < kRows * kRanks / 2; i += kThreads) {
      const int at = i / (kRanks / 2), j = i % (kRanks / 2) * 2;
      if (first + at >= rows.count || j >= end) continue;
      float2 sum = make_float2(0, 0);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const float2 v =
            *reinterpret_cast<const float2*>(parts + (part * kRows + at) * kStride + j);
        sum = make_float2(sum.x + v.x, sum.y + v.y);
      }
      *reinterpret_cast<float2*>(to + at * p.hidden_width + j) = sum;
    }
  }

  /// Sums of column c and of ranks j and j + 1 of the group.
  __device__ __forceinline__ void store_sums(std::int64_t c, int j, float v0, float v1) const {
    if (c >= own->columns) return;
    j += first_rank;
    if (p.side == Side::kA) {
      const std::int64_t stride = grad_stride(own->columns);
      float* to = own->sums + (std::int64_t{tile} * own->width + j) * stride + c;
      to[0] = v0;
      to[stride] = v1;
    } else {
      float* to = own->sums + (tile * own->columns + c) * own->width + j;
      *reinterpret_cast<float2*>(to) = make_float2(v0, v1);
    }
  }
  /// The same of ranks whose copies have been added.
  __device__ __forceinline__ void store_added(std::int64_t c, int j, float v0, float v1) const {
    if (c >= own->columns) return;
    const int width = own->width / kSumCopies;
    j += first_rank / kSumCopies;
    if (p.side == Side::kA) {
      const std::int64_t stride = grad_stride(own->columns);
      float* to = own->sums + (std::int64_t{tile} * width + j) * stride + c;
      to[0] = v0;
      to[stride] = v1;
    } else {
      float* to = own->sums + (tile * own->columns + c) * width + j;
      *reinterpret_cast<float2*>(to) = make_float2(v0, v1);
    }
  }
};

inline dim3 panel_grid(const PanelParams& p) {
  const PanelOperand& last = p.operands[p.num_operands - 1];
  return dim3((last.first_panel + last.panels) * p.groups, static_cast<unsigned>(p.max_tiles));
}

}  // namespace mortar::lora::train::cuda
