// SPDX-License-Identifier: Apache-2.0
// The sum of dw over the chunks of rows.
//
// dw[n] (+)= sum_c partials[c,n], rounded once
// bytes  : 4 N for each of up to 132 chunks, from L2; N=4096: 2.1 MB -> 0.5 us
// limit  : latency: all of a CTA's partials are in flight together into shared memory. It is small
//          enough to lie beside a CTA of the backward and wait there
#include "device/async_copy.cuh"
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "fp8_rmsnorm/cuda/backward.cuh"
#include "fp8_rmsnorm/cuda/elements.cuh"

namespace mortar::fp8_rmsnorm::cuda {
namespace {

constexpr int kDwColumns = 32, kDwQuads = kDwColumns / 4;  // of a CTA
constexpr int kDwParts = 4, kDwThreads = kDwColumns * kDwParts;

/// dw (+)= the sum of the chunks' partials: four sums of every fourth chunk, and these in order.
__global__ void __launch_bounds__(kDwThreads)
    dw_kernel(const __grid_constant__ BackwardParams params) {
  __shared__ __align__(16) float partials[most_chunks(1)][kDwColumns];
  __shared__ float sums[kDwParts][kDwColumns];
  const BackwardProblem& p = params.problem;
  const std::int64_t hidden = p.input.hidden, stride = round_up<std::int64_t>(hidden, 4);
  const int thread = static_cast<int>(threadIdx.x);
  const int column = thread % kDwColumns, part = thread / kDwColumns;
  const int chunks = static_cast<int>(params.plan.chunks);
  const std::int64_t first = std::int64_t{blockIdx.x} * kDwColumns;
  const int quad = thread % kDwQuads;
  const int bytes = first + 4 * quad < hidden ? 16 : 0;
  const float* from = params.partials + first + 4 * quad;
  device::pdl_begin(/*early=*/true);
  device::pdl_wait();
#pragma unroll 3
  for (int chunk = thread / kDwQuads; chunk < chunks; chunk += kDwThreads / kDwQuads) {
    device::cp_async_16(device::smem_address(&partials[chunk][4 * quad]), from + chunk * stride,
                        bytes);
  }
  device::cp_async_commit();
  device::cp_async_wait<0>();
  __syncthreads();
  float sum = 0.0f;
#pragma unroll 11
  for (int chunk = part; chunk < chunks; chunk += kDwParts) sum += partials[chunk][column];
  sums[part][column] = sum;
  __syncthreads();
  if (part != 0 || first + column >= hidden) return;
#pragma unroll
  for (int i = 1; i < kDwParts; ++i) sum += sums[i][column];
  if (p.accumulate_dw) sum += device::load_as_float(p.dw.data, p.dw.dtype, first + column);
  device::store_from_float(p.dw.data, p.dw.dtype, first + column, sum);
}

}  // namespace

void reduce_dw(const BackwardParams& params, Stream stream) {
  device::Launch launch;
  launch.threads = kDwThreads;
  launch.grid =
      dim3(static_cast<unsigned>(ceil_div<std::int64_t>(params.problem.input.hidden, kDwColumns)));
  launch.stream = stream;
  launch.pdl = true;
  launch.carve_out = true;
  device::launch<dw_kernel>(kBackwardOp, launch, params);
}

}  // namespace mortar::fp8_rmsnorm::cuda
