// SPDX-License-Identifier: Apache-2.0
// Dropout on the rows of product.cu and product_split.cu: a warpgroup puts zeros in place of the
// dropped elements of its rows of a stage, while its MMAs of the stage before run.
//
// A Philox block is 16 neighbouring elements, two pieces of 16 bytes: some 160 instructions. A
// thread has two of them in a stage of 128 rows or columns, 800 clocks; the stage's bytes take
// 1,200 of an SM's share of DRAM.
#pragma once

#include "core/philox.h"
#include "device/bulk_copy.cuh"
#include "lora/cuda/product_shape.cuh"
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
  const int depth = (unit.first_step + step) * kProductStep;
  auto* const tile = static_cast<unsigned char*>(__cvta_shared_to_generic(stage));
  if (threshold != 0) {
#pragma unroll
    for (int i = 0; i < kLines * kQuarters / kWarpgroup; ++i) {
      const int at = static_cast<int>(threadIdx.x) % kWarpgroup + i * kWarpgroup;
      const int line = warpgroup * kLines + at / kQuarters, quarter = at % kQuarters;
      const std::int64_t row = kByDepth ? unit.row + line : depth + line % kProductStep;
      const int column =
          (kByDepth ? depth : unit.row + line / kProductStep * 64) + quarter * train::kMaskGroup;
      const std::int64_t index = row * p.mask_columns + p.mask_first + column;
      const PhiloxWords all =
          philox_quad<train::kMaskRounds>(draws.seed, draws.offset, index / train::kMaskGroup);
#pragma unroll
      for (int octet = 0; octet < 2; ++octet) {
        auto* own = reinterpret_cast<uint4*>(tile + device::swizzled(line, 2 * quarter + octet));
        const train::OctetDraw draw{{all.word[2 * octet], all.word[2 * octet + 1]}};
        *own = train::cuda::masked(*own, train::cuda::keep_words(draw, threshold));
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

}  // namespace mortar::lora::cuda::product
