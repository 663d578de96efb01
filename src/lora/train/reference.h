// SPDX-License-Identifier: Apache-2.0
// The oracle of LoRA training: plain loops in float64, on host tensors, with the error that the
// documented roundings and float32 sums may make (docs/numerics.md).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "mortar/lora_train.h"

namespace mortar::lora::train {

/// A value and the most that an op may be away from it.
struct Estimate {
  double value = 0, error = 0;
};

/// The results of one call, dense and row-major.
struct Reference {
  std::vector<Estimate> h;                    ///< [M, hidden_width]
  std::vector<std::vector<Estimate>> y;       ///< [S] of [M, N_s]
  std::vector<Estimate> dx;                   ///< [M, K]
  std::vector<std::vector<Estimate>> da, db;  ///< [L * S] of [r, K], [N_s, r]
};

/// `row_adapter[m]` is the adapter of row m, or -1. Every tensor is on the host; `y` and the
/// gradients hold what is added to where the call adds.
Reference reference_forward(const LoraTrainProblem& problem, const LoraTrainForward& forward,
                            std::span<const std::int32_t> row_adapter);
Reference reference_backward(const LoraTrainProblem& problem, const LoraTrainBackward& backward,
                             std::span<const std::int32_t> row_adapter);

}  // namespace mortar::lora::train
