// SPDX-License-Identifier: Apache-2.0
// Where product.cu puts a thread's sums: float32 partials, or rounded rows, to which a base may be
// added.
#pragma once

#include <cstdint>

#include "device/barrier.cuh"
#include "device/convert.cuh"
#include "device/stmatrix.cuh"
#include "device/tensor_copy.cuh"
#include "lora/cuda/product_shape.cuh"
#include "lora/train/cuda/part_columns.cuh"

namespace mortar::lora::cuda::product {

/// Partials, as the product wants them.
template <class S>
__device__ __forceinline__ void store_partials(const Params& p, const Unit<S>& unit, int row,
                                               const float (&sum)[S::kSums]) {
  const Group& group = p.groups[unit.group];
  const int column = unit.column + static_cast<int>(threadIdx.x) % 4 * 2;
  const std::int64_t step = p.column_stride;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (row + 8 * half >= unit.end) continue;
    float* to = p.partials + unit.part * p.part_stride + (row + 8 * half) * p.row_stride +
                (group.first_column + column) * step;
#pragma unroll
    for (int j = 0; j < S::kSums / 4; ++j) {
      if (column + 8 * j >= unit.columns) continue;
      const float2 v = make_float2(sum[4 * j + 2 * half], sum[4 * j + 2 * half + 1]);
      if (step == 1) {
        *reinterpret_cast<float2*>(to + 8 * j) = v;
      } else {
        to[8 * j * step] = v.x;
        to[(8 * j + 1) * step] = v.y;
      }
    }
  }
}

/// The same where three neighbouring octets of columns are the parts of one, which are added.
template <class S>
__device__ __forceinline__ void store_added_partials(const Params& p, const Unit<S>& unit, int row,
                                                     const float (&sum)[S::kSums]) {
  constexpr int kCopies = lora::train::cuda::kSumCopies;
  const int first = (static_cast<int>(p.groups[unit.group].first_column) + unit.column) / kCopies +
                    static_cast<int>(threadIdx.x) % 4 * 2;
  const std::int64_t step = p.column_stride;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (row + 8 * half >= unit.end) continue;
    float* to =
        p.partials + unit.part * p.part_stride + (row + 8 * half) * p.row_stride + first * step;
#pragma unroll
    for (int o = 0; o < S::kColumns / (8 * kCopies); ++o) {
      if (unit.column + 8 * kCopies * o >= unit.columns) continue;
      const float* v = sum + 4 * kCopies * o + 2 * half;
      const float2 two = make_float2(lora::train::cuda::sum_of_columns(v[0], v[4], v[8]),
                                     lora::train::cuda::sum_of_columns(v[1], v[5], v[9]));
      if (step == 1) {
        *reinterpret_cast<float2*>(to + 8 * o) = two;
      } else {
        to[8 * o * step] = two.x;
        to[(8 * o + 1) * step] = two.y;
      }
    }
  }
}

/// Sums over rows as they are where partials are added to zero: none is -0.
template <int kSums>
__device__ __forceinline__ void add_to_zero(float (&sum)[kSums]) {
#pragma unroll
  for (float& v : sum) v = 0.0f + v;
}

/// Adds the base's tile, which lies in shared memory as two blocks of 64 columns. `row` is counted
/// from the tile's first.
template <class S>
__device__ __forceinline__ void add_base(Ring<S>* ring, const unsigned char* smem, int row,
                                         float (&sum)[S::kSums]) {
  ring->full[ring->at.stage].wait(ring->at.round & 1);
  const unsigned char* stage = smem + ring->at.stage * S::kStageBytes;
  const int quad_lane = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int j = 0; j < S::kSums / 4; ++j) {
      const unsigned char* block = stage + j / 8 * kProductRows * device::kSwizzleBytes;
      const float2 base = device::unpack2<typename S::T>(*reinterpret_cast<const std::uint32_t*>(
          block + device::swizzled(row + 8 * half, j % 8) + 4 * quad_lane));
      float* v = sum + 4 * j + 2 * half;
      v[0] = base.x + v[0];
      v[1] = base.y + v[1];
    }
  }
  __syncwarp();
  release(*ring, ring->at.stage);
  ring->at.next();
}

/// Rounds a warpgroup's rows into its blocks of shared memory, up to 128 columns at a time, which
/// copies then take to where they belong while the next unit is multiplied.
template <class S>
__device__ __forceinline__ void store_boxes(const Params& p, const Unit<S>& unit,
                                            const Ring<S>& ring, const float (&sum)[S::kSums]) {
  constexpr int kRows = kProductRows / 2, kBlocks = S::kColumns == 64 ? 1 : 2;
  const int warpgroup = static_cast<int>(threadIdx.x) / kWarpgroup;
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4,
            lane = static_cast<int>(threadIdx.x) % 32;
  const bool asks = threadIdx.x % kWarpgroup == 0;
  const std::uint32_t own = ring.tile + warpgroup * kBlocks * kBlockBytes;
  // Lanes give the rows of two neighbouring pieces of 8 columns, of the first 8 rows and of the
  // others.
  const int row = 16 * warp + lane / 8 % 2 * 8 + lane % 8;
#pragma unroll
  for (int first = 0; first < S::kColumns; first += 64 * kBlocks) {
    const int blocks = min(kBlocks, (S::kColumns - first) / 64);
    if (asks) device::store_boxes_wait_read();
    meet_warpgroup(warpgroup);
#pragma unroll
    for (int j = 0; j < 8 * blocks; j += 2) {
      device::store_rounded<typename S::T>(
          own + j / 8 * kBlockBytes + device::swizzled(row, j % 8 + lane / 16),
          sum + 4 * (first / 8 + j));
    }
    device::fence_async_proxy();
    meet_warpgroup(warpgroup);
    if (!asks) continue;
#pragma unroll
    for (int block = 0; block < blocks; ++block) {
      device::store_box(p.out_map, unit.column + first + 64 * block, unit.row + warpgroup * kRows,
                        own + block * kBlockBytes);
    }
    device::store_boxes_commit();
  }
}

/// A warpgroup's rows of a tile, rounded, which leave while the next unit is multiplied: first 128
/// columns, then the others.
template <class S>
struct Outgoing {
  static constexpr int kBlocks = S::kColumns / 64, kBlockWords = 16;

  std::uint32_t words[kBlocks * kBlockWords];
  int row, column, sent = 2;  ///< halves

  __device__ __forceinline__ void take(const Unit<S>& unit, const float (&sum)[S::kSums]) {
#pragma unroll
    for (int i = 0; i < S::kSums / 2; ++i) {
      words[i] = device::pack2<typename S::T>(sum[2 * i], sum[2 * i + 1]);
    }
    row = unit.row;
    column = unit.column;
    sent = 0;
  }

  /// Sends halves until so many have left.
  __device__ __forceinline__ void send(const Params& p, std::uint32_t tile, int upto) {
    if (sent < 1 && upto >= 1) send_blocks<0, 2>(p, tile);
    if (sent < 2 && upto >= 2) send_blocks<2, kBlocks>(p, tile);
    sent = max(sent, upto);
  }

 private:
  template <int kFirst, int kEnd>
  __device__ __forceinline__ void send_blocks(const Params& p, std::uint32_t tile) {
    const int warpgroup = static_cast<int>(threadIdx.x) / kWarpgroup;
    const int warp = static_cast<int>(threadIdx.x) / 32 % 4,
              lane = static_cast<int>(threadIdx.x) % 32;
    const bool asks = threadIdx.x % kWarpgroup == 0;
    const std::uint32_t own = tile + 2 * warpgroup * kBlockBytes;
    const int line = 16 * warp + lane / 8 % 2 * 8 + lane % 8;  // as in store_boxes()
    if (asks) device::store_boxes_wait_read();
    meet_warpgroup(warpgroup);
#pragma unroll
    for (int block = kFirst; block < kEnd; ++block) {
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        const std::uint32_t* from = words + block * kBlockWords + 2 * j;
        device::stmatrix_x4(
            own + (block - kFirst) * kBlockBytes + device::swizzled(line, j + lane / 16),
            {from[0], from[1], from[2], from[3]});
      }
    }
    device::fence_async_proxy();
    meet_warpgroup(warpgroup);
    if (!asks) return;
#pragma unroll
    for (int block = kFirst; block < kEnd; ++block) {
      device::store_box(p.out_map, column + 64 * block, row + warpgroup * (kProductRows / 2),
                        own + (block - kFirst) * kBlockBytes);
    }
    device::store_boxes_commit();
  }
};

/// Rounds rows straight to where they belong, 16 bytes of a thread at a time.
template <class S>
__device__ __forceinline__ void store_rows(const Params& p, const Unit<S>& unit, int row,
                                           const float (&sum)[S::kSums]) {
  const Group& group = p.groups[unit.group];
  const int column = unit.column + static_cast<int>(threadIdx.x) % 4 * 8;
  const int columns = unit.columns - column;  // from the thread's first on
  uint4* to[2];
  bool there[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::int64_t own = row + 8 * half;
    there[half] = own < unit.end;
    to[half] = reinterpret_cast<uint4*>(static_cast<unsigned short*>(p.out) + own * p.out_stride +
                                        group.first_column + column);
  }
#pragma unroll
  for (int g = 0; g < S::kColumns / 32; ++g) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      std::uint32_t words[4];
      round_row<typename S::T>(words, sum + 16 * g + 2 * half);
      if (!there[half] || 32 * g >= columns) continue;
      __stcs(to[half] + 4 * g, make_uint4(words[0], words[1], words[2], words[3]));
    }
  }
}

}  // namespace mortar::lora::cuda::product
