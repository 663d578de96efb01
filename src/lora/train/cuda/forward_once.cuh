// SPDX-License-Identifier: Apache-2.0
// h and y in one launch, lora/cuda/product_forward.cu.
#pragma once

#include "lora/train/cuda/forward_plan.h"
#include "lora/train/cuda/kernels.cuh"

namespace mortar::lora::train::cuda {

/// Whether h and y are products of one 16-bit type, of one slice and without dropout.
inline bool may_run_once(const Problem& p) {
  return p.num_slices == 1 && !p.drops && p.hidden_width > 0 && p.slices[0].width > 0 &&
         p.weight != DType::kFloat32 && p.x.dtype == p.weight && p.slices[0].y.dtype == p.weight;
}

/// The launch of both, as the plan says; false where it does not take the operands.
bool forward_products(const ShrinkParams& s, const ExpandParams& e, Policy policy,
                      const ForwardPlan& plan, Stream stream);

}  // namespace mortar::lora::train::cuda
