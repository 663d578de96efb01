// SPDX-License-Identifier: Apache-2.0
// The launch plan of dense float32 operands without dropout: shrink_float.cu and expand_float.cu.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/int_math.h"
#include "lora/train/cuda/config.h"

namespace mortar::lora::train::cuda {

/// Columns of the weights that a thread block of shrink_float.cu has where it has an SM for itself.
inline constexpr int kLongFloatChunk = 512;

/// Levels of the tree of leaves that a thread of shrink_float.cu holds.
constexpr int float_levels(int ranks) { return ranks == 16 ? 2 : 1; }
constexpr int float_unfused_parts(std::int64_t rows, int width) {
  const int levels = float_levels(std::min(stream_ranks(width), kMostUnfusedRanks));
  return std::max(unfused_parts(rows, width), kLeaves >> levels);
}

/// Microseconds of shrink_boxes.cu: waves of thread blocks that have an SM each, of which a wave
/// takes its start and end, and its bytes from a DRAM that all share or, of a few thread blocks,
/// what an SM takes in.
struct BoxTime {
  static constexpr double kStartUs = 2.5, kDramBytesPerUs = 3.0e6, kSmBytesPerUs = 50e3;
  std::int64_t columns;
  constexpr double us(std::int64_t blocks, int rows, int parts, int sms) const {
    const double bytes = 4.0 * rows * static_cast<double>(columns) / parts;
    const auto wave = [&](std::int64_t n) {
      return n == 0 ? 0.0
                    : kStartUs + std::max(static_cast<double>(n) * bytes / kDramBytesPerUs,
                                          bytes / kSmBytesPerUs);
    };
    return static_cast<double>(blocks / sms) * wave(sms) + wave(blocks % sms);
  }
};

/// h or ds of dense float32 rows. `stores_h`: as float32 and in no other form. Then, of so few rows
/// that their thread blocks have an SM each, clusters add the sums and store it. `boxes`: operands
/// are for shrink_boxes.cu, if the device is.
inline ShrinkPlan choose_float_shrink(std::int64_t rows, std::int64_t columns, int width,
                                      std::int64_t adapters, bool stores_h, bool boxes,
                                      const Machine& machine) {
  ShrinkPlan plan;
  plan.floats = true;
  plan.boxes = boxes && machine.clusters;
  plan.leaf = leaf_columns(columns);
  plan.ranks = std::min(stream_ranks(width), kMostUnfusedRanks);
  plan.parts = float_unfused_parts(rows, width);
  const std::int64_t blocks_of_ranks = ceil_div(std::max(width, 1), plan.ranks);
  const std::int64_t tiles = ceil_div<std::int64_t>(rows, kTileRows) * blocks_of_ranks;
  // One long stream an SM beats two of half its length: a forward of 4096 x 4096 x 4096 and 16
  // ranks 60.0 us for 62.0, a backward of 2048 x 5120 x 13824 and 32 ranks 176.4 for 179.9.
  const auto fill = [&](int parts) {
    const std::int64_t blocks = tiles * parts;
    return blocks <= machine.sms && 10 * blocks >= std::int64_t{9} * machine.sms;
  };
  if (plan.boxes) {
    const BoxTime time{columns};
    double least = 0;
    for (const int tile : {128, 64}) {
      const std::int64_t all =
          (ceil_div<std::int64_t>(rows, tile) + adapters / 2) * blocks_of_ranks;
      const int fewest = kLeaves >> float_levels(plan.ranks);
      for (int parts = float_unfused_parts(rows, width); parts >= fewest; parts /= 2) {
        const double us = time.us(all * parts, tile, parts, machine.sms);
        if (least > 0 && us >= least) continue;
        least = us;
        plan.rows = tile;
        plan.parts = parts;
      }
    }
  } else if (fill(plan.parts)) {
    plan.per_sm = 1;
  } else if (plan.ranks == 16 && plan.parts == kLeaves && fill(kLeaves / 2)) {
    plan.parts = kLeaves / 2;
    plan.per_sm = 1;
  } else if (tiles * plan.parts <= machine.sms) {
    plan.rows = kTileRows / 2;
    plan.per_sm = 2;
  }
  if (!machine.clusters || !stores_h) return plan;
  for (const int tile : {128, 64}) {
    const std::int64_t clusters = (ceil_div<std::int64_t>(rows, tile) + adapters) * blocks_of_ranks;
    if (clusters > clusters_at_once(kLeaves, 1, machine.sms)) break;
    plan.fused = true;
    plan.rows = tile;
    plan.parts = kLeaves;
    plan.per_sm = 1;
    plan.chunk = kLongFloatChunk;
  }
  return plan;
}

/// Thread blocks of an SM that expand_float.cu has.
constexpr int float_expand_blocks(int ranks) { return ranks == 16 ? 4 : 3; }

}  // namespace mortar::lora::train::cuda
