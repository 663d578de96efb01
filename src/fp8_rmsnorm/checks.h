// SPDX-License-Identifier: Apache-2.0
// Checks of the three ops and of their workspace queries. Each throws before anything is written
// and returns the problem that backends take, without its workspace.
#pragma once

#include <cstdint>

#include "core/check.h"
#include "fp8_rmsnorm/problem.h"

namespace mortar::fp8_rmsnorm {

/// Most rows: kernels count them in int32.
inline constexpr std::int64_t kMaxRows = (std::int64_t{1} << 31) - (1 << 20);

ForwardProblem check_forward(const ArgCheck& arg, const Tensor& x, const Tensor& x_scale,
                             const Tensor& weight, float eps, float weight_offset,
                             const Tensor& residual, const Fp8Format& format,
                             const Fp8Quantized& out, const Tensor& rstd, const Tensor& normed);

BackwardProblem check_backward(const ArgCheck& arg, const Tensor& dy, const Tensor& x,
                               const Tensor& x_scale, const Tensor& weight, float weight_offset,
                               const Tensor& rstd, const Tensor& residual_grad, const Tensor& dx,
                               const Tensor& dw, bool accumulate_dw);

QuantizeProblem check_quantize(const ArgCheck& arg, const Tensor& y, const Fp8Format& format,
                               const Fp8Quantized& out);

/// What the workspace queries look at: sizes, dtypes, the format and which outputs there are.
ForwardProblem sizes_of_forward(const ArgCheck& arg, const Tensor& x, const Fp8Format& format,
                                const Fp8Quantized& out);
BackwardProblem sizes_of_backward(const ArgCheck& arg, const Tensor& x);
QuantizeProblem sizes_of_quantize(const ArgCheck& arg, const Tensor& y, const Fp8Format& format,
                                  const Fp8Quantized& out);

/// The memory of a workspace of at least `bytes`, null where none is needed and none came.
std::byte* check_workspace(const ArgCheck& arg, const Tensor& workspace, std::int64_t bytes,
                           Device device);

/// A tensor with its name in messages.
struct Named {
  const Tensor& tensor;
  const char* name;
};

/// All have memory; no output may overlap itself, another output or an input.
void check_outputs_apart(const ArgCheck& arg, std::initializer_list<Named> outputs,
                         std::initializer_list<Named> inputs);

}  // namespace mortar::fp8_rmsnorm
