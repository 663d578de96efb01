// SPDX-License-Identifier: Apache-2.0
// Whether products store dA and dB themselves, in place of partial sums.
#pragma once

#include <cstdint>

#include "core/int_math.h"
#include "lora/train/cuda/config.h"
#include "mortar/lora.h"
#include "mortar/stream.h"

namespace mortar::lora::train::cuda {

/// dA or dB as one chunk of rows, or as the sum of two in a thread's registers: neither partial
/// sums nor their launch, in tiles of 128 ranks by 128 columns. Those of dA, whose rows are ranks,
/// are two thread blocks' at least.
inline constexpr int kMostStoredChunks = 2;

/// Whether that takes less time: more thread blocks are at work where partial sums have wide tiles,
/// fewer where they have two chunks. No bit depends on it. (us of a backward, sums / stored: on an
/// H200, rank 256, 4096 x 8192 x 8192 154 / 128, rank 128, 2048 x 8192 x 8192 61.8 / 57.5; on an
/// H100, rank 512, 2048 x 4096 x 4096 85.5 / 70.4; but rank 256, 8192 x 4096 x 4096, on an H200,
/// 134 / 145. 8192 rows of rank 512 gave 256 / 248 there in one run, and nothing in another.)
inline bool stores_sums(std::int64_t rows, std::int64_t columns, int width, std::int64_t chunk_rows,
                        bool of_a, int sms) {
  using namespace lora::cuda;
  constexpr double kStepUs = 0.43, kWideStepUs = 0.72;  // of 128 and 256 columns of ranks
  constexpr double kSumBytesPerUs = 1.5e6, kTie = 1.05;
  const std::int64_t chunks = ceil_div(rows, chunk_rows);
  if (width <= (of_a ? kProductRows : kProductRows / 2) || chunks > kMostStoredChunks) return false;
  const auto waves_us = [&](std::int64_t tiles, std::int64_t depth, double step_us) {
    const std::int64_t clusters = sms / kProductCluster;
    return static_cast<double>(ceil_div(tiles, clusters) *
                               ceil_div<std::int64_t>(depth, kProductStep)) *
           step_us;
  };
  const std::int64_t lines = of_a ? width : columns, dense = of_a ? columns : width;
  const double stored = waves_us(ceil_div<std::int64_t>(lines, kProductCluster * kProductRows) *
                                     ceil_div<std::int64_t>(dense, kProductRows),
                                 rows, kStepUs);
  const int tile = rows_launch_tile(width, 1);
  const double summed =
      waves_us(ceil_div<std::int64_t>(columns, kProductCluster * kProductRows) *
                   ceil_div(width, tile) * chunks,
               chunk_rows, tile > kProductRows ? kWideStepUs * tile / 256 : kStepUs) +
      4.0 * static_cast<double>(chunks * columns) * width / kSumBytesPerUs;
  return kTie * stored < summed;
}

/// Operands of a pass over x or dy whose gradients its product stores.
struct StoredSums {
  bool of[kLoraMaxSlices + 1] = {};
};
struct PanelParams;
void panel_products(const PanelParams& p, const StoredSums& stored, Policy policy, Stream stream);

}  // namespace mortar::lora::train::cuda
