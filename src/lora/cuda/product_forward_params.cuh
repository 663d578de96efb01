// SPDX-License-Identifier: Apache-2.0
// What the launches of h and y share (product_forward.cu, product_forward_wide.cu): parameters, a
// cluster's tile, and what is asked for ahead.
#pragma once

#include <algorithm>

#include "device/cache_policy.cuh"
#include "device/launch.cuh"
#include "device/tensor_copy.cuh"
#include "lora/cuda/product_forward.h"
#include "lora/cuda/product_params.cuh"

namespace mortar::lora::cuda::product {

inline constexpr int kForwardThreads = kConsumers + 32;
/// Steps that are asked for before the wait: all of them, or so few that those of the kernel
/// before are not in their way.
inline constexpr int kMostAheadSteps = 8, kAheadSteps = 3;

struct ForwardParams {
  Params h;
  CUtensorMap weights, out;
  int column_tiles;  ///< of y
  int half_rows;     ///< of a tile, which has S::kHalves
  bool adds_base;    ///< h.base_map
  int ahead_steps;
  const void *x, *a;
  std::int64_t x_stride, a_stride;
};

/// What a cluster needs before its thread blocks look anything up: barriers for so many bytes of
/// sums and for `columns` of a tile of h. A barrier of the cluster must follow.
template <class S>
__device__ __forceinline__ void make_barriers(const ForwardParams& q, const Ring<S>& ring,
                                              device::Mbarrier& received, int sum_bytes,
                                              device::Mbarrier& came, int columns = S::kColumns) {
  if (threadIdx.x == 0) {
    ring.init_barriers();
    received.init(1);
    came.init(1);
    device::Mbarrier::fence_init();
    received.arrive_and_expect(sum_bytes);
    came.arrive_and_expect(q.h.tile_rows * columns * 2);
  }
  if (threadIdx.x == kConsumers) {
    device::prefetch_tensor_map(q.h.a[0]);
    device::prefetch_tensor_map(q.h.b[0]);
    device::prefetch_tensor_map(q.weights);
    device::prefetch_tensor_map(q.out);
  }
}

/// Asks for the first steps of x and A in L2, before what is before this kernel has ended.
template <class S>
__device__ __forceinline__ void ask(const ForwardParams& q, const Unit<S>& unit) {
  if (threadIdx.x >= kConsumers) return;
  const int lines = min(unit.steps, q.ahead_steps);
  const std::int64_t first = unit.first_step * kProductStep;
  for (int i = threadIdx.x; i < (S::kRows + S::kColumns) * kMostAheadSteps; i += kConsumers) {
    const int row = i / kMostAheadSteps, line = i % kMostAheadSteps, rank = row - S::kRows;
    const bool there =
        rank < 0 ? row < q.h.tile_rows && unit.row + row < unit.end : rank < q.h.live[0];
    if (line >= lines || !there) continue;
    const auto* from = static_cast<const unsigned short*>(rank < 0 ? q.x : q.a) +
                       (rank < 0 ? (unit.row + row) * q.x_stride : rank * q.a_stride) + first;
    device::prefetch_l2(from + line * kProductStep);
  }
}

/// The parameters of a launch of shape S, whose x and base come in S::kBoxes boxes of rows.
template <class S>
ForwardParams make_forward_params(const char* op, const ForwardProduct& product,
                                  const ForwardPlan& plan) {
  ProductPlan h;
  h.columns = S::kColumns;
  h.parts = plan.parts;
  h.leaf = plan.leaf;
  h.leaves = plan.leaves;
  h.rows = S::kTileRows;
  ForwardParams q{};
  q.h = make_params<S>(op, product.h, h);
  q.h.tile_rows = plan.rows;
  q.h.units = static_cast<int>(ceil_div<std::int64_t>(q.h.rows, plan.rows));
  q.half_rows = plan.rows / S::kHalves;
  const int box_rows = plan.rows / S::kBoxes;
  set_map(q.h.a[0], product.h, product.h.a[0], box_rows, kProductStep);
  const ProductOperand& b = product.b;
  ProductOperand lines = b;
  if (S::kShare > 1) lines = {b.data, b.rows / S::kShare, kProductStep, kProductStep, false};
  set_map(q.weights, product.h, lines, S::kLines, kProductStep);
  device::set_tensor_map(q.out, product.h.dtype, product.y, b.rows, product.h.a[0].rows,
                         product.y_stride, q.half_rows);
  q.adds_base = product.base.data != nullptr;
  if (q.adds_base) {
    device::set_tensor_map(q.h.base_map, product.h.dtype, product.base.data, b.rows,
                           product.h.a[0].rows, product.base.stride, box_rows);
  }
  q.ahead_steps = q.h.part_steps <= kMostAheadSteps ? q.h.part_steps : kAheadSteps;
  q.x = product.h.a[0].data;
  q.x_stride = product.h.a[0].stride;
  q.a = product.h.b[0].data;
  q.a_stride = product.h.b[0].stride;
  q.column_tiles = static_cast<int>(ceil_div<std::int64_t>(b.rows, kForwardColumns));
  return q;
}

template <class S>
device::Launch forward_launch(const ForwardParams& q, const ForwardPlan& plan, int threads,
                              Stream stream) {
  device::Launch l = cluster_launch(q.h.units, plan.parts, threads, S::kSmem, stream);
  l.carve_out = true;
  return l;
}

}  // namespace mortar::lora::cuda::product
