// SPDX-License-Identifier: Apache-2.0
// The rows of a batch in chunks of one adapter each, and those of none.
#pragma once

#include <cstdint>
#include <vector>

#include "lora/train/problem.h"

namespace mortar::lora::train::cpu {

/// Rows row(start) .. row(start + count - 1), all of `adapter`; -1: base rows.
struct Chunk {
  std::int64_t adapter = 0, start = 0, count = 0;
};

class RowChunks {
 public:
  explicit RowChunks(const Problem& p);

  /// In the order of adapters, those of an adapter in the order of its rows.
  const std::vector<Chunk>& chunks() const { return chunks_; }
  const std::vector<Chunk>& base_chunks() const { return base_; }
  std::int64_t row(std::int64_t position) const {
    return sorted_ == nullptr ? position : sorted_[position];
  }

 private:
  void cut(std::int64_t adapter, std::int64_t start, std::int64_t count, std::int64_t size,
           std::vector<Chunk>* to);

  const std::int32_t* sorted_ = nullptr;
  std::vector<Chunk> chunks_, base_;
};

/// Most chunks that a batch of M rows and L adapters has.
std::int64_t most_chunks(const Problem& p);

}  // namespace mortar::lora::train::cpu
