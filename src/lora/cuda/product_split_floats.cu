// SPDX-License-Identifier: Apache-2.0
// h of float32 weights, up to 16 ranks, by the clusters of product_split.cu: the columns of parts
// of part_columns.cuh in its order, and so its bits, without a launch before this one that writes
// them.
//
// Bytes: 2 M K of x, 4 M R of h; A comes from L2 for every tile of rows, in float32.
// 8192 rows, K = 4096, R = 16: 68 MB, 15.8 us at 4.28 TB/s
// limit  : DRAM
// wrong  : few rows, which h and y in one launch take (product_forward_parts.cu); tiles of 64 rows,
//          the product's where these are one wave, were not timed
//
// Boxes of A come in float32 to the place in a stage where their parts will lie; a warp splits a
// whole one there, so that eight of them are being split at a time. A stage is full when x has come
// and its warp has split.
#include "core/check.h"
#include "device/cluster.cuh"
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "device/wgmma.cuh"
#include "lora/cuda/product_forward_parts.cuh"
#include "lora/cuda/product_multiply.cuh"
#include "lora/cuda/product_params.cuh"
#include "lora/cuda/product_split.cuh"
#include "lora/cuda/product_split_floats.h"
#include "lora/cuda/product_split_forms.cuh"

namespace mortar::lora::cuda {
namespace {

using namespace product;
using forward_parts::kBoxFloats;
using forward_parts::kCopyAt;
using forward_parts::kPartsThreads;
using forward_parts::kSplitters;

constexpr int kRanks = kPartsForwardRanks;
constexpr int kFloatBytes = kRanks * device::kSwizzleBytes;  ///< of a box of A
constexpr int kAheadLines = 4;  ///< of a row, asked for before the wait

struct FloatsShape
    : Shape<__nv_bfloat16, 64, Major::kDepth, Major::kDepth, ProductEnd::kStore, 2, true> {
  static constexpr int kSlotBytes = forward_parts::kSlotBytes;
  /// Each warp has its own stages: a barrier's phase that is two ahead would be taken for the one
  /// that has ended.
  static_assert(kStages % kSplitters == 0);
};
using S = FloatsShape;

struct FloatsParams {
  Params h;
  const void* x;
  std::int64_t x_stride;
};

/// Copies x and A, step by step; by one thread.
__device__ __forceinline__ void produce_floats(const Params& p, Ring<S>& ring, const Unit<S>& unit,
                                               device::Mbarrier* came) {
  for (int i = 0; i < unit.steps; ++i, ring.at.next()) {
    const int stage = ring.at.stage, depth = (unit.first_step + i) * kProductStep;
    ring.empty[stage].wait((ring.at.round & 1) ^ 1);
    came[stage].arrive_and_expect(2 * kFloatBytes);
    const std::uint32_t to = ring.stage() + S::kRowsBytes + S::kSlotBytes - 2 * kFloatBytes;
    device::copy_box(to, p.b[0], 2 * depth, 0, came + stage);
    device::copy_box(to + kFloatBytes, p.b[0], 2 * (depth + kBoxFloats), 0, came + stage);
    ring.full[stage].arrive_and_expect(S::kRowsBytes);
    device::copy_box_once(ring.stage(), p.a[0], depth, unit.row, ring.full + stage);
  }
}

/// Splits every kSplitters-th step of A where it lies; by a warp of its own number.
__device__ __forceinline__ void split_floats(Ring<S>& ring, const Unit<S>& unit,
                                             unsigned char* smem, device::Mbarrier* came) {
  const int warp = static_cast<int>(threadIdx.x) / 32 % kSplitters;
  for (int i = warp; i < unit.steps; i += kSplitters) {
    const int stage = i % S::kStages;
    came[stage].wait(i / S::kStages & 1);
    forward_parts::split_a<kRanks>(smem + stage * S::kStageBytes + S::kRowsBytes);
    device::fence_async_proxy();
    ring.full[stage].arrive();
  }
}

__global__ void __launch_bounds__(kPartsThreads, 1)
    split_floats_kernel(const __grid_constant__ FloatsParams q) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  const Params& p = q.h;
  extern __shared__ __align__(1024) unsigned char smem[];
  __shared__ device::Mbarrier received, came[S::kStages];
  Ring<S> ring(smem);
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kStages; ++i) {
      ring.full[i].init(1 + 32);
      ring.empty[i].init(S::kArrivals);
      came[i].init(1);
    }
    received.init(1);
    device::Mbarrier::fence_init();
    received.arrive_and_expect(S::kTileBytes);
  }
  if (threadIdx.x == kCopyAt) {
    device::prefetch_tensor_map(p.a[0]);
    device::prefetch_tensor_map(p.b[0]);
  }
  device::cluster_arrive_relaxed();  // fence_init() has shown the barriers
  const int index = static_cast<int>(blockIdx.x);
  const Unit<S> unit(p, *ring.segments, index);
  for (int i = threadIdx.x; i < S::kRows * kAheadLines; i += kPartsThreads) {
    const int row = i / kAheadLines, line = i % kAheadLines;
    if (line >= min(kAheadLines - 1, unit.steps) || unit.row + row >= unit.end) continue;
    device::prefetch_l2(static_cast<const unsigned short*>(q.x) + (unit.row + row) * q.x_stride +
                        (unit.first_step + line) * kProductStep);
  }
  device::cluster_wait();  // all blocks run, and their barriers are there
  device::pdl_begin(false);
  if (threadIdx.x >= kCopyAt) {
    device::fewer_registers<32>();
    if (threadIdx.x == kCopyAt) produce_floats(p, ring, unit, came);
    return;
  }
  if (threadIdx.x >= kConsumers) {
    device::fewer_registers<72>();
    split_floats(ring, unit, smem, came);
    return;
  }
  device::more_registers<152>();
  auto* const sums = reinterpret_cast<float*>(smem + S::kStages * S::kStageBytes);
  float sum[S::kSums];
  multiply(p, unit, &ring, sum);
  send_sums<S>(unit.part, p.parts, sums, sum, &received);
  received.wait(0);
  store_forms_share<S>(p, unit, sums);
#endif
}

}  // namespace

bool takes_split_floats(const Product& product, const ProductPlan& plan) {
  const ProductOperand& b = product.b[0];
  return product.end == ProductEnd::kForms && product.dtype == DType::kBFloat16 &&
         product.offsets == nullptr && product.pairs == 1 && product.rng == nullptr &&
         plan.columns == 64 && plan.rows == kProductRows && plan.parts > 1 &&
         !product.a[0].rows_dense && !b.rows_dense && b.rows <= kRanks &&
         product.columns[0] <= plan.columns && takes_product(product.a[0]) &&
         device::takes_tensor_map(b.data, 2 * b.depth, b.rows, 2 * b.stride);
}

void launch_split_floats(const char* op, const Product& product, const ProductPlan& plan,
                         Stream stream) {
  check(takes_split_floats(product, plan) && plan.parts <= kMostProductParts, op,
        ": no product of clusters that split float32 weights");
  const ProductOperand &a = product.a[0], &b = product.b[0];
  FloatsParams q{make_params<S>(op, product, plan), a.data, a.stride};
  // Boxes of 32 floats are boxes of 64 elements of 16 bits.
  device::set_tensor_map(q.h.b[0], DType::kBFloat16, b.data, 2 * b.depth, b.rows, 2 * b.stride,
                         kRanks);
  device::launch<split_floats_kernel>(
      op, cluster_launch(q.h.units, plan.parts, kPartsThreads, S::kSmem, stream), q);
}

}  // namespace mortar::lora::cuda
