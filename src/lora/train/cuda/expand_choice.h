// SPDX-License-Identifier: Apache-2.0
// Which kernel makes y or dx, and how it is cut: pure functions of sizes and of the device.
#pragma once

#include <algorithm>
#include <cstdint>

#include "lora/train/cuda/config.h"

namespace mortar::lora::train::cuda {

/// Time of the streaming expand from 64 ranks on, over that of its bytes: its warps wait for their
/// MMAs. 8192 x 4096, 128 ranks: 33 us where bytes take 25, and the product 26.
inline constexpr double kWideStreamTime = 1.35;
/// What the model of products takes too long for beside it: on one H100 y of 1024 x 2048 and 64
/// ranks takes 2.6 us less by the product.
inline constexpr double kExpandProductAheadUs = 2.1;

/// Time of a thread block with two warps for a column, over that of one with the same bytes.
inline constexpr double kTwoRowWarpsTime = 1.06;

/// The streaming expand with tiles of so many rows (any number) and 1 or 2 warps for a column.
constexpr ExpandPlan stream_expand(std::int64_t columns, int width, int row_warps, int tile_rows) {
  const int ranks = stream_ranks(width);
  const int panel = expand_warp_columns(ranks) * (kThreads / 32) / row_warps;
  return {ExpandPlan::Kernel::kStream, ranks, row_warps,
          static_cast<int>(ceil_div<std::int64_t>(columns, panel)), tile_rows};
}

/// y or dx by a product.
inline ExpandPlan product_expand(std::int64_t columns, const ProductCut& cut) {
  ExpandPlan plan;
  plan.kernel = ExpandPlan::Kernel::kProduct;
  plan.tile_rows = lora::cuda::kProductRows;
  plan.tile_columns = cut.columns;
  plan.panels = static_cast<int>(ceil_div<std::int64_t>(columns, cut.columns));
  return plan;
}

/// `arrays`: those of the size of the output that pass, 1 or (with a base) 2.
inline ExpandPlan choose_expand(std::int64_t rows, std::int64_t columns, int width,
                                std::int64_t adapters, int arrays, Policy policy,
                                const Machine& machine) {
  ExpandPlan plan;
  using Kernel = ExpandPlan::Kernel;
  plan.kernel = policy == Policy::kSplit
                    ? Kernel::kSplit
                    : (width <= kMostStreamRanks ? Kernel::kStream : Kernel::kWide);
  plan.ranks = stream_ranks(width);
  plan.panels = static_cast<int>(
      ceil_div<std::int64_t>(columns, plan.kernel == Kernel::kWide ? kWideColumns : kTileColumns));
  ProductCut cut;
  if (takes_products(rows, width, kLeastProductRanks, adapters, machine)) {
    cut = cut_expand(product_rows(rows, adapters), columns, width, arrays, machine.sms);
  }
  if (plan.kernel != Kernel::kStream) return cut.us > 0 ? product_expand(columns, cut) : plan;
  const auto block_bytes = [&](double tile_rows, int panel) {
    return 2.0 *
           (tile_rows * (arrays * panel + plan.ranks * kL2Weight) + kL2Weight * panel * plan.ranks);
  };
  const double wide_time = plan.ranks >= 64 ? kWideStreamTime : 1.0;
  double least = 0;
  for (int row_warps = 1; row_warps <= 2; row_warps *= 2) {
    const int panel = expand_warp_columns(plan.ranks) * (kThreads / 32) / row_warps;
    const std::int64_t panels = ceil_div<std::int64_t>(columns, panel);
    if (machine.clusters && adapters > 0 && adapters <= kMostEvenAdapters) {
      // Two thread blocks share an SM; every adapter leaves half a tile on average.
      const int at_once = 2 * machine.sms;
      const std::int64_t waves = even_waves(adapters, panels, at_once);
      const double tiles = static_cast<double>(waves * at_once) / static_cast<double>(panels) -
                           0.5 * static_cast<double>(adapters);
      const double tile_rows = static_cast<double>(rows) / tiles + 8 * row_warps;
      const double us = wide_time * time_of(2 * waves, block_bytes(tile_rows, panel), 1.0);
      if (least > 0 && us >= least) continue;
      least = us;
      const int fewest =
          even_cut(rows, adapters, 16 * row_warps, panels, at_once, kExpandFixedRows).rows;
      plan = stream_expand(columns, width, row_warps, fewest);
      plan.at_once = at_once;
      continue;
    }
    for (const int per_sm : {1, 2, 4, 6, 8}) {
      const std::int64_t tiles = std::max<std::int64_t>(per_sm * machine.sms / panels, 1);
      const std::int64_t tile_rows = std::min<std::int64_t>(
          round_up<std::int64_t>(ceil_div<std::int64_t>(std::max<std::int64_t>(rows, 1), tiles),
                                 16 * row_warps),
          1 << 20);
      const std::int64_t blocks = panels * (ceil_div<std::int64_t>(rows, tile_rows) + adapters / 2);
      const std::int64_t blocks_of_sm = ceil_div<std::int64_t>(blocks, machine.sms);
      const double us = wide_time * (row_warps > 1 ? kTwoRowWarpsTime : 1.0) *
                        time_of(blocks_of_sm, block_bytes(static_cast<double>(tile_rows), panel),
                                blocks_of_sm > 1 ? 1.0 : 0.7);
      if (least > 0 && us >= least) continue;
      least = us;
      plan = stream_expand(columns, width, row_warps, static_cast<int>(tile_rows));
    }
  }
  return cut.us > 0 && cut.us - kExpandProductAheadUs < least ? product_expand(columns, cut) : plan;
}

/// y of float32 weights that the stream splits itself.
inline ExpandPlan choose_split_expand(std::int64_t rows, std::int64_t columns,
                                      std::int64_t adapters, int arrays, Machine machine) {
  machine.products = false;
  ExpandPlan plan = choose_expand(rows, columns, kStreamCopies * kMostSplitRanks, adapters, arrays,
                                  Policy::kBFloat16, machine);
  plan.splits = true;
  return plan;
}

/// y or dx by expand_parts.cu. A tile takes its MMAs or its share of the DRAM's rate, a panel's
/// weights some 2 us.
inline ExpandPlan choose_parts_expand(std::int64_t rows, std::int64_t columns, int width, int sms) {
  ExpandPlan plan;
  plan.kernel = ExpandPlan::Kernel::kParts;
  plan.ranks = width <= 16 ? 16 : width <= 32 ? 32 : kMostPartsRanks;
  plan.panels = static_cast<int>(ceil_div<std::int64_t>(columns, kPartsColumns));
  const std::int64_t row_tiles =
      std::max<std::int64_t>(ceil_div<std::int64_t>(rows, kPartsRows), 1);
  const std::int64_t tiles = row_tiles * plan.panels;
  const double tile_us = std::max(48 * width / 1755.0, 1.08), panel_us = 2;
  double least = 0;
  // Whole shares of a panel, or all SMs, whose thread blocks have the ends of two panels.
  for (const std::int64_t blocks :
       {sms / plan.panels * std::int64_t{plan.panels}, std::int64_t{sms}}) {
    if (blocks == 0) continue;
    const std::int64_t own = std::min(blocks, tiles), most = ceil_div(tiles, own);
    const std::int64_t parts = ceil_div(most, row_tiles) + (tiles % own == 0 ? 0 : 1);
    const double us = static_cast<double>(most) * tile_us + static_cast<double>(parts) * panel_us;
    if (least > 0 && us >= least) continue;
    least = us;
    plan.blocks = static_cast<int>(own);
  }
  return plan;
}

}  // namespace mortar::lora::train::cuda
