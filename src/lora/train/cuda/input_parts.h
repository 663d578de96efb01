// SPDX-License-Identifier: Apache-2.0
// dA and dx of float32 weights beside bfloat16 in one pass over x (input_parts.cu): when, and in
// what chunks of rows.
#pragma once

#include <algorithm>
#include <cstdint>

#include "lora/train/cuda/panel.h"

namespace mortar::lora::train::cuda {

struct PanelParams;

/// Ranks that input_parts.cu has room for.
constexpr int most_input_parts_ranks(bool drops) { return drops ? 16 : 32; }

/// Chunks of a sum of columns of parts of x, with dx, whose thread blocks of 128 columns have an SM
/// each; 0: dx comes apart, as these are too short, or leave more than a sixth of the SMs idle. Made
/// for the SMs of an H200 on every device, as sums follow from it.
inline std::int64_t chunks_with_dx_in_parts(const PanelProblem& x, bool drops) {
  constexpr std::int64_t kFewestRows = 256;
  if (x.adapters > 0 || !x.by_products() || x.width > x.copies * most_input_parts_ranks(drops)) {
    return 0;
  }
  const std::int64_t panels =
      ceil_div<std::int64_t>(std::max<std::int64_t>(x.columns[0], 1), dx_columns(DxPanels::k128));
  const std::int64_t chunks = std::min(kPanelSms / panels, x.rows / kFewestRows);
  return 6 * panels * chunks >= 5 * kPanelSms ? chunks : 0;
}

/// `ds`: in float32, dense; its columns of parts are the sums' own operand.
void input_parts(const PanelParams& p, const Matrix& ds, const Matrix& dx, Stream stream);

}  // namespace mortar::lora::train::cuda
