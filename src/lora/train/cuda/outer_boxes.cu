// SPDX-License-Identifier: Apache-2.0
// dA = ds^T x and dB^T = h^T dy of dense float32 operands of one adapter without dropout, as
// partial sums over chunks of rows, on sm_90a: the sums of outer_float.cu, bit for bit, by wgmma.
//
// Bytes: 4 M C + 4 M R (per 256 columns, from L2) + 4 (M / chunk) R C. With M = 2048, C = 13824,
// R = 32 that is 113 MB and partials, 37 us at 3.03 TB/s. MMAs and instructions as in
// shrink_boxes.cu.
#include "core/check.h"
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "device/wgmma.cuh"
#include "lora/train/cuda/kernels.cuh"
#include "lora/train/cuda/outer_boxes.cuh"
#include "lora/train/cuda/outer_store.cuh"

namespace mortar::lora::train::cuda {
namespace {

constexpr int kGroups = 2;

struct BoxParams {
  OuterParams p;
  CUtensorMap wide;
};

template <int kRanks>
__global__ void __launch_bounds__(OuterPipe<kRanks, kGroups>::kThreads, 1)
    outer_boxes_kernel(const __grid_constant__ BoxParams params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  const OuterParams& p = params.p;
  extern __shared__ __align__(1024) char smem[];
  __shared__ PipeBarriers<OuterPipe<kRanks, kGroups>> barriers;
  if (threadIdx.x == 0) device::prefetch_tensor_map(params.wide);
  device::pdl_begin(p.early);

  // Coordinates
  const int slot = blockIdx.y;
  const RowTile rows = row_tile(p.rows, slot, p.chunk_rows, false);
  if (rows.count == 0) return device::pdl_leave();
  const int column = static_cast<int>(blockIdx.x) * outer_columns(kGroups);
  const int first_rank = static_cast<int>(blockIdx.z) * kRanks;
  const int steps = ceil_div(rows.count, kPipeDepth);
  if (threadIdx.x == 0) barriers.init();
  __syncthreads();
  if (threadIdx.x < kGroups * kPipeThreads) {
    device::more_registers<208>();
    multiply_outer(p, barriers, device::smem_address(smem), steps, slot, column, first_rank);
  } else {
    device::fewer_registers<88>();
    fill_outer(p, params.wide, barriers, smem, rows, steps, column, first_rank);
  }
#endif
}

template <int kRanks>
void launch_boxes(const OuterParams& p, Stream stream) {
  device::Launch l;
  l.grid = dim3(static_cast<unsigned>(ceil_div<std::int64_t>(p.columns, outer_columns(kGroups))),
                static_cast<unsigned>(p.max_tiles), ceil_div(p.width, kRanks));
  l.threads = OuterPipe<kRanks, kGroups>::kThreads;
  l.smem = OuterPipe<kRanks, kGroups>::kSmem;
  l.stream = stream;
  l.pdl = true;
  BoxParams params;
  params.p = p;
  set_float_boxes(params.wide, p.wide, p.rows.num_rows, p.columns, kPipeDepth);
  device::launch<outer_boxes_kernel<kRanks>>("lora_train", l, params);
}

}  // namespace

bool outer_boxes(const OuterParams& p, Stream stream) {
  const bool takes = p.s.parts == kFloatPlanes && p.rows.groups == nullptr &&
                     p.rows.offsets == nullptr && p.chunk_rows % kPipeDepth == 0 &&
                     takes_float_boxes(p.wide, p.rows.num_rows, p.columns);
  if (!takes) return false;
  p.ranks == 16 ? launch_boxes<16>(p, stream) : launch_boxes<32>(p, stream);
  return true;
}

}  // namespace mortar::lora::train::cuda
