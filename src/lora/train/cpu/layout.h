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
  /// Partial sums of chunk i: of dA [sum of ranks, K], and of dB of a slice, [r, N_s].
  float* da_sums(std::int64_t chunk) const { return da_sums_ + chunk * hidden_rows_ * hidden_; }
  float* db_sums(std::int64_t chunk, int slice) const;

 private:
  const Problem& p_;
  bool backward_;
  std::int64_t hidden_, hidden_rows_, bytes_ = 0;
  std::int64_t width_ = 0;            ///< widest row
  std::int64_t weight_bytes_ = 0;     ///< of one adapter
  std::int64_t scratch_bytes_ = 0;    ///< of one thread
  std::int64_t db_rows_columns_ = 0;  ///< elements of dB of all slices
  char* weights_ = nullptr;
  char* scratch_ = nullptr;
  float* da_sums_ = nullptr;
  float* db_sums_ = nullptr;

  PreparedWeights take_weights(Arena* arena) const;
};

}  // namespace mortar::lora::train::cpu
