// SPDX-License-Identifier: Apache-2.0
// Forward and backward by plans that the caller has chosen: tests try others than the library's.
#pragma once

#include "lora/cuda/product_forward.h"
#include "lora/train/cuda/config.h"
#include "lora/train/cuda/panel.h"
#include "lora/train/problem.h"

namespace mortar::lora::train::cuda {

/// Plans of the forward in place of those that the sizes give. Null: as chosen.
struct ForcedPlans {
  const ShrinkPlan* shrink = nullptr;
  const ExpandPlan* expand = nullptr;
  const lora::cuda::ForwardPlan* once = nullptr;  ///< h and y in one launch
};
void forward(const Problem& p, const ForcedPlans& forced, Stream stream);

/// The plan of a problem's backward.
BackwardPlan plan_backward(const Problem& p);
std::int64_t backward_workspace(const Problem& p, const BackwardPlan& plan);
void backward(const Problem& p, const BackwardPlan& plan, Stream stream);

}  // namespace mortar::lora::train::cuda
