// SPDX-License-Identifier: Apache-2.0
// The tree by which sums over columns are added: kLeaves leaves of equal length (the last ones may
// be shorter or empty), or fewer (config.h).
#pragma once

#include "device/leaf_sums.cuh"
#include "lora/train/cuda/config.h"

namespace mortar::lora::train::cuda {

using device::LeafSums;

}  // namespace mortar::lora::train::cuda
