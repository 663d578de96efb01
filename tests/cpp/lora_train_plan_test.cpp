// SPDX-License-Identifier: Apache-2.0
// Launch plans of LoRA training on CUDA: what the host chooses.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "lora/train/cuda/config.h"
#include "lora/train/cuda/expand_choice.h"
#include "lora/train/cuda/float_plan.h"
#include "lora/train/cuda/panel.h"

namespace mortar::testing {
namespace {

using namespace lora::train::cuda;
using enum ShrinkOperands;

constexpr Machine kH200{132, true, true}, kH200Strided{132, true, false}, kA100{108, false, false};

// Up to 63 ranks from columns alone; where h is one chain, from rows and ranks too.
TEST(LoraTrainPlan, LeavesFollowFromSizesAlone) {
  std::mt19937_64 rng(7);
  int chains = 0;
  for (int i = 0; i < 2000; ++i) {
    const std::int64_t columns = static_cast<std::int64_t>(rng() >> (rng() % 50 + 14));
    const int width = i % 2 == 0 ? 16 : 64 << rng() % 4;
    std::vector<std::int64_t> all;
    for (const std::int64_t rows : {1, 100, 4096, 70000}) {
      std::vector<std::int64_t> leaves;
      for (const Machine& machine : {kH200, kH200Strided, kA100}) {
        for (const bool dense : {false, true}) {
          const ShrinkPlan plan =
              choose_shrink(rows, columns, width, 0, false, dense, kOneType, machine);
          leaves.push_back(plan.leaf);
          EXPECT_GE(plan.leaf * plan.leaves, columns);
          EXPECT_EQ(plan.leaf % kBlockColumns, 0);
          chains += plan.leaves == 1;
        }
      }
      EXPECT_EQ(*std::min_element(leaves.begin(), leaves.end()),
                *std::max_element(leaves.begin(), leaves.end()));
      all.insert(all.end(), leaves.begin(), leaves.end());
    }
    if (width < kLeastProductRanks) {
      EXPECT_EQ(*std::min_element(all.begin(), all.end()),
                *std::max_element(all.begin(), all.end()));
    }
  }
  EXPECT_GT(chains, 0);
}

TEST(LoraTrainPlan, EveryChoiceHasAKernel) {
  std::mt19937_64 rng(8);
  for (int i = 0; i < 5000; ++i) {
    const std::int64_t rows = rng() % 70000, columns = 1 + rng() % 40000;
    const int width = 8 * static_cast<int>(1 + rng() % 512);
    const std::int64_t adapters = rng() % 3 == 0 ? rng() % 40 : 0;
    for (const Machine& machine : {kH200, kH200Strided, kA100}) {
      const bool part_columns = i % 3 == 0;
      const ShrinkPlan s =
          choose_shrink(rows, columns, width, adapters, i % 2 == 0, true,
                        part_columns ? kPartColumns : kOneType, machine, i % 7 == 0);
      EXPECT_TRUE(machine.products || !s.product) << describe(s);
      EXPECT_TRUE(s.leaves == kLeaves || s.leaves <= 2) << describe(s);
      EXPECT_TRUE(s.parts > 0 && s.leaves % s.parts == 0) << describe(s);
      if (!s.product || s.leaves < kLeaves) {
        EXPECT_EQ(s.fused, machine.clusters && !part_columns) << describe(s);
      }
      if (s.product && s.leaves == 1) {
        EXPECT_TRUE(s.ranks % 64 == 0 && s.ranks <= 256) << describe(s);
        continue;
      }
      if (s.product && s.fused) {
        EXPECT_TRUE((!part_columns || width <= s.ranks) && s.parts > 1) << describe(s);
        EXPECT_LE(s.leaves / s.parts, most_split_leaves(s.ranks)) << describe(s);
        continue;
      }
      if (s.product) {
        EXPECT_TRUE(s.ranks == 64 || (s.ranks == 128 && s.parts > 1)) << describe(s);
        continue;
      }
      EXPECT_TRUE(s.rows == 128 || (machine.clusters && (s.rows == 64 || s.rows == 32)))
          << describe(s);
      EXPECT_TRUE(stream_has(s.ranks, s.rows)) << describe(s);
      EXPECT_LE(s.leaves / s.parts, 1 << stream_levels(s.ranks, s.rows)) << describe(s);
      EXPECT_TRUE(machine.clusters || s.ranks <= kMostUnfusedRanks) << describe(s);
      const ExpandPlan e =
          choose_expand(rows, columns, width, adapters, 1 + i % 2, Policy::kBFloat16, machine);
      const bool wide = e.kernel == ExpandPlan::Kernel::kWide;
      if (e.kernel == ExpandPlan::Kernel::kProduct) {
        EXPECT_TRUE(machine.products && width >= kLeastProductRanks) << describe(e);
        EXPECT_TRUE(e.tile_columns == 128 || e.tile_columns == 256) << describe(e);
        continue;
      }
      EXPECT_EQ(wide, width > kMostStreamRanks) << describe(e);
      EXPECT_GE(wide ? std::int64_t{e.panels} * kWideColumns
                     : e.panels * expand_warp_columns(e.ranks) * 8 / e.row_warps,
                columns)
          << describe(e);
      EXPECT_GT(e.tile_rows, 0);
      if (!wide) {
        EXPECT_LE(width, e.ranks);
      }
    }
  }
}

TEST(LoraTrainPlan, OneLargeProductFillsTheDeviceOnce) {
  const ShrinkPlan s = choose_shrink(4096, 4096, 16, 0, false, true, kOneType, kH200);
  EXPECT_EQ(describe(s), "stream, 32 rows, 16 ranks, 2 blocks in a cluster, leaves of 512");
  const ExpandPlan e = choose_expand(4096, 4096, 16, 0, 1, Policy::kBFloat16, kH200);
  const std::int64_t blocks = e.panels * ceil_div(4096, e.tile_rows);
  EXPECT_GT(blocks, kH200.sms * 3 / 2) << describe(e);
  EXPECT_LE(blocks, 2 * kH200.sms) << describe(e);
}

// Thread blocks that split float32 weights share all tiles: a panel's evenly, or all SMs have some.
TEST(LoraTrainPlan, BoxesOfFloatsFillTheDeviceInFewWaves) {
  struct Case {
    int rows, columns, width, tile, parts;
  };
  for (const auto& [rows, columns, width, tile, parts] :
       {Case{4096, 4096, 16, 128, 4}, Case{2048, 13824, 32, 128, 8}, Case{5000, 4096, 8, 128, 2},
        Case{1500, 4096, 8, 128, 8}, Case{2000, 4096, 64, 128, 4}}) {
    const ShrinkPlan plan = choose_float_shrink(rows, columns, width, 0, false, true, kH200);
    EXPECT_EQ(plan.rows, tile) << rows;
    EXPECT_EQ(plan.parts, parts) << rows;
  }
  std::mt19937_64 rng(11);
  for (int i = 0; i < 5000; ++i) {
    const std::int64_t rows = rng() % 70000, columns = 1 + rng() % 40000;
    const int width = 8 * static_cast<int>(1 + rng() % 16);
    for (const Machine& machine : {kH200, kA100}) {
      for (const bool stores_h : {false, true}) {
        const ShrinkPlan plan =
            choose_float_shrink(rows, columns, width, 0, stores_h, true, machine);
        EXPECT_EQ(plan.boxes, machine.clusters);
        EXPECT_GE(plan.parts, kLeaves >> float_levels(plan.ranks));
        EXPECT_LE(plan.parts, plan.fused ? kLeaves : float_unfused_parts(rows, width));
      }
    }
  }
}

TEST(LoraTrainPlan, TilesOfSplitWeightsFillTheDevice) {
  const auto blocks = [](std::int64_t rows, std::int64_t columns, int width) {
    return choose_parts_expand(rows, columns, width, kH200.sms).blocks;
  };
  EXPECT_EQ(blocks(4096, 4096, 64), 128);
  EXPECT_EQ(blocks(2048, 13824, 32), 132);
  EXPECT_EQ(blocks(64, 264, 16), 2);
  EXPECT_EQ(blocks(1, 8, 16), 1);
  EXPECT_EQ(describe(choose_parts_expand(4096, 4096, 20, kH200.sms)),
            "float32 weights split on their way, 32 ranks, 16 panels, 128 blocks");
}

// h of float32 weights beside bfloat16: clusters that store it, of one tile for a slice.
TEST(LoraTrainPlan, ColumnsOfPartsOfUpTo64RanksAreStoredByClusters) {
  const auto shrink = [](int width, int slices, std::int64_t rows = 4096) {
    return choose_shrink(rows, 4096, width, 0, false, true, ShrinkOperands::kPartColumns, kH200,
                         false, slices);
  };
  EXPECT_EQ(describe(shrink(192, 1)),
            "product, 64 rows, 192 ranks, 2 blocks in a cluster, leaves of 512");
  EXPECT_EQ(describe(shrink(96, 1)),
            "product, 64 rows, 96 ranks, 2 blocks in a cluster, leaves of 512");
  // Half of the rows where all tiles run at once.
  EXPECT_EQ(describe(shrink(48, 1)),
            "product, 64 rows, 64 ranks, 2 blocks in a cluster, leaves of 512");
  EXPECT_EQ(describe(shrink(24, 1)),
            "product, 64 rows, 64 ranks, 2 blocks in a cluster, leaves of 512");
  EXPECT_EQ(describe(shrink(48, 1, 512)),
            "product, 64 rows, 64 ranks, 8 blocks in a cluster, leaves of 512");
  EXPECT_EQ(describe(shrink(48, 1, 8192)),
            "product, 128 rows, 64 ranks, 2 blocks in a cluster, leaves of 512");
  EXPECT_FALSE(shrink(192, 2).fused);
  EXPECT_FALSE(shrink(216, 1).fused);
}

TEST(LoraTrainPlan, WideRanksAreProducts) {
  const auto shrink = [](std::int64_t rows, std::int64_t adapters, bool masked, bool dense) {
    return choose_shrink(rows, 4096, 256, adapters, masked, dense, kOneType, kH200);
  };
  EXPECT_EQ(describe(shrink(8192, 0, false, true)), "product, 128 rows, 128 ranks, one chain");
  EXPECT_EQ(describe(shrink(2048, 0, false, true)),
            "product, 128 rows, 64 ranks, 2 blocks in a cluster, leaves of 2048");
  // Of 256 columns a quarter would be empty.
  EXPECT_EQ(describe(choose_shrink(8192, 4096, 384, 0, false, true, kOneType, kH200)),
            "product, 128 rows, 192 ranks, one chain");
  // Half of a tile of 256 ranks would be empty, though dB takes as long beside it.
  EXPECT_EQ(describe(choose_shrink(8192, 5120, 128, 0, false, true, kOneType, kH200, true)),
            "product, 128 rows, 128 ranks, one chain");
  EXPECT_TRUE(shrink(8192, 3, false, true).product);
  EXPECT_FALSE(shrink(1000, 8, false, true).product);
  EXPECT_EQ(describe(shrink(8192, 0, true, true)),
            "product, 128 rows, 128 ranks, 4 blocks in a cluster, leaves of 512");
  // Each of several slices' tiles would draw what is dropped of x anew.
  EXPECT_FALSE(choose_shrink(8192, 4096, 256, 0, true, true, kOneType, kH200, false, 3).product);
  EXPECT_FALSE(shrink(8192, 0, false, false).product);
  EXPECT_FALSE(shrink(100, 0, false, true).product);
  const auto expand = [](int arrays, const Machine& machine) {
    return describe(choose_expand(8192, 4096, 256, 0, arrays, Policy::kBFloat16, machine));
  };
  EXPECT_EQ(expand(1, kH200), "product, tiles of 128 rows by 256 columns, 16 panels");
  EXPECT_EQ(expand(2, kH200), "product, tiles of 128 rows by 128 columns, 32 panels");
  EXPECT_EQ(expand(1, kH200Strided), expand(1, kA100));
}

/// Thread blocks of the tiles that kernels make of adapters' rows, and the rows of a tile.
std::pair<std::int64_t, int> even_blocks(const RowCut& cut, const std::vector<int>& counts) {
  double least = -1;
  std::pair<std::int64_t, int> best;
  for (int i = 0; i < kMostEvenAdapters; ++i) {
    const int rows = even_size(cut, i);
    std::int64_t blocks = 0;
    for (const int count : counts) blocks += std::int64_t{cut.blocks} * ceil_div(count, rows);
    const std::int64_t waves = ceil_div<std::int64_t>(blocks, cut.at_once);
    const double cost = static_cast<double>(waves) * (rows + cut.fixed_rows);
    if (least >= 0 && cost >= least) continue;
    least = cost;
    best = {blocks, rows};
  }
  return best;
}

TEST(LoraTrainPlan, RowsOfSeveralAdaptersFillTheDeviceOnce) {
  const std::vector<int> ragged = {512, 563, 410, 563, 563, 410, 563, 512};
  const ExpandPlan e = choose_expand(4096, 4096, 32, 8, 1, Policy::kBFloat16, kH200);
  EXPECT_EQ(describe(e), "stream, at least 128 rows, 32 ranks, 1 warps a column, 8 panels");
  EXPECT_EQ(even_blocks(e.cut(), ragged), std::pair(std::int64_t{240}, 144));
  PanelProblem p;
  p.rows = 4096;
  p.matrices = 1;
  p.columns[0] = 4096;
  p.width = 32;
  p.adapters = 8;
  const BackwardPlan b = choose_backward(p, p, true, 227 * 1024);
  EXPECT_TRUE(b.one_pass) << to_string(b);
  EXPECT_EQ(even_blocks(b.dy.chunk, ragged), std::pair(std::int64_t{128}, 288));
  EXPECT_EQ(even_blocks(b.x.chunk, ragged), std::pair(std::int64_t{128}, 576));
}

// Above 32 ranks by clusters of products, or with dx where panels have all adapters' rows at once.
TEST(LoraTrainPlan, WideRanksOfSeveralAdaptersFillTheDeviceOnce) {
  PanelProblem p;
  p.rows = 2048;
  p.matrices = 1;
  p.columns[0] = 4096;
  p.width = 64;
  p.adapters = 2;
  p.products = p.few_segments = p.with_dx = true;
  const BackwardPlan b = choose_backward(p, p, true, 227 * 1024);
  EXPECT_FALSE(b.one_pass) << to_string(b);
  EXPECT_EQ(even_blocks(b.dy.chunk, {1024, 1024}), std::pair(std::int64_t{64}, 512));
  EXPECT_EQ(even_blocks(b.x.chunk, {1024, 1024}), std::pair(std::int64_t{128}, 1024));
  EXPECT_EQ(dx_panels(p, b.x, 132, 50 << 20), DxPanels::k64);
  p.adapters = 8;
  const PanelPlan apart = choose_input(p, 227 * 1024);
  EXPECT_EQ(apart.shape, kChainPanels);
  EXPECT_EQ(dx_panels(p, apart, 132, 50 << 20), DxPanels::kNone);
  const ExpandPlan dx = choose_expand(2048, 4096, 128, 2, 1, Policy::kBFloat16, kH200);
  EXPECT_EQ(dx.kernel, ExpandPlan::Kernel::kProduct) << describe(dx);
}

TEST(LoraTrainPlan, ProductsSumOverRowsFrom24RanksOn) {
  for (const int width : {8, 16, 24, 32, 40, 64}) {
    for (const bool products : {false, true}) {
      PanelProblem p;
      p.rows = 4096;
      p.matrices = 1;
      p.columns[0] = 4096;
      p.width = width;
      p.products = products;
      const PanelCut cut = choose_panels(p, false, 227 * 1024);
      const PanelShape& shape = kPanelShapes[cut.plan.shape];
      const bool expected = width >= (products ? 24 : 64);
      EXPECT_EQ(shape.ranks == kMostRanks && shape.groups == 1, expected) << to_string(cut.plan);
      EXPECT_TRUE(!expected || cut.plan.chunk.rows % lora::cuda::kProductStep == 0);
      p.adapters = 8;
      EXPECT_FALSE(p.by_products());
      p.few_segments = true;
      EXPECT_EQ(p.by_products(), products && width > 32);
    }
  }
}

TEST(LoraTrainPlan, DxComesWithTheSumsOfXWhereThatPays) {
  const auto panels = [](std::int64_t rows, std::int64_t hidden, int rank,
                         std::int64_t adapters = 0) {
    PanelProblem x;
    x.adapters = adapters;
    x.rows = rows;
    x.matrices = 1;
    x.columns[0] = hidden;
    x.width = rank;
    x.products = x.with_dx = true;
    return dx_panels(x, choose_input(x, 227 * 1024), 132, 50 << 20);
  };
  using enum DxPanels;
  EXPECT_EQ(panels(4096, 4096, 16), k256);
  EXPECT_EQ(panels(16384, 2048, 16), k256);
  EXPECT_EQ(panels(8192, 14336, 16), kNone);  // 112 thread blocks
  EXPECT_EQ(panels(4096, 4096, 64), k64);
  EXPECT_EQ(panels(8192, 4096, 64), k64);
  EXPECT_EQ(panels(2048, 4096, 64), k64);
  EXPECT_EQ(panels(1024, 7168, 64), k64Pairs);  // 224 thread blocks
  EXPECT_EQ(panels(8192, 14336, 64), kNone);    // as many, and x and dx do not fit L2
  EXPECT_EQ(panels(8192, 2560, 64), k64);       // 120 of a third of the rows
  EXPECT_EQ(panels(4096, 5120, 64), k128);      // as many
  EXPECT_EQ(panels(2500, 5120, 64), k64Pairs);  // x and dx fit L2
  EXPECT_EQ(panels(4096, 14336, 64), kNone);    // 112 of all rows
  EXPECT_EQ(panels(6001, 3584, 24), k256);
  EXPECT_EQ(panels(4096, 8192, 32), k256);
  EXPECT_EQ(panels(2048, 4096, 24), k256);
  EXPECT_EQ(panels(3000, 3584, 32), k256);  // 112 thread blocks
  EXPECT_EQ(panels(2048, 2048, 32), k128);  // chunks of 128 rows would be short
  EXPECT_EQ(panels(2048, 5120, 32), k128);  // six of 384 rows, of which the last one has 128
  EXPECT_EQ(panels(8192, 4096, 128), kNone);
  EXPECT_EQ(panels(4096, 4096, 16, 8), k256);
  EXPECT_EQ(panels(4096, 4096, 32, 8), k256);
  EXPECT_EQ(panels(4096, 4096, 64, 8), kNone);  // no kernel has such panels
}

TEST(LoraTrainPlan, EvenTilesAreNoMoreThanThereIsRoomFor) {
  std::mt19937_64 rng(9);
  for (int i = 0; i < 2000; ++i) {
    const std::int64_t rows = 1 + static_cast<std::int64_t>((rng() >> 33) >> rng() % 30);
    const int adapters = 1 + static_cast<int>(rng() % kMostEvenAdapters);
    const int unit = 16 << rng() % 3;
    const std::int64_t blocks = 1 + static_cast<std::int64_t>(rng() % 300);
    const RowCut cut = even_cut(rows, adapters, unit, blocks, 132, 100);
    const std::int64_t fewest = even_waves(adapters, blocks, 132) * 132 / blocks;
    EXPECT_GE(fewest, 2 * adapters);
    int before = 0;
    for (int size = 0; size < kMostEvenAdapters; ++size) {
      const int own = even_size(cut, size);
      EXPECT_GE(own, std::max(before, cut.rows));
      EXPECT_EQ(own % unit, 0);
      before = own;
    }
    EXPECT_LE(std::min<std::int64_t>(ceil_div(rows, fewest), kMostCutRows), cut.rows);
    EXPECT_GT(cut.rows, 0);
  }
}

// Fewer rows than the device has tiles for: more parts of the depth, until partials cost more.
TEST(LoraTrainPlan, ProductsFillTheDevice) {
  for (const int width : {64, 128, 256, 512}) {
    int parts = kLeaves;
    for (std::int64_t rows = 512; rows <= 32768; rows *= 2) {
      const ProductCut cut = cut_shrink(rows, 4096, width, kLeaves, false, 132);
      EXPECT_LE(cut.parts, parts) << rows << " rows, " << width << " ranks";
      parts = cut.parts;
      const ProductCut sums = cut_rows(rows, 4096, width);
      EXPECT_GE(ceil_div<std::int64_t>(rows, sums.parts), lora::cuda::kProductStep);
    }
  }
}

}  // namespace
}  // namespace mortar::testing
