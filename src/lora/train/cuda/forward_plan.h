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

/// The plan that takes least, and less than `apart_us`, of clusters that share `leaves` leaves, up
/// to `most_leaves` a thread block. `offer(parts, at_once, take)` calls take(rows, us, clusters)
/// for tiles that clusters of `parts` thread blocks, of which `at_once` run at once, may have.
template <class Offer>
ForwardPlan fastest_forward(std::int64_t columns, int leaves, int most_leaves, int sms,
                            double apart_us, const Offer& offer) {
  ForwardPlan best;
  double least = apart_us;
  for (int parts = leaves; parts >= std::max(leaves / most_leaves, 2); parts /= 2) {
    const auto take = [&](std::int64_t rows, double us, std::int64_t clusters = 0) {
      if (us >= least) return;
      least = us;
      best =
          forward_plan(columns, leaves, parts, static_cast<int>(rows), static_cast<int>(clusters));
    };
    offer(parts, std::max<std::int64_t>(clusters_at_once(parts, 1, sms), 1), take);
  }
  return best;
}

/// Rows of a tile of so many clusters, a multiple of `unit`.
inline int tile_rows_of(std::int64_t rows, std::int64_t clusters, int unit) {
  return static_cast<int>(round_up<std::int64_t>(ceil_div<std::int64_t>(rows, clusters), unit));
}

/// Tiles of as few rows as let all run at once.
inline ForwardPlan choose_wide_forward(std::int64_t rows, std::int64_t columns,
                                       std::int64_t out_columns, int width, int sms) {
  using namespace lora::cuda;
  const int leaves = leaves_of(rows, columns, width, 0, false, false, ShrinkOperands::kOneType);
  const double apart = wide_apart_us(rows, columns, out_columns, width);
  return fastest_forward(columns, leaves, kMostWideForwardLeaves, sms, apart,
                         [&](int parts, std::int64_t at_once, const auto& take) {
                           const int tile = tile_rows_of(rows, at_once, kWideForwardRowUnit);
                           if (tile > kWideForwardRows) return;
                           take(tile,
                                wide_forward_us(rows, columns, out_columns, width, parts, tile));
                         });
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
  const int most_rounds = in_parts || out_columns > columns ? 1 : 2;
  return fastest_forward(
      columns, leaves, kMostForwardLeaves, sms,
      apart_us(rows, columns, out_columns, width, in_parts),
      [&](int parts, std::int64_t at_once, const auto& take) {
        for (int rounds = 1; rounds <= most_rounds; ++rounds) {
          const std::int64_t clusters = rounds * at_once;
          if (rounds > 1 && rows <= clusters * kForwardRows) continue;
          if (rows > clusters * kTallForwardRows) continue;
          const int tile = tile_rows_of(rows, clusters, kForwardRowUnit);
          take(tile, in_parts ? parts_forward_us(rows, columns, out_columns, parts, tile)
                              : forward_us(rows, columns, out_columns, width, parts, tile, rounds));
        }
      });
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
  return fastest_forward(
      columns, leaves, kMostForwardLeaves, sms, apart_us(rows, columns, out_columns, width, false),
      [&](int parts, std::int64_t at_once, const auto& take) {
        if (rows > at_once * kForwardRows) return;
        const std::int64_t full = std::max<std::int64_t>(at_once - segments / 2, 1);
        const int tile = std::min(tile_rows_of(rows, full, kForwardRowUnit), kForwardRows);
        // Windows of many adapters are done piece by piece.
        if (segments > 1 && 2 * rows < std::int64_t{segments} * tile) return;
        take(tile, forward_us(rows, columns, out_columns, width, parts, tile),
             segments > 1 ? at_once : 0);
      });
}

}  // namespace mortar::lora::train::cuda
