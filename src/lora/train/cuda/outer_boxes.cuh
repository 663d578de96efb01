// SPDX-License-Identifier: Apache-2.0
// Sums over a chunk of dense float32 rows, by wgmma: what outer_boxes.cu and dy_boxes.cu share. The
// sums are those of outer_float.cu, bit for bit.
//
// A warp has 32 columns, of which a thread reads four neighbours in a row: two tiles of the MMA's
// rows, of which it splits one while the products of the other run.
#pragma once

#include "device/pdl.cuh"
#include "device/wgmma.cuh"
#include "lora/train/cuda/float_pipe.cuh"
#include "lora/train/cuda/kernels.cuh"

namespace mortar::lora::train::cuda {

inline constexpr int kBoxBytes = kPipeDepth * kBoxFloats * 4;
inline constexpr int kOuterTiles = 2;  ///< of the MMA's rows, of a warpgroup
/// Columns of a thread block, a box for each warp that multiplies.
constexpr int outer_columns(int groups) { return groups * kPipeThreads / 32 * kBoxFloats; }

template <int kRanks, int kGroups, int kMemory = kPipeMemory>
using OuterPipe = FloatPipe<kRanks, kGroups, outer_columns(kGroups) * kPipeDepth * 4, kMemory>;

/// The warpgroup that fills the pipe.
template <class Pipe>
__device__ __forceinline__ void fill_outer(const OuterParams& p, const CUtensorMap& wide,
                                           PipeBarriers<Pipe>& barriers, char* smem,
                                           const RowTile& rows, int steps, int column,
                                           int first_rank) {
  const auto line_of = [&](int rank) {
    const int j = first_rank + rank;
    const auto* from = static_cast<const float*>(p.s.m.data) + rows.start * p.s.m.row_stride +
                       p.first_hidden + min(j, p.width - 1);
    return NarrowLine{from, p.s.m.row_stride, j < p.width};
  };
  const NarrowPieces<Pipe::kRanks> pieces(static_cast<int>(threadIdx.x) % kPipeThreads, false,
                                          rows.count, false, line_of);
  fill_pipe<Pipe>(
      barriers, smem, steps, pieces, [] {},
      [&](int step, std::uint32_t to, device::Mbarrier* barrier) {
#pragma unroll 1
        for (int box = 0; box < Pipe::kWideBytes / kBoxBytes; ++box) {
          const int at = 2 * (column + box * kBoxFloats);
          const int row = static_cast<int>(rows.start) + step * kPipeDepth;
          // x for the last time; dy is read by two thread blocks.
          p.side == Side::kA ? device::copy_box_once(to + box * kBoxBytes, wide, at, row, barrier)
                             : device::copy_box(to + box * kBoxBytes, wide, at, row, barrier);
        }
      });
}

/// Two sums of a warpgroup that multiplies, and where they go.
template <class Pipe>
__device__ __forceinline__ void multiply_outer(const OuterParams& p, PipeBarriers<Pipe>& barriers,
                                               std::uint32_t smem, int steps, int slot,
                                               int first_column, int first_rank) {
  constexpr int kRanks = Pipe::kRanks;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const std::uint32_t even = warp * kBoxBytes + lane % 4 * 256 + ((lane / 4 ^ lane % 4 * 2) << 4);
  const std::uint32_t odd = (even ^ 16) + 128;  // the next row
  PipeWalk<Pipe> walk{barriers, smem};
  device::WgmmaPartSums<kRanks> sums[kOuterTiles];
  device::WgmmaRegisters<kFloatPlanes> a[kOuterTiles][1];
#pragma unroll
  for (auto& own : sums) {
    own.begin();
    device::wgmma_keep(own.rest);
    device::wgmma_keep(own.step[0]);
  }
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    walk.wait();
    const std::uint64_t planes = walk.planes();
#pragma unroll
    for (int k = 0; k < kPipeSteps; ++k) {
      // Rows 2 t and 2 t + 1 of the MMA's step, then those eight on.
      float4 row[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        row[i] = read_float4(walk.wide() + (i % 2 == 0 ? even : odd) + k * 2048 + i / 2 * 1024);
      }
#pragma unroll
      for (int tile = 0; tile < kOuterTiles; ++tile) {
        float2 pair[4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float4 &v = row[2 * i], &w = row[2 * i + 1];
          pair[2 * i] = tile == 0 ? make_float2(v.x, w.x) : make_float2(v.z, w.z);
          pair[2 * i + 1] = tile == 0 ? make_float2(v.y, w.y) : make_float2(v.w, w.w);
        }
        split_fragment(pair, a[tile][0].part);
        sums[tile].template add<kFloatPlanes, kFloatPlanes>(
            a[tile], planes + k * device::kDescriptorStep, Pipe::kPlaneBytes / 16);
        if (k == 0 && tile == 0) walk.leave_last();
      }
    }
    walk.next();
  }
#pragma unroll
  for (auto& own : sums) own.end();
  walk.leave_last();
  if (p.early) device::pdl_wait();

  // Store: a lane has four neighbouring columns of two neighbouring ranks in every eight.
  const std::int64_t column = first_column + warp * kBoxFloats + lane / 4 * 4;
  const bool of_a = p.side == Side::kA;
  const std::int64_t stride = of_a ? grad_stride(p.columns) : 1;
  float* to = p.partials + slot * p.width * (of_a ? stride : p.columns);
  if (column >= p.columns) return;
#pragma unroll
  for (int n = 0; n < kRanks / 8; ++n) {
    const int j = first_rank + 8 * n + lane % 4 * 2;
    if (j >= p.width) continue;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (of_a) {
        // Whole vectors: past the last column lies what nobody reads.
        *reinterpret_cast<float4*>(to + (j + i) * stride + column) =
            make_float4(sums[0].total(4 * n + i), sums[0].total(4 * n + 2 + i),
                        sums[1].total(4 * n + i), sums[1].total(4 * n + 2 + i));
      }
    }
    for (int c = 0; !of_a && c < 4; ++c) {
      if (column + c >= p.columns) continue;
      const auto& own = sums[c / 2];
      *reinterpret_cast<float2*>(to + (column + c) * p.width + j) =
          make_float2(own.total(4 * n + c % 2 * 2), own.total(4 * n + c % 2 * 2 + 1));
    }
  }
}

}  // namespace mortar::lora::train::cuda
