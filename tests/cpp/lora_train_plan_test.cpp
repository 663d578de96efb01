// SPDX-License-Identifier: Apache-2.0
// Launch plans of LoRA training on CUDA: what the host chooses, and that no choice changes a bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "lora/train/cuda/config.h"
#include "lora_train_case.h"
#if MORTAR_HAS_CUDA
#include "lora/train/checks.h"
#include "lora/train/cuda/backend.cuh"
#endif

namespace mortar::testing {
namespace {

using namespace lora::train::cuda;

constexpr Machine kH200{132, true, true}, kH200Strided{132, true, false}, kA100{108, false, false};

TEST(LoraTrainPlan, LeavesFollowFromColumnsAlone) {
  std::mt19937_64 rng(7);
  for (int i = 0; i < 2000; ++i) {
    const std::int64_t columns = static_cast<std::int64_t>(rng() >> (rng() % 50 + 14));
    std::vector<std::int64_t> leaves;
    for (const std::int64_t rows : {1, 100, 4096, 70000}) {
      for (const Machine& machine : {kH200, kH200Strided, kA100}) {
        for (const bool dense : {false, true}) {
          leaves.push_back(choose_shrink(rows, columns, 16, 0, false, dense, false, machine).leaf);
        }
      }
    }
    EXPECT_EQ(*std::min_element(leaves.begin(), leaves.end()),
              *std::max_element(leaves.begin(), leaves.end()));
    EXPECT_GE(leaves[0] * kLeaves, columns);
    EXPECT_EQ(leaves[0] % kBlockColumns, 0);
  }
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
          choose_shrink(rows, columns, width, adapters, i % 2 == 0, true, part_columns, machine);
      EXPECT_EQ(s.fused, machine.clusters && !part_columns && !s.product);
      EXPECT_TRUE(machine.products || !s.product) << describe(s);
      if (s.product) {
        EXPECT_TRUE(s.ranks == 64 || (s.ranks == 128 && s.parts > 1)) << describe(s);
        EXPECT_TRUE(s.parts > 0 && kLeaves % s.parts == 0) << describe(s);
        continue;
      }
      EXPECT_TRUE(s.rows == 128 || (machine.clusters && (s.rows == 64 || s.rows == 32)))
          << describe(s);
      EXPECT_TRUE(s.parts > 0 && kLeaves % s.parts == 0) << describe(s);
      EXPECT_LE(kLeaves / s.parts, 1 << stream_levels(s.ranks, s.rows)) << describe(s);
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
  const ShrinkPlan s = choose_shrink(4096, 4096, 16, 0, false, true, false, kH200);
  EXPECT_EQ(describe(s), "stream, 64 rows, 16 ranks, 2 blocks in a cluster, leaves of 512");
  const ExpandPlan e = choose_expand(4096, 4096, 16, 0, 1, Policy::kBFloat16, kH200);
  const std::int64_t blocks = e.panels * ceil_div(4096, e.tile_rows);
  EXPECT_GT(blocks, kH200.sms * 3 / 2) << describe(e);
  EXPECT_LE(blocks, 2 * kH200.sms) << describe(e);
}

TEST(LoraTrainPlan, WideRanksOfOneAdapterAreProducts) {
  const auto shrink = [](std::int64_t rows, std::int64_t adapters, bool masked, bool dense) {
    return choose_shrink(rows, 4096, 256, adapters, masked, dense, false, kH200);
  };
  EXPECT_EQ(describe(shrink(8192, 0, false, true)),
            "product, 128 rows, 128 ranks, 2 split-K partials, leaves of 512");
  EXPECT_FALSE(shrink(8192, 3, false, true).product);
  EXPECT_FALSE(shrink(8192, 0, true, true).product);
  EXPECT_FALSE(shrink(8192, 0, false, false).product);
  EXPECT_FALSE(shrink(100, 0, false, true).product);
  const auto expand = [](int arrays, const Machine& machine) {
    return describe(choose_expand(8192, 4096, 256, 0, arrays, Policy::kBFloat16, machine));
  };
  EXPECT_EQ(expand(1, kH200), "product, tiles of 128 rows by 256 columns, 16 panels");
  EXPECT_EQ(expand(2, kH200), "product, tiles of 128 rows by 128 columns, 32 panels");
  EXPECT_EQ(expand(1, kH200Strided), expand(1, kA100));
}

// Fewer rows than the device has tiles for: more parts of the depth, until partials cost more.
TEST(LoraTrainPlan, ProductsFillTheDevice) {
  for (const int width : {64, 128, 256, 512}) {
    int parts = kLeaves;
    for (std::int64_t rows = 512; rows <= 32768; rows *= 2) {
      const ProductCut cut = cut_shrink(rows, 4096, width, kLeaves, 132);
      EXPECT_LE(cut.parts, parts) << rows << " rows, " << width << " ranks";
      parts = cut.parts;
      const ProductCut sums = cut_rows(rows, 4096, width);
      EXPECT_GE(ceil_div<std::int64_t>(rows, sums.parts), lora::cuda::kProductStep);
    }
  }
}

#if MORTAR_HAS_CUDA

class LoraTrainShapes : public ::testing::TestWithParam<Device> {};

/// The forward with plans of one's own.
void run_planned(TrainStep* step, const ForcedPlans& forced) {
  const LoraTrainProblem problem = step->problem(false);
  const LoraTrainForward arguments = step->forward_arguments(false);
  const ArgCheck arg("lora_train_forward");
  auto [p, device] = lora::train::check_forward(arg, problem, arguments);
  // Other plans may leave as many partials as there are leaves, each of up to three columns.
  GuardedTensor workspace = byte_tensor(lora_train_forward_workspace(problem, arguments) +
                                            3 * kLeaves * 4 * p.num_rows * p.hidden_width,
                                        step->device);
  p.workspace = workspace.view().data;
  forward(p, forced, Stream{});
  workspace.download();
  EXPECT_TRUE(workspace.guards_intact());
  for (GuardedTensor* t : step->outputs()) {
    t->download();
    EXPECT_TRUE(t->guards_intact());
  }
}

void expect_same_forward(TrainStep& a, TrainStep& b, const std::string& what) {
  for (std::size_t s = 0; s < a.y.size(); ++s) {
    EXPECT_TRUE(same_bytes(a.y[s].host(), b.y[s].host())) << what << ": y";
  }
  EXPECT_TRUE(same_bytes(a.h.host(), b.h.host())) << what << ": h";
}

TEST_P(LoraTrainShapes, NoPlanChangesABit) {
  constexpr DType kBF16 = DType::kBFloat16, kF32 = DType::kFloat32;
  struct Case {
    int rank;
    bool plain;
    DType weight;
  };
  for (const auto& [rank, plain, weight] : {Case{8, false, kBF16},
                                            {24, false, kBF16},
                                            {64, false, kBF16},
                                            {100, false, kBF16},
                                            {16, true, kBF16},
                                            {40, true, kBF16},
                                            {5, false, kF32},
                                            {16, true, kF32}}) {
    TrainCase c;
    c.rows = 333;
    c.hidden = 1104;  // whole groups of dropout
    c.widths = {520};
    c.ranks = {rank};
    c.x = c.y = kBF16;
    c.w = weight;
    const int copies = weight == kF32 ? 3 : 1, width = (rank + 7) / 8 * 8;
    if (!plain) {
      c.p = {0.1f};
      c.base = BaseIs::kApart;
    }
    TrainStep chosen(c, GetParam());
    chosen.run_forward();
    ShrinkPlan shrink =
        choose_shrink(c.rows, c.hidden, copies * width, 0, !plain, true, copies > 1, kH200Strided);
    for (shrink.rows = 32; shrink.rows <= 128; shrink.rows *= 2) {
      for (shrink.parts = kLeaves >> stream_levels(shrink.ranks, shrink.rows);
           shrink.parts <= kLeaves; shrink.parts *= 2) {
        TrainStep other(c, GetParam());
        run_planned(&other, {&shrink, nullptr});
        expect_same_forward(chosen, other, describe(shrink));
      }
    }
    for (int row_warps = 1; row_warps <= 2; ++row_warps) {
      for (const int tile_rows : {16, 100, 1024}) {
        const ExpandPlan expand =
            stream_expand(520, copies > 1 ? 2 * copies * width : width, row_warps, tile_rows);
        TrainStep other(c, GetParam());
        run_planned(&other, {nullptr, &expand});
        expect_same_forward(chosen, other, describe(expand));
      }
    }
  }
}

// The same of float32 weights, whose columns of parts are products from 24 ranks on.
TEST_P(LoraTrainShapes, NoProductOfPartsChangesABit) {
  for (const int rank : {24, 72}) {
    TrainCase c;
    c.rows = 333;
    c.hidden = 1096;
    c.widths = {520};
    c.ranks = {rank};
    c.x = c.y = DType::kBFloat16;
    const ShrinkPlan streamed =
        choose_shrink(c.rows, c.hidden, 3 * rank, 0, false, true, true, kH200Strided);
    const ExpandPlan copied =
        choose_expand(c.rows, 520, 6 * rank, 0, 1, Policy::kBFloat16, kH200Strided);
    TrainStep first(c, GetParam());
    run_planned(&first, {&streamed, &copied});
    for (int parts = 1; parts <= kLeaves; parts *= 2) {
      const ShrinkPlan product = product_shrink(c.hidden, {64, parts});
      TrainStep other(c, GetParam());
      run_planned(&other, {&product, nullptr});
      expect_same_forward(first, other, describe(product));
    }
    for (const int columns : {128, 256}) {
      const ExpandPlan product = product_expand(520, {columns, 1});
      TrainStep other(c, GetParam());
      run_planned(&other, {nullptr, &product});
      expect_same_forward(first, other, describe(product));
    }
  }
}

// Products, and the kernels of operands that they do not take, leave the same bits.
TEST_P(LoraTrainShapes, NoProductChangesABit) {
  for (const int rank : {64, 104, 200}) {
    for (const BaseIs base : {BaseIs::kNone, BaseIs::kApart, BaseIs::kInPlace}) {
      TrainCase c;
      c.rows = 333;
      c.hidden = 1096;
      c.widths = {520, 520};
      c.ranks = {rank, 40};
      c.x = c.w = c.y = rank == 104 ? DType::kFloat16 : DType::kBFloat16;
      c.base = base;
      const ShrinkPlan streamed =
          choose_shrink(c.rows, c.hidden, rank + 40, 0, false, true, false, kH200Strided);
      const ExpandPlan copied = choose_expand(c.rows, 520, rank, 0, 2, Policy::kBFloat16, kA100);
      TrainStep first(c, GetParam());
      run_planned(&first, {&streamed, &copied});
      for (const int columns : {64, 128}) {
        for (int parts = columns / 64; parts <= kLeaves; parts *= 2) {
          const ShrinkPlan product = product_shrink(c.hidden, {columns, parts});
          TrainStep other(c, GetParam());
          run_planned(&other, {&product, nullptr});
          expect_same_forward(first, other, describe(product));
        }
      }
      for (const int columns : {128, 256}) {
        if (columns == 256 && base != BaseIs::kNone) continue;
        const ExpandPlan product = product_expand(520, {columns, 1});
        TrainStep other(c, GetParam());
        run_planned(&other, {nullptr, &product});
        expect_same_forward(first, other, describe(product));
      }
    }
  }
}

std::vector<Device> gpus() {
  std::vector<Device> all = devices();
  std::erase(all, Device{});
  return all;
}
INSTANTIATE_TEST_SUITE_P(Gpus, LoraTrainShapes, ::testing::ValuesIn(gpus()),
                         [](const auto& one) { return device_label(one.param); });
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(LoraTrainShapes);

#endif

}  // namespace
}  // namespace mortar::testing
