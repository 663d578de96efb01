// SPDX-License-Identifier: Apache-2.0
// What the kernels of the backward share.
#pragma once

#include "fp8_rmsnorm/cuda/kernels.cuh"

namespace mortar::fp8_rmsnorm::cuda {

inline constexpr const char* kBackwardOp = "fp8_rmsnorm_backward";

/// What a launch does: all, or for rows in strips first the dots and then what needs them.
enum class Work { kAll, kDots, kGivenDots };

struct BackwardParams {
  BackwardProblem problem;
  BackwardPlan plan;
  Work work = Work::kAll;
  float* partials = nullptr;  ///< [chunks][N rounded up to 4]
  float* dots = nullptr;      ///< [strips][M]
  bool x_aligned = false, dy_aligned = false;
};

/// dw from the partial sums of the chunks.
void reduce_dw(const BackwardParams& params, Stream stream);

}  // namespace mortar::fp8_rmsnorm::cuda
