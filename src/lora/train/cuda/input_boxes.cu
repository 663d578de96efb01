// SPDX-License-Identifier: Apache-2.0
// dx = ds A and dA^T = x^T ds, up to 64 ranks of each adapter, of
// neighbouring dense rows of one 16-bit type on sm_90a: while x comes from memory for dA, dx goes
// to it. The sums of expand_stream.cu and panel.cu in their order, by wgmma on boxes that the copy
// engine brings and takes.
//
// Bytes: 4 M K + 2 M R per panel (from L2) + 4 R K per chunk. M = K = 4096: 67 MB, 22 us at
// 3.03 TB/s. A mask of dropout is drawn once, for x and for dx.
// limit: DRAM, which has x to read while L2 takes dx. Apart, dx leaves it idle.
//
// A thread block has a panel of 64 to 256 columns and a chunk of rows, which pass 64 at a time. One
// warpgroup, or two for half of the columns each, has the sums of dA in registers over the whole
// chunk; one or two multiply for dx and round into boxes. With dropout one or two others draw, drop
// elements of x where they lie, and leave a bit for each of dx, before ds is there. The first lane
// of a last warp copies: x before the kernel before it has ended, which makes ds, and before the
// weights have come. Rows of another adapter that a chunk's last box brings become zeros, and of
// its dx threads store the chunk's own.
#include "lora/train/cuda/panel_boxes.cuh"

#include "core/check.h"
#include "device/barrier.cuh"
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "device/tensor_copy.cuh"
#include "device/wgmma.cuh"
#include "lora/train/cuda/input_boxes.cuh"
#include "lora/train/cuda/input_roles.cuh"
#include "lora/train/cuda/panel.cuh"

namespace mortar::lora::train::cuda {
namespace {

using namespace input_pass;

/// All that is not copied.
template <class T, class S>
__device__ __forceinline__ void multiply(const InputBoxParams& p, const PanelPart<>& part,
                                         char* smem, Barriers<S>& barriers) {
  const int warpgroup = thread_anew() / kWarpgroup;
  if constexpr (S::kDrops) {
    // Draws wait for no kernel: those of this call before have waited for what wrote the seed.
    constexpr int kFirst = S::kSummers + S::kStorers;
    if (warpgroup >= kFirst && warpgroup < kFirst + S::kDroppers) {
      return drop_stages(part, smem, barriers);
    }
  }
  device::pdl_begin(false);
  if (warpgroup < S::kSummers) {
    sum_rows<T>(part, warpgroup, device::smem_address(smem), barriers);
  } else if (warpgroup < S::kSummers + S::kStorers) {
    store_products<T>(p, part, warpgroup - S::kSummers, smem, barriers);
  }
}

template <class T, class S>
__global__ void __launch_bounds__(S::kThreads) __maxnreg__(S::kRegisters)
    input_boxes_kernel(const __grid_constant__ InputBoxParams p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char smem[];
  __shared__ Barriers<S> barriers;
  __shared__ int live[(S::kThreads + kThreads - 1) / kThreads];
  const PanelPart<> part(p.panel, S::kColumns, S::kRanks, false, live);
  if (part.rows.count == 0) return device::pdl_leave();
  const bool copies = threadIdx.x == S::kThreads - 32;
  if (copies) {
    barriers.init(false);
    device::prefetch_tensor_map(p.wide);
    device::prefetch_tensor_map(p.narrow);
  }
  __syncthreads();
  // x is on its way while weights come.
  if (threadIdx.x >= S::kThreads - 32) {
    if (copies) copy_stages<S>(p, part, device::smem_address(smem), barriers);
    return;
  }
  load_weights<S, S::kThreads - 32>(part, smem + S::kWeightsAt);
  device::fence_async_proxy();
  device::named_barrier<4, S::kThreads - 32>();
  multiply<T>(p, part, smem, barriers);
#endif
}

/// The same of several adapters' rows.
template <class T, class S>
__global__ void __launch_bounds__(S::kThreads) __maxnreg__(S::kRegisters)
    input_segments_kernel(const __grid_constant__ InputBoxParams p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char smem[];
  __shared__ Barriers<S> barriers[2];  // of this place and of the next one
  __shared__ int live[(S::kThreads + kThreads - 1) / kThreads], places;
  const auto copies = [] { return thread_anew() == S::kThreads - 32; };
  if (copies()) barriers[0].init(false);
  __syncthreads();
  walk_places(p.panel, p.places, &places, [&](int panel, int tile, int round) {
    if (copies()) barriers[(round + 1) % 2].init(round > 0);
    const PanelPart<> part(p.panel, S::kColumns, S::kRanks, false, live, panel, tile);
    if (part.rows.adapter < 0) return false;
    if (part.rows.count == 0) return true;
    if (thread_anew() >= S::kThreads - 32) {
      if (copies()) copy_stages<S>(p, part, device::smem_address(smem), barriers[round % 2]);
      __syncwarp();
    } else {
      load_weights<S, S::kThreads - 32>(part, smem + S::kWeightsAt);
      device::fence_async_proxy();
      device::named_barrier<4, S::kThreads - 32>();
      multiply<T>(p, part, smem, barriers[round % 2]);
    }
    return true;
  });
#endif
}

template <class T, class S>
void launch_shape(const PanelParams& p, const Matrix& dx, DType dtype, Stream stream) {
  InputBoxParams params;
  set_params<S>(&params, p, dx, dtype);
  params.dx = dx;
  device::set_tensor_map(params.narrow, dtype, p.s, p.hidden_width, p.rows.num_rows, p.hidden_width,
                         kBlockRows);
  device::Launch l = launch_of<S>(params.panel, stream);
  if constexpr (S::kSegments) {
    l.grid = segment_grid(params.panel, &params.places);
    device::launch<input_segments_kernel<T, S>>("lora_train", l, params);
  } else {
    device::launch<input_boxes_kernel<T, S>>("lora_train", l, params);
  }
}

template <class T>
void launch_type(const PanelParams& p, const Matrix& dx, DxPanels panels, DType dtype,
                 Stream stream) {
  using enum DxPanels;
  // Of up to 64 ranks, in one chain. Few ranks mostly have panels of 128 columns.
  const bool segments = p.rows.offsets != nullptr;
  if (panels == k64 && segments) {
    return launch_shape<T, Shape<64, kChainPanels, k64, 0, true>>(p, dx, dtype, stream);
  }
  if (panels == k128) {
    return p.operands[0].width <= 32
               ? launch_shape<T, Shape<32, kChainPanels, k128>>(p, dx, dtype, stream)
               : launch_shape<T, Shape<64, kChainPanels, k128>>(p, dx, dtype, stream);
  }
  if (panels == k64) return launch_shape<T, Shape<64, kChainPanels, k64>>(p, dx, dtype, stream);
  if (panels == k64Pairs) {
    return launch_shape<T, Shape<64, kChainPanels, k64Pairs>>(p, dx, dtype, stream);
  }
  // Of 16 ranks the same, half of them zeros.
  if (segments) {
    return p.masked
               ? launch_shape<T, Shape<32, kInputPanels32, k256, 1, true>>(p, dx, dtype, stream)
               : launch_shape<T, Shape<32, kInputPanels32, k256, 0, true>>(p, dx, dtype, stream);
  }
  if (p.shape == kInputPanels32) {
    return p.masked ? launch_shape<T, Shape<32, kInputPanels32, k256, 1>>(p, dx, dtype, stream)
                    : launch_shape<T, Shape<32, kInputPanels32, k256>>(p, dx, dtype, stream);
  }
  p.masked ? launch_shape<T, Shape<16, kInputPanels, k256, 2>>(p, dx, dtype, stream)
           : launch_shape<T, Shape<16, kInputPanels, k256>>(p, dx, dtype, stream);
}

}  // namespace

void input_boxes(const PanelParams& p, const Matrix& dx, DxPanels panels, Policy policy,
                 Stream stream) {
  const bool wide = p.shape == kInputPanels || p.shape == kInputPanels32;
  const bool takes =
      panels == DxPanels::k256 ? wide : panels != DxPanels::kNone && p.shape == kChainPanels;
  check(takes && (wide || !p.masked) && p.num_operands == 1 &&
            p.operands[0].width <= kPanelShapes[p.shape].ranks &&
            (p.chunk.at_once > 0 ? p.chunk.unit : p.chunk.rows) % kBlockRows == 0 && !p.early,
        "lora_train: operands that the kernel of dA and dx does not take");
  policy == Policy::kFloat16 ? launch_type<__half>(p, dx, panels, DType::kFloat16, stream)
                             : launch_type<__nv_bfloat16>(p, dx, panels, DType::kBFloat16, stream);
}

}  // namespace mortar::lora::train::cuda
