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
    c.steps = static_cast<int>(
        std::clamp<std::int64_t>(ceil_div<std::int64_t>(time, chunks), kLeastSteps, kMostSteps));
    return c;
  }
};

/// How the CUDA backend cuts (B, T, D): a CTA takes `threads` groups of adjacent channels through
/// `steps` steps of time.
struct CudaConfig {
  int threads = 128;
  int steps = 32;

  /// Threads an SM needs: the loads of 320 hide the latency of memory, and fewer, longer chunks
  /// beat more threads (backward, 1 x 4096 x 3072, W = 4, H200: 78.5 us with 372 an SM in chunks of
  /// 128 steps, 83.6 us with 1,490 in chunks of 32).
  static constexpr std::int64_t kThreadsPerSm = 320;
  static constexpr int kLeastSteps = 8;

  /// `groups`: channel groups of one step; `most_steps`: 16 forward, 128 backward (whose halo,
  /// W - 1 steps of every chunk, costs more).
  static CudaConfig make(std::int64_t batch, std::int64_t time, std::int64_t groups, int num_sms,
                         int most_steps) {
    CudaConfig c;
    while (c.threads > 32 && c.threads / 2 >= groups) c.threads /= 2;
    c.steps = most_steps;
    const auto in_flight = [&] { return batch * groups * ceil_div<std::int64_t>(time, c.steps); };
    while (c.steps > kLeastSteps && in_flight() < kThreadsPerSm * num_sms) c.steps /= 2;
    return c;
  }
};

}  // namespace mortar::dynamic_conv
