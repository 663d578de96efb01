// SPDX-License-Identifier: Apache-2.0
// Launch choices as data. None of them changes a bit of any result.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/int_math.h"

namespace mortar::dynamic_conv {

/// How the CPU backend cuts (B, T, D) into pieces of work.
struct CpuConfig {
  /// Most channels of a block: whole rows for most models, so that k is one stream from memory.
  /// Blocks of 1024 take a fifth longer forward and a tenth backward (D = 3072, W = 4). The rows
  /// that go with them, the last W inputs and, backward, as many rows of float32 gradients, then
  /// come from the second-level cache: 4096 * 4 B * (2 W + 2) = 160 KB at W = 4, 300 KB of stack at
  /// W = 8.
  static constexpr std::int64_t kBlockChannels = 4096;
  /// Fewest of a block that is cut so that every thread has work, and those of a decode step.
  static constexpr std::int64_t kLeastBlockChannels = 1024;
  /// Blocks are multiples of a cache line, whatever the dtype.
  static constexpr std::int64_t kChannelGranule = 64;
  /// Steps per chunk when there is work for all: the halo of the backward, W - 1 steps of every
  /// chunk, is then 2 %.
  static constexpr int kMostSteps = 128;
  static constexpr int kLeastSteps = 16;
  /// Pieces per thread: enough that a slow core does not hold up the others.
  static constexpr int kPiecesPerThread = 4;
  /// Forwards that move as much write y past the caches, which saves reading its lines first:
  /// 5-15 %, also when y is read next. One of 3 MB gained 10 % but its reader lost more.
  static constexpr std::int64_t kStreamBytes = 32 << 20;

  std::int64_t block_channels = kBlockChannels;
  int steps = kMostSteps;

  static CpuConfig make(std::int64_t batch, std::int64_t time, std::int64_t channels, int threads) {
    const std::int64_t wanted = std::int64_t{kPiecesPerThread} * threads;
    std::int64_t most_channels = kBlockChannels;
    const auto blocks = [&] { return ceil_div(channels, most_channels); };
    while (most_channels > kLeastBlockChannels &&
           batch * blocks() * ceil_div<std::int64_t>(time, kLeastSteps) < wanted) {
      most_channels /= 2;
    }
    CpuConfig c;
    c.block_channels = ceil_div(ceil_div(channels, blocks()), kChannelGranule) * kChannelGranule;
    const std::int64_t chunks = ceil_div(wanted, std::max<std::int64_t>(batch * blocks(), 1));
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
  /// Chunks of more steps are a multiple of these: whole groups of loads.
  static constexpr int kStepGranule = 8;

  /// `groups`: channel groups of one step; `most_steps`: 8 to 48 forward, 96 or 128 backward
  /// (whose halo, W - 1 steps of every chunk, costs more); `least_steps`: where threads are too few
  /// for the SMs whatever the chunks, 1 or a multiple of kStepGranule.
  static CudaConfig make(std::int64_t batch, std::int64_t time, std::int64_t groups, int num_sms,
                         int most_steps, int least_steps) {
    CudaConfig c;
    while (c.threads > 32 && c.threads / 2 >= groups) c.threads /= 2;
    c.steps = most_steps;
    const auto in_flight = [&] { return batch * groups * ceil_div<std::int64_t>(time, c.steps); };
    while (c.steps > least_steps && in_flight() < kThreadsPerSm * num_sms) {
      c.steps = c.steps > kStepGranule ? round_up(c.steps / 2, kStepGranule) : c.steps / 2;
    }
    return c;
  }
};

}  // namespace mortar::dynamic_conv
