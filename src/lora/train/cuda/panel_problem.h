// SPDX-License-Identifier: Apache-2.0
// What the sums over rows of LoRA training depend on, and how rows of several adapters of more than
// 32 ranks are cut for them.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "lora/train/cuda/config.h"
#include "lora/train/cuda/panel_shapes.h"
#include "mortar/lora.h"

namespace mortar::lora::train::cuda {

/// What a pass over the matrices of all slices, or over x, depends on.
struct PanelProblem {
  std::int64_t rows = 0;
  int matrices = 0;
  std::array<std::int64_t, kLoraMaxSlices> columns{};
  int width = 0;              ///< the most rank columns of any
  std::int64_t adapters = 0;  ///< whose rows are cut apart; 0: one has all rows
  bool products = false;      ///< lora/cuda/product.cu takes most operands: sm_90a
  bool few_segments = false;  ///< the same of several adapters: their operands come with a launch
  int copies = 1;             ///< columns of a rank (part_columns.cuh)
  bool beside_ds = false;     ///< of dy: dB comes beside ds
  bool with_dx = false;       ///< of x: dx is wanted, and not added to what is there

  /// Whether chunks are those of products, and have one chain each.
  bool by_products() const {
    if (adapters > 0) return products && few_segments && width > kPanelShapes[kInputPanels32].ranks;
    return width >= (products ? kLeastRowProductRanks : kLeastProductRanks);
  }
  /// Whether dB's thread blocks run beside those of ds by a product.
  bool beside_product() const {
    return beside_ds && copies == 1 && matrices == 1 && adapters == 0 &&
           width >= kLeastProductRanks;
  }
};

/// Rows that take as long as a chunk's first stages and partial sums.
inline constexpr int kSegmentFixedRows = 256;

/// Chunks of several adapters' rows by products, whose clusters are one wave or few.
inline RowCut segment_chunks(const PanelProblem& p) {
  using namespace lora::cuda;
  const int tile = rows_tile(p.width);
  std::int64_t clusters = 0;  // side by side
  for (int i = 0; i < p.matrices; ++i) {
    clusters += ceil_div<std::int64_t>(p.columns[i], kProductCluster * kProductRows) *
                ceil_div(p.width, tile);
  }
  RowCut cut = even_cut(p.rows, p.adapters, kProductStep, std::max<std::int64_t>(clusters, 1),
                        kPanelSms / kProductCluster, kSegmentFixedRows);
  // Shorter chunks would leave more bytes than they read.
  cut.rows = std::max(cut.rows, round_up(2 * p.width, kProductStep));
  return cut;
}

/// Panels of 64 columns of x, one at least.
inline std::int64_t dx_panels_of(const PanelProblem& x) {
  const std::int64_t columns = std::max<std::int64_t>(x.columns[0], 1);
  return ceil_div<std::int64_t>(columns, dx_columns(DxPanels::k64));
}
/// Whether such panels with an SM each have each adapter's rows at once: dx comes with dA then.
inline bool segments_with_dx(const PanelProblem& x) {
  return x.with_dx && x.adapters > 0 && x.by_products() && x.width <= kMostRanks &&
         dx_panels_of(x) * x.adapters <= kPanelSms;
}
/// Chunks of several adapters' rows by these.
inline RowCut dx_chunks(const PanelProblem& x) {
  return even_cut(x.rows, x.adapters, lora::cuda::kProductStep, dx_panels_of(x), kPanelSms,
                  kSegmentFixedRows);
}

}  // namespace mortar::lora::train::cuda
