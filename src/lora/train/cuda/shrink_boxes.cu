// SPDX-License-Identifier: Apache-2.0
// h = x A^T and ds = dy B of dense float32 x, dy and weights without dropout, on sm_90a: the sums
// of shrink_float.cu, bit for bit, by wgmma (device/wgmma_parts.cuh says why they are the same).
//
// Bytes: 4 M C + 4 R C (per 128 rows, from L2) + 4 parts M R. With M = 2048, C = 13824, R = 32 that
// is 113 MB and partials, 37 us at 3.03 TB/s. MMAs: 6 products of parts, 10.9 GFLOP, 17 us at 650
// T; instructions of a warp and 16 x 16 elements: 52 that split, some 40 others.
#include "core/check.h"
#include "device/cluster.cuh"
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "device/wgmma.cuh"
#include "lora/train/cuda/kernels.cuh"
#include "lora/train/cuda/shrink_boxes.cuh"
#include "lora/train/cuda/shrink_store.cuh"
#include "lora/train/cuda/shrink_tile.cuh"

namespace mortar::lora::train::cuda {
namespace {

struct BoxParams {
  ShrinkParams p;
  CUtensorMap wide;
};

template <int kRanks, int kGroups>
__global__ void __launch_bounds__(ShrinkPipe<kRanks, kGroups>::kThreads, 1)
    shrink_boxes_kernel(const __grid_constant__ BoxParams params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  const ShrinkParams& p = params.p;
  extern __shared__ __align__(1024) char smem[];
  __shared__ Pairs pairs;
  __shared__ PipeBarriers<ShrinkPipe<kRanks, kGroups>> barriers;
  __shared__ Octet octets[kRanks / 8];
  if (threadIdx.x == 0) device::prefetch_tensor_map(params.wide);
  if (!p.ahead) device::pdl_begin(false);

  // Coordinates
  const RowTile rows = row_tile(p.rows, static_cast<int>(blockIdx.x), 64 * kGroups, p.plan.fused);
  if (rows.count == 0) return device::pdl_leave();
  const int part = blockIdx.y, first_rank = static_cast<int>(blockIdx.z) * kRanks;
  const bool multiplies = threadIdx.x < kGroups * kPipeThreads;
  const ShrinkPart own(p, part);
  pairs.fill(p.pairs, rows.adapter, p.first_slice, p.num_slices);
  if (threadIdx.x == 0) barriers.init();
  __syncthreads();
  fill_octets(p, pairs, first_rank, octets);

  float sum[kRanks / 2] = {};
  const auto begin = [&] {
    if (p.ahead) device::pdl_begin(false);
  };
  if (multiplies) {
    begin();
    multiply_shrink(p, barriers, device::smem_address(smem), own, sum);
  } else {
    fill_shrink(p, params.wide, pairs, barriers, smem, own, rows.start, first_rank, begin);
  }
  const int own_row = static_cast<int>(threadIdx.x) / 32 * 16 + shrink_row();
  if (p.plan.fused) {
    store_hidden<kRanks>(p, rows, part, first_rank, own_row, multiplies, octets,
                         reinterpret_cast<float*>(smem), sum);
  } else if (multiplies) {
    store_partials<kRanks>(p, rows, part, first_rank, own_row, sum);
  }
#endif
}

template <int kRanks, int kGroups>
void launch_boxes(const ShrinkParams& p, Stream stream) {
  device::Launch l;
  l.grid = dim3(static_cast<unsigned>(p.max_tiles), p.plan.parts, ceil_div(p.width, kRanks));
  l.cluster_y = p.plan.fused ? p.plan.parts : 1;
  l.threads = ShrinkPipe<kRanks, kGroups>::kThreads;
  l.smem = ShrinkPipe<kRanks, kGroups>::kSmem;
  l.stream = stream;
  l.pdl = true;
  BoxParams params;
  params.p = p;
  set_float_boxes(params.wide, p.wide, p.rows.num_rows, p.columns, 64 * kGroups);
  device::launch<shrink_boxes_kernel<kRanks, kGroups>>("lora_train", l, params);
}
template <int kRanks>
void launch_boxes(const ShrinkParams& p, Stream stream) {
  p.plan.rows == 64 ? launch_boxes<kRanks, 1>(p, stream) : launch_boxes<kRanks, 2>(p, stream);
}

}  // namespace

bool shrink_boxes(const ShrinkParams& p, Stream stream) {
  const bool takes = p.weights.parts == kFloatPlanes && p.rows.groups == nullptr &&
                     (p.plan.rows == 64 || p.plan.rows == 128) &&
                     takes_float_boxes(p.wide, p.rows.num_rows, p.columns);
  if (!takes) return false;
  p.plan.ranks == 16 ? launch_boxes<16>(p, stream) : launch_boxes<32>(p, stream);
  return true;
}

}  // namespace mortar::lora::train::cuda
