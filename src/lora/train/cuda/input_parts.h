// SPDX-License-Identifier: Apache-2.0
// dA and dx of float32 weights beside bfloat16 in one pass over x (input_parts.cu): when, and in
// what chunks of rows.
#pragma once

#include <algorithm>
#include <cstdint>

#include "lora/train/cuda/panel.h"
#include "lora/train/problem.h"
#include "mortar/stream.h"

namespace mortar::lora::train::cuda {

struct PanelParams;

/// Ranks that input_parts.cu has room for.
inline constexpr int kMostInputPartsRanks = 32;

/// Chunks of a sum of columns of parts of x, with dx, whose thread blocks of 128 columns have an SM
/// each; 0: dx comes apart, as these are too short, or leave more than an eighth of the SMs idle.
/// Made for the SMs of an H200 on every device, as sums follow from it. (us of a backward on an
/// H200, apart / in one pass: rank 16, 4096 x 4096 x 4096 48.4 / 44.1, 4096 x 5120 x 5120 57.8 /
/// 53.9, 8192 x 4096 x 14336 171 / 168; rank 32, 4096 x 4096 x 4096 69.8 / 66.5; but with 112
/// thread blocks, 8192 x 14336 x 4096 174 / 191.)
inline std::int64_t chunks_with_dx_in_parts(const PanelProblem& x) {
  constexpr std::int64_t kFewestRows = 256;
  if (x.adapters > 0 || !x.by_products() || x.width > x.copies * kMostInputPartsRanks) return 0;
  const std::int64_t panels =
      ceil_div<std::int64_t>(std::max<std::int64_t>(x.columns[0], 1), dx_columns(DxPanels::k128));
  const std::int64_t chunks = std::min(kPanelSms / panels, x.rows / kFewestRows);
  return 8 * panels * chunks >= 7 * kPanelSms ? chunks : 0;
}

/// `ds`: in float32, dense; its columns of parts are the sums' own operand.
void input_parts(const PanelParams& p, const Matrix& ds, const Matrix& dx, Stream stream);

}  // namespace mortar::lora::train::cuda
