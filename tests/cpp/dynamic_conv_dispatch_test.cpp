// SPDX-License-Identifier: Apache-2.0
// A dtype without a kernel that got past the checks: every choice of a kernel throws, and nothing
// is launched, so the CUDA ones need no GPU.
#include <gtest/gtest.h>

#include <utility>

#include "dynamic_conv/cpu/rows.h"
#include "dynamic_conv/problem.h"
#include "mortar/error.h"
#if MORTAR_HAS_CUDA
#include "dynamic_conv/cuda/backend.cuh"
#endif

namespace mortar::dynamic_conv {
namespace {

constexpr DType kNone = DType::kFloat8E4M3, kSome = DType::kBFloat16;

TEST(DynamicConvDispatch, CpuRefusesOtherDTypes) {
  EXPECT_NO_THROW(cpu::row_kernels(kSome, DType::kFloat16, 4, 3));
  EXPECT_THROW(cpu::row_kernels(kNone, kSome, 4, 3), Error);
  EXPECT_THROW(cpu::row_kernels(kSome, kNone, 4, 3), Error);
  EXPECT_THROW(cpu::row_kernels(kNone, kNone, 4, 0), Error);
}

#if MORTAR_HAS_CUDA
template <class Problem>
Problem problem(DType x, DType k) {
  Problem p;
  p.shape.batch = p.shape.channels = p.shape.time = 1;
  p.shape.x_dtype = x;
  p.shape.k_dtype = k;
  return p;
}

TEST(DynamicConvDispatch, CudaRefusesOtherDTypes) {
  for (const auto& [x, k] : {std::pair{kNone, kNone}, {kNone, kSome}, {kSome, kNone}}) {
    EXPECT_THROW(cuda::forward(problem<ForwardProblem>(x, k), nullptr, {}), Error);
    EXPECT_THROW(cuda::backward(problem<BackwardProblem>(x, k), nullptr, {}), Error);
    StepProblem step;
    step.rows = step.channels = 1;
    step.x_dtype = x;
    step.k_dtype = k;
    EXPECT_THROW(cuda::step(step, {}), Error);
  }
}
#endif

}  // namespace
}  // namespace mortar::dynamic_conv
