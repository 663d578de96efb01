// SPDX-License-Identifier: Apache-2.0
// ds = dy B and dB^T = h^T dy of dense float32 operands of one adapter and one slice without
// dropout, on sm_90a, in one launch: thread blocks for the same rows of dy run at the same time, so
// that what one of them has brought into L2 others find there. The sums are those of
// shrink_boxes.cu and outer_boxes.cu.
//
// Bytes: between 4 M C and 8 M C, by how much L2 keeps, and partial sums. M = N = 4096, R = 16: 67
// to 134 MB, 22 to 44 us at 3.03 TB/s, 38 on an H100; M = 2048, N = 13824, R = 32: 113 to 226 MB,
// 37 to 75 us, 75 there. Two thread blocks share an SM: the start and end of one take none of the
// time of the other.
#include "core/check.h"
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "device/wgmma.cuh"
#include "lora/train/cuda/dy_boxes.cuh"
#include "lora/train/cuda/kernels.cuh"
#include "lora/train/cuda/outer_boxes.cuh"
#include "lora/train/cuda/shrink_boxes.cuh"
#include "lora/train/cuda/shrink_tile.cuh"

namespace mortar::lora::train::cuda {
namespace {

struct DyParams {
  ShrinkParams ds;
  OuterParams db;
  int ds_tiles, db_panels;  ///< of a chunk of rows: tiles of 64 rows, and 128 columns each
  CUtensorMap dy;
};

template <int kRanks>
union DyBarriers {
  PipeBarriers<ShrinkPipe<kRanks, 1, kHalfMemory>> ds;
  PipeBarriers<OuterPipe<kRanks, 1, kHalfMemory>> db;
};

template <int kRanks>
__global__ void __launch_bounds__(2 * kPipeThreads, 2)
    dy_boxes_kernel(const __grid_constant__ DyParams params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char smem[];
  __shared__ Pairs pairs;
  __shared__ DyBarriers<kRanks> barriers;
  const ShrinkParams& p = params.ds;
  if (threadIdx.x == 0) device::prefetch_tensor_map(params.dy);

  // Coordinates
  const int ds_blocks = params.ds_tiles * p.plan.parts, all = ds_blocks + params.db_panels;
  const int chunk = static_cast<int>(blockIdx.x) / all, own = static_cast<int>(blockIdx.x) % all;
  const int first_rank = static_cast<int>(blockIdx.z) * kRanks;
  const bool multiplies = threadIdx.x < kPipeThreads;
  if (own < ds_blocks) {
    const RowTile rows = row_tile(p.rows, chunk * params.ds_tiles + own / p.plan.parts, 64, false);
    if (rows.count == 0) return device::pdl_leave();
    const ShrinkPart part(p, own % p.plan.parts);
    pairs.fill(p.pairs, 0, p.first_slice, p.num_slices);
    if (threadIdx.x == 0) barriers.ds.init();
    __syncthreads();
    const auto begin = [] { device::pdl_begin(false); };
    if (multiplies) {
      device::more_registers<168>();
      begin();
      float sum[kRanks / 2] = {};
      multiply_shrink(p, barriers.ds, device::smem_address(smem), part, sum);
      store_partials<kRanks>(p, rows, own % p.plan.parts, first_rank,
                             static_cast<int>(threadIdx.x) / 32 * 16 + shrink_row(), sum);
    } else {
      device::fewer_registers<88>();
      fill_shrink(p, params.dy, pairs, barriers.ds, smem, part, rows.start, first_rank, begin);
    }
    return;
  }
  const OuterParams& q = params.db;
  const RowTile rows = row_tile(q.rows, chunk, q.chunk_rows, false);
  const int column = (own - ds_blocks) * outer_columns(1);
  const int steps = ceil_div(rows.count, kPipeDepth);
  if (threadIdx.x == 0) barriers.db.init();
  __syncthreads();
  device::pdl_begin(false);
  if (multiplies) {
    device::more_registers<168>();
    multiply_outer(q, barriers.db, device::smem_address(smem), steps, chunk, column, first_rank);
  } else {
    device::fewer_registers<88>();
    fill_outer(q, params.dy, barriers.db, smem, rows, steps, column, first_rank);
  }
#endif
}

template <int kRanks>
void launch_boxes(const ShrinkParams& ds, const OuterParams& db, Stream stream) {
  DyParams params;
  params.ds = ds;
  params.db = db;
  params.ds_tiles = db.chunk_rows / 64;
  params.db_panels = static_cast<int>(ceil_div<std::int64_t>(db.columns, outer_columns(1)));
  set_float_boxes(params.dy, ds.wide, ds.rows.num_rows, ds.columns, 64);
  device::Launch l;
  l.grid = dim3(
      static_cast<unsigned>(db.max_tiles * (params.ds_tiles * ds.plan.parts + params.db_panels)), 1,
      ceil_div(ds.width, kRanks));
  l.threads = 2 * kPipeThreads;
  l.smem =
      std::max(ShrinkPipe<kRanks, 1, kHalfMemory>::kSmem, OuterPipe<kRanks, 1, kHalfMemory>::kSmem);
  l.stream = stream;
  l.pdl = true;
  device::launch<dy_boxes_kernel<kRanks>>("lora_train", l, params);
}

}  // namespace

bool dy_boxes(const ShrinkParams& ds, const OuterParams& db, Stream stream) {
  const bool takes = ds.plan.boxes && !ds.plan.fused && ds.ahead &&
                     ds.weights.parts == kFloatPlanes && db.s.parts == kFloatPlanes &&
                     db.chunk_rows % kPipeDepth == 0 && ds.plan.ranks == db.ranks &&
                     takes_float_boxes(ds.wide, ds.rows.num_rows, ds.columns);
  if (!takes) return false;
  db.ranks == 16 ? launch_boxes<16>(ds, db, stream) : launch_boxes<32>(ds, db, stream);
  return true;
}

}  // namespace mortar::lora::train::cuda
