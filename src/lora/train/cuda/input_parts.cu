// SPDX-License-Identifier: Apache-2.0
// dx = ds A and dA^T = x^T ds of float32 weights beside bfloat16 x and dx, up to 32 ranks of one
// adapter on sm_90a, in one pass: while x comes from memory for dA, dx goes to it. The products of
// bfloat16 parts of part_columns.cuh, with the bits of expand_parts.cu and of sums by columns.
//
// Bytes: 4 M K + 10 M R per panel (from L2) + 4 R K per chunk. M = K = 4096: 67 MB, 16 us at
// 4.28 TB/s
// FLOP:  18 M R K; with R = 16 4.8 GFLOP, 6 us at 800 T
// limit: DRAM, which has x to read while L2 takes dx
// wrong: more than 32 ranks, whose three sums of 128 columns do not fit a warpgroup's registers,
//        and dropout, whose draws one more warpgroup makes too slowly, and for two of which there
//        are too few registers
//
// A thread block has a panel of 128 columns and a chunk of rows, which pass 64 at a time, with ds
// as columns of parts for dA and in float32 for dx. One warpgroup has the sums of dA in registers
// over the whole chunk; two have 64 columns of dx each, whose weights lie in parts in shared
// memory: they split what they have of ds in registers. The first lane of a last warp copies, x
// before the kernel before it has ended, which makes ds.
#include "core/check.h"
#include "device/barrier.cuh"
#include "device/convert.cuh"
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "device/stmatrix.cuh"
#include "device/tensor_copy.cuh"
#include "device/wgmma.cuh"
#include "lora/train/cuda/input_boxes.cuh"
#include "lora/train/cuda/input_parts.h"
#include "lora/train/cuda/input_roles.cuh"
#include "lora/train/cuda/panel.cuh"
#include "lora/train/cuda/part_planes.cuh"

namespace mortar::lora::train::cuda {
namespace {

using namespace input_pass;

/// As input_boxes.cu's shapes say it. Of more ranks boxes of dx wait for room.
template <int kRanks_>
struct PartsShape {
  static constexpr int kRanks = kRanks_, kOctets = kRanks / 8;
  static constexpr int kSumRanks = kSumCopies * kRanks;  ///< columns of parts
  static constexpr bool kDrops = false;
  static constexpr int kColumns = dx_columns(DxPanels::k128), kBlocks = kColumns / kBlockColumns;
  static constexpr int kSummers = 1, kStorers = kBlocks, kDroppers = 0;
  static constexpr int kThreads = (kSummers + kStorers) * kWarpgroup + 32, kRegisters = 152;
  static constexpr int kBuffers = kRanks > 16 ? 1 : 2;
  static constexpr int kStages = kRanks > 16 ? 5 : 6, kNarrowStages = kStages - 1;
  static constexpr int kReaders = (kSummers + kStorers) * kWarpgroup / 32;
  static constexpr int kStageBytes = kBlocks * kBlockBytes;
  static constexpr int kSumBoxes = ceil_div(kSumRanks, kBlockColumns);
  static constexpr int kNarrowBytes = (kSumBoxes + 1) * kBlockBytes;
  static constexpr int kPlaneBytes = part_plane_bytes(kColumns);
  static constexpr int kOctetBytes = kPartPlanes * kPlaneBytes;
  static constexpr int kNarrowAt = kStages * kStageBytes;
  static constexpr int kStoreAt = kNarrowAt + kNarrowStages * kNarrowBytes;
  static constexpr int kWeightsAt = kStoreAt + kStorers * kBuffers * kBlockBytes;
  static constexpr int kSmem = kWeightsAt + kOctets * kOctetBytes;
  static_assert(kRanks * 2 <= kBlockColumns, "a box of float32 has all ranks");
};

struct InputPartsParams {
  PanelParams panel;
  CUtensorMap wide, sums, values, out;

  /// Copies ds of a step: columns of parts, and then values.
  template <class S>
  __device__ __forceinline__ void copy_narrow(std::uint32_t to, int /*first*/, int row,
                                              device::Mbarrier* full) const {
#pragma unroll
    for (int box = 0; box < S::kSumBoxes; ++box) {
      device::copy_box(to + box * kBlockBytes, sums, box * kBlockColumns, row, full);
    }
    device::copy_box(to + S::kSumBoxes * kBlockBytes, values, 0, row, full);
  }
};

/// A's columns of the panel in parts: a thread has an octet of ranks of a column at a time.
template <class S, int kLoaders>
__device__ __forceinline__ void load_parts(const PanelPart<>& part, unsigned char* to) {
  constexpr int kItems = S::kOctets * S::kColumns;
  const HiddenColumns& hidden = part.p.hidden;
#pragma unroll 1
  for (int item = thread_anew(); item < kItems; item += kLoaders) {
    const int octet = item / S::kColumns, own = item % S::kColumns;
    const int slice = slice_of(hidden, 0, hidden.num_slices, min(8 * octet, hidden.width - 1));
    const PairEntry& pair = part.p.pairs.own[slice];
    const int rank = 8 * octet - hidden.first[slice];
    const std::int64_t c = part.column + own;
    const int left = c < part.own->columns ? pair.rank - rank : 0;
    const float* from =
        static_cast<const float*>(pair.a.data) + rank * pair.a.row_stride + c * pair.a.col_stride;
    float v[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) v[k] = k < left ? __ldcg(from + k * pair.a.row_stride) : 0.0f;
    store_planes<S::kPlaneBytes>(to + octet * S::kOctetBytes + own * 16, v);
  }
}

/// dA of the panel, by a warpgroup: the sums of a rank's three columns, added.
template <class S>
__device__ __forceinline__ void sum_parts(const PanelPart<>& part, std::uint32_t smem,
                                          Barriers<S>& barriers) {
  float sum[S::kBlocks][1][S::kSumRanks / 2] = {};
  const int thread = thread_anew(), lane = thread % 32;
  device::RingCursor<S::kStages> at;
  device::RingCursor<S::kNarrowStages> narrow;
#pragma unroll 1
  for (int first = 0; first < part.rows.count; first += kBlockRows, at.next(), narrow.next()) {
    barriers.narrow_full[narrow.stage].wait(narrow.round & 1);
    barriers.full[at.stage].wait(at.round & 1);
    const auto rows = device::wgmma_descriptor(smem + at.stage * S::kStageBytes);
    const auto ranks =
        device::wgmma_descriptor(smem + S::kNarrowAt + narrow.stage * S::kNarrowBytes, kBlockBytes);
    device::wgmma_fence();
    multiply_rows<__nv_bfloat16, S::kSumRanks>(sum, rows, ranks);
    device::wgmma_commit();
    device::wgmma_wait<0>();
    if (lane == 0) {
      barriers.empty[at.stage].arrive();
      barriers.narrow_empty[narrow.stage].arrive();
    }
  }
#pragma unroll
  for (auto& block : sum) device::wgmma_keep(block[0]);
  const int ranks = *part.live;
  const int row = thread % kWarpgroup / 32 * 16 + lane / 4;
#pragma unroll
  for (int octet = 0; octet < S::kOctets; ++octet) {
    if (8 * kSumCopies * octet >= ranks) break;
#pragma unroll
    for (int block = 0; block < S::kBlocks; ++block) {
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        const float* v = sum[block][0] + 4 * kSumCopies * octet + 2 * upper;
        part.store_added(part.column + block * kBlockColumns + row + 8 * upper,
                         8 * octet + lane % 4 * 2, sum_of_columns(v[0], v[4], v[8]),
                         sum_of_columns(v[1], v[5], v[9]));
      }
    }
  }
}

/// dx of 64 of the panel's columns, by a warpgroup.
template <class S>
__device__ __forceinline__ void store_parts(const InputPartsParams& p, const PanelPart<>& part,
                                            int block, const unsigned char* smem,
                                            Barriers<S>& barriers) {
  const std::uint32_t base = device::smem_address(smem);
  const std::uint32_t buffers = base + S::kStoreAt + block * S::kBuffers * kBlockBytes;
  const std::uint32_t weights = base + S::kWeightsAt + part_plane_bytes(block * kBlockColumns);
  std::uint32_t stored = buffers;
  const int thread = thread_anew() % kWarpgroup, lane = thread % 32;
  const int warp_row = thread / 32 * 16;
  const bool asks = thread == 0;
  const auto meet = [&] {
    if (block == 0) {
      device::named_barrier<1, kWarpgroup>();
    } else {
      device::named_barrier<2, kWarpgroup>();
    }
  };
  device::RingCursor<S::kNarrowStages> narrow;
#pragma unroll 1
  for (int first = 0; first < part.rows.count; first += kBlockRows, narrow.next()) {
    barriers.narrow_full[narrow.stage].wait(narrow.round & 1);
    const unsigned char* values = smem + S::kNarrowAt + narrow.stage * S::kNarrowBytes +
                                  S::kSumBoxes * kBlockBytes + lane % 2 * 8;
    std::uint32_t a[S::kOctets][kPartSteps][4];
#pragma unroll
    for (int octet = 0; octet < S::kOctets; ++octet) {
      const auto of_row = [&](int row) {
        return *reinterpret_cast<const float2*>(values +
                                                device::swizzled(row, 2 * octet + lane % 4 / 2));
      };
      const int row = warp_row + lane / 4;
      split_hidden(of_row(row), of_row(row + 8), a[octet]);
    }
    __syncwarp();
    if (lane == 0) barriers.narrow_empty[narrow.stage].arrive();
    float sum[kBlockColumns / 2];
    device::wgmma_keep(sum);
    device::wgmma_fence();
#pragma unroll
    for (int octet = 0; octet < S::kOctets; ++octet) {
      if (8 * octet >= part.p.hidden.width) break;
#pragma unroll
      for (int step = 0; step < kPartSteps; ++step) {
        device::wgmma<kBlockColumns>(sum, a[octet][step],
                                     planes_descriptor<S::kPlaneBytes>(
                                         weights + octet * S::kOctetBytes + step * S::kPlaneBytes),
                                     octet + step > 0);
      }
    }
    device::wgmma_commit();
    if (asks) device::store_boxes_wait_read<S::kBuffers - 1>();
    meet();
    device::wgmma_wait<0>();
    device::wgmma_keep(sum);
#pragma unroll
    for (int j = 0; j < kBlockColumns / 8; j += 2) {
      device::store_rounded<__nv_bfloat16>(
          stored + device::swizzled(warp_row + lane / 8 % 2 * 8 + lane % 8, j + lane / 16),
          sum + 4 * j);
    }
    device::fence_async_proxy();
    meet();
    if (asks) {
      device::store_box(p.out, static_cast<int>(part.column) + block * kBlockColumns,
                        static_cast<int>(part.rows.start) + first, stored);
      device::store_boxes_commit();
    }
    if constexpr (S::kBuffers == 2) stored = 2 * buffers + kBlockBytes - stored;
  }
  if (asks) device::store_boxes_wait();
}

template <class S>
__global__ void __launch_bounds__(S::kThreads) __maxnreg__(S::kRegisters)
    input_parts_kernel(const __grid_constant__ InputPartsParams p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char smem[];
  __shared__ Barriers<S> barriers;
  __shared__ int live[ceil_div(S::kThreads, kThreads)];
  const PanelPart<> part(p.panel, S::kColumns, S::kSumRanks, false, live);
  if (part.rows.count == 0) return device::pdl_leave();
  constexpr int kLoaders = S::kThreads - 32;
  const bool copies = threadIdx.x == kLoaders;
  if (copies) {
    barriers.init(false);
    device::prefetch_tensor_map(p.wide);
    device::prefetch_tensor_map(p.sums);
    device::prefetch_tensor_map(p.values);
  }
  __syncthreads();
  if (threadIdx.x >= kLoaders) {
    if (copies) copy_stages<S>(p, part, device::smem_address(smem), barriers);
    return;
  }
  load_parts<S, kLoaders>(part, smem + S::kWeightsAt);
  device::fence_async_proxy();
  device::named_barrier<4, kLoaders>();
  const int warpgroup = thread_anew() / kWarpgroup;
  device::pdl_begin(false);
  if (warpgroup < S::kSummers) {
    sum_parts(part, device::smem_address(smem), barriers);
  } else {
    store_parts(p, part, warpgroup - S::kSummers, smem, barriers);
  }
#endif
}

template <class S>
void launch_shape(const PanelParams& p, const Matrix& ds, const Matrix& dx, Stream stream) {
  const auto bf16 = DType::kBFloat16;
  const std::int64_t rows = p.rows.num_rows;
  InputPartsParams params;
  set_params<S>(&params, p, dx, bf16);
  device::set_tensor_map(params.sums, bf16, p.s, p.operands[0].width, rows, p.hidden_width,
                         kBlockRows);
  // Boxes of 32 floats are boxes of 64 elements of 16 bits.
  const std::int64_t words = 2 * ds.row_stride;
  device::set_tensor_map(params.values, bf16, ds.data, words, rows, words, kBlockRows);
  device::launch<input_parts_kernel<S>>("lora_train", launch_of<S>(params.panel, stream), params);
}

}  // namespace

void input_parts(const PanelParams& p, const Matrix& ds, const Matrix& dx, Stream stream) {
  const int width = p.operands[0].width / kSumCopies;
  check(p.copies == kSumCopies && p.num_operands == 1 && p.pairs.entries == nullptr &&
            width <= kMostInputPartsRanks && p.chunk.at_once == 0 &&
            p.chunk.rows % kBlockRows == 0 && !p.early && !p.masked,
        "lora_train: operands that the kernel of dA and dx in parts does not take");
  width <= 16 ? launch_shape<PartsShape<16>>(p, ds, dx, stream)
              : launch_shape<PartsShape<32>>(p, ds, dx, stream);
}

}  // namespace mortar::lora::train::cuda
