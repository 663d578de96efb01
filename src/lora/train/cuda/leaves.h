// SPDX-License-Identifier: Apache-2.0
// Into how many leaves sums over columns are cut, which src/device/leaf_sums.cuh adds: by sizes and
// dtypes alone, as bits follow from it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/int_math.h"
#include "lora/train/cuda/product_plan.h"

namespace mortar::lora::train::cuda {

/// Leaves, unless products have fewer (product_leaves): at 4096 columns one has 512.
inline constexpr int kLeaves = 8;
constexpr std::int64_t leaf_columns(std::int64_t columns, int leaves = kLeaves) {
  return round_up<std::int64_t>(std::max<std::int64_t>(ceil_div<std::int64_t>(columns, leaves), 1),
                                kBlockColumns);
}

/// How the operands of h or ds are multiplied: as they are, of one 16-bit type; as sums of parts;
/// or as columns of parts of float32 weights (part_columns.cuh), whose sums leave as partials, or
/// in a product's cluster.
enum class ShrinkOperands { kOneType, kSplit, kPartColumns };

/// `beside`: of ds, which dB comes beside.
inline int leaves_of(std::int64_t rows, std::int64_t columns, int width, std::int64_t adapters,
                     bool masked, bool beside, ShrinkOperands operands) {
  const bool fewer = operands == ShrinkOperands::kOneType && !masked && adapters == 0;
  return fewer ? product_leaves(rows, columns, width, beside, kLeaves) : kLeaves;
}

}  // namespace mortar::lora::train::cuda
