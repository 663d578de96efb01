// SPDX-License-Identifier: Apache-2.0
// Sums over columns of a tile of dense float32 rows, by wgmma: what shrink_boxes.cu and dy_boxes.cu
// share. The sums are those of shrink_float.cu, bit for bit (device/wgmma_parts.cuh says why).
#pragma once

#include "device/leaf_sums.cuh"
#include "device/pdl.cuh"
#include "device/wgmma.cuh"
#include "lora/train/cuda/float_pipe.cuh"
#include "lora/train/cuda/float_plan.h"
#include "lora/train/cuda/kernels.cuh"
#include "lora/train/cuda/stream.cuh"

namespace mortar::lora::train::cuda {

/// Tiles of 64 rows for each warpgroup that multiplies, in `kMemory` bytes.
template <int kRanks, int kGroups, int kMemory = kPipeMemory>
using ShrinkPipe = FloatPipe<kRanks, kGroups, kGroups * 64 * kPipeDepth * 4, kMemory>;

/// What a thread block has: leaves of a part of the columns, from `begin` on.
struct ShrinkPart {
  int leaves, begin, count, steps;

  __device__ __forceinline__ ShrinkPart(const ShrinkParams& p, int part)
      : leaves(kLeaves / p.plan.parts) {
    const int columns = static_cast<int>(p.columns), width = leaves * static_cast<int>(p.plan.leaf);
    begin = min(part * width, columns);
    count = min(width, columns - begin);
    steps = ceil_div(count, kPipeDepth);
  }
};

/// A lane's first row of its warp's 16, in an order that meets no bank twice; the other is the
/// eighth from there.
__device__ __forceinline__ int shrink_row() {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  return lane / 4 % 4 * 2 + lane / 16;
}

/// The warpgroup that fills the pipe. begin(): as fill_pipe()'s.
template <class Pipe, class Begin>
__device__ __forceinline__ void fill_shrink(const ShrinkParams& p, const CUtensorMap& wide,
                                            const Pairs& pairs, PipeBarriers<Pipe>& barriers,
                                            char* smem, const ShrinkPart& own, std::int64_t row,
                                            int first_rank, const Begin& begin) {
  const auto line_of = [&](int rank) {
    const int j = min(first_rank + rank, p.width - 1) + p.first_hidden;
    const int s = slice_of(p.hidden, p.first_slice, p.num_slices, j), r = j - p.hidden.first[s];
    const PairEntry& pair = pairs.slice(s);
    const Matrix m = pair.weight(p.side == Side::kA);
    const std::int64_t rank_stride = p.side == Side::kA ? m.row_stride : m.col_stride;
    const std::int64_t stride = p.side == Side::kA ? m.col_stride : m.row_stride;
    return NarrowLine{static_cast<const float*>(m.data) + r * rank_stride + own.begin * stride,
                      stride, first_rank + rank < p.width && r < pair.rank};
  };
  const bool by_ranks = p.weights.rows_are_ranks;
  const NarrowPieces<Pipe::kRanks> pieces(static_cast<int>(threadIdx.x) % kPipeThreads, by_ranks,
                                          own.count, p.weights.vectors && by_ranks, line_of);
  fill_pipe<Pipe>(barriers, smem, own.steps, pieces, begin,
                  [&](int step, std::uint32_t to, device::Mbarrier* barrier) {
#pragma unroll
                    for (int box = 0; box < kPipeDepth / kBoxFloats; ++box) {
                      device::copy_box(to + box * (Pipe::kWideBytes / 2), wide,
                                       2 * (own.begin + step * kPipeDepth + box * kBoxFloats),
                                       static_cast<int>(row), barrier);
                    }
                  });
}

/// The sums of a warpgroup that multiplies.
template <class Pipe>
__device__ __forceinline__ void multiply_shrink(const ShrinkParams& p, PipeBarriers<Pipe>& barriers,
                                                std::uint32_t smem, const ShrinkPart& part,
                                                float (&sum)[Pipe::kRanks / 2]) {
  constexpr int kTogether = 2;  // MMA steps
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int row = warp * 16 + shrink_row();
  const std::uint32_t own = row * 128 + ((lane % 4 / 2 ^ row % 8) << 4) + lane % 2 * 8;
  PipeWalk<Pipe> walk{barriers, smem};
  device::LeafSums<Pipe::kRanks / 2, float_levels(Pipe::kRanks)> tree;
  device::WgmmaPartSums<Pipe::kRanks, kTogether> sums;
  device::WgmmaRegisters<kFloatPlanes> a[2][kTogether];
  int step = 0;
#pragma unroll 1
  for (int leaf = 0; leaf < part.leaves; ++leaf) {
    const int leaf_end = min(part.steps, (leaf + 1) * static_cast<int>(p.plan.leaf) / kPipeDepth);
    sums.begin();
#pragma unroll 1
    for (; step < leaf_end; ++step) {
      walk.wait();
      const std::uint64_t planes = walk.planes();
#pragma unroll
      for (int k = 0; k < kPipeSteps; k += kTogether) {
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          float2 pair[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const int inside = (k + i) % 2 * 64 + j / 2 * 32;
            pair[j] = read_float2((own ^ inside) + walk.wide() +
                                  (k + i) / 2 * (Pipe::kWideBytes / 2) + j % 2 * 1024);
          }
          split_fragment(pair, a[k / kTogether % 2][i].part);
        }
        sums.template add<kFloatPlanes, kFloatPlanes>(
            a[k / kTogether % 2], planes + k * device::kDescriptorStep, Pipe::kPlaneBytes / 16);
        if (k == 0) walk.leave_last();
      }
      walk.next();
    }
    sums.end();
    walk.leave_last();
#pragma unroll
    for (int i = 0; i < Pipe::kRanks / 2; ++i) sum[i] = sums.total(i);
    tree.add(leaf, sum);
  }
}

}  // namespace mortar::lora::train::cuda
