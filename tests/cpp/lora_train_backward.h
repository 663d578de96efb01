// SPDX-License-Identifier: Apache-2.0
// A backward of LoRA training on a GPU by a plan of the test's own.
#pragma once

#include <functional>

#include "lora/train/checks.h"
#include "lora/train/cuda/backend.cuh"
#include "lora_train_case.h"

namespace mortar::testing {

using lora::train::cuda::BackwardPlan;

/// Runs it by the plan that `plan_of` makes for the problem. What it wrote is downloaded, and
/// nothing may lie outside of its workspace and its outputs.
inline void run_backward(TrainStep& step,
                         const std::function<BackwardPlan(const lora::train::Problem&)>& plan_of) {
  const LoraTrainProblem given = step.problem(false);
  const LoraTrainBackward arguments = step.backward_arguments(false);
  lora::train::Problem p =
      lora::train::check_backward(ArgCheck("lora_train_backward"), given, arguments).problem;
  const BackwardPlan plan = plan_of(p);
  GuardedTensor workspace =
      byte_tensor(lora::train::cuda::backward_workspace(p, plan), step.device);
  p.workspace = workspace.view().data;
  lora::train::cuda::backward(p, plan, Stream{});
  workspace.download();
  EXPECT_TRUE(workspace.guards_intact()) << "wrote outside the workspace";
  for (GuardedTensor* t : step.outputs()) {
    t->download();
    EXPECT_TRUE(t->guards_intact()) << "wrote outside an output";
  }
}
inline void run_backward(TrainStep& step, const BackwardPlan& plan) {
  run_backward(step, [&](const lora::train::Problem&) { return plan; });
}

}  // namespace mortar::testing
