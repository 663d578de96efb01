// SPDX-License-Identifier: Apache-2.0
// The backward by a plan that the caller has chosen: tests try others than the library's own.
#pragma once

#include "lora/train/cuda/panel.h"
#include "lora/train/problem.h"

namespace mortar::lora::train::cuda {

/// The plan of a problem's backward.
BackwardPlan plan_backward(const Problem& p);
std::int64_t backward_workspace(const Problem& p, const BackwardPlan& plan);
void backward(const Problem& p, const BackwardPlan& plan, Stream stream);

}  // namespace mortar::lora::train::cuda
