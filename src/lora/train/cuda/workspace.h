// SPDX-License-Identifier: Apache-2.0
// Sizes that follow from a problem, and the pieces of a call's workspace.
#pragma once

#include <cstdint>

#include "lora/train/cuda/config.h"
#include "lora/train/problem.h"

namespace mortar::lora::train::cuda {

/// Pieces of the workspace; without memory it counts bytes alone.
class Arena {
 public:
  explicit Arena(void* memory) : memory_(static_cast<char*>(memory)) {}
  template <class T>
  T* take(std::int64_t count) {
    constexpr std::int64_t kAlignment = 256;
    char* at = memory_ == nullptr ? nullptr : memory_ + used_;
    used_ += round_up<std::int64_t>(count * static_cast<std::int64_t>(sizeof(T)), kAlignment);
    return reinterpret_cast<T*>(at);
  }
  std::int64_t used() const { return used_; }

 private:
  char* memory_;
  std::int64_t used_ = 0;
};

inline bool grouped(const Problem& p) {
  return p.rows.offsets != nullptr || p.rows.plan != nullptr;
}

/// Most tiles of so many rows; groups and the base rows may each leave one that is not full.
inline std::int64_t most_tiles(const Problem& p, std::int64_t rows) {
  return ceil_div(p.num_rows, rows) + (grouped(p) ? p.num_adapters + 1 : 0);
}

/// Columns of h of a slice.
inline int width_of(const Problem& p, int slice) {
  return round_up(p.slices[slice].rank, kHiddenGranule);
}

}  // namespace mortar::lora::train::cuda
