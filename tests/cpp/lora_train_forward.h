// SPDX-License-Identifier: Apache-2.0
// A forward of LoRA training on a GPU by plans of the test's own.
#pragma once

#include <string>

#include "lora/train/checks.h"
#include "lora/train/cuda/backend.cuh"
#include "lora_train_case.h"

namespace mortar::testing {

/// What it wrote is downloaded, and nothing may lie outside of its workspace and its outputs.
inline void run_planned(TrainStep* step, const lora::train::cuda::ForcedPlans& forced) {
  const LoraTrainProblem problem = step->problem(false);
  const LoraTrainForward arguments = step->forward_arguments(false);
  const ArgCheck arg("lora_train_forward");
  auto [p, device] = lora::train::check_forward(arg, problem, arguments);
  // Other plans may leave as many partials as there are leaves, each of up to three columns.
  GuardedTensor workspace =
      byte_tensor(lora_train_forward_workspace(problem, arguments) +
                      3 * lora::train::cuda::kLeaves * 4 * p.num_rows * p.hidden_width,
                  step->device);
  p.workspace = workspace.view().data;
  lora::train::cuda::forward(p, forced, Stream{});
  workspace.download();
  EXPECT_TRUE(workspace.guards_intact());
  for (GuardedTensor* t : step->outputs()) {
    t->download();
    EXPECT_TRUE(t->guards_intact());
  }
}

inline void expect_same_forward(TrainStep& a, TrainStep& b, const std::string& what) {
  for (std::size_t s = 0; s < a.y.size(); ++s) {
    EXPECT_TRUE(same_bytes(a.y[s].host(), b.y[s].host())) << what << ": y";
  }
  EXPECT_TRUE(same_bytes(a.h.host(), b.h.host())) << what << ": h";
}

}  // namespace mortar::testing
