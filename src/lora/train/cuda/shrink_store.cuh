// SPDX-License-Identifier: Apache-2.0
// Where the sums of shrink_float.cu and shrink_boxes.cu go, of few rows: a cluster adds them and
// stores h.
#pragma once

#include "device/cluster.cuh"
#include "device/leaf_sums.cuh"
#include "lora/train/cuda/kernels.cuh"
#include "lora/train/cuda/stream.cuh"

namespace mortar::lora::train::cuda {

/// shrink_boxes.cu: as shrink_float() of plans for it, by wgmma; of float32 weights and rows side
/// by side alone, on sm_90a.
bool shrink_boxes(const ShrinkParams& p, Stream stream);

/// Eight ranks that lie side by side in h.
struct Octet {
  float factor;
  int ranks;  ///< that the pair has
};

/// Of the launch's rank columns from `first_rank` on. A barrier must follow.
template <int kOctets>
__device__ __forceinline__ void fill_octets(const ShrinkParams& p, const Pairs& pairs,
                                            int first_rank, Octet (&octets)[kOctets]) {
  if (threadIdx.x >= kOctets) return;
  const int j = p.first_hidden + first_rank + 8 * static_cast<int>(threadIdx.x);
  Octet octet{0, 0};
  if (j < p.first_hidden + p.width) {
    const int s = slice_of(p.hidden, p.first_slice, p.num_slices, j);
    octet = Octet{pairs.slice(s).factor, pairs.slice(s).rank - (j - p.hidden.first[s])};
  }
  octets[threadIdx.x] = octet;
}

/// Adds what the thread blocks of a cluster have of their rows and stores h: float32. `own_row`: of
/// the tile, of a lane's first sums; the others are those of the eighth row on.
template <int kRanks>
__device__ __forceinline__ void store_hidden(const ShrinkParams& p, const RowTile& rows, int part,
                                             int first_rank, int own_row, bool multiplies,
                                             const Octet* octets, float* partial,
                                             const float (&sum)[kRanks / 2]) {
  constexpr int kPitch = kRanks + 4;  ///< floats of a row of partial sums
  const int lane = static_cast<int>(threadIdx.x) % 32;
  __syncthreads();
  if (multiplies) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float* to = partial + (own_row + 8 * half) * kPitch + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < kRanks / 8; ++n) {
        *reinterpret_cast<float2*>(to + 8 * n) =
            make_float2(sum[4 * n + 2 * half], sum[4 * n + 2 * half + 1]);
      }
    }
  }
  device::cluster_arrive();
  device::cluster_wait();
  const int parts = p.plan.parts, own_rows = p.plan.rows / parts;
  constexpr int kWords = kRanks / 4;
  for (int i = threadIdx.x; i < own_rows * kWords; i += static_cast<int>(blockDim.x)) {
    const int at = part * own_rows + i / kWords, j = i % kWords * 4;
    if (at >= rows.count || first_rank + j >= p.width) continue;
    const float4 all = device::sum_in_cluster<kLeaves>(partial + at * kPitch + j, parts);
    const std::int64_t row = row_at(p.rows, rows.start + at);
    if (row < 0) continue;
    const Octet octet = octets[j / 8];
    const auto scaled = [&](float v_, int n) {
      return j % 8 + n < octet.ranks ? octet.factor * v_ : 0.0f;
    };
    *reinterpret_cast<float4*>(static_cast<float*>(p.h) + row * p.hidden.width + p.first_hidden +
                               first_rank + j) =
        make_float4(scaled(all.x, 0), scaled(all.y, 1), scaled(all.z, 2), scaled(all.w, 3));
  }
  // Nobody ends while others may still read its shared memory.
  device::cluster_arrive_relaxed();
  device::cluster_wait();
}

}  // namespace mortar::lora::train::cuda
