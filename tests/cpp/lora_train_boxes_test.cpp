// SPDX-License-Identifier: Apache-2.0
// The kernels that take two products of a backward in one pass by the copy engine change no bit, on
// a GPU.
#include <string>

#include "lora_train_case.h"

#if MORTAR_HAS_CUDA
#include "lora_train_backward.h"

namespace mortar::testing {
namespace {

using lora::train::cuda::DxPanels;
using lora::train::cuda::kChainPanels;
using lora::train::cuda::kDsPanels16;
using lora::train::cuda::kDsPanels32;
using lora::train::cuda::kInputPanels;
using lora::train::cuda::kInputPanels32;
using lora::train::cuda::RowCut;

class LoraTrainBoxes : public ::testing::TestWithParam<Device> {};

/// By both kernels, or by neither.
void expect_same(const TrainCase& c, Device device, const BackwardPlan& boxes,
                 const std::string& what) {
  TrainStep first(c, device), other(c, device);
  copy_inputs(first, &other);
  for (TrainStep* step : {&first, &other}) {
    BackwardPlan plan = boxes;
    if (step == &other) {
      plan.boxes = false;
      plan.with_dx = DxPanels::kNone;
    }
    step->run_forward();
    run_backward(*step, plan);
  }
  expect_same_results(first, other, what);
}

TrainCase base_case(int rank) {
  TrainCase c;
  c.rows = 203;  // ends in a box of rows
  c.hidden = 328;
  c.widths = {680};  // a panel, and the start of a second one
  c.ranks = {rank};
  c.x = c.w = c.y = c.grad = c.dx = DType::kBFloat16;
  return c;
}

BackwardPlan plan_of(int rank, int dy_rows, int x_rows) {
  BackwardPlan plan;
  plan.one_pass = rank <= 32;
  plan.products = true;
  plan.dy = {rank <= 16 ? kDsPanels16 : rank <= 32 ? kDsPanels32 : kChainPanels, dy_rows};
  plan.x = {rank <= 16 ? kInputPanels : kChainPanels, x_rows};
  plan.with_dx = rank <= 16 ? DxPanels::k256 : DxPanels::k64;
  return plan;
}

TEST_P(LoraTrainBoxes, NoKernelChangesABitOfTheBackward) {
  for (const int rank : {3, 16, 24, 32, 64}) {
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
      TrainCase c = base_case(rank);
      c.x = c.w = c.y = c.grad = c.dx = dtype;
      c.transposed_weights = dtype == DType::kFloat16;
      const int chunk = dtype == DType::kFloat16 ? 64 : 128;
      BackwardPlan plan = plan_of(rank, chunk + 32 * (rank <= 32), chunk);
      expect_same(c, GetParam(), plan, concat("rank ", rank, ", chunks of ", chunk));
      if (rank <= 16) continue;
      for (const DxPanels panels : {DxPanels::k128, DxPanels::k64Pairs}) {
        plan.with_dx = panels;
        expect_same(c, GetParam(), plan,
                    concat("rank ", rank, ", panels ", static_cast<int>(panels)));
      }
    }
  }
}

BackwardPlan wide_plan(int rank, int dy_rows, int x_rows) {
  BackwardPlan plan = plan_of(rank, dy_rows, x_rows);
  plan.x.shape = kInputPanels32;
  plan.with_dx = DxPanels::k256;
  return plan;
}

TEST_P(LoraTrainBoxes, WidePanelsOf32RanksChangeNoBit) {
  for (const int rank : {20, 32}) {
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
      TrainCase c = base_case(rank);
      c.x = c.w = c.y = c.grad = c.dx = dtype;
      expect_same(c, GetParam(), wide_plan(rank, 96, 128), concat("rank ", rank));
    }
  }
}

TEST_P(LoraTrainBoxes, DropoutOfBothIsTheSame) {
  for (const int rank : {7, 16, 24}) {
    TrainCase c = base_case(rank);
    c.hidden = 336;  // whole groups of draws
    c.p = {0.3f};
    const BackwardPlan plan = rank <= 16 ? plan_of(rank, 64, 128) : wide_plan(rank, 64, 128);
    expect_same(c, GetParam(), plan, concat("rank ", rank));
  }
}

// Float32 weights, whose kernel takes ds in parts.
TEST_P(LoraTrainBoxes, Float32WeightsChangeNoBit) {
  for (const int rank : {3, 16, 24, 32}) {
    for (const float p : {0.0f, 0.3f}) {
      TrainCase c = base_case(rank);
      c.w = c.grad = DType::kFloat32;
      c.hidden = p > 0 ? 336 : 328;
      if (p > 0) c.p = {p};
      c.transposed_weights = rank == 24;
      BackwardPlan plan = plan_of(64, 128, 64);
      plan.one_pass = false;
      plan.with_dx = DxPanels::k128;
      expect_same(c, GetParam(), plan, concat("rank ", rank, ", p ", p));
      if (rank != 32) continue;
      c.ranks = {16, 5};
      c.widths = {520, 40};
      plan.x.chunk = RowCut{128};
      expect_same(c, GetParam(), plan, concat("slices, p ", p));
    }
  }
}

// The plan of a call's own, of as few rows as fill the device.
TEST_P(LoraTrainBoxes, Float32WeightsHaveDxWithTheSumsOfX) {
  TrainCase c = base_case(8);
  c.w = c.grad = DType::kFloat32;
  c.rows = 259;
  c.hidden = 116 * 128 - 8;
  c.widths = {24};
  TrainStep step(c, GetParam()), other(c, GetParam());
  copy_inputs(step, &other);
  for (TrainStep* one : {&step, &other}) {
    one->run_forward();
    run_backward(*one, [&](const lora::train::Problem& p) {
      BackwardPlan plan = lora::train::cuda::plan_backward(p);
      EXPECT_EQ(plan.with_dx, DxPanels::k128);
      EXPECT_EQ(plan.x.chunk.rows, 320);
      if (one == &other) plan.with_dx = DxPanels::kNone;
      return plan;
    });
  }
  expect_same_results(step, other, "one pass, and two");
}

// ds of float32 weights on half of the SMs: by clusters, and of many rows by thread blocks that
// have whole rows.
TEST_P(LoraTrainBoxes, Float32WeightsShareDy) {
  for (const int rows : {600, 5700}) {
    TrainCase c = base_case(rows == 600 ? 16 : 5);
    c.w = c.grad = DType::kFloat32;
    c.rows = rows;
    c.hidden = 64;
    c.widths = {600};
    BackwardPlan plan = plan_of(64, 128, 128);
    plan.one_pass = false;
    TrainStep first(c, GetParam()), other(c, GetParam());
    copy_inputs(first, &other);
    for (TrainStep* step : {&first, &other}) {
      plan.shares_dy = step == &first;
      step->run_forward();
      run_backward(*step, plan);
    }
    expect_same_results(first, other, concat(rows, " rows"));
  }
}

// More panels of dy than one thread adds for ds, a quarter each for four of them.
TEST_P(LoraTrainBoxes, ManyPanelsAreAddedByFourThreads) {
  for (const int rank : {16, 32}) {
    for (const int width : {9 * 512, 17 * 512 + 8}) {
      TrainCase c = base_case(rank);
      c.rows = 70;
      c.widths = {width};
      const BackwardPlan plan = plan_of(rank, 64, 128);
      TrainStep step(c, GetParam());
      step.run_forward();
      const lora::train::Reference want = lora::train::reference_backward(
          step.problem(true), step.backward_arguments(true), step.map);
      run_backward(step, plan);
      expect_near(step.dx.host(), want.dx, concat("dx, rank ", rank, ", width ", width));
      expect_same(c, GetParam(), plan, concat("rank ", rank, ", width ", width));
    }
  }
}

TEST_P(LoraTrainBoxes, SlicesShareThePass) {
  TrainCase c = base_case(8);
  c.widths = {520, 40, 264};
  c.ranks = {16, 5, 8};
  BackwardPlan plan = plan_of(32, 96, 128);
  expect_same(c, GetParam(), plan, "three slices");
  c.ranks = {8, 3};
  c.widths = {520, 40};
  plan = plan_of(16, 96, 128);
  expect_same(c, GetParam(), plan, "two slices");
}

TEST_P(LoraTrainBoxes, RowsOfOtherAdaptersShareABox) {
  for (const bool wide : {false, true}) {
    for (const float p : {0.0f, 0.3f}) {
      TrainCase c = base_case(0);
      c.by = RowsBy::kSegments;
      c.adapters = 3;
      c.rows = 410;  // ends at 45, 182 and 410
      c.hidden = p > 0 ? 336 : 328;
      c.ranks = wide ? std::vector{5, 32, 17} : std::vector{16, 3, 8};
      if (p > 0) c.p = {p, p, p};
      c.empty_segment = p > 0;
      BackwardPlan plan = plan_of(16, 96, 128);
      if (wide) plan.dy.shape = kDsPanels32, plan.x.shape = kInputPanels32;
      expect_same(c, GetParam(), plan, concat("chunks, wide ", wide, ", p ", p));
      plan.dy.chunk = RowCut{64, 32, 2, 16, 30};  // the kernels choose the size
      plan.x.chunk = RowCut{64, 64, 2, 8, 30};
      expect_same(c, GetParam(), plan, concat("cuts, wide ", wide, ", p ", p));
      c.widths = {520, 264};
      c.ranks = wide ? std::vector{5, 8, 16, 16, 7, 3} : std::vector{8, 8, 3, 5, 1, 7};
      expect_same(c, GetParam(), plan, concat("slices, wide ", wide, ", p ", p));
    }
  }
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(LoraTrainBoxes);  // on a machine without a GPU
INSTANTIATE_TEST_SUITE_P(Gpus, LoraTrainBoxes, ::testing::ValuesIn(gpus()),
                         [](const auto& one) { return device_label(one.param); });

}  // namespace
}  // namespace mortar::testing
#endif
