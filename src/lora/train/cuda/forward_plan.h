// SPDX-License-Identifier: Apache-2.0
// h and y in one launch (lora/cuda/product_forward.cu): when, and how it is cut.
#pragma once

#include <algorithm>
#include <cstdint>

#include "lora/cuda/product_forward.h"
#include "lora/train/cuda/config.h"

namespace mortar::lora::train::cuda {

using lora::cuda::ForwardPlan;

/// A plan of tiles of `rows` and so many thread blocks a cluster.
inline ForwardPlan forward_plan(std::int64_t columns, int leaves, int parts,
                                int rows = lora::cuda::kForwardRows, int clusters = 0) {
  return {parts, leaf_columns(columns, leaves), leaves / parts, rows, clusters};
}

/// What a thread block has of so many columns, by `unit` columns.
inline double units_of_block(std::int64_t columns, int unit, int parts) {
  return static_cast<double>(ceil_div<std::int64_t>(ceil_div<std::int64_t>(columns, unit), parts));
}

/// What a thread block takes whose tile has more rows than an MMA: sums and h of so many ranks pass
/// from each of `parts` to all others; a step's bytes fill its shared memory, with `weight_rows` of
/// 128 bytes beside those of x; and y leaves it at some 30 KB a microsecond.
struct TallTile {
  double start_us = 0, least_step_us = 0, columns_us = 0;
  TallTile(int tile_rows, int ranks, int parts, int weight_rows) {
    constexpr double kSentPerUs = 16e3, kColumnsUs = 0.06, kColumnsRowUs = 0.008;
    if (tile_rows <= lora::cuda::kForwardRows) return;
    start_us = static_cast<double>(tile_rows * ranks * parts) / kSentPerUs;
    least_step_us = 2.0 * kBlockColumns * (tile_rows + weight_rows) / kStageBytesPerUs;
    columns_us = kColumnsUs + kColumnsRowUs * tile_rows;
  }
};

/// The least time of a launch that passes so many rows of x and y. Of tall tiles nearly all thread
/// blocks read, and then nearly all write, which is slower; but fewer start and end.
inline double dram_us(std::int64_t rows, std::int64_t columns, std::int64_t out_columns,
                      int tile_rows) {
  const double bytes = 2.0 * static_cast<double>(rows) * static_cast<double>(columns + out_columns);
  return tile_rows > lora::cuda::kForwardRows ? 2.5 + bytes / 3.6e6 : 5 + bytes / 4.1e6;
}

/// What a thread block of a cluster of `parts` takes for a tile of `rows`, by steps of 64 columns
/// of x and 128 columns of y at a time; and no less than all bytes take. Rows of B that are no
/// whole sectors of L2 take longer where all SMs ask for them, or where eight share a line. Fitted
/// to 103 plans of 55 sizes (M of 64 to 4,200, K and N of 1,024 to 28,672, ranks 8 to 64) on an
/// H200: what it chooses takes at most 1.05 times as long as the best of these plans and two
/// launches.
inline double forward_us(std::int64_t rows, std::int64_t columns, std::int64_t out_columns,
                         int width, int parts, int tile_rows, int rounds = 1) {
  constexpr double kStartUs = 3.64, kStepUs = 0.147, kStepRowUs = 0.00065;
  constexpr double kColumnsUs = 0.315, kColumnsRowUs = 0.0027;
  const int ranks = width <= 32 ? 32 : lora::cuda::kForwardRanks;
  const double part_sectors = width % 16 == 0 ? 0 : parts == 2 ? 0.5 : width < 16 ? 0.25 : 0;
  const TallTile tall(tile_rows, width, parts, ranks);
  const double own =
      kStartUs + tall.start_us +
      units_of_block(columns, lora::cuda::kProductStep, parts) *
          std::max(kStepUs + kStepRowUs * (tile_rows + ranks), tall.least_step_us) +
      units_of_block(out_columns, lora::cuda::kForwardColumns, parts) *
          (std::max(kColumnsUs + kColumnsRowUs * tile_rows, tall.columns_us) + part_sectors);
  return std::max(rounds * own,
                  dram_us(rows, columns, out_columns, tile_rows) + 1.5 * (rounds - 1));
}

/// The same of float32 weights, whose boxes a warp splits.
inline double parts_forward_us(std::int64_t rows, std::int64_t columns, std::int64_t out_columns,
                               int parts, int tile_rows) {
  constexpr double kStartUs = 4.6, kStepUs = 0.22, kColumnsUs = 0.7;
  constexpr double kTallStartUs = 0.8, kTallColumnsUs = 0.4;  // more
  const TallTile tall(tile_rows, lora::cuda::kPartsForwardRanks, parts, 32);
  const bool is_tall = tile_rows > lora::cuda::kForwardRows;
  const double own = kStartUs + tall.start_us + (is_tall ? kTallStartUs : 0) +
                     units_of_block(columns, lora::cuda::kProductStep, parts) *
                         std::max(kStepUs, tall.least_step_us) +
                     units_of_block(out_columns, lora::cuda::kForwardColumns, parts) *
                         (is_tall ? tall.columns_us + kTallColumnsUs : kColumnsUs);
  return std::max(own, 1 + dram_us(rows, columns, out_columns, tile_rows));
}

/// Two launches, of which products take 1.5 us more; of float32 weights, which another one splits,
/// three.
inline double apart_us(std::int64_t rows, std::int64_t columns, std::int64_t out_columns, int width,
                       bool in_parts) {
  const double read = 2.0 * static_cast<double>(columns) * static_cast<double>(rows + width);
  const double written = 2.0 * static_cast<double>(out_columns) * static_cast<double>(rows + width);
  if (in_parts) return 8.5 + (read + written) / 3.1e6;
  if (width <= 16) return 6.3 + read / 3.32e6 + written / 4.14e6;
  return 6.3 + read / 2.97e6 + written / 3.87e6 + (width > 32 ? 1.5 : 0);
}

/// The same of up to 128 rows and ranks (lora/cuda/product_forward_wide.cu): all bytes that pass
/// through an SM's shared memory, and a start that is longer in large clusters. Within a tenth
/// of what nine sizes of 1,024 to 8,192 rows took on an H200.
inline double wide_forward_us(std::int64_t rows, std::int64_t columns, std::int64_t out_columns,
                              int width, int parts, int tile_rows) {
  using namespace lora::cuda;
  constexpr double kStartUs = 2.2, kPartUs = 0.7, kSmemBytesPerUs = 52e3;
  const double step_bytes = 2.0 * kProductStep * (tile_rows + kWideForwardRanks);
  const double tile_bytes = 2.0 * kForwardColumns * (tile_rows + kWideForwardRanks);
  const double own = kStartUs + kPartUs * parts +
                     (units_of_block(columns, kProductStep, parts) * step_bytes +
                      units_of_block(out_columns, kForwardColumns, parts) * tile_bytes) /
                         kSmemBytesPerUs;
  return std::max(own, 5 + 2 * static_cast<double>(columns + out_columns) *
                               static_cast<double>(rows + width) / 4.1e6);
}
/// Two launches for so many ranks.
inline double wide_apart_us(std::int64_t rows, std::int64_t columns, std::int64_t out_columns,
                            int width) {
  return 10.2 + 2 * static_cast<double>(columns + out_columns) * static_cast<double>(rows + width) /
                    3.03e6;
}

/// Tiles of as few rows as let all run at once.
inline ForwardPlan choose_wide_forward(std::int64_t rows, std::int64_t columns,
                                       std::int64_t out_columns, int width, int sms) {
  using namespace lora::cuda;
  const int leaves = leaves_of(rows, columns, width, 0, false, false, ShrinkOperands::kOneType);
  ForwardPlan best;
  double least = wide_apart_us(rows, columns, out_columns, width);
  for (int parts = leaves; parts >= std::max(leaves / kMostWideForwardLeaves, 2); parts /= 2) {
    const std::int64_t at_once = std::max<std::int64_t>(clusters_at_once(parts, 1, sms), 1);
    const std::int64_t tile =
        round_up<std::int64_t>(ceil_div<std::int64_t>(rows, at_once), kWideForwardRowUnit);
    if (tile > kWideForwardRows) continue;
    const double us =
        wide_forward_us(rows, columns, out_columns, width, parts, static_cast<int>(tile));
    if (us >= least) continue;
    least = us;
    best = forward_plan(columns, leaves, parts, static_cast<int>(tile));
  }
  return best;
}

/// Tiles of as few rows as let all run at once, or, where y is no wider than x, of more than 64 in
/// two rounds, whose thread blocks start as those of the first end. (us on an H200, apart / in two
/// rounds: rank 16, 12345 x 2560 x 2560 42.0 / 38.3; 16384 x 2048 x 2048 42.0 / 40.7; 12000 x 4096
/// x 4096 60.0 / 58.7; but rank 24, the first 44.0 / 45.1.) y is no wider than eight times x: where
/// nearly all is written, two launches reach more of the DRAM (4096 x 1024 x 28672, rank 16: 65.4
/// us for 68.5).
inline ForwardPlan choose_forward(std::int64_t rows, std::int64_t columns, std::int64_t out_columns,
                                  int width, int sms, bool in_parts = false) {
  using namespace lora::cuda;
  if (width > (in_parts ? kPartsForwardRanks : kWideForwardRanks)) return {};
  if (out_columns > 8 * columns) return {};
  if (width > kForwardRanks) return choose_wide_forward(rows, columns, out_columns, width, sms);
  const auto operands = in_parts ? ShrinkOperands::kPartColumns : ShrinkOperands::kOneType;
  const int leaves = leaves_of(rows, columns, width, 0, false, false, operands);
  const int fewest = std::max(leaves / kMostForwardLeaves, 2);
  ForwardPlan best;
  double least = apart_us(rows, columns, out_columns, width, in_parts);
  for (int parts = leaves; parts >= fewest; parts /= 2) {
    const std::int64_t at_once = std::max<std::int64_t>(clusters_at_once(parts, 1, sms), 1);
    const int most_rounds = in_parts || out_columns > columns ? 1 : 2;
    for (int rounds = 1; rounds <= most_rounds; ++rounds) {
      const std::int64_t least_rows = ceil_div<std::int64_t>(rows, rounds * at_once);
      if (least_rows > kTallForwardRows || (rounds > 1 && least_rows <= kForwardRows)) continue;
      const int tile = round_up(static_cast<int>(least_rows), kForwardRowUnit);
      const double us = in_parts
                            ? parts_forward_us(rows, columns, out_columns, parts, tile)
                            : forward_us(rows, columns, out_columns, width, parts, tile, rounds);
      if (us >= least) continue;
      least = us;
      best = forward_plan(columns, leaves, parts, tile);
    }
  }
  return best;
}

/// The same of so many adapters' rows, or of one's with dropout (product_forward_segments.cu), all
/// of whose tiles have up to 64 rows and run at once. As half of the last tile of each of several
/// is empty on average, theirs have a few rows more, if they may.
inline ForwardPlan choose_segment_forward(std::int64_t rows, std::int64_t columns,
                                          std::int64_t out_columns, int width, int sms,
                                          int segments) {
  using namespace lora::cuda;
  if (width > kForwardRanks || out_columns > 8 * columns) return {};
  const int leaves =
      leaves_of(rows, columns, width, segments, false, false, ShrinkOperands::kOneType);
  const int fewest = std::max(leaves / kMostForwardLeaves, 2);
  ForwardPlan best;
  double least = apart_us(rows, columns, out_columns, width, false);
  for (int parts = leaves; parts >= fewest; parts /= 2) {
    const std::int64_t at_once = std::max<std::int64_t>(clusters_at_once(parts, 1, sms), 1);
    const auto tile_of = [&](std::int64_t clusters) {
      return round_up<std::int64_t>(ceil_div<std::int64_t>(rows, clusters), kForwardRowUnit);
    };
    if (tile_of(at_once) > kForwardRows) continue;
    const std::int64_t full = std::max<std::int64_t>(at_once - segments / 2, 1);
    const int tile = static_cast<int>(std::min<std::int64_t>(tile_of(full), kForwardRows));
    // Windows of many adapters are done piece by piece.
    if (segments > 1 && 2 * rows < std::int64_t{segments} * tile) continue;
    const double us = forward_us(rows, columns, out_columns, width, parts, tile);
    if (us >= least) continue;
    least = us;
    const int clusters = segments > 1 ? static_cast<int>(at_once) : 0;
    best = forward_plan(columns, leaves, parts, tile, clusters);
  }
  return best;
}

}  // namespace mortar::lora::train::cuda
