// SPDX-License-Identifier: Apache-2.0
// The checks of LoRA training. Each throws before anything is written.
#pragma once

#include "core/check.h"
#include "lora/train/problem.h"

namespace mortar::lora::train {

/// What a call writes: nothing that another argument shares memory with.
struct Checked {
  Problem problem;
  Device device;
};

/// Everything but the workspace.
Checked check_forward(const ArgCheck& arg, const LoraTrainProblem& given,
                      const LoraTrainForward& forward);
Checked check_backward(const ArgCheck& arg, const LoraTrainProblem& given,
                       const LoraTrainBackward& backward);

/// Throws if `out` overlaps itself, or anything that a call reads beside its wide matrices and h.
void check_apart(const ArgCheck& arg, const Tensor& out, const char* name,
                 const LoraTrainProblem& given);

/// Throws unless offsets[0 .. num_adapters], in host memory, cut num_rows rows into segments.
void check_segments(const ArgCheck& arg, const std::int32_t* offsets, std::int64_t num_adapters,
                    std::int64_t num_rows);

}  // namespace mortar::lora::train
