// SPDX-License-Identifier: Apache-2.0
// No kernel of the backward of float32 operands changes a bit, on a GPU.
#include <string>

#include "lora_train_case.h"

#if MORTAR_HAS_CUDA
#include "lora_train_backward.h"

namespace mortar::testing {
namespace {

class LoraTrainFloats : public ::testing::TestWithParam<Device> {};

/// A step whose backward has ds and dB in one launch, or apart.
void run(TrainStep* step, bool together) {
  step->run_forward();
  run_backward(*step, [&](const lora::train::Problem& p) {
    BackwardPlan plan = lora::train::cuda::plan_backward(p);
    plan.together = together;
    return plan;
  });
}

// On sm_90a dense rows of one adapter go through boxes, ds beside dB or apart; those of a segment
// through rings of warps, and rows that are not aligned through the kernels of any strides.
TEST_P(LoraTrainFloats, NoKernelChangesABitOfTheBackward) {
  struct Case {
    int rank, rows, width;
  };
  // Of few rows a cluster has ds, which then is never beside dB.
  for (const auto& [rank, rows, width] :
       {Case{5, 70, 1100}, Case{16, 1000, 200}, Case{24, 1000, 300}, Case{40, 520, 300}}) {
    TrainCase c;
    c.rows = rows;
    c.hidden = 264;
    c.widths = {width};
    c.ranks = {rank};
    c.x = c.w = c.y = c.grad = c.dx = DType::kFloat32;
    TrainStep first(c, GetParam());
    run(&first, true);
    TrainCase rings = c, any = c, turned = c;
    rings.by = RowsBy::kSegments;
    any.layout = {1, 3};
    turned.transposed = true;
    const auto expect_same = [&](const TrainCase& own, const std::string& what) {
      TrainStep other(own, GetParam());
      copy_inputs(first, &other);
      run(&other, false);
      expect_same_results(first, other, what);
    };
    expect_same(c, "apart");
    expect_same(rings, "rings of warps");
    expect_same(any, "any strides");
    expect_same(turned, "transposed");
  }
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(LoraTrainFloats);  // on a machine without a GPU
INSTANTIATE_TEST_SUITE_P(Gpus, LoraTrainFloats, ::testing::ValuesIn(gpus()),
                         [](const auto& one) { return device_label(one.param); });

}  // namespace
}  // namespace mortar::testing
#endif
