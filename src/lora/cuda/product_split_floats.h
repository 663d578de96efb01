// SPDX-License-Identifier: Apache-2.0
// h of float32 weights beside bfloat16 x by clusters that share the depth, which split the weights.
#pragma once

#include "lora/cuda/product.h"

namespace mortar::lora::cuda {

/// Whether launch_split_floats takes a product of kForms whose b is in float32.
bool takes_split_floats(const Product& product, const ProductPlan& plan);
/// launch_split_product of one b in float32, [values, depth], with its bits.
void launch_split_floats(const char* op, const Product& product, const ProductPlan& plan,
                         Stream stream);

}  // namespace mortar::lora::cuda
