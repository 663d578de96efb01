// SPDX-License-Identifier: Apache-2.0
// dB = dy^T h, and ds = dy B in the same pass over dy, of neighbouring dense rows of one 16-bit
// type on sm_90a: the sums of panel.cu in their order, by wgmma on boxes that the copy engine
// brings.
//
// Bytes: as panel.cu, 2 M N + 2 M R per panel (from L2) + 4 R N per chunk + 4 M R per panel. With
// M = 8192, N = 14336, R = 16 that is 261 MB, 86 us at 3.03 TB/s.
// limit: DRAM. Shared memory passes 3 bytes for each byte of dy, of the 4 that it could.
//
// A thread block has a panel of 512 columns and a chunk of rows, which pass 64 at a time, half of
// the panel in a stage. A warpgroup for each half multiplies for dB, and has its sums in registers
// over the whole chunk; a third one multiplies both halves for ds, by B in shared memory: one chain
// for 64 columns, which are added in order. The first lane of a last warp copies. B of the only
// adapter is there, and the first rows have been asked for in L2, before the kernel before it has
// ended. Rows of another adapter that a chunk's last box brings become zeros.
#include "lora/train/cuda/panel_boxes.cuh"

#include "core/check.h"
#include "core/int_math.h"
#include "device/barrier.cuh"
#include "device/bulk_copy.cuh"
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "device/ring.cuh"
#include "device/tensor_copy.cuh"
#include "device/wgmma.cuh"
#include "lora/train/cuda/panel.cuh"
#include "lora/train/cuda/panel_operands.cuh"

namespace mortar::lora::train::cuda {
namespace {

using device::Major;
using namespace panel_pass;

/// dB of half of the panel, by a warpgroup.
template <class T, class B>
__device__ __forceinline__ void sum_rows(const PanelPart<>& part, int half, std::uint32_t smem,
                                         Barriers<B>& barriers) {
  float sum[B::kBlocks][B::kChains][B::kRanks / 2] = {};
  const int thread = thread_anew(), lane = thread % 32;
  int stage = half;
  std::uint32_t parity = 0;
  device::RingCursor<B::kNarrowStages> narrow;
#pragma unroll 1
  for (int first = 0; first < part.rows.count; first += kBlockRows, narrow.next()) {
    barriers.narrow_full[narrow.stage].wait(narrow.round & 1);
    barriers.full[stage].wait(parity);
    const std::uint32_t wide_stage = smem + stage * B::kStageBytes;
    const std::uint32_t narrow_stage = smem + B::kNarrowAt + narrow.stage * kBlockBytes;
    const int left = part.rows.count - first;
    if (clears_rows(part, first)) {
      const int end = round_up(left, 16);
      clear_rows<B::kBlocks>(wide_stage, left, end);
      if (half == 0) clear_rows<1>(narrow_stage, left, end);
      device::fence_async_proxy();
      barriers.cleared.arrive();
      barriers.cleared.wait(0);
    }
    const auto rows = device::wgmma_descriptor(wide_stage);
    const auto ranks = device::wgmma_descriptor(narrow_stage);
#pragma unroll
    for (int k = 0; k < kBlockRows / 16; ++k) {
      // What follows the chunk's rows in the block was not copied, or is zeros.
      if (16 * k >= left) break;
      device::wgmma_fence();
#pragma unroll
      for (int block = 0; block < B::kBlocks; ++block) {
        device::wgmma<T, B::kRanks, Major::kRows, Major::kRows>(
            sum[block][k % B::kChains],
            rows + block * (kBlockBytes / 16) + k * device::descriptor_step(Major::kRows),
            ranks + k * device::descriptor_step(Major::kRows), 1);
      }
      device::wgmma_commit();
    }
    device::wgmma_wait<0>();
    if (lane == 0) {
      barriers.empty[stage].arrive();
      barriers.narrow_empty[narrow.stage].arrive();
    }
    stage += kHalves;
    if (stage >= B::kStages) {
      stage -= B::kStages;
      parity ^= 1;
    }
  }
#pragma unroll
  for (int block = 0; block < B::kBlocks; ++block) {
#pragma unroll
    for (int chain = 0; chain < B::kChains; ++chain) device::wgmma_keep(sum[block][chain]);
  }
  const int ranks = *part.live;
  const int row = thread % kWarpgroup / 32 * 16 + lane / 4;
#pragma unroll
  for (int n = 0; n < B::kRanks / 8; ++n) {
    if (8 * n >= ranks) break;
#pragma unroll
    for (int block = 0; block < B::kBlocks; ++block) {
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        const auto value = [&](int i) {
          const int at = 4 * n + 2 * upper + i;
          return B::kChains == 1 ? sum[block][0][at]
                                 : sum[block][0][at] + sum[block][B::kChains - 1][at];
        };
        part.store_sums(part.column + (half * B::kBlocks + block) * kBlockColumns + row + 8 * upper,
                        8 * n + lane % 4 * 2, value(0), value(1));
      }
    }
  }
}

/// The panel's partial of ds, by a warpgroup.
template <class T, class B>
__device__ __forceinline__ void sum_columns(const PanelPart<>& part, std::uint32_t smem,
                                            Barriers<B>& barriers) {
  const PanelParams& p = part.p;
  const int thread = thread_anew(), lane = thread % 32, end = *part.live;
  const int row = thread % kWarpgroup / 32 * 16 + lane / 4;
  const int rank = lane % 4 * 2;
  float* to =
      p.ds + (std::int64_t{part.panel} * p.rows.num_rows + part.rows.start + row) * p.hidden_width +
      part.own->first_hidden + rank;
  device::RingCursor<B::kStages> at;
#pragma unroll 1
  for (int first = 0; first < part.rows.count; first += kBlockRows) {
    if (clears_rows(part, first)) barriers.cleared.wait(0);
    float sum[B::kRanks / 2] = {};
#pragma unroll 1
    for (int half = 0; half < kHalves; ++half, at.next()) {
      barriers.full[at.stage].wait(at.round & 1);
      const auto rows = device::wgmma_descriptor(smem + at.stage * B::kStageBytes);
      const auto weights =
          device::wgmma_descriptor(smem + B::kWeightsAt + half * B::kBlocks * B::kWeightBytes);
#pragma unroll
      for (int block = 0; block < B::kBlocks; block += B::kAtOnce) {
        float chain[B::kAtOnce][B::kRanks / 2];
        device::wgmma_fence();
        // Of two chains in turns, as an MMA of 32 ranks waits for the one before it in its chain.
        constexpr int kSteps = kBlockColumns / 16;
#pragma unroll
        for (int at = 0; at < kSteps * B::kAtOnce; ++at) {
          const int i = B::kAtOnce == 2 ? at % 2 : at / kSteps;
          const int k = B::kAtOnce == 2 ? at / 2 : at % kSteps;
          device::wgmma<T, B::kRanks>(
              chain[i], rows + (block + i) * (kBlockBytes / 16) + k * device::kDescriptorStep,
              weights + (block + i) * (B::kWeightBytes / 16) + k * device::kDescriptorStep, k > 0);
        }
        device::wgmma_commit();
        device::wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < B::kAtOnce; ++i) {
          device::wgmma_keep(chain[i]);
#pragma unroll
          for (int n = 0; n < B::kRanks / 2; ++n) sum[n] += chain[i][n];
        }
      }
      if (lane == 0) barriers.empty[at.stage].arrive();
    }
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      if (first + row + 8 * upper >= part.rows.count) continue;
      float* own = to + std::int64_t{first + 8 * upper} * p.hidden_width;
#pragma unroll
      for (int n = 0; n < B::kRanks / 8; ++n) {
        if (8 * n + rank >= end) break;
        *reinterpret_cast<float2*>(own + 8 * n) =
            make_float2(sum[4 * n + 2 * upper], sum[4 * n + 2 * upper + 1]);
      }
    }
  }
}

/// All that is not copied.
template <class T, class B>
__device__ __forceinline__ void multiply(const PanelPart<>& part, std::uint32_t smem,
                                         Barriers<B>& barriers) {
  const int warpgroup = thread_anew() / kWarpgroup;
  if (warpgroup < kHalves) {
    sum_rows<T>(part, warpgroup, smem, barriers);
  } else if (warpgroup == kHalves) {
    sum_columns<T>(part, smem, barriers);
  }
}

template <class T, int kShape>
__global__ void __launch_bounds__(Boxes<kShape>::kThreads) __maxnreg__(Boxes<kShape>::kRegisters)
    panel_boxes_kernel(const __grid_constant__ PanelBoxParams p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using B = Boxes<kShape>;
  extern __shared__ __align__(1024) char smem[];
  __shared__ Barriers<B> barriers;
  __shared__ int live[(kBoxThreads + kThreads - 1) / kThreads];
  const PanelPart<> part(p.panel, B::kColumns, B::kRanks, true, live);
  if (part.rows.count == 0) return device::pdl_leave();
  part.ask<B::kColumns>(2 * kBlockRows);
  const bool copies = threadIdx.x == kBoxThreads - 32;
  if (copies) {
    barriers.init(false);
    device::prefetch_tensor_map(p.wide[part.own - p.panel.operands]);
    device::prefetch_tensor_map(p.narrow);
  }
  load_weights<B, kBoxThreads, false>(part, smem + B::kWeightsAt);
  device::fence_async_proxy();
  __syncthreads();
  device::pdl_begin(false);
  const std::uint32_t at = device::smem_address(smem);
  copies ? copy_stages<B>(p, part, at, barriers) : multiply<T>(part, at, barriers);
#endif
}

/// The same of several adapters' rows.
template <class T, int kShape>
__global__ void __launch_bounds__(Boxes<kShape>::kThreads) __maxnreg__(Boxes<kShape>::kRegisters)
    panel_segments_kernel(const __grid_constant__ PanelBoxParams p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using B = Boxes<kShape>;
  extern __shared__ __align__(1024) char smem[];
  __shared__ Barriers<B> barriers[2];  // of this place and of the next one
  __shared__ int live[(kBoxThreads + kThreads - 1) / kThreads], places;
  const auto copies = [] { return thread_anew() == kBoxThreads - 32; };
  if (copies()) {
    barriers[0].init(false);
    device::prefetch_tensor_map(p.wide[0]);
    device::prefetch_tensor_map(p.narrow);
  }
  ask_ahead<B>(p);
  __syncthreads();
  device::pdl_begin(false);
  walk_places(p.panel, p.places, &places, [&](int panel, int tile, int round) {
    if (copies()) barriers[(round + 1) % 2].init(round > 0);
    const PanelPart<> part(p.panel, B::kColumns, B::kRanks, true, live, panel, tile);
    if (part.rows.adapter < 0) return false;
    if (part.rows.count == 0) return true;
    const std::uint32_t at = device::smem_address(smem);
    if (thread_anew() >= kBoxThreads - 32) {
      if (copies()) copy_stages<B>(p, part, at, barriers[round % 2]);
      __syncwarp();
    } else {
      load_weights<B, kBoxThreads - 32, true>(part, smem + B::kWeightsAt);
      device::fence_async_proxy();
      device::named_barrier<2, kBoxThreads - 32>();
      multiply<T>(part, at, barriers[round % 2]);
    }
    return true;
  });
#endif
}

template <class T, int kShape>
void launch_shape(const PanelParams& p, DType dtype, Stream stream) {
  PanelBoxParams params;
  static_assert(sizeof(params) <= 4096, "parameters of a launch");
  params.panel = p;
  for (int i = 0; i < p.num_operands; ++i) {
    const PanelOperand& own = p.operands[i];
    device::set_tensor_map(params.wide[i], dtype, own.wide.data, own.columns, p.rows.num_rows,
                           own.wide.row_stride, kBoxRows);
  }
  device::set_tensor_map(params.narrow, dtype, p.s, p.hidden_width, p.rows.num_rows, p.hidden_width,
                         kBoxRows);
  device::Launch l;
  l.grid = panel_grid(p);
  l.threads = kBoxThreads;
  l.smem = Boxes<kShape>::kSmem;
  l.stream = stream;
  l.pdl = true;
  if (p.ahead) return device::launch<panel_boxes_kernel<T, kShape>>("lora_train", l, params);
  l.grid = segment_grid(p, &params.places);
  device::launch<panel_segments_kernel<T, kShape>>("lora_train", l, params);
}

template <class T>
void launch_type(const PanelParams& p, DType dtype, Stream stream) {
  p.shape == kDsPanels16 ? launch_shape<T, kDsPanels16>(p, dtype, stream)
                         : launch_shape<T, kDsPanels32>(p, dtype, stream);
}

}  // namespace

bool panel_boxes(const PanelParams& p, Policy policy, Stream stream) {
  const int unit = p.chunk.at_once > 0 ? p.chunk.unit : p.chunk.rows;
  bool takes = device::current_device().arch == 90 && policy != Policy::kSplit &&
               fills_boxes(p.rows) && !p.masked && !p.early &&
               (p.shape == kDsPanels16 || p.shape == kDsPanels32) && p.copies == 1 &&
               p.num_operands <= kMostBoxOperands && unit % kBoxRows == 0 &&
               device::takes_tensor_map(p.s, p.hidden_width, p.rows.num_rows, p.hidden_width);
  for (int i = 0; i < p.num_operands; ++i) {
    const PanelOperand& own = p.operands[i];
    takes =
        takes && own.async && own.sums != nullptr &&
        device::takes_tensor_map(own.wide.data, own.columns, p.rows.num_rows, own.wide.row_stride);
  }
  if (!takes) return false;
  policy == Policy::kFloat16 ? launch_type<__half>(p, DType::kFloat16, stream)
                             : launch_type<__nv_bfloat16>(p, DType::kBFloat16, stream);
  return true;
}

}  // namespace mortar::lora::train::cuda
