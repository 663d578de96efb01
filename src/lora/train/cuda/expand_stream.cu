// SPDX-License-Identifier: Apache-2.0
// y = base + h B^T and dx = ds A for up to 128 ranks, weights of one 16-bit type: a stream of rows.
// And y of up to 16 ranks of float32 weights beside bfloat16 (expand_stream_parts.cuh).
//
// y[m, n] = base[m, n] + sum_j h[m, j] W[j, n]        j ranks of all slices, in one chain
// bytes  = 2 M N (twice with a base) + 2 R N + 2 M R, of which the last two come from L2
// FLOP   = 2 M N R: never the limit up to R = 128
// 8192 rows, N = 14336, R = 16: 235 MB, 55 us at 4.28 TB/s
// limit  : DRAM
// wrong  : more than 128 ranks (the weights no longer fit the registers); of float32 weights more
//          than 16 (warps wait for their MMAs)
//
// A warp keeps the weights of 64 columns (32 above rank 64) in registers for as long as its thread
// block lives and walks over the rows of a tile, 16 at a time. Columns: inside groups of 32, MMA
// fragment j takes columns 8 a + 2 j + b, so that a lane's results are 8 neighbouring columns, 16
// bytes. h passes through two stages of shared memory, the base through a ring of four pieces for
// each warp, whose threads read back what they copied themselves. Weights of any strides are
// fetched before the predecessor's end is awaited.
#include <type_traits>

#include "core/check.h"
#include "device/convert.cuh"
#include "device/launch.cuh"
#include "device/mma.cuh"
#include "device/pdl.cuh"
#include "lora/train/cuda/expand_store.cuh"
#include "lora/train/cuda/expand_stream_parts.cuh"
#include "lora/train/cuda/expand_stream_weights.cuh"
#include "lora/train/cuda/kernels.cuh"
#include "lora/train/cuda/stream.cuh"
#include "lora/train/cuda/tiles.cuh"

namespace mortar::lora::train::cuda {
namespace {

using namespace expand_operands;

template <class S>
__global__ void __launch_bounds__(kThreads, 2)
    expand_stream_kernel(const __grid_constant__ ExpandParams p) {
  constexpr int kRanks = S::kRanks;
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

  // Guard
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  const RowCut cut{p.plan.tile_rows};  // plans leave it no choice: it would spill registers
#else
  const RowCut cut = p.plan.cut();
#endif
  const RowTile rows = row_tile(p.rows, tile, cut, true);
  if (rows.count == 0) {
    device::pdl_wait();
    return;
  }

  // Weights
  char* own = smem + warp * S::warp_bytes(p.lean);
  std::conditional_t<S::kParts, PartWeights<S>, Weights<kRanks>> weights;
  std::uint32_t threshold = 0;
  int live_steps = 0;  // of 16 ranks
  if (rows.adapter >= 0) {
    pairs.fill(p.pairs, rows.adapter, p.first_slice, p.num_slices);
    __syncthreads();
    for (int s = p.first_slice; s < p.first_slice + p.num_slices; ++s) {
      const int rank = pairs.slice(s).rank;
      const int end = p.hidden.first[s] - p.first_hidden + rank;
      if (rank > 0) live_steps = S::kParts ? kStepsOfOctet * ((end + 7) / 8) : (end + 15) / 16;
    }
    if (p.masked) threshold = pairs.threshold(p.first_slice, p.num_slices);
    weights.load(p, pairs, column, own);
  }
  if (p.starts_next) device::pdl_trigger();
  device::pdl_begin(false);
  if (threshold != 0 && threshold < kDropAll && threadIdx.x == 0) draws.read(p.mask.rng);

  // Load
  const int stage_rows = S::stage_rows(row_warps);
  const int steps = (rows.count + stage_rows - 1) / stage_rows;
  char* hidden = smem + kWarps * S::warp_bytes(p.lean);
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
      const bool there = row >= 0 && piece < 2 * live_steps && (S::kParts || 8 * piece < p.width);
      const int own =
          S::kParts ? part_piece_column(p.first_hidden, piece) : p.first_hidden + 8 * piece;
      if (there) from += row * p.h.m.row_stride + own;
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
  const auto begin_step = [&](int step) {
    device::cp_async_wait<kUnits - 1>();
    __syncthreads();
    load_hidden(step + 1);
  };
  if (p.plain) {
    // Neighbouring rows, nothing added and nothing dropped: addresses grow by a constant.
    const int unit_rows = kUnitRows * row_warps;
    const std::int64_t half_bytes = 16 * p.out.row_stride,
                       unit_bytes = 2 * unit_rows * p.out.row_stride;
    int left = rows.count - warp_row - lane / 4;  // rows from the lane's first one on
    char* to = static_cast<char*>(p.out.data) +
               2 * ((rows.start + warp_row + lane / 4) * p.out.row_stride + own_column);
    device::visit_checked_dtype(typename S::DTypes(), p.h.m.dtype, [&](auto type) {
      using T = typename decltype(type)::type;
      for (int step = 0; step < steps; ++step) {
        begin_step(step);
        // As many groups as the loop below has units: h is waited for by their number.
#pragma unroll
        for (int u = 0; u < kUnits; ++u) device::cp_async_commit();
        std::uint32_t rows_at = hidden_lane + (step % 2 * stage_rows + warp_row) * kRanks * 2;
#pragma unroll
        for (int u = 0; u < kUnits; ++u) {
          if (step * stage_rows + u * unit_rows + warp_row >= rows.count) break;
#pragma unroll
          for (int g = 0; g < S::kGroups; ++g) {
            float sum[4][4] = {};
            weights.template multiply<T>(rows_at, g, live_steps, sum);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              float v[8];
#pragma unroll
              for (int i = 0; i < 8; ++i) v[i] = sum[i / 2][2 * half + i % 2];
              if (left > 8 * half && own_column + 32 * g < p.columns) {
                __stcs(reinterpret_cast<uint4*>(to + half * half_bytes + 64 * g), pack_eight<T>(v));
              }
            }
          }
          to += unit_bytes;
          left -= unit_rows;
          rows_at += unit_rows * kRanks * 2;
        }
      }
    });
    device::cp_async_wait<0>();
    return;
  }
  for (int unit = 0; unit < units; ++unit) {
    if (unit % kUnits == 0) begin_step(unit / kUnits);
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
      device::visit_checked_dtype(typename S::DTypes(), p.h.m.dtype, [&](auto type) {
        weights.template multiply<typename decltype(type)::type>(rows_at, g, live_steps, sum);
      });
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
        if (reads_base) {
          add_eight(p.h.m.dtype, *reinterpret_cast<const uint4*>(base_at(unit, g, half)), v);
        }
        const uint4 words = pack_eight(p.h.m.dtype, v);
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

template <class S>
void launch_stream(const ExpandParams& p, Stream stream) {
  device::Launch l;
  l.grid = dim3(static_cast<unsigned>(p.plan.panels * p.max_tiles));
  l.threads = kThreads;
  l.smem = S::smem(p.plan.row_warps, p.lean);
  l.stream = stream;
  l.pdl = true;
  prefer_shared<expand_stream_kernel<S>>();
  device::launch<expand_stream_kernel<S>>("lora_train", l, p);
}

}  // namespace

void expand_stream(const ExpandParams& p, Policy policy, Stream stream) {
  check(policy != Policy::kSplit && p.width <= (p.plan.splits ? kMostSplitRanks : kMostStreamRanks),
        "lora_train: no stream of rows for these weights");
  if (p.plan.splits) return launch_stream<Shape<kStreamCopies * kMostSplitRanks, true>>(p, stream);
  switch (p.plan.ranks) {
    case 16:
      return launch_stream<Shape<16>>(p, stream);
    case 32:
      return launch_stream<Shape<32>>(p, stream);
    case 64:
      return launch_stream<Shape<64>>(p, stream);
    default:
      return launch_stream<Shape<128>>(p, stream);
  }
}

}  // namespace mortar::lora::train::cuda
