// SPDX-License-Identifier: Apache-2.0
// dB = dy^T h, and ds = dy B in the same pass over dy, of one adapter's dense rows of one 16-bit
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
// for 64 columns, which are added in order. The first lane of a last warp copies. B is there, and
// the first rows have been asked for in L2, before the kernel before it has ended.
#include "lora/train/cuda/panel_boxes.cuh"

#include "core/check.h"
#include "device/barrier.cuh"
#include "device/bulk_copy.cuh"
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "device/ring.cuh"
#include "device/swizzle.cuh"
#include "device/tensor_copy.cuh"
#include "device/wgmma.cuh"
#include "lora/train/cuda/panel.cuh"

namespace mortar::lora::train::cuda {
namespace {

using device::Major;

constexpr int kWarpgroup = 128;
constexpr int kHalves = 2;                                    ///< of a panel
constexpr int kBoxThreads = (kHalves + 1) * kWarpgroup + 32;  ///< dB, ds, and the copies
constexpr int kBlockRows = 64, kBoxRows = 32;
constexpr int kBlockBytes = kBlockRows * device::kSwizzleBytes;  ///< of 64 columns
constexpr int kMostBoxOperands = 4;

template <int kShape>
struct Boxes {
  static constexpr PanelShape kAll = kPanelShapes[kShape];
  static constexpr int kRanks = kAll.ranks, kColumns = kAll.columns;
  /// With so few ds_kernel fits an SM beside a thread block, and has looked up what it needs when
  /// the last one ends.
  static constexpr int kThreads = kBoxThreads, kRegisters = 104;
  /// Chains of dB: of every other 16 rows, or of all.
  static constexpr int kChains = kAll.groups;
  static constexpr int kBlocks = kColumns / kHalves / kBlockColumns;  ///< of a stage
  static constexpr int kStageBytes = kBlocks * kBlockBytes, kStages = 5, kNarrowStages = 3;
  static constexpr int kNarrowAt = kStages * kStageBytes;
  static constexpr int kWeightsAt = kNarrowAt + kNarrowStages * kBlockBytes;
  static constexpr int kWeightBytes = kRanks * device::kSwizzleBytes;  ///< of 64 columns
  static constexpr int kSmem = kWeightsAt + kColumns / kBlockColumns * kWeightBytes;
  static constexpr int kAtOnce = 64 / kRanks;  ///< chains of ds that fit the registers
  static_assert(kAll.makes_ds && kColumns == kPanelWarps * kBlockColumns && kBlocks % kAtOnce == 0);
  static_assert(kChains == 1 || (kChains == 2 && kAll.rows == 16));
};

struct PanelBoxParams {
  PanelParams panel;
  CUtensorMap wide[kMostBoxOperands], narrow;
};

template <class B>
struct Barriers {
  device::Mbarrier full[B::kStages], empty[B::kStages];
  device::Mbarrier narrow_full[B::kNarrowStages], narrow_empty[B::kNarrowStages];

  /// By one thread; a barrier must follow.
  __device__ __forceinline__ void init() {
    for (device::Mbarrier& b : full) b.init(1);
    for (device::Mbarrier& b : narrow_full) b.init(1);
    for (device::Mbarrier& b : empty) b.init(2 * kWarpgroup / 32);
    for (device::Mbarrier& b : narrow_empty) b.init(kHalves * kWarpgroup / 32);
    device::Mbarrier::fence_init();
  }
};

/// B of the panel's columns as the second operand of ds: rows of 64 columns for each rank, zeros
/// past the rank and the columns. All loads are in flight together.
template <class B>
__device__ __forceinline__ void load_weights(const PanelPart<>& part, char* to) {
  const PanelOperand& own = *part.own;
  const PairEntry pair = part.p.pairs.get(part.rows.adapter, own.slice);
  const auto* from = static_cast<const unsigned short*>(pair.b.data);
  const bool vectors = pair.b.col_stride == 1 && pair.b.row_stride % kPiece == 0 &&
                       reinterpret_cast<std::uintptr_t>(from) % 16 == 0;
  constexpr int kOctets = B::kRanks / 8, kItems = B::kColumns * kOctets;
  constexpr int kRounds = (kItems + kBoxThreads - 1) / kBoxThreads;
  union Eight {
    uint4 words;
    unsigned short values[8];
  } v[kRounds];
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const int item = i * kBoxThreads + static_cast<int>(threadIdx.x);
    const int octet = item % kOctets;
    const std::int64_t c = part.column + item / kOctets;
    const int ranks = item < kItems && c < own.columns ? pair.rank - 8 * octet : 0;
    v[i].words = make_uint4(0, 0, 0, 0);
    const auto* at = from + c * pair.b.row_stride + 8 * octet * pair.b.col_stride;
    if (vectors && ranks >= 8) {
      v[i].words = __ldcg(reinterpret_cast<const uint4*>(at));
    } else {
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        if (k < ranks) v[i].values[k] = __ldcg(at + k * pair.b.col_stride);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const int item = i * kBoxThreads + static_cast<int>(threadIdx.x);
    if (item >= kItems) break;
    const int octet = item % kOctets, c = item / kOctets;
    char* block = to + c / kBlockColumns * B::kWeightBytes + c % 8 * 2;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      *reinterpret_cast<unsigned short*>(
          block + device::swizzled(8 * octet + k, c % kBlockColumns / 8)) = v[i].values[k];
    }
  }
}

/// Copies all stages; by one thread.
template <class B>
__device__ __forceinline__ void copy_stages(const PanelBoxParams& p, const PanelPart<>& part,
                                            std::uint32_t smem, Barriers<B>& barriers) {
  const CUtensorMap& wide = p.wide[part.own - p.panel.operands];
  device::RingCursor<B::kStages> at;
  device::RingCursor<B::kNarrowStages> narrow;
  for (int first = 0; first < part.rows.count; first += kBlockRows, narrow.next()) {
    const int row = static_cast<int>(part.rows.start) + first;
    const int boxes = part.rows.count - first > kBoxRows ? 2 : 1;
#pragma unroll 1
    for (int half = 0; half < kHalves; ++half, at.next()) {
      device::Mbarrier* full = barriers.full + at.stage;
      barriers.empty[at.stage].wait((at.round & 1) ^ 1);
      full->arrive_and_expect(boxes * (B::kStageBytes / 2));
#pragma unroll
      for (int block = 0; block < B::kBlocks; ++block) {
        const std::uint32_t to = smem + at.stage * B::kStageBytes + block * kBlockBytes;
        const int column =
            static_cast<int>(part.column) + (half * B::kBlocks + block) * kBlockColumns;
        // dy for the last time, so that partial sums stay in L2 until they are added.
        for (int box = 0; box < boxes; ++box) {
          device::copy_box_once(to + box * (kBlockBytes / 2), wide, column, row + box * kBoxRows,
                                full);
        }
      }
      if (half > 0) continue;
      barriers.narrow_empty[narrow.stage].wait((narrow.round & 1) ^ 1);
      barriers.narrow_full[narrow.stage].arrive_and_expect(boxes * (kBlockBytes / 2));
      const std::uint32_t to = smem + B::kNarrowAt + narrow.stage * kBlockBytes;
      for (int box = 0; box < boxes; ++box) {
        device::copy_box(to + box * (kBlockBytes / 2), p.narrow, part.own->first_hidden,
                         row + box * kBoxRows, barriers.narrow_full + narrow.stage);
      }
    }
  }
}

/// dB of half of the panel, by a warpgroup.
template <class T, class B>
__device__ __forceinline__ void sum_rows(const PanelPart<>& part, int half, std::uint32_t smem,
                                         Barriers<B>& barriers) {
  float sum[B::kBlocks][B::kChains][B::kRanks / 2] = {};
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int stage = half;
  std::uint32_t parity = 0;
  device::RingCursor<B::kNarrowStages> narrow;
#pragma unroll 1
  for (int first = 0; first < part.rows.count; first += kBlockRows, narrow.next()) {
    barriers.narrow_full[narrow.stage].wait(narrow.round & 1);
    barriers.full[stage].wait(parity);
    const auto rows = device::wgmma_descriptor(smem + stage * B::kStageBytes);
    const auto ranks = device::wgmma_descriptor(smem + B::kNarrowAt + narrow.stage * kBlockBytes);
#pragma unroll
    for (int k = 0; k < kBlockRows / 16; ++k) {
      // What follows the chunk's rows in the block was not copied, or is zeros.
      if (16 * k >= part.rows.count - first) break;
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
  const int row = static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16 + lane / 4;
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
  const int lane = static_cast<int>(threadIdx.x) % 32, end = *part.live;
  const int row = static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16 + lane / 4;
  const int rank = lane % 4 * 2;
  float* to =
      p.ds + (std::int64_t{part.panel} * p.rows.num_rows + part.rows.start + row) * p.hidden_width +
      part.own->first_hidden + rank;
  device::RingCursor<B::kStages> at;
#pragma unroll 1
  for (int first = 0; first < part.rows.count; first += kBlockRows) {
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
#pragma unroll
        for (int i = 0; i < B::kAtOnce; ++i) {
#pragma unroll
          for (int k = 0; k < kBlockColumns / 16; ++k) {
            device::wgmma<T, B::kRanks>(
                chain[i], rows + (block + i) * (kBlockBytes / 16) + k * device::kDescriptorStep,
                weights + (block + i) * (B::kWeightBytes / 16) + k * device::kDescriptorStep,
                k > 0);
          }
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
  if (threadIdx.x == kBoxThreads - 32) {
    barriers.init();
    device::prefetch_tensor_map(p.wide[part.own - p.panel.operands]);
    device::prefetch_tensor_map(p.narrow);
  }
  load_weights<B>(part, smem + B::kWeightsAt);
  device::fence_async_proxy();
  __syncthreads();
  device::pdl_begin(false);
  const int warpgroup = static_cast<int>(threadIdx.x) / kWarpgroup;
  const std::uint32_t at = device::smem_address(smem);
  if (warpgroup < kHalves) {
    sum_rows<T>(part, warpgroup, at, barriers);
  } else if (warpgroup == kHalves) {
    sum_columns<T>(part, at, barriers);
  } else if (threadIdx.x == kBoxThreads - 32) {
    copy_stages<B>(p, part, at, barriers);
  }
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
  device::launch<panel_boxes_kernel<T, kShape>>("lora_train", l, params);
}

template <class T>
void launch_type(const PanelParams& p, DType dtype, Stream stream) {
  p.shape == kDsPanels16 ? launch_shape<T, kDsPanels16>(p, dtype, stream)
                         : launch_shape<T, kDsPanels32>(p, dtype, stream);
}

}  // namespace

bool panel_boxes(const PanelParams& p, Policy policy, Stream stream) {
  bool takes = device::current_device().arch == 90 && policy != Policy::kSplit && p.ahead &&
               (p.shape == kDsPanels16 || p.shape == kDsPanels32) && p.copies == 1 &&
               p.num_operands <= kMostBoxOperands && p.chunk.at_once == 0 &&
               p.chunk.rows % kBoxRows == 0 &&
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
