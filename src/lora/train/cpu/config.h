// SPDX-License-Identifier: Apache-2.0
// Sizes of the pieces into which the CPU backend cuts its work. Of these, kStepRows decides about
// bits: dA and dB are sums of so many rows of an adapter, added in order.
#pragma once

#include <algorithm>
#include <cstdint>

namespace mortar::lora::train::cpu {

/// Rows of a chunk, which pass through a step together: 128 rows of 64 columns in float32 fill the
/// first-level cache.
inline constexpr std::int64_t kStepRows = 128;
/// Rows that are copied at a time where they must be (drops, gathers, widens): 32 rows of 4,096
/// float32 columns are 512 KB.
inline constexpr std::int64_t kCopyRows = 32;
/// Columns that pass through float32 scratch at a time where rows cannot be written in place.
inline constexpr std::int64_t kTileColumns = 512;

/// Most columns of x or dy whose sums over rows a thread makes at a time: 256 KB of sums. Fewer
/// have it walk over the pages of all rows more often.
inline std::int64_t most_block_columns(std::int64_t ranks) {
  const std::int64_t columns = (64 << 10) / std::max<std::int64_t>(ranks, 1);
  return std::max(kTileColumns, columns / kTileColumns * kTileColumns);
}

/// x and dy of a group of chunks, whose share of dA and dB is added once its last chunk has passed:
/// what a third-level cache still holds then. Two chunks a thread at least.
inline constexpr std::int64_t kGroupBytes = 8 << 20;

/// Multiply-adds that are worth a thread: about 8 us of one core.
inline constexpr std::int64_t kWorkPerThread = 1 << 20;

}  // namespace mortar::lora::train::cpu
