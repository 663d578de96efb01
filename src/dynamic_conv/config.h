// SPDX-License-Identifier: Apache-2.0
// Launch choices as data. None of them changes a bit of any result.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/int_math.h"

namespace mortar::dynamic_conv {

/// How the CPU backend cuts (B, T, D) into pieces of work.
struct CpuConfig {
  /// Channels per block. W float32 rows of input history, W of pending gradients and two more must
  /// stay in the first-level cache (32-48 KB) beside the stream of k: 1024 * 4 B * (W + 2) = 24 KB
  /// forward at W = 4; the 8 KB run of k per step is long enough for the hardware prefetcher.
  static constexpr int kBlockChannels = 1024;
  /// Steps per chunk when there is work for all: the halo of the backward, W - 1 steps of every
  /// chunk, is then 2 %.
  static constexpr int kMostSteps = 128;
  static constexpr int kLeastSteps = 16;
  /// Pieces per thread: enough that a slow core does not hold up the others.
  static constexpr int kPiecesPerThread = 4;

  int steps = kMostSteps;

  static CpuConfig make(std::int64_t batch, std::int64_t time, std::int64_t channels, int threads) {
    const std::int64_t rows = batch * ceil_div<std::int64_t>(channels, kBlockChannels);
    const std::int64_t chunks =
        ceil_div<std::int64_t>(kPiecesPerThread * threads, std::max<std::int64_t>(rows, 1));
    CpuConfig c;
    c.steps = static_cast<int>(std::clamp<std::int64_t>(ceil_div<std::int64_t>(time, chunks),
                                                        kLeastSteps, kMostSteps));
    return c;
  }
};

}  // namespace mortar::dynamic_conv
