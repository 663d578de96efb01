// SPDX-License-Identifier: Apache-2.0
// How h and ds of float32 weights beside bfloat16 are cut, whose columns of parts one tile has, and
// dB beside ds: pure functions of sizes and of the number of SMs.
#pragma once

#include "lora/train/cuda/product_plan.h"

namespace mortar::lora::train::cuda {

/// h or ds of so few columns of parts by clusters that share the depth, in one tile a row, the
/// narrowest. `beside`: of ds, whose tiles have all rows where they may, as dB begins where
/// clusters of four leave SMs free. (Backward, 4096 x 4096 x 4096, rank 32, on an H100: 88 us for
/// 95.)
inline ProductCut cut_part_shrink(std::int64_t rows, std::int64_t columns, int width, int leaves,
                                  int sms, bool beside) {
  const int middle = beside ? 128 : kHalfPartTile;
  const int tile = width <= 64 ? 64 : width <= middle ? middle : kWidestPartTile;
  const ProductCut cut = cut_split_shrink(rows, columns, width, leaves, sms, Alone(), tile);
  return beside ? cut : half_tiles(cut, rows, width, leaves, sms);
}

/// ds of so few columns of parts that one tile of 64 has them, on half of the SMs, with dB beside
/// it on the others, so that dy comes from memory once: by thread blocks that have whole rows,
/// whose sums another launch adds, or by clusters. None (of parts 0): where few rows leave most SMs
/// idle, or many take all.
inline ProductCut cut_part_shrink_beside(std::int64_t rows, std::int64_t columns, int width,
                                         int leaves, int sms) {
  constexpr int kTile = 64;
  constexpr double kAddUs = 3, kEndUs = 1.1, kEndPartUs = 0.5;
  constexpr double kWholeStep = 1.3;  // whole rows: two thread blocks share each step of b
  ProductCut best{kTile, 0};
  for (int parts = 1; parts <= leaves; parts *= 2) {
    const std::int64_t blocks = product_blocks(rows, width, kTile, parts);
    if (width > kTile || 2 * blocks > sms || 3 * blocks < sms) continue;
    const double steps = static_cast<double>(
        ceil_div<std::int64_t>(ceil_div<std::int64_t>(columns, lora::cuda::kProductStep), parts));
    const double end_us = parts == 1 ? kAddUs : kEndUs + kEndPartUs * parts;
    const double step_us = (parts == 1 ? kWholeStep : 1) * long_step_us(kTile);
    best = {kTile, parts, kRampUs + steps * step_us + end_us, parts > 1};
  }
  return best;
}

/// Whether that takes less time than ds on all SMs and then dB: a pure function of sizes, for the
/// SMs of an H200, as the chunks of dB follow from it.
inline bool shares_dy(std::int64_t rows, std::int64_t columns, int width, int leaves, int copies) {
  constexpr int kSms = 132;
  const ProductCut half = cut_part_shrink_beside(rows, columns, width, leaves, kSms);
  if (half.parts == 0) return false;
  const BesideRowSums beside(rows, columns, width, kSms);
  const BesideRowSums after(rows, columns, width, kSms,
                            cut_rows_alone(rows, columns, width, copies));
  const double apart_us = cut_part_shrink(rows, columns, width, leaves, kSms, true).us;
  return beside(half.us, product_blocks(rows, width, half.columns, half.parts)) <
         after(apart_us, kSms);
}

}  // namespace mortar::lora::train::cuda
