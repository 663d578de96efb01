// SPDX-License-Identifier: Apache-2.0
// y of product_forward_segments.cu, by the two warpgroups that have made h.
#pragma once

#include "device/convert.cuh"
#include "device/stmatrix.cuh"
#include "device/thread_anew.cuh"
#include "device/wgmma.cuh"
#include "lora/cuda/product_forward_lines.cuh"
#include "lora/cuda/product_forward_segments.cuh"
#include "lora/cuda/product_split.cuh"

namespace mortar::lora::cuda::forward_segments {

/// Of two adapters' values, one after the other, each row keeps those of its own.
template <int kCount>
__device__ __forceinline__ void keep_own(const Tile& tile, float (&v)[2 * kCount]) {
  const int thread = static_cast<int>(threadIdx.x);
  const int row = thread % kWarpgroup / 32 * 16 + thread % 32 / 4;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (row + i / 2 % 2 * 8 >= tile.cut) v[i] = v[kCount + i];
  }
}

/// The tile's own rows of a block of 64 columns of y, by a warpgroup.
__device__ __forceinline__ void store_rows(const SegmentParams& p, const Tile& tile, int column,
                                           const unsigned char* block) {
  const std::int64_t columns = p.out_columns - column;
  for (int i = device::thread_anew() % kWarpgroup; i < tile.count * 8; i += kWarpgroup) {
    const int row = i / 8, first = i % 8 * 8;
    const auto* v = reinterpret_cast<const uint4*>(block + device::swizzled(row, i % 8));
    unsigned short* to = p.y_data + (tile.row + row) * p.y_stride + column + first;
    if (first + 8 <= columns) {
      *reinterpret_cast<uint4*>(to) = *v;
    } else {
      const auto* values = reinterpret_cast<const unsigned short*>(v);
      for (int k = 0; first + k < columns && k < 8; ++k) to[k] = values[k];
    }
  }
}

/// y of this thread block's columns: a warpgroup has 64 of the 128 that a stage has weights of.
template <class S, int kAdapters>
__device__ __forceinline__ void make_y(const SegmentParams& p, const Tile& tile,
                                       unsigned char* smem, Barriers<S>& bars,
                                       device::RingCursor<S::kStages>& at) {
  using T = typename S::T;
  constexpr int kSums = 64 / 2;
  const Part part(p);
  const int thread = static_cast<int>(threadIdx.x), warpgroup = thread / kWarpgroup;
  const int warp = thread / 32 % 4, lane = thread % 32, row = 16 * warp + lane / 4;
  const bool asks = thread % kWarpgroup == 0;
  const auto release = [&](int stage) {
    if (lane == 0) bars.empty[stage].arrive();
  };
  const std::uint32_t base = device::smem_address(smem);
  const auto h = device::wgmma_descriptor(base + S::kHiddenAt, kBlockBytes);
  const int put = device::swizzled(16 * warp + lane / 8 % 2 * 8 + lane % 8, lane / 16);
  int block = S::kOutAt + 2 * warpgroup * kBlockBytes;
  const int blocks = 2 * block + kBlockBytes;
  float sum[kAdapters * kSums] = {};
  for (int i = 0; i < part.columns; ++i) {
    const int column = part.column(p, i) + 64 * warpgroup;
    int stages[kAdapters];
    device::wgmma_keep(sum);
#pragma unroll
    for (int k = 0; k < kAdapters; ++k, at.next()) {
      stages[k] = at.stage;
      bars.full[at.stage].wait(at.round & 1);
    }
    device::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kAdapters; ++k) {
      const auto b = device::wgmma_descriptor(
          base + stages[k] * S::kStageBytes + warpgroup * kBlockBytes / S::kShare, kBlockBytes);
      auto& own = reinterpret_cast<float(&)[kSums]>(sum[k * kSums]);
      if constexpr (S::kShare > 1) {
        multiply_lines<T, S>(h, b, own);
      } else {
#pragma unroll
        for (int n = 0; n < S::kRanks / 16; ++n) {
          device::wgmma<T, 64>(own, h + n * device::kDescriptorStep,
                               b + n * device::kDescriptorStep, n > 0);
        }
      }
    }
    device::wgmma_commit();
    if (asks) device::store_boxes_wait_read<1>();
    meet_warpgroup(warpgroup);
    device::wgmma_wait<0>();
    device::wgmma_keep(sum);
#pragma unroll
    for (int k = 0; k < kAdapters; ++k) release(stages[k]);
    if constexpr (kAdapters > 1) keep_own<kSums>(tile, sum);
    if (S::kShare == 1 && p.adds_base) {
      bars.full[at.stage].wait(at.round & 1);
      const unsigned char* from =
          smem + at.stage * S::kStageBytes + warpgroup * kBlockBytes + lane % 4 * 4;
      add_base<T>(from, row, reinterpret_cast<float(&)[kSums]>(sum));
      __syncwarp();
      release(at.stage);
      at.next();
    }
    if (16 * warp < tile.count) {
      if constexpr (S::kShare > 1) {
        put_lines<T, S>(smem + block, reinterpret_cast<float(&)[kSums]>(sum));
      } else {
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
          device::store_rounded<T>((base + block + put) ^ j * 16, sum + 4 * j);
        }
      }
    }
    device::fence_async_proxy();
    meet_warpgroup(warpgroup);
    if (!tile.whole) {
      store_rows(p, tile, column, smem + block);
    } else if (asks) {
      device::store_box(p.y, column, tile.row, base + block);
      device::store_boxes_commit();
    }
    block = blocks - block;
  }
  if (asks) device::store_boxes_wait_read();
}

}  // namespace mortar::lora::cuda::forward_segments
