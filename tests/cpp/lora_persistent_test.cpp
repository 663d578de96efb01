// SPDX-License-Identifier: Apache-2.0
// LoRA's kernels whose CTAs or warps take several pieces of work each, on a GPU: the bits of the
// plan that is chosen, which agrees with fp64. No test is generated without a GPU.
#include <gtest/gtest.h>

#include <cstdint>
#include <iterator>
#include <string>
#include <vector>

#include "lora_case.h"
#if MORTAR_HAS_CUDA
#include "lora/launch_choice.h"
#include "lora_every_plan.h"

namespace mortar::testing {
namespace {

class LoraPersistent : public LaunchTest, public ::testing::WithParamInterface<Device> {
 protected:
  LoraPersistent() : LaunchTest(GetParam()) {}
};

/// CTAs of shrink that walk over units: one K chunk and many, an odd number of them, half-full and
/// single tiles, rank rows that leave the last unit some boxes or none.
TEST_P(LoraPersistent, PersistentShrinkGivesTheSameBits) {
  if (this_machine().arch != 90) return;
  const auto expect = [&](LoraCase c, Map map) {
    c.one_rank = true;
    c.map = map;
    Solved problem(c, device_);
    int walk = 0;
    for (const LaunchPlan& plan : plans_to_run(problem.op)) {
      if (plan.shrink.kernel != lora::ShrinkKernel::kWalk) continue;
      expect_plan_gives(plan, problem);
      ++walk;
    }
    EXPECT_GE(walk, 2);
  };
  expect(case_of(1, 8, {8}, {128}), Map::kOneAdapter);
  expect(case_of(129, 200, {40}, {192}, DType::kFloat16), Map::kOneAdapter);
  expect(case_of(300, 520, {40, 24, 8}, {128}), Map::kRandom);
  expect(case_of(140, 1288, {40, 24}, {128}), Map::kRandom);
  expect(case_of(70, 4616, {40}, {448}), Map::kOneAdapter);
}

/// Of the persistent wide expand, whose steps are several to a CTA: full and short runs of one tile
/// and of two, adapters without weights, ranks of a part of a block and of several, other ranks in
/// each slice, rows of B of any address, y overwritten. Without wgmma only the chosen plan runs.
TEST_P(LoraPersistent, PersistentCtasTakeSeveralSteps) {
  const bool has_wide = this_machine().arch == 90;
  const auto expect = [&](LoraCase c, int least_steps) {
    const std::int64_t blocks =
        ceil_div<std::int64_t>(c.widths[0], 128) +
        (c.widths.size() > 1 ? ceil_div<std::int64_t>(c.widths[1], 128) : 0);
    c.tokens += 128 * ceil_div<std::int64_t>(least_steps * this_machine().sms, blocks);
    Solved problem(c, device_);
    LaunchPlan plan = lora::choose(shape_of(problem.op), this_machine());
    if (plan.shrink.split()) plan.shrink.partials = lora::Partials::kFinish;
    for (int i = 0; i < static_cast<int>(std::size(lora::kWideShapes)); ++i) {
      const lora::WideShape& shape = lora::kWideShapes[i];
      if (!has_wide || shape.float_weights != plan.shape.float_weights) continue;
      if (i == lora::kWideStagedShape && problem.op.max_rank() > lora::kWideStagedMaxRank) continue;
      if (i == lora::kWideWalkPartsShape && problem.op.max_rank() > lora::kWideWalkPartsMaxRank)
        continue;
      if (i == lora::kWideKeptShape && problem.op.max_rank() > lora::kWideKeptMaxRank) continue;
      plan.expand = {lora::ExpandKernel::kWide, i, 64, shape.cols};
      plan.workspace_bytes = lora::workspace_of(plan);
      for (const int cluster : {1, 2}) {
        plan.expand.cluster = cluster;
        if (cluster > 1 && !(shape.walks && plan.shape.b_boxes)) continue;
        expect_plan_gives(plan, problem);
      }
      plan.expand.cluster = 1;
      plan.expand.boxes = plan.shape.b_boxes && !shape.walks && !shape.float_weights;
      if (plan.expand.boxes) expect_plan_gives(plan, problem);
    }
  };
  expect(case_of(77, 40, {264, 40}, {72, 0, 136, 8}), 3);
  LoraCase half = case_of(200, 40, {520}, {130, 65, 64}, DType::kFloat16);
  half.add = false;
  expect(half, 2);
  LoraCase table = case_of(1, 40, {136, 264}, {16, 0, 200});
  table.table = true;
  expect(table, 2);
  LoraCase alone = case_of(60, 40, {648}, {512});
  alone.map = Map::kOneAdapter;
  expect(alone, 2);
  // Float32 adapters
  LoraCase floats = case_of(77, 40, {264, 40}, {72, 0, 137, 8});
  floats.w = DType::kFloat32;
  expect(floats, 3);
  floats = case_of(60, 40, {648}, {256});
  floats.w = DType::kFloat32;
  floats.map = Map::kOneAdapter;
  expect(floats, 2);
  // Boxes, whose pairs of CTAs take one run of tokens or two, and an odd number of blocks of
  // columns; at last of more of B than stays in L2.
  LoraCase boxes = case_of(10, 40, {384, 256}, {128});
  boxes.one_rank = true;
  for (const int adapters : {2, 5}) {
    boxes.adapters = adapters;
    expect(boxes, 3);
  }
  boxes.ranks = {512};
  boxes.map = Map::kOneAdapter;
  expect(boxes, 2);
  boxes.tokens = 420;
  boxes.widths = {97 * 128};
  boxes.map = Map::kRandom;
  boxes.adapters = 2;
  expect(boxes, 1);
}

/// Persistent warps of shrink take several pieces of work each: of adapters of other ranks in each
/// slice, without weights, and with more tokens than a piece has; short and long K chunks.
TEST_P(LoraPersistent, PersistentWarpsTakeSeveralPieces) {
  const auto expect = [&](LoraCase c, int adapters) {
    c.adapters = adapters;
    Solved problem(c, device_);
    int stream = 0;
    for (const LaunchPlan& plan : lora::candidates(shape_of(problem.op), this_machine())) {
      // One plan of each number of CTAs an SM, which come in order.
      if (plan.shrink.kernel != lora::ShrinkKernel::kStream || plan.shrink.per_sm <= stream)
        continue;
      expect_plan_gives(plan, problem);
      stream = plan.shrink.per_sm;
    }
    EXPECT_EQ(stream > 0, this_machine().arch >= 90);
  };
  expect(case_of(300, 2056, {40, 24}, {64, 8, 24}), 60);
  expect(case_of(200, 2056, {40, 24}, {64, 8, 24}), 60);
  LoraCase table = case_of(260, 4616, {40, 24, 8}, {16, 0, 40}, DType::kFloat16);
  table.table = true;
  expect(table, 30);
}

/// Persistent CTAs of the expand of low ranks take several steps each: full and short tiles, steps
/// of several slices and of a part of their columns, adapters of other ranks and without weights, y
/// overwritten.
TEST_P(LoraPersistent, PersistentExpandOfLowRanksGivesTheSameBits) {
  if (this_machine().arch != 90) return;
  const auto expect = [&](LoraCase c, int adapters) {
    c.adapters = adapters;
    Solved problem(c, device_);
    LaunchPlan plan = lora::choose(shape_of(problem.op), this_machine());
    if (plan.one_kernel()) plan.shrink = {};
    if (plan.shrink.split()) plan.shrink.partials = lora::Partials::kFinish;
    ASSERT_TRUE(lora::runs_bulk(plan.shape, this_machine()));
    plan.expand = lora::bulk_expand(plan.shape, this_machine());
    plan.workspace_bytes = lora::workspace_of(plan);
    expect_plan_gives(plan, problem);
  };
  LoraCase alike = case_of(700, 40, {1056, 32, 544}, {4});
  alike.one_rank = true;
  expect(alike, 90);
  LoraCase full = case_of(400, 40, {1504}, {16}, DType::kFloat16);
  full.one_rank = true;
  full.add = false;
  expect(full, 3);
  expect(case_of(600, 40, {544, 96}, {12, 0, 3, 6}), 50);
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(LoraPersistent);
INSTANTIATE_TEST_SUITE_P(Gpu, LoraPersistent, ::testing::ValuesIn(gpus()),
                         [](const auto&) { return std::string("cuda"); });

}  // namespace
}  // namespace mortar::testing

#endif  // MORTAR_HAS_CUDA
