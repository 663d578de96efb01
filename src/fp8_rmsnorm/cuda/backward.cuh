// SPDX-License-Identifier: Apache-2.0
// What the kernels of the backward share.
#pragma once

#include "fp8_rmsnorm/cuda/kernels.cuh"

namespace mortar::fp8_rmsnorm::cuda {

inline constexpr const char* kBackwardOp = "fp8_rmsnorm_backward";

/// What a launch does: all, or for rows in strips without clusters first the dots and then what
/// needs them.
enum class Work { kAll, kDots, kGivenDots };

struct BackwardParams {
  BackwardProblem problem;
  BackwardPlan plan;
  Work work = Work::kAll;
  float* partials = nullptr;  ///< [chunks][N rounded up to 4]
  float* dots = nullptr;      ///< [strips][M]
  bool makes_dx = false, makes_dw = false, adds = false;
  bool weight_aligned = false;
  int weight_bytes = 0;  ///< of an element
  /// From a row of a row group to its next, bytes.
  int row_step = 0;  ///< rows
  std::int64_t x_step = 0, dy_step = 0, added_step = 0, dx_step = 0, scale_step = 0;
  int group_shift = 0;        ///< log2 of the columns of a scale of x
  bool narrow_scale = false;  ///< it is bfloat16, else float32
};

/// dw from the partial sums of the chunks.
void reduce_dw(const BackwardParams& params, Stream stream);

}  // namespace mortar::fp8_rmsnorm::cuda
