// SPDX-License-Identifier: Apache-2.0
// Dropout in product.cu and product_split.cu. On rows: a warpgroup puts zeros in place of the
// dropped elements of its rows of a stage, while its MMAs of the stage before run. On what is
// stored: a thread does so with its sums.
//
// A Philox block is 16 neighbouring elements, two pieces of 16 bytes. A thread has two of them in a
// stage of 128 rows or columns. Instructions alone would take some 800 clocks of 1,200 that the
// stage's bytes take of an SM's share of DRAM; dA of 4096 x 14336 elements and 64 ranks takes twice
// that, 71 us on an H100, as two warps a scheduler wait for each other's results.
#pragma once

#include "core/philox.h"
#include "device/bulk_copy.cuh"
#include "lora/cuda/product_shape.cuh"
#include "lora/train/cuda/keep.cuh"
#include "lora/train/cuda/stream.cuh"

namespace mortar::lora::cuda::product {

/// Drops elements of `step` of a unit, in the stage where the ring is; by both warpgroups.
template <class S>
__device__ __forceinline__ void drop_stage(const Params& p, const lora::train::cuda::Draws& draws,
                                           std::uint32_t threshold, const Unit<S>& unit, int step,
                                           std::uint32_t stage) {
  namespace train = lora::train;
  constexpr int kQuarters = kProductStep / train::kMaskGroup;
  constexpr int kLines = S::kRowsBytes / device::kSwizzleBytes / 2;  // of a warpgroup
  constexpr bool kByDepth = S::kA == Major::kDepth;
  const int warpgroup = static_cast<int>(threadIdx.x) / kWarpgroup;
  const int depth = unit.depth + (unit.first_step + step) * kProductStep;
  auto* const tile = static_cast<unsigned char*>(__cvta_shared_to_generic(stage));
  if (threshold != 0) {
    const train::cuda::Keep keep(threshold);
#pragma unroll
    for (int i = 0; i < kLines * kQuarters / kWarpgroup; ++i) {
      const int at = static_cast<int>(threadIdx.x) % kWarpgroup + i * kWarpgroup;
      const int line = warpgroup * kLines + at / kQuarters, quarter = at % kQuarters;
      const std::int64_t row = kByDepth ? unit.row + line : depth + line % kProductStep;
      const int column =
          (kByDepth ? depth : unit.row + line / kProductStep * 64) + quarter * train::kMaskGroup;
      const std::int64_t index = row * p.mask_columns + p.mask_first + column;
      const PhiloxWords all =
          train::cuda::draw_block(draws.seed, draws.offset, index / train::kMaskGroup);
#pragma unroll
      for (int octet = 0; octet < 2; ++octet) {
        auto* own = reinterpret_cast<uint4*>(tile + device::swizzled(line, 2 * quarter + octet));
        const train::OctetDraw draw{{all.word[2 * octet], all.word[2 * octet + 1]}};
        *own = train::cuda::masked(*own, train::cuda::mask_words(keep.bits(draw)));
      }
    }
  }
  device::fence_async_proxy();
  if constexpr (S::kByColumns) {
    device::named_barrier<1, kConsumers>();
  } else {
    meet_warpgroup(warpgroup);
  }
}

/// Bit j is set if element j of four is kept: of bits 7, 15, 23 and 31, in OctetDraw's order.
__device__ __forceinline__ std::uint32_t gather_bits(std::uint32_t word) {
  return (word >> 7 & 0x01010101u) * 0x10402080u >> 28;
}

/// Drops elements of a thread's sums of `row` and of eight rows further. Of four blocks of 16
/// columns each lane of a quad draws one, and gives its bits to the others: 16 of each row.
template <class S>
__device__ __forceinline__ void drop_sums(const Params& p, const lora::train::cuda::Draws& draws,
                                          const Unit<S>& unit, int row, float (&sum)[S::kSums]) {
  namespace train = lora::train;
  const std::uint32_t threshold = p.thresholds[unit.first_b];
  if (threshold == 0) return;
  const train::cuda::Keep keep(threshold);
  const int quad_lane = static_cast<int>(threadIdx.x) % 4;
  const std::int64_t first = row * p.mask_columns + p.mask_first + unit.column;
#pragma unroll
  for (int g = 0; g < S::kColumns / 64; ++g) {
    std::uint32_t bits = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int64_t block = (first + 8 * half * p.mask_columns) / train::kMaskGroup;
      const PhiloxWords all =
          train::cuda::draw_block(draws.seed, draws.offset, block + 4 * g + quad_lane);
#pragma unroll
      for (int octet = 0; octet < 2; ++octet) {
        const uint2 kept = keep.bits({{all.word[2 * octet], all.word[2 * octet + 1]}});
        bits |= (gather_bits(kept.x) | gather_bits(kept.y) << 4) << (16 * half + 8 * octet);
      }
    }
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      const std::uint32_t own = __shfl_sync(0xffffffffu, bits, block, 4) >> 2 * quad_lane;
#pragma unroll
      for (int i = 0; i < 8; ++i) {  // of each of two rows, pairs of two octets
        const int half = i / 2 % 2, octet = i / 4;
        float& v = sum[4 * (8 * g + 2 * block + octet) + 2 * half + i % 2];
        v = (own >> (16 * half + 8 * octet + i % 2) & 1) != 0 ? v : 0.0f;
      }
    }
  }
}

}  // namespace mortar::lora::cuda::product
