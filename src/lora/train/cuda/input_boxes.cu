// SPDX-License-Identifier: Apache-2.0
// dx = ds A and dA^T = x^T ds of one adapter, up to 64 ranks, of dense rows of one 16-bit
// type on sm_90a: while x comes from memory for dA, dx goes to it. The sums of expand_stream.cu and
// panel.cu in their order, by wgmma on boxes that the copy engine brings and takes.
//
// Bytes: 4 M K + 2 M R per panel (from L2) + 4 R K per chunk. M = K = 4096: 67 MB, 22 us at
// 3.03 TB/s. A mask of dropout is drawn once, for x and for dx.
// limit: DRAM, which has x to read while L2 takes dx. Apart, dx leaves it idle.
//
// A thread block has a panel of 64 to 256 columns and a chunk of rows, which pass 64 at a time. One
// warpgroup has the sums of dA in registers over the whole chunk; one, or two for half of the
// columns each, multiplies for dx and rounds into boxes. With dropout another one draws, drops
// elements of x where they lie, and leaves a bit for each of dx. The first lane of a last warp
// copies: x before the kernel before it has ended, which makes ds.
#include "lora/train/cuda/panel_boxes.cuh"

#include "core/check.h"
#include "device/barrier.cuh"
#include "device/bulk_copy.cuh"
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "device/stmatrix.cuh"
#include "device/swizzle.cuh"
#include "device/tensor_copy.cuh"
#include "device/wgmma.cuh"
#include "lora/train/cuda/input_boxes.cuh"
#include "lora/train/cuda/panel.cuh"

namespace mortar::lora::train::cuda {
namespace {

using device::Major;
using namespace input_pass;

/// dA of the panel, by a warpgroup.
template <class T, class S>
__device__ __forceinline__ void sum_rows(const PanelPart<>& part, std::uint32_t smem,
                                         Barriers<S>& barriers) {
  constexpr int kSteps = kBlockRows / 16;
  float sum[S::kBlocks][S::kChains][S::kRanks / 2] = {};
  const int lane = static_cast<int>(threadIdx.x) % 32;
  device::RingCursor<S::kStages> at;
  device::RingCursor<S::kNarrowStages> narrow;
#pragma unroll 1
  for (int first = 0; first < part.rows.count; first += kBlockRows, at.next(), narrow.next()) {
    barriers.narrow_full[narrow.stage].wait(narrow.round & 1);
    (S::kDrops ? barriers.dropped : barriers.full)[at.stage].wait(at.round & 1);
    const auto rows = device::wgmma_descriptor(smem + at.stage * S::kStageBytes);
    const auto ranks = device::wgmma_descriptor(smem + S::kNarrowAt + narrow.stage * kBlockBytes);
    device::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
#pragma unroll
      for (int block = 0; block < S::kBlocks; ++block) {
        device::wgmma<T, S::kRanks, Major::kRows, Major::kRows>(
            sum[block][k / (kSteps / S::kChains)],
            rows + block * (kBlockBytes / 16) + k * device::descriptor_step(Major::kRows),
            ranks + k * device::descriptor_step(Major::kRows), 1);
      }
    }
    device::wgmma_commit();
    device::wgmma_wait<0>();
    if (lane == 0) {
      barriers.empty[at.stage].arrive();
      barriers.narrow_empty[narrow.stage].arrive();
    }
  }
#pragma unroll
  for (int block = 0; block < S::kBlocks; ++block) {
#pragma unroll
    for (int chain = 0; chain < S::kChains; ++chain) device::wgmma_keep(sum[block][chain]);
  }
  const int ranks = *part.live;
  const int row = static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16 + lane / 4;
#pragma unroll
  for (int n = 0; n < S::kRanks / 8; ++n) {
    if (8 * n >= ranks) break;
#pragma unroll
    for (int block = 0; block < S::kBlocks; ++block) {
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        const auto value = [&](int i) {
          const int at = 4 * n + 2 * upper + i;
          return S::kChains == 1 ? sum[block][0][at]
                                 : sum[block][0][at] + sum[block][S::kChains - 1][at];
        };
        part.store_sums(part.column + block * kBlockColumns + row + 8 * upper, 8 * n + lane % 4 * 2,
                        value(0), value(1));
      }
    }
  }
}

/// dx of half of the panel's columns, by a warpgroup.
template <class T, class S>
__device__ __forceinline__ void store_products(const InputBoxParams& p, const PanelPart<>& part,
                                               int half, char* smem, Barriers<S>& barriers) {
  constexpr int kOwn = S::kOwn;
  const std::uint32_t base = device::smem_address(smem);
  const std::uint32_t stored = base + S::kStoreAt + half * kOwn * kBlockBytes;
  const int first_column = S::kTurns ? 0 : half * kOwn;  // in blocks
  const auto weights =
      device::wgmma_descriptor(base + S::kWeightsAt + first_column * S::kWeightBytes);
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup, lane = thread % 32;
  const int warp_row = thread / 32 * 16;
  const bool asks = thread == 0;
  const auto meet = [&] {
    if (half == 0) {
      device::named_barrier<1, kWarpgroup>();
    } else {
      device::named_barrier<2, kWarpgroup>();
    }
  };
  device::RingCursor<S::kStages> at;
  device::RingCursor<S::kNarrowStages> narrow;
  constexpr int kStep = S::kTurns ? kStorers : 1;
  const auto next = [&] {
    at.next();
    narrow.next();
  };
  if (S::kTurns && half == 1) next();
#pragma unroll 1
  for (int first = S::kTurns ? half * kBlockRows : 0; first < part.rows.count;
       first += kStep * kBlockRows) {
    barriers.narrow_full[narrow.stage].wait(narrow.round & 1);
    const auto rows = device::wgmma_descriptor(base + S::kNarrowAt + narrow.stage * kBlockBytes);
#pragma unroll
    for (int first_block = 0; first_block < kOwn; first_block += S::kAtOnce) {
      float sum[S::kAtOnce][kBlockColumns / 2];
      device::wgmma_fence();
#pragma unroll
      for (int i = 0; i < S::kAtOnce; ++i) {
#pragma unroll
        for (int k = 0; k < S::kRanks / 16; ++k) {
          device::wgmma<T, kBlockColumns, Major::kDepth, Major::kRows>(
              sum[i], rows + k * device::kDescriptorStep,
              weights + (first_block + i) * (S::kWeightBytes / 16) +
                  k * device::descriptor_step(Major::kRows),
              k > 0);
        }
      }
      device::wgmma_commit();
      device::wgmma_wait<0>();
#pragma unroll
      for (int i = 0; i < S::kAtOnce; ++i) device::wgmma_keep(sum[i]);
      if (first_block + S::kAtOnce == kOwn && lane == 0) {
        barriers.narrow_empty[narrow.stage].arrive();
      }
      if (first_block == 0) {
        if constexpr (S::kDrops) barriers.dropped[at.stage].wait(at.round & 1);
        if (asks) device::store_boxes_wait_read();
        meet();
      }
#pragma unroll
      for (int i = 0; i < S::kAtOnce; ++i) {
        const int block = first_block + i;
        [[maybe_unused]] std::uint64_t kept[2];  // of the lane's rows, by columns
        if constexpr (S::kDrops) {
          const char* masks =
              smem + S::kMasksAt + at.stage * S::kMaskBytes + (first_column + block) * 8;
#pragma unroll
          for (int upper = 0; upper < 2; ++upper) {
            kept[upper] = *reinterpret_cast<const std::uint64_t*>(
                              masks + (warp_row + lane / 4 + 8 * upper) * (S::kColumns / 8)) >>
                          (lane % 4 * 2);
          }
        }
#pragma unroll
        for (int j = 0; j < kBlockColumns / 8; j += 2) {
          std::uint32_t words[4];
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            const float* v = sum[i] + 4 * j + 2 * n;
            words[n] = device::pack2<T>(v[0], v[1]);
            if constexpr (S::kDrops) {
              const auto two = static_cast<std::uint32_t>(kept[n % 2] >> (8 * (j + n / 2))) & 3u;
              words[n] &= ((two | two << 15) & 0x10001u) * 0xffffu;
            }
          }
          device::stmatrix_x4(
              stored + block * kBlockBytes +
                  device::swizzled(warp_row + lane / 8 % 2 * 8 + lane % 8, j + lane / 16),
              words);
        }
      }
    }
    if constexpr (S::kDrops) barriers.empty[at.stage].arrive();
    device::fence_async_proxy();
    meet();
    if (asks) {
#pragma unroll
      for (int block = 0; block < kOwn; ++block) {
        device::store_box(p.out,
                          static_cast<int>(part.column) + (first_column + block) * kBlockColumns,
                          static_cast<int>(part.rows.start) + first, stored + block * kBlockBytes);
      }
      device::store_boxes_commit();
    }
#pragma unroll
    for (int i = 0; i < kStep; ++i) next();
  }
  if (asks) device::store_boxes_wait();
}

/// Draws masks, drops elements of x in its stages, and leaves bits for dx; by a warpgroup.
template <class S>
__device__ __forceinline__ void drop_stages(const PanelPart<>& part, char* smem,
                                            Barriers<S>& barriers) {
  constexpr int kPieces = S::kColumns / kPiece, kRowStep = kWarpgroup / kPieces, kAtOnce = 4;
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
  const int piece = thread % kPieces, first_row = thread / kPieces;
  const std::int64_t c = part.column + piece * kPiece;
  Draws draws;
  draws.read(part.p.mask.rng);
  device::RingCursor<S::kStages> at;
#pragma unroll 1
  for (int first = 0; first < part.rows.count; first += kBlockRows, at.next()) {
    char* rows = smem + at.stage * S::kStageBytes + piece / kRowPieces * kBlockBytes;
    char* masks = smem + S::kMasksAt + at.stage * S::kMaskBytes + piece;
#pragma unroll 1
    for (int i = 0; i < kBlockRows / kRowStep; i += kAtOnce) {
      OctetDraw drawn[kAtOnce];
      const int own = first_row + i * kRowStep;
      part.draw<kAtOnce, kRowStep>(draws, first + own, c, drawn);
      if (i == 0) barriers.full[at.stage].wait(at.round & 1);
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int row = own + k * kRowStep;
        auto* v = reinterpret_cast<uint4*>(rows + device::swizzled(row, piece % kRowPieces));
        *v = masked(*v, keep_words(drawn[k], part.threshold));
        const std::uint32_t limit = drawn[k].limit(part.threshold);
        std::uint32_t bits = 0;  // those of even columns, and 16 bits above them the others
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
          bits |= (drawn[k].kept(pair, limit) & 0x80008000u) >> (15 - 2 * pair);
        }
        masks[row * kPieces] = static_cast<char>(bits | bits >> 15);
      }
    }
    device::fence_async_proxy();
    barriers.dropped[at.stage].arrive();
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
    barriers.init();
    device::prefetch_tensor_map(p.wide);
    device::prefetch_tensor_map(p.narrow);
  }
  load_weights<S>(part, smem + S::kWeightsAt);
  device::fence_async_proxy();
  __syncthreads();
  const std::uint32_t at = device::smem_address(smem);
  if (copies) return copy_stages<S>(p, part, at, barriers);
  device::pdl_begin(false);
  const int warpgroup = static_cast<int>(threadIdx.x) / kWarpgroup;
  if (warpgroup == 0) {
    sum_rows<T>(part, at, barriers);
  } else if (warpgroup <= kStorers) {
    store_products<T>(p, part, warpgroup - 1, smem, barriers);
  } else if (S::kDrops && threadIdx.x < S::kThreads - 32) {
    drop_stages(part, smem, barriers);
  }
#endif
}

template <class T, class S>
void launch_shape(PanelParams p, const Matrix& dx, DType dtype, Stream stream) {
  InputBoxParams params;
  static_assert(sizeof(params) <= 4096, "parameters of a launch");
  PanelOperand& own = p.operands[0];
  const std::int64_t rows = p.rows.num_rows, columns = own.columns;
  own.panels = static_cast<int>(ceil_div<std::int64_t>(columns, S::kColumns));
  p.groups = 1;
  params.panel = p;
  device::set_tensor_map(params.wide, dtype, own.wide.data, columns, rows, own.wide.row_stride,
                         kBlockRows);
  device::set_tensor_map(params.out, dtype, dx.data, columns, rows, dx.row_stride, kBlockRows);
  device::set_tensor_map(params.narrow, dtype, p.s, p.hidden_width, rows, p.hidden_width,
                         kBlockRows);
  device::Launch l;
  l.grid = panel_grid(p);
  l.threads = S::kThreads;
  l.smem = S::kSmem;
  l.stream = stream;
  l.pdl = true;
  device::launch<input_boxes_kernel<T, S>>("lora_train", l, params);
}

template <class T>
void launch_type(const PanelParams& p, const Matrix& dx, DType dtype, Stream stream) {
  const int ranks = p.operands[0].width;
  if (p.masked) return launch_shape<T, Shape<16, true>>(p, dx, dtype, stream);
  if (p.shape == kInputPanels) return launch_shape<T, Shape<16, false>>(p, dx, dtype, stream);
  ranks <= 32 ? launch_shape<T, Shape<32, false>>(p, dx, dtype, stream)
              : launch_shape<T, Shape<64, false>>(p, dx, dtype, stream);
}

}  // namespace

void input_boxes(const PanelParams& p, const Matrix& dx, Policy policy, Stream stream) {
  const bool takes = p.shape == kInputPanels || (p.shape == kChainPanels && !p.masked);
  check(takes && p.num_operands == 1 && p.operands[0].width <= kPanelShapes[p.shape].ranks &&
            p.chunk.rows % kBlockRows == 0 && !p.early,
        "lora_train: operands that the kernel of dA and dx does not take");
  policy == Policy::kFloat16 ? launch_type<__half>(p, dx, DType::kFloat16, stream)
                             : launch_type<__nv_bfloat16>(p, dx, DType::kBFloat16, stream);
}

}  // namespace mortar::lora::train::cuda
