// SPDX-License-Identifier: Apache-2.0
// Sizes of the pieces into which the CPU backend cuts its work. Only the rows of a partial sum
// decide about bits, and they depend on M alone.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/int_math.h"

namespace mortar::lora::train::cpu {

/// Rows that pass through one step: 128 rows of 64 columns in float32 fill the first-level cache,
/// and a step's sums for dA and dB are read and written once.
inline constexpr std::int64_t kStepRows = 128;
/// Rows that are copied at a time where they must be (drops, gathers, widens): 32 rows of 4,096
/// float32 columns are 512 KB.
inline constexpr std::int64_t kCopyRows = 32;
/// Columns that pass through float32 scratch at a time where rows cannot be written in place.
inline constexpr std::int64_t kTileColumns = 512;

/// dA and dB are sums over rows: partial sums of chunks of so many rows of one adapter, which are
/// then added in order. At most 32 chunks, each of whole steps: with rank 16 the partial sums of
/// 4,096 rows are an eighth of x.
inline std::int64_t chunk_rows(std::int64_t num_rows) {
  return std::max(kStepRows, round_up(ceil_div<std::int64_t>(num_rows, 32), kStepRows));
}

/// Multiply-adds that are worth a thread: about 8 us of one core.
inline constexpr std::int64_t kWorkPerThread = 1 << 20;

}  // namespace mortar::lora::train::cpu
