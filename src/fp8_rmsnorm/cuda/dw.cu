// SPDX-License-Identifier: Apache-2.0
// The sum of dw over the chunks of rows.
//
// dw[n] (+)= sum_c partials[c,n], rounded once
// bytes  : 4 N for each of up to 132 chunks, from L2; N=4096: 2.1 MB -> 0.5 us
// limit  : latency: a thread adds up to 5 quads of values, all in flight. It is small enough to lie
//          beside a CTA of the backward and wait there
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "fp8_rmsnorm/cuda/backward.cuh"
#include "fp8_rmsnorm/cuda/elements.cuh"

namespace mortar::fp8_rmsnorm::cuda {
namespace {

constexpr int kDwColumns = 32, kDwSlices = 32, kDwThreads = kDwColumns / 4 * kDwSlices;
constexpr int kChunksOfSlice = static_cast<int>(ceil_div<std::int64_t>(most_chunks(1), kDwSlices));

/// dw (+)= the sum of the chunks' partials: 32 slices of every 32nd chunk, these by fours, and the
/// fours in order.
__global__ void __launch_bounds__(kDwThreads)
    dw_kernel(const __grid_constant__ BackwardParams params) {
  __shared__ float4 slices[kDwSlices / 4][kDwColumns / 4];
  const BackwardProblem& p = params.problem;
  const std::int64_t hidden = p.input.hidden, stride = round_up<std::int64_t>(hidden, 4);
  const int thread = static_cast<int>(threadIdx.x);
  const int quad = thread % (kDwColumns / 4), slice = thread / (kDwColumns / 4);
  const std::int64_t first = std::int64_t{blockIdx.x} * kDwColumns, column = first + 4 * quad;
  device::pdl_begin(/*early=*/true);
  device::pdl_wait();
  float4 part[kChunksOfSlice];
#pragma unroll
  for (int i = 0; i < kChunksOfSlice; ++i) {
    const int chunk = i * kDwSlices + slice;
    part[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (column < hidden && chunk < params.plan.chunks) {
      part[i] = __ldcg(reinterpret_cast<const float4*>(params.partials + chunk * stride + column));
    }
  }
  float4 sum = part[0];
#pragma unroll
  for (int i = 1; i < kChunksOfSlice; ++i) {
    sum.x += part[i].x;
    sum.y += part[i].y;
    sum.z += part[i].z;
    sum.w += part[i].w;
  }
  // The four slices of a warp.
#pragma unroll
  for (int step = 16; step >= kDwColumns / 4; step /= 2) {
    sum.x += __shfl_xor_sync(0xffffffffu, sum.x, step);
    sum.y += __shfl_xor_sync(0xffffffffu, sum.y, step);
    sum.z += __shfl_xor_sync(0xffffffffu, sum.z, step);
    sum.w += __shfl_xor_sync(0xffffffffu, sum.w, step);
  }
  if (slice % 4 == 0) slices[slice / 4][quad] = sum;
  __syncthreads();
  if (thread >= kDwColumns || first + thread >= hidden) return;
  float total = 0.0f;
#pragma unroll
  for (int s = 0; s < kDwSlices / 4; ++s) {
    total += reinterpret_cast<const float*>(slices[s])[thread];
  }
  if (p.accumulate_dw) total += device::load_as_float(p.dw.data, p.dw.dtype, first + thread);
  device::store_from_float(p.dw.data, p.dw.dtype, first + thread, total);
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
