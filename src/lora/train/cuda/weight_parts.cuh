// SPDX-License-Identifier: Apache-2.0
// Float32 weights of a call, written out as columns of bfloat16 parts (part_columns.cuh).
#pragma once

#include "lora/train/cuda/kernels.cuh"
#include "lora/train/cuda/workspace.h"

namespace mortar::lora::train::cuda {

/// Which weights a call needs with how many copies of a rank.
struct PartNeeds {
  bool sum_a = false, sum_b = false, pair_a = false, pair_b = false;
  bool any() const { return sum_a || sum_b || pair_a || pair_b; }
};

/// Their place in the workspace.
class WeightParts {
 public:
  WeightParts() = default;
  WeightParts(const Problem& p, const PartNeeds& needs, Arena* arena);
  const PartNeeds& needs() const { return needs_; }
  /// The next pair's entry in the table of weights with so many copies, from its entry as the
  /// caller gave it; pairs come in order. Null where nobody asks.
  PairEntry next(const Problem& p, const PairEntry& from, int slice, int copies);

 private:
  PartNeeds needs_;
  char *sum_a_ = nullptr, *sum_b_ = nullptr, *pair_a_ = nullptr, *pair_b_ = nullptr;
};

/// How they lie: A along K, B along its ranks.
inline WeightLayout part_layout(Side side) { return {side == Side::kA, true, true, 1}; }

/// Columns of parts of the h that the forward has saved, of one adapter's rows; null: not wanted.
struct SavedHidden {
  const float* values = nullptr;
  void* columns = nullptr;
  std::int64_t rows = 0;
  HiddenColumns hidden{};
};

/// Writes the weights of all pairs that `sum` and `pair` have a place for.
struct WeightPartsParams {
  PairTable from, sum, pair;
  Side sides[4];
  int copies[4];
  int num_jobs;
  int num_pairs;
  std::int64_t hidden, widths[kLoraMaxSlices];
  SavedHidden saved;
};
void split_weights(const Problem& p, const PartNeeds& needs, const PairTable& from,
                   const PairTable& sum, const PairTable& pair, const SavedHidden& saved,
                   Stream stream);

}  // namespace mortar::lora::train::cuda
