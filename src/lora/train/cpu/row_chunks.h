// SPDX-License-Identifier: Apache-2.0
// The rows of a batch in chunks of one adapter each, and those of none.
#pragma once

#include <cstdint>
#include <vector>

#include "lora/train/problem.h"

namespace mortar::lora::train::cpu {

/// Rows of the batch: row(i) is the i-th one's index.
struct StepRows {
  const std::int32_t* sorted = nullptr;  ///< null: rows lie one after the other
  std::int64_t first = 0, count = 0;
  std::int64_t row(std::int64_t i) const {
    return sorted == nullptr ? first + i : sorted[first + i];
  }
};

/// Up to kStepRows rows of one adapter.
struct Chunk {
  std::int64_t adapter = 0, start = 0, count = 0;
};

class RowChunks {
 public:
  explicit RowChunks(const Problem& p);

  /// In the order of adapters, those of an adapter in the order of its rows.
  const std::vector<Chunk>& chunks() const { return chunks_; }
  std::int64_t size() const { return static_cast<std::int64_t>(chunks_.size()); }
  StepRows rows(std::int64_t i) const { return {sorted_, chunks_[i].start, chunks_[i].count}; }
  /// Rows without an adapter, and those of adapters whose dropout leaves nothing: zero times a NaN
  /// would be a NaN.
  const std::vector<StepRows>& base_rows() const { return base_; }

 private:
  void cut(const Problem& p, std::int64_t adapter, std::int64_t start, std::int64_t count);

  const std::int32_t* sorted_ = nullptr;
  std::vector<Chunk> chunks_;
  std::vector<StepRows> base_;
};

/// Most chunks that a batch of M rows and L adapters has.
std::int64_t most_chunks(const Problem& p);

}  // namespace mortar::lora::train::cpu
