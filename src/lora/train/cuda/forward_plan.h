// SPDX-License-Identifier: Apache-2.0
// h and y in one launch (lora/cuda/product_forward.cu): when, and how it is cut.
#pragma once

#include <algorithm>
#include <cstdint>

#include "lora/cuda/product_forward.h"
#include "lora/train/cuda/config.h"

namespace mortar::lora::train::cuda {

using lora::cuda::ForwardPlan;

/// A plan of tiles of `rows` and so many thread blocks a cluster, one for each tile or `clusters`
/// for all.
inline ForwardPlan forward_plan(std::int64_t columns, int leaves, int parts, int clusters = 0,
                                int rows = lora::cuda::kForwardRows) {
  return {parts, leaf_columns(columns, leaves), leaves / parts, clusters, rows};
}

/// What a thread block has of so many columns, by `unit` columns.
inline double units_of_block(std::int64_t columns, int unit, int parts) {
  return static_cast<double>(ceil_div<std::int64_t>(ceil_div<std::int64_t>(columns, unit), parts));
}

/// What a thread block of a cluster of `parts` takes for a tile of `rows`, by steps of 64 columns
/// of x and 128 columns of y at a time; and no less than all bytes take. Rows of B that are no
/// whole sectors of L2 take longer where all SMs ask for them, or where eight share a line. Fitted
/// to 103 plans of 55 sizes (M of 64 to 4,200, K and N of 1,024 to 28,672, ranks 8 to 64) on an
/// H200: what it chooses takes at most 1.05 times as long as the best of these plans and two
/// launches.
inline double forward_us(std::int64_t rows, std::int64_t columns, std::int64_t out_columns,
                         int width, int parts, int tile_rows) {
  constexpr double kStartUs = 3.64, kStepUs = 0.147, kStepRowUs = 0.00065;
  constexpr double kColumnsUs = 0.315, kColumnsRowUs = 0.0027;
  const int ranks = width <= 32 ? 32 : lora::cuda::kForwardRanks;
  const double part_sectors = width % 16 == 0 ? 0 : parts == 2 ? 0.5 : width < 16 ? 0.25 : 0;
  const double own = kStartUs +
                     units_of_block(columns, lora::cuda::kProductStep, parts) *
                         (kStepUs + kStepRowUs * (tile_rows + ranks)) +
                     units_of_block(out_columns, lora::cuda::kForwardColumns, parts) *
                         (kColumnsUs + kColumnsRowUs * tile_rows + part_sectors);
  return std::max(
      own, 5 + 2 * static_cast<double>(columns + out_columns) * static_cast<double>(rows) / 4.1e6);
}

/// The same of float32 weights, whose boxes a warp splits.
inline double parts_forward_us(std::int64_t columns, std::int64_t out_columns, int parts) {
  constexpr double kStartUs = 4.6, kStepUs = 0.22, kColumnsUs = 0.7;
  return kStartUs + kStepUs * units_of_block(columns, lora::cuda::kProductStep, parts) +
         kColumnsUs * units_of_block(out_columns, lora::cuda::kForwardColumns, parts);
}

/// Two launches, of which products take 1.5 us more; of float32 weights, which another one splits,
/// three.
inline double apart_us(std::int64_t rows, std::int64_t columns, std::int64_t out_columns, int width,
                       bool in_parts) {
  const double bytes =
      2.0 * static_cast<double>(columns + out_columns) * static_cast<double>(rows + width);
  if (in_parts) return 8.5 + bytes / 3.1e6;
  return 6.3 + bytes / (width <= 16 ? 3.75e6 : 3.4e6) + (width > 32 ? 1.5 : 0);
}

/// The same of up to 128 rows and ranks (lora/cuda/product_forward_wide.cu): all bytes that pass
/// through an SM's shared memory, and a start that is longer in large clusters. Within a tenth
/// of what nine sizes of 1,024 to 8,192 rows took on an H200.
inline double wide_forward_us(std::int64_t rows, std::int64_t columns, std::int64_t out_columns,
                              int width, int parts, int tile_rows) {
  using namespace lora::cuda;
  constexpr double kStartUs = 2.2, kPartUs = 0.7, kBytesPerUs = 52e3;
  const double step_bytes = 2.0 * kProductStep * (tile_rows + kWideForwardRanks);
  const double tile_bytes = 2.0 * kForwardColumns * (tile_rows + kWideForwardRanks);
  const double own = kStartUs + kPartUs * parts +
                     (units_of_block(columns, kProductStep, parts) * step_bytes +
                      units_of_block(out_columns, kForwardColumns, parts) * tile_bytes) /
                         kBytesPerUs;
  return std::max(own, 5 + 2 * static_cast<double>(columns + out_columns) *
                               static_cast<double>(rows + width) / 4.1e6);
}
/// Two launches for so many ranks.
inline double wide_apart_us(std::int64_t rows, std::int64_t columns, std::int64_t out_columns,
                            int width) {
  return 10.2 + 2 * static_cast<double>(columns + out_columns) *
                    static_cast<double>(rows + width) / 3.03e6;
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
    best = forward_plan(columns, leaves, parts, 0, static_cast<int>(tile));
  }
  return best;
}

/// Tiles of as few rows as let all run at once, or, of so many ranks that two launches take longer,
/// of 64 rows in two full rounds. y is no wider than eight times x: where nearly all is written,
/// two launches reach more of the DRAM (4096 x 1024 x 28672, rank 16: 65.4 us for 68.5).
inline ForwardPlan choose_forward(std::int64_t rows, std::int64_t columns, std::int64_t out_columns,
                                  int width, int sms, bool in_parts = false) {
  using namespace lora::cuda;
  constexpr int kTwoRoundRanks = 64;
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
    const std::int64_t tile =
        round_up<std::int64_t>(ceil_div<std::int64_t>(rows, at_once), kForwardRowUnit);
    if (tile > kForwardRows) continue;
    const double us =
        in_parts ? parts_forward_us(columns, out_columns, parts)
                 : forward_us(rows, columns, out_columns, width, parts, static_cast<int>(tile));
    if (us >= least) continue;
    least = us;
    best = forward_plan(columns, leaves, parts, 0, static_cast<int>(tile));
  }
  if (best.parts > 0) return best;
  const std::int64_t tiles = ceil_div<std::int64_t>(rows, kForwardRows);
  const std::int64_t at_once = clusters_at_once(fewest, 1, sms);
  const bool two_rounds = tiles <= 2 * at_once && 10 * tiles >= 18 * at_once;
  if (in_parts || leaves < fewest || width < kTwoRoundRanks || !two_rounds || out_columns > columns)
    return {};
  return forward_plan(columns, leaves, fewest, static_cast<int>(at_once));
}

}  // namespace mortar::lora::train::cuda
