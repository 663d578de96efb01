// SPDX-License-Identifier: Apache-2.0
// The passes of the CUDA backend, one per .cu file.
#pragma once

#include "dynamic_conv/config.h"
#include "dynamic_conv/problem.h"

namespace mortar::dynamic_conv::cuda {

/// `config` null: CudaConfig::make's choice; benchmarks try others.
void forward(const ForwardProblem& p, const CudaConfig* config, Stream stream);
void backward(const BackwardProblem& p, const CudaConfig* config, Stream stream);
void step(const StepProblem& p, Stream stream);

}  // namespace mortar::dynamic_conv::cuda
