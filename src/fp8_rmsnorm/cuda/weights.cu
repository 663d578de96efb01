// SPDX-License-Identifier: Apache-2.0
// Weights + offset in float32, in the workspace: for rows whose weights do not fit in shared
// memory.
//
// bytes  : up to 4 N read and 4 N written; N=65536: 0.5 MB -> 0.1 us, a launch
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "fp8_rmsnorm/cuda/row_weights.cuh"

namespace mortar::fp8_rmsnorm::cuda {
namespace {

template <class T>
__global__ void weights_kernel(const __grid_constant__ ForwardParams p) {
  constexpr int kElements = kPiece<T>;
  device::pdl_wait();
  device::pdl_trigger();
  store_weights<kElements>(p, p.weights, ceil_div(static_cast<int>(p.input.hidden), kElements),
                           static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x),
                           static_cast<int>(gridDim.x * blockDim.x));
}

}  // namespace

void convert_weights(const ForwardParams& p, Stream stream) {
  device::visit_dtype<InputDTypes>(p.input.x.dtype, p.op, [&](auto tag) {
    device::Launch launch;
    launch.threads = 256;
    launch.grid = dim3(64);
    launch.stream = stream;
    launch.pdl = true;
    device::launch<weights_kernel<typename decltype(tag)::type>>(p.op, launch, p);
  });
}

}  // namespace mortar::fp8_rmsnorm::cuda
