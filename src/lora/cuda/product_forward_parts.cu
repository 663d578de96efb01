// SPDX-License-Identifier: Apache-2.0
// h = factor * x A^T and y = h B^T of float32 weights and bfloat16 x and y in one launch, for up to
// 16 ranks, as the products of bfloat16 parts of lora/train/cuda/part_columns.cuh, in its order.
//
// h[m, j] = factor sum_k x[m, k] A[j, k],  y[m, n] = sum_j h[m, j] B[n, j]
// bytes  = 2 M K + 2 M N + 4 M R; A and B come from L2 for every tile of rows
// FLOP   = 6 M R K + 12 M R N
// 4096 rows, K = N = 4096, R = 16: 67 MB, 15.8 us at 4.28 TB/s
// limit  : DRAM; of few rows a thread block's steps, some 0.22 us for 64 columns of x and 0.7 us
//          (of more than 64 rows 0.9 to 1.4) for 128 of y
// wrong  : more ranks (0.42 and 0.9 us with 32; 4096 x 4096 x 4096 33.3 us for 33.7 apart)
//
// A cluster has a tile of rows, as in product_forward.cu, of one half or two. Boxes of A come in
// float32 to the place where their parts will lie, and rows of B to registers; a warp splits a
// whole box, or 64 rows, so that eight of them are being split at a time, and the latency of none
// is waited for. h passes between the thread blocks in float32; each thread splits what it has of
// it as the first operand of wgmma, once. Columns of y come 64 at a time, which the two warpgroups
// that multiply have in turns.
#include "core/check.h"
#include "device/cluster.cuh"
#include "device/convert.cuh"
#include "device/launch.cuh"
#include "device/leaf_sums.cuh"
#include "device/pdl.cuh"
#include "device/stmatrix.cuh"
#include "device/wgmma.cuh"
#include "lora/cuda/product_forward_parts.cuh"
#include "lora/cuda/product_params.cuh"
#include "lora/cuda/product_split.cuh"

namespace mortar::lora::cuda {
namespace {

using namespace forward_parts;

/// The sums of this thread block's columns of x, in the tree of leaves.
template <class S>
__device__ __forceinline__ void multiply(const PartsParams& p, const Work& work, std::uint32_t smem,
                                         Barriers<S>* bars, float (&sum)[S::kSums]) {
  const std::uint32_t warpgroup = threadIdx.x / kWarpgroup;
  const std::uint32_t own_rows = S::kHalves == 1 ? 0 : warpgroup * kBlockBytes;
  const std::uint32_t own_columns =
      S::kSlotsAt + (S::kHalves == 1 ? warpgroup * S::kMmaColumns * device::kSwizzleBytes : 0);
  const auto release = [&](int step) {
    if (step < 0 || threadIdx.x % 32 != 0) return;
    bars->x_empty[step % S::kStages].arrive();
    bars->a_empty[step % kSlots].arrive();
  };
  device::LeafSums<S::kSums, 2> tree;
  int step = 0;
#pragma unroll 1
  for (int leaf = 0; leaf < p.leaves; ++leaf) {
    const int end = min(work.steps, (leaf + 1) * p.leaf_steps);
    if (step >= end) {
#pragma unroll
      for (int i = 0; i < S::kSums; ++i) sum[i] = 0;
    }
    int last = -1;  // step of the MMAs in flight
#pragma unroll 1
    for (; step < end; ++step) {
      const int stage = step % S::kStages, slot = step % kSlots;
      bars->a_ready[slot].wait(step / kSlots & 1);
      bars->x_full[stage].wait(step / S::kStages & 1);
      const auto a = device::wgmma_descriptor(smem + own_rows + stage * S::kStageBytes);
      const auto b = device::wgmma_descriptor(smem + own_columns + slot * kSlotBytes);
      device::wgmma_keep(sum);
      device::wgmma_fence();
#pragma unroll
      for (int i = 0; i < kProductStep / 16; ++i) {
        device::wgmma<__nv_bfloat16, S::kMmaColumns>(sum, a + i * device::kDescriptorStep,
                                                     b + i * device::kDescriptorStep,
                                                     i > 0 || last >= 0);
      }
      device::wgmma_commit();
      device::wgmma_wait<1>();
      release(last);
      last = step;
    }
    device::wgmma_wait<0>();
    device::wgmma_keep(sum);
    release(last);
    tree.add(leaf, sum);
  }
}

/// Sums this thread block's rows of h, stores them and sends them to the whole cluster.
template <class S>
__device__ __forceinline__ void share_hidden(const PartsParams& p, const Work& work,
                                             const float* sums, float* hidden,
                                             device::Mbarrier* came) {
  constexpr int kFours = S::kRanks / 4;
  const int own_rows = p.tile_rows / p.parts;
  for (int i = threadIdx.x; i < own_rows * kFours; i += kConsumers) {
    const int own_row = i / kFours, value = i % kFours * 4;
    float4 column[kSumCopies];
#pragma unroll
    for (int q = 0; q < kSumCopies; ++q) {
      column[q] = sum_received<S>(sums, p.parts, own_rows, own_row,
                                  train::cuda::part_column(value, kSumCopies) + 8 * q);
    }
    const float4 four = train::cuda::scaled(
        train::cuda::sum_of_columns(column[0], column[1], column[2]), p.factor, p.rank - value);
    const int row = work.part * own_rows + own_row;
    for (int rank = 0; rank < p.parts; ++rank) {
      device::send_to_cluster(hidden + row * S::kRanks + value, four, came, rank);
    }
    if (p.h == nullptr || work.row + row >= p.rows || value >= p.width) continue;
    *reinterpret_cast<float4*>(p.h + (work.row + row) * p.h_stride + value) = four;
  }
}

/// y of this thread block's columns, of an h of kOctets: no branch may lie within a group of MMAs,
/// else the compiler waits for each.
template <class S, int kOctets>
__device__ __forceinline__ void make_y(const PartsParams& p, const Work& work, const float* hidden,
                                       std::uint32_t smem, Barriers<S>* bars) {
  constexpr int kSums = 64 / 2, kSteps = kPartSteps;
  const int warpgroup = static_cast<int>(threadIdx.x) / kWarpgroup;
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4,
            lane = static_cast<int>(threadIdx.x) % 32;
  const bool asks = threadIdx.x % kWarpgroup == 0;
  std::uint32_t h[S::kHalves][kOctets][kSteps][4];
#pragma unroll
  for (int half = 0; half < S::kHalves; ++half) {
#pragma unroll
    for (int octet = 0; octet < kOctets; ++octet) {
      const auto at = [&](int row) {
        const float* own = hidden + (half * p.half_rows + row) * S::kRanks;
        return *reinterpret_cast<const float2*>(own + 8 * octet + lane % 4 * 2);
      };
      const int row = 16 * warp + lane / 4;
      train::cuda::split_hidden(at(row), at(row + 8), h[half][octet]);
    }
  }
  const std::uint32_t blocks = smem + 2 * warpgroup * kBlockBytes;
  const std::uint32_t put = device::swizzled(16 * warp + lane / 8 % 2 * 8 + lane % 8, lane / 16);
  std::uint32_t block = blocks;
  for (int unit = warpgroup; unit < work.units; unit += 2) {
    const int slot = work.slot(unit);
    bars->b_ready[slot].wait(unit / kSlots & 1);
    const std::uint32_t weights = smem + S::kSlotsAt + slot * kSlotBytes;
    float sums[S::kHalves][kSums];
#pragma unroll
    for (auto& sum : sums) device::wgmma_keep(sum);
    device::wgmma_fence();
#pragma unroll
    for (int half = 0; half < S::kHalves; ++half) {
#pragma unroll
      for (int octet = 0; octet < kOctets; ++octet) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          device::wgmma<64>(sums[half], h[half][octet][step],
                            train::cuda::planes_descriptor<kPlaneBytes>(
                                weights + octet * kOctetBytes + step * kPlaneBytes),
                            octet + step > 0);
        }
      }
      device::wgmma_commit();
    }
#pragma unroll
    for (int half = 0; half < S::kHalves; ++half) {
      auto& sum = sums[half];
      if (asks) device::store_boxes_wait_read<1>();
      meet_warpgroup(warpgroup);
      half + 1 < S::kHalves ? device::wgmma_wait<1>() : device::wgmma_wait<0>();
      device::wgmma_keep(sum);
      if (half + 1 == S::kHalves && lane == 0) bars->b_empty[slot].arrive();
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        if (16 * warp >= p.half_rows) break;
        device::store_rounded<__nv_bfloat16>((block + put) ^ j * 16, sum + 4 * j);
      }
      device::fence_async_proxy();
      meet_warpgroup(warpgroup);
      if (asks) {
        device::store_box(p.y, work.column(p, unit), work.row + half * p.half_rows, block);
        device::store_boxes_commit();
      }
      block = 2 * blocks + kBlockBytes - block;
    }
  }
  if (asks) device::store_boxes_wait_read();
}

template <class S>
__global__ void __launch_bounds__(kPartsThreads, 1)
    forward_parts_kernel(const __grid_constant__ PartsParams p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char smem[];
  __shared__ Barriers<S> bars;
  const int octets = p.width / 8 * kSumCopies;  // of columns that h has
  if (threadIdx.x == kCopyAt) {
    device::prefetch_tensor_map(p.x);
    device::prefetch_tensor_map(p.a);
    device::prefetch_tensor_map(p.y);
    bars.init_copies();
  }
  if (threadIdx.x == 0) {
    bars.init_others();
    bars.received.arrive_and_expect(p.tile_rows * octets * 32);
    bars.came.arrive_and_expect(p.tile_rows * S::kRanks * 4);
  }
  device::cluster_arrive_relaxed();  // fence_init() has shown the barriers
  const Work work(p);
  for (int i = threadIdx.x; i < 4 * S::kRows; i += kPartsThreads) {
    const int row = i / 4, line = i % 4;
    if (line < min(kAheadSteps, work.steps) && row < p.tile_rows && work.row + row < p.rows) {
      device::prefetch_l2(static_cast<const unsigned short*>(p.x_data) +
                          (work.row + row) * p.x_stride + (work.first_step + line) * kProductStep);
    }
  }
  device::cluster_wait();  // all blocks run, and their barriers are there
  device::pdl_begin(false);
  const std::uint32_t own = device::smem_address(smem);
  if (threadIdx.x >= kCopyAt) {
    device::fewer_registers<32>();
    if (threadIdx.x == kCopyAt) produce<S>(p, work, own, &bars);
    return;
  }
  if (threadIdx.x >= kConsumers) {
    device::fewer_registers<72>();
    split<S>(p, work, smem, &bars);
    return;
  }
  device::more_registers<152>();
  auto* const sums = reinterpret_cast<float*>(smem + S::kSumsAt);
  auto* const hidden = reinterpret_cast<float*>(smem + S::kHiddenAt);
  float sum[S::kSums];
  multiply<S>(p, work, own, &bars, sum);
  send_sums<S>(work.part, p.parts, sums, sum, &bars.received, p.tile_rows, octets);
  bars.received.wait(0);
  share_hidden<S>(p, work, sums, hidden, &bars.came);
  bars.came.wait(0);
  p.width > 8 ? make_y<S, S::kOctets>(p, work, hidden, own, &bars)
              : make_y<S, 1>(p, work, hidden, own, &bars);
#endif
}

}  // namespace

bool takes_forward(const PartsForward& f) {
  return f.rank > 0 && f.rank <= kPartsForwardRanks &&
         device::takes_tensor_map(f.x, f.columns, f.rows, f.x_stride) &&
         device::takes_tensor_map(f.a, 2 * f.columns, f.rank, 2 * f.a_stride) &&
         device::takes_tensor_map(f.b, 2 * f.rank, f.out_columns, 2 * f.b_stride) &&
         device::takes_tensor_map(f.y, f.out_columns, f.rows, f.y_stride);
}

namespace {

template <class S>
void launch_shape(const char* op, const PartsForward& f, const ForwardPlan& plan, Stream stream) {
  PartsParams p{};
  p.tile_rows = plan.rows;
  p.half_rows = plan.rows / S::kHalves;
  const auto bf16 = DType::kBFloat16;
  device::set_tensor_map(p.x, bf16, f.x, f.columns, f.rows, f.x_stride, p.half_rows);
  // Boxes of 32 floats are boxes of 64 elements of 16 bits.
  device::set_tensor_map(p.a, bf16, f.a, 2 * f.columns, f.rank, 2 * f.a_stride, S::kRanks);
  p.b = static_cast<const float*>(f.b);
  p.b_stride = f.b_stride;
  p.out_columns = static_cast<int>(f.out_columns);
  device::set_tensor_map(p.y, bf16, f.y, f.out_columns, f.rows, f.y_stride, p.half_rows);
  p.x_data = f.x;
  p.x_stride = f.x_stride;
  p.rows = f.rows;
  p.rank = f.rank;
  p.width = round_up(f.rank, 8);
  p.parts = plan.parts;
  p.leaves = plan.leaves;
  p.leaf_steps = static_cast<int>(plan.leaf / kProductStep);
  p.part_steps = p.leaf_steps * plan.leaves;
  p.steps = static_cast<int>(ceil_div<std::int64_t>(f.columns, kProductStep));
  check(p.part_steps * plan.parts >= p.steps && plan.leaves <= kMostForwardLeaves, op,
        ": parts that leave some columns out");
  p.column_tiles = static_cast<int>(ceil_div<std::int64_t>(f.out_columns, kForwardColumns));
  p.factor = f.factor;
  p.h = f.h;
  p.h_stride = f.h_stride;
  const auto tiles = static_cast<int>(ceil_div<std::int64_t>(f.rows, plan.rows));
  device::Launch l = cluster_launch(tiles, plan.parts, kPartsThreads, S::kSmem, stream);
  l.carve_out = true;
  device::launch<forward_parts_kernel<S>>(op, l, p);
}

}  // namespace

void launch_forward(const char* op, const PartsForward& f, const ForwardPlan& plan, Stream stream) {
  check(takes_forward(f) && plan.parts > 1 && plan.parts <= kMostProductParts && plan.rows > 0 &&
            plan.rows <= kTallForwardRows && plan.rows % kForwardRowUnit == 0,
        op, ": no h and y of float32 weights in one launch");
  plan.rows > kForwardRows ? launch_shape<PartsShape<2>>(op, f, plan, stream)
                           : launch_shape<PartsShape<1>>(op, f, plan, stream);
}

}  // namespace mortar::lora::cuda
