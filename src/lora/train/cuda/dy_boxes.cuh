// SPDX-License-Identifier: Apache-2.0
// ds and dB of dense float32 operands in one launch.
#pragma once

#include "lora/train/cuda/kernels.cuh"

namespace mortar::lora::train::cuda {

/// The partial sums of both; false for operands that it does not take, for which nothing happens.
bool dy_boxes(const ShrinkParams& ds, const OuterParams& db, Stream stream);

}  // namespace mortar::lora::train::cuda
