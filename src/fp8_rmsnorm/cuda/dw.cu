// SPDX-License-Identifier: Apache-2.0
// The sum of dw over the chunks of rows.
//
// dw[n] (+)= sum_c partials[c,n], rounded once
// bytes  : 4 N for each of up to 128 chunks, from L2; N=4096: 2.1 MB -> 0.5 us
// limit  : latency: a thread adds up to 16 values, of which 4 are in flight
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "fp8_rmsnorm/cuda/backward.cuh"
#include "fp8_rmsnorm/cuda/elements.cuh"

namespace mortar::fp8_rmsnorm::cuda {
namespace {

constexpr int kDwThreads = 256, kDwColumns = 32, kDwSlices = kDwThreads / kDwColumns;

/// dw (+)= the sum of the chunks' partials: 8 slices of every eighth chunk, then these in order.
__global__ void __launch_bounds__(kDwThreads)
    dw_kernel(const __grid_constant__ BackwardParams params) {
  __shared__ float slices[kDwSlices][kDwColumns];
  const BackwardProblem& p = params.problem;
  const std::int64_t hidden = p.input.hidden, stride = round_up<std::int64_t>(hidden, 4);
  const int column_in_cta = static_cast<int>(threadIdx.x) % kDwColumns;
  const int slice = static_cast<int>(threadIdx.x) / kDwColumns;
  const std::int64_t column = std::int64_t{blockIdx.x} * kDwColumns + column_in_cta;
  device::pdl_wait();
  device::pdl_trigger();
  float sum = 0.0f;
  if (column < hidden) {
#pragma unroll 4
    for (std::int64_t chunk = slice; chunk < params.plan.chunks; chunk += kDwSlices) {
      sum += __ldcg(params.partials + chunk * stride + column);
    }
  }
  slices[slice][column_in_cta] = sum;
  __syncthreads();
  if (slice != 0 || column >= hidden) return;
  for (int s = 1; s < kDwSlices; ++s) sum += slices[s][column_in_cta];
  if (p.accumulate_dw) sum += device::load_as_float(p.dw.data, p.dw.dtype, column);
  device::store_from_float(p.dw.data, p.dw.dtype, column, sum);
}

}  // namespace

void reduce_dw(const BackwardParams& params, Stream stream) {
  device::Launch launch;
  launch.threads = kDwThreads;
  launch.grid =
      dim3(static_cast<unsigned>(ceil_div<std::int64_t>(params.problem.input.hidden, kDwColumns)));
  launch.stream = stream;
  launch.pdl = true;
  device::launch<dw_kernel>(kBackwardOp, launch, params);
}

}  // namespace mortar::fp8_rmsnorm::cuda
