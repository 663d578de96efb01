// SPDX-License-Identifier: Apache-2.0
// Scales of the columns of a matrix without rows: those of zeros.
//
// bytes  : 4 N written; N=65536: 0.3 MB -> 0.1 us, a launch
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "fp8_rmsnorm/cuda/kernels.cuh"
#include "fp8_rmsnorm/cuda/quantize.cuh"

namespace mortar::fp8_rmsnorm::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    empty_columns_kernel(const __grid_constant__ ForwardParams p) {
  device::pdl_wait();
  device::pdl_trigger();
  const std::int64_t n = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (n >= p.input.hidden) return;
  p.out.scale_t.data[n * p.out.scale_t.row_stride] = scale_for(p.out, 0.0f);
}

}  // namespace

void empty_columns(const ForwardParams& p, Stream stream) {
  device::Launch launch;
  launch.threads = kThreads;
  launch.grid = dim3(static_cast<unsigned>(ceil_div<std::int64_t>(p.input.hidden, kThreads)));
  launch.stream = stream;
  launch.pdl = true;
  device::launch<empty_columns_kernel>(p.op, launch, p);
}

}  // namespace mortar::fp8_rmsnorm::cuda
