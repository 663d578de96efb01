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

  /// Chunks of fewer steps than this are over after a trip or two to memory: such a kernel asks for
  /// its operands in L2 before it waits, and lets its successor start at once.
  static constexpr int kShortSteps = 8;

  /// `groups`: channel groups of one step; `threads_per_sm`: as many as hide the latency of memory,
  /// if the chunks can be short enough; `group_steps`: steps whose loads are in flight together, of
  /// which a chunk has a whole number; `most_steps`: a multiple of them.
  static CudaConfig make(std::int64_t batch, std::int64_t time, std::int64_t groups, int num_sms,
                         int threads_per_sm, int group_steps, int most_steps) {
    CudaConfig c;
    while (c.threads > 32 && c.threads / 2 >= groups) c.threads /= 2;
    const std::int64_t chunks = ceil_div<std::int64_t>(std::int64_t{threads_per_sm} * num_sms,
                                                       std::max<std::int64_t>(batch * groups, 1));
    const std::int64_t steps = time / chunks / group_steps * group_steps;
    c.steps = static_cast<int>(std::clamp<std::int64_t>(steps, group_steps, most_steps));
    return c;
  }
};

}  // namespace mortar::dynamic_conv
