// SPDX-License-Identifier: Apache-2.0
// What a call keeps in its workspace.
#pragma once

#include <cstdint>

#include "lora/train/cpu/operands.h"
#include "lora/train/cpu/passes.h"
#include "lora/train/cpu/row_chunks.h"

namespace mortar::lora::train::cpu {

/// Threads that scratch is kept for.
int most_threads();

/// Where the weights of one adapter lie in the form that kernels take.
struct PreparedWeights {
  char* a[kLoraMaxSlices] = {};           ///< copy of A [r, K], where its rows are not dense
  char* bt[kLoraMaxSlices] = {};          ///< copy of B^T [r, N], likewise (backward)
  std::uint32_t* b[kLoraMaxSlices] = {};  ///< packed B (forward)
  std::uint32_t* at = nullptr;            ///< packed A^T of all slices side by side (for dx)
};

/// Pieces of the workspace. Made without memory, it counts bytes alone.
class WorkLayout {
 public:
  WorkLayout(const Problem& p, bool backward);

  std::int64_t bytes() const { return bytes_; }
  PreparedWeights weights(std::int64_t adapter) const;
  Scratch scratch(int thread) const;
  /// Chunks that pass before their share of dA and dB is added.
  std::int64_t group_chunks() const { return group_chunks_; }
  /// ds of chunk i of the group that passes, and the columns of its h from `column` on, as the sums
  /// over rows take them.
  char* ds_entries(std::int64_t i) const { return ds_entries_ + i % group_chunks_ * entry_bytes_; }
  char* h_entries(std::int64_t i, std::int64_t column) const {
    return h_entries_ + i % group_chunks_ * entry_bytes_ + column * kStepRows * sizeof(float);
  }
  /// Blocks of sums for dA and dB of all adapters.
  float* sums() const { return sums_; }

 private:
  const Problem& p_;
  bool backward_;
  std::int64_t hidden_, bytes_ = 0;
  std::int64_t width_ = 0;          ///< widest row
  std::int64_t weight_bytes_ = 0;   ///< of one adapter
  std::int64_t scratch_bytes_ = 0;  ///< of one thread
  std::int64_t entry_bytes_ = 0;    ///< of h or ds of one chunk
  std::int64_t group_chunks_ = 1;
  char* weights_ = nullptr;
  char* scratch_ = nullptr;
  char* ds_entries_ = nullptr;
  char* h_entries_ = nullptr;
  float* sums_ = nullptr;

  PreparedWeights take_weights(Arena* arena) const;
};

}  // namespace mortar::lora::train::cpu
