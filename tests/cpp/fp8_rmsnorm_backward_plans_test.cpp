// SPDX-License-Identifier: Apache-2.0
// Every shape of the CUDA backward's kernels, forced by plans: all are right, and what is no matter
// of sizes changes no bit.
#if MORTAR_HAS_CUDA
#include "fp8_rmsnorm_grad_case.h"

namespace mortar::testing {
namespace {

using fp8_rmsnorm::BackwardPlan;
using fp8_rmsnorm::BackwardShape;

class Fp8RmsNormBackwardPlans : public ::testing::TestWithParam<Device> {
 protected:
  struct Bits {
    Bytes dx, dw;
    bool operator==(const Bits&) const = default;
  };

  static BackwardShape shape_of(const GradCase& c) {
    return {c.rows, c.columns, static_cast<int>(dtype_size(c.x)),
            static_cast<int>(dtype_size(c.dy)), c.residual_grad};
  }
  Bits run(const GradCase& c, const BackwardPlan& plan) {
    std::ostringstream printed;
    printed << plan;
    SCOPED_TRACE(printed.str());
    GradTrial trial(c, GetParam(), 11);
    trial.run(&plan);
    trial.expect_right();
    return {bytes_of(trial.dx_tensor()), bytes_of(trial.dw)};
  }

  const fp8_rmsnorm::GpuShape gpu_ = fp8_rmsnorm::cuda::this_gpu();
};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Fp8RmsNormBackwardPlans);
INSTANTIATE_TEST_SUITE_P(Devices, Fp8RmsNormBackwardPlans, ::testing::ValuesIn(gpus()),
                         device_name);

// Fewer rows in flight; and views that start or end between 16-byte vectors. Rows in one strip and
// in several.
TEST_P(Fp8RmsNormBackwardPlans, StagesAndAlignmentChangeNoBit) {
  for (const auto& [x, dy] :
       {std::pair{kE4M3, kBF16}, {kE5M2, kF32}, {kF16, kF16}, {kF32, kBF16}}) {
    for (const auto& [columns, threads] :
         {std::pair{48, 512}, {1040, 512}, {5120, 512}, {2064, 64}}) {
      const GradCase c{.rows = 37, .columns = columns, .x = x, .dy = dy, .residual_grad = true};
      const BackwardPlan plan = backward_plan(shape_of(c), gpu_, threads, 9);
      const Bits bits = run(c, plan);
      GradCase moved = c;
      moved.layout = {.lead = 4, .row_gap = 4};
      EXPECT_EQ(run(moved, plan), bits) << concat(moved);
      for (int stages = 1; stages < plan.stages; ++stages) {
        BackwardPlan shallow = plan;
        shallow.stages = stages;
        EXPECT_EQ(run(c, shallow), bits) << concat(c) << ", " << stages << " stages";
      }
    }
  }
}

// Few threads and chunks: every number of row groups and of strips, whose sums meet in a cluster
// or by a pass of their own.
TEST_P(Fp8RmsNormBackwardPlans, EveryShapeIsRight) {
  for (const int threads : {64, 96, 192, 512}) {
    for (const std::int64_t columns : {16, 528, 2064, 5136}) {
      for (const auto& [x, dy] : {std::pair{kE4M3, kBF16}, {kBF16, kF32}}) {
        const GradCase c{
            .rows = 37, .columns = columns, .x = x, .dy = dy, .residual_grad = columns == 528};
        fp8_rmsnorm::GpuShape gpu = gpu_;
        const Bits bits = run(c, backward_plan(shape_of(c), gpu, threads, columns == 16 ? 1 : 9));
        gpu.clusters = false;
        EXPECT_EQ(run(c, backward_plan(shape_of(c), gpu, threads, columns == 16 ? 1 : 9)), bits)
            << concat(c);
      }
    }
  }
}

}  // namespace
}  // namespace mortar::testing
#endif
