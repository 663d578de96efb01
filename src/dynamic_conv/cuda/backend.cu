// SPDX-License-Identifier: Apache-2.0
// The CUDA backend's table of functions.
#include "device/launch.cuh"
#include "dynamic_conv/cuda/backend.cuh"

namespace mortar::dynamic_conv::cuda {
namespace {

void forward_default(const ForwardProblem& p, Stream stream) { forward(p, nullptr, stream); }
void backward_default(const BackwardProblem& p, Stream stream) { backward(p, nullptr, stream); }

void read(const void* from, void* to, std::size_t bytes, Stream stream) {
  const auto s = static_cast<cudaStream_t>(stream.handle);
  device::cuda_check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, s),
                     "dynamic_conv_check");
  device::cuda_check(cudaStreamSynchronize(s), "dynamic_conv_check");
}

}  // namespace

const Backend kBackend = {forward_default, backward_default, step, read};

}  // namespace mortar::dynamic_conv::cuda
