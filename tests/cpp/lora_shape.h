// SPDX-License-Identifier: Apache-2.0
// What launch choices look at, of a case of the tests.
#pragma once

#include <algorithm>

#include "lora/launch_plan.h"
#include "lora_case.h"

namespace mortar::testing {

/// Of lora_apply.
inline lora::LoraShape shape_of(const LoraOperands& op) {
  lora::LoraShape s;
  s.num_tokens = op.c.tokens;
  s.hidden = op.c.hidden;
  s.num_adapters = op.c.adapters;
  std::copy(op.c.widths.begin(), op.c.widths.end(), s.widths.begin());
  s.num_slices = static_cast<int>(op.c.widths.size());
  s.max_rank = s.h_columns = op.max_rank();
  s.one_type = op.c.w != DType::kFloat32 && op.c.x == op.c.w && op.c.y == op.c.w;
  s.float_weights = op.c.w == DType::kFloat32 && op.c.x == DType::kBFloat16 && op.c.y == op.c.x;
  s.aligned_x = s.aligned_y = !op.c.strided;
  s.b_by_8 = s.one_type && op.max_rank() % 8 == 4 && !op.c.strided;
  s.b_runs = s.one_type && !op.c.table && !op.c.strided && op.max_rank() % 4 == 0 &&
             std::all_of(op.c.widths.begin(), op.c.widths.end(),
                         [](std::int64_t width) { return width % 32 == 0; });
  s.segments = op.c.segments;
  s.ragged = !op.c.table && !op.c.one_rank;
  s.boxes = op.c.one_rank && op.max_rank() % lora::kWalkBoxRows == 0 && s.one_type && !op.c.strided;
  s.b_boxes =
      s.boxes && std::all_of(op.c.widths.begin(), op.c.widths.end(),
                             [](std::int64_t width) { return width % lora::kWalkCols == 0; });
  return s;
}

}  // namespace mortar::testing
