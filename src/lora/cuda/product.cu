// SPDX-License-Identifier: Apache-2.0
// out[m, n] = sum over d of a[m, d] b[n, d] for 16-bit operands, on sm_90a: h, y, ds and dx of LoRA
// from 64 ranks on, dA and dB from 24.
//
// Bytes: 2 rows depth (a, once for each tile of columns) + 2 columns depth (b, from L2 for every
// 256 rows) + the output. FLOP: 2 rows columns depth. h of 8192 rows, depth 4096, 64 ranks: 67 MB,
// 15.7 us at 4.28 TB/s (22 measured); of 512 ranks 34 GFLOP, 49 us at 700 TFLOP/s (71 measured; dA
// 48). Up to 128 ranks memory binds it, from 256 on the tensor cores, and L2, which gives all SMs
// 6 TB/s: an SM takes 32 KB for the 1,024 clocks of a step of 128 x 256, 24 KB for the 512 of
// 128 x 128.
//
// A cluster of two thread blocks stays and walks over units of work: 256 rows, one tile of columns,
// one part of the depth. Each block has 128 of the rows, 64 for each of two warpgroups that
// multiply, and one thread of a third copies: its rows of a, and half of b to both blocks of the
// cluster. Stages of 64 elements of the depth pass through a ring; the copies of the next unit are
// under way while the sums of this one are stored. Rounded tiles leave by TMA, through 32 KB of
// shared memory, while the next unit is multiplied. A part of the depth is one MMA chain, or some
// leaves that are one each and are added in pairs. Rows may be of segments, each with its own b: a
// unit then has rows of one segment, and those past its end are multiplied but not stored. Wrong
// where there are few rows: half of the SMs then have nothing to do.
#include "lora/cuda/product.h"

#include <algorithm>

#include "core/check.h"
#include "core/int_math.h"
#include "device/cluster.cuh"
#include "device/dtype_visitor.cuh"
#include "device/launch.cuh"
#include "device/leaf_sums.cuh"
#include "device/pdl.cuh"
#include "device/wgmma.cuh"
#include "lora/cuda/product_shape.cuh"
#include "lora/cuda/product_store.cuh"

namespace mortar::lora::cuda {
namespace {

using namespace product;

/// Copies the stages of all units of the cluster; by one thread.
template <class S>
__device__ __forceinline__ void produce(const Params& p, Ring<S> ring, int units) {
  constexpr std::uint16_t kBoth = (1 << kProductCluster) - 1;
  const int rank = static_cast<int>(blockIdx.y);
  for (int u = blockIdx.x; u < units; u += static_cast<int>(gridDim.x)) {
    const Unit unit(p, *ring.segments, u, S::kColumns);
    int pair = 0, step = unit.first_step;
    const int stages = unit.steps + (S::kBase && p.base != nullptr ? 1 : 0);
    for (int i = 0; i < stages; ++i, ++step, ring.at.next()) {
      while (p.num_groups == 1 && i < unit.steps && step == p.steps[unit.first_b + pair]) {
        ++pair;
        step = 0;
      }
      const CUtensorMap& a = p.a[pair];
      const CUtensorMap& b = p.b[unit.first_b + pair];
      device::Mbarrier* full = ring.full + ring.at.stage;
      ring.empty[ring.at.stage].wait((ring.at.round & 1) ^ 1);
      full->arrive_and_expect(S::kStageBytes);
      std::uint32_t to = ring.stage();
      if (S::kBase && i == unit.steps) {
#pragma unroll
        for (int block = 0; block < S::kColumns / 64; ++block) {
          device::copy_box(to + block * kProductRows * device::kSwizzleBytes, p.base_map,
                           unit.column + 64 * block, unit.row, full);
        }
        continue;
      }
      const int depth = step * kProductStep;
      if constexpr (S::kA == Major::kDepth) {
        device::copy_box(to, a, depth, unit.row, full);
      } else {
#pragma unroll
        for (int block = 0; block < kProductRows / 64; ++block) {
          device::copy_box(to + block * kBlockBytes, a, unit.row + 64 * block, depth, full);
        }
      }
      to += kRowsBytes;
      if constexpr (S::kB == Major::kDepth) {
        const int own = rank * S::kColumns / 2;
        device::copy_box_to(kBoth, to + own * device::kSwizzleBytes, b, depth, unit.column + own,
                            full);
      } else {
        const int own = rank * kProductStep / 2;
#pragma unroll
        for (int block = 0; block < S::kColumns / 64; ++block) {
          device::copy_box_to(kBoth, to + block * kBlockBytes + own * device::kSwizzleBytes, b,
                              unit.column + 64 * block, depth + own, full);
        }
      }
    }
  }
}

/// Adds leaf `i` of a unit to the tree of its leaves. After the last one `sum` is the sum of all.
template <class S, class Tree>
__device__ __forceinline__ void add_leaf(Tree* tree, float4* parked, int i,
                                         float (&sum)[S::kSums]) {
  tree->add(i, sum);
  if constexpr (S::kParked > 0) {
    constexpr int kLeaves = 1 << (S::kLevels - S::kParked);  // whose sum is parked
    if (i % kLeaves != kLeaves - 1) return;
    float4* own = parked + threadIdx.x;
    const bool second = i / kLeaves % 2 != 0;
#pragma unroll
    for (int n = 0; n < S::kSums / 4; ++n) {
      float* v = sum + 4 * n;
      if (second) {
        const float4 first = own[n * kConsumers];
        v[0] = first.x + v[0], v[1] = first.y + v[1], v[2] = first.z + v[2], v[3] = first.w + v[3];
      } else {
        own[n * kConsumers] = make_float4(v[0], v[1], v[2], v[3]);
      }
    }
  }
}

/// The sums of a unit, a part of the depth.
template <class S>
__device__ __forceinline__ void multiply(const Params& p, const Unit& unit, Ring<S>* ring,
                                         float (&sum)[S::kSums]) {
  const std::uint32_t own_rows = threadIdx.x / kWarpgroup * kBlockBytes;
  device::LeafSums<S::kSums, S::kLevels - S::kParked> tree;
  int step = 0;
#pragma unroll 1
  for (int leaf = 0; leaf < p.leaves; ++leaf) {
    const int end = min(unit.steps, (leaf + 1) * p.leaf_steps);
    if (step >= end) {
#pragma unroll
      for (int i = 0; i < S::kSums; ++i) sum[i] = 0;
    }
    int last = -1;  // stage of the MMAs in flight
#pragma unroll 1
    for (; step < end; ++step, ring->at.next()) {
      ring->full[ring->at.stage].wait(ring->at.round & 1);
      const auto a = device::wgmma_descriptor(ring->stage() + own_rows, kBlockBytes);
      const auto b = device::wgmma_descriptor(ring->stage() + kRowsBytes, kBlockBytes);
      device::wgmma_keep(sum);
      device::wgmma_fence();
#pragma unroll
      for (int i = 0; i < kProductStep / 16; ++i) {
        device::wgmma<typename S::T, S::kColumns, S::kA, S::kB>(
            sum, a + i * device::descriptor_step(S::kA), b + i * device::descriptor_step(S::kB),
            i > 0 || last >= 0);
      }
      device::wgmma_commit();
      device::wgmma_wait<1>();
      release(*ring, last);
      last = ring->at.stage;
    }
    device::wgmma_wait<0>();
    device::wgmma_keep(sum);
    release(*ring, last);
    add_leaf<S>(&tree, ring->parked, leaf, sum);
  }
}

template <class S>
__global__ void __launch_bounds__(kThreads, 1) product_kernel(const __grid_constant__ Params p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char smem[];
  Ring<S> ring(smem);
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kStages; ++i) {
      ring.full[i].init(1);
      ring.empty[i].init(kArrivals);
    }
    device::Mbarrier::fence_init();
  }
  if (threadIdx.x == kConsumers) {
    device::prefetch_tensor_map(p.a[0]);
    if (p.steps[0] > 0) device::prefetch_tensor_map(p.b[0]);
  }
  device::cluster_arrive();
  device::cluster_wait();
  device::pdl_begin(p.early);
  const int units = find_segments(p, ring.segments);

  if (threadIdx.x >= kConsumers) {
    device::fewer_registers<40>();
    if (threadIdx.x == kConsumers) produce<S>(p, ring, units);
    __syncwarp();
    // Nobody ends while the other block may still copy to its shared memory or free its stages.
    device::cluster_arrive_relaxed();
    device::cluster_wait();
  } else {
    device::more_registers<232>();
    const int first_row = static_cast<int>(threadIdx.x) / 32 * 16 + threadIdx.x % 32 / 4;
    for (int u = blockIdx.x; u < units; u += static_cast<int>(gridDim.x)) {
      const Unit unit(p, *ring.segments, u, S::kColumns);
      float sum[S::kSums];
      multiply(p, unit, &ring, sum);
      if constexpr (S::kEnd == ProductEnd::kPartials) {
        if (p.early) device::pdl_wait();
        store_partials<S>(p, unit, unit.row + first_row, sum);
      } else {
        if (p.scaled) scale_sums<S>(p, unit, sum);
        if constexpr (S::kBase) {
          if (p.base != nullptr) add_base(&ring, smem, first_row, sum);
        }
        if (p.by_boxes) {
          store_boxes(p, unit, ring, sum);
        } else {
          store_rows<S>(p, unit, unit.row + first_row, sum);
        }
      }
    }
    if constexpr (S::kEnd == ProductEnd::kStore) device::store_boxes_wait();
    if (p.early) device::pdl_wait();  // a block without units too
    device::cluster_arrive_relaxed();
    device::cluster_wait();
  }
#endif
}

// ---- host ---------------------------------------------------------------------------------------

void set_map(CUtensorMap& map, const Product& product, const ProductOperand& o, int rows_of_box,
             int depth_of_box) {
  o.rows_dense
      ? device::set_tensor_map(map, product.dtype, o.data, o.rows, o.depth, o.stride, depth_of_box)
      : device::set_tensor_map(map, product.dtype, o.data, o.depth, o.rows, o.stride, rows_of_box);
}

int steps_of(const ProductOperand& o) {
  return static_cast<int>(ceil_div<std::int64_t>(o.depth, kProductStep));
}

template <class S>
void launch_shape(const char* op, const Product& product, const ProductPlan& plan, Stream stream) {
  Params p{};
  const bool along_depth = product.along_depth || product.pairs == 1;
  p.num_groups = along_depth ? 1 : product.pairs;
  p.offsets = product.offsets;
  p.segments = product.segments;
  p.pairs = product.pairs;
  for (int i = 0; i < product.pairs; ++i) {
    if (i == 0 || along_depth) {
      set_map(p.a[i], product, product.a[i], kProductRows, kProductStep);
    }
    if (i > 0 && along_depth) continue;
    p.groups[i] = {p.tiles, product.first_column[i]};
    p.tiles += static_cast<int>(ceil_div<std::int64_t>(product.columns[i], S::kColumns));
  }
  int all_steps = 0;
  for (int first = 0; first < product.segments * product.pairs; first += product.pairs) {
    int steps = 0;  // of the segment
    for (int i = 0; i < product.pairs; ++i) {
      const ProductOperand& b = product.b[first + i];
      // Of partials those past b's rows are left out, of what is stored none.
      const std::int64_t columns = product.columns[along_depth ? 0 : i];
      const std::int64_t there = b.data == nullptr ? 0 : round_up<std::int64_t>(b.rows, 8);
      p.live[first + i] = b.data == nullptr ? 0 : static_cast<int>(b.rows);
      p.factor[first + i] = product.factor[first + i];
      p.columns[first + i] =
          static_cast<int>(product.end == ProductEnd::kStore ? columns : std::min(columns, there));
      if (b.data == nullptr) continue;
      set_map(p.b[first + i], product, b, S::kColumns / 2, kProductStep / 2);
      p.steps[first + i] = steps_of(b);
      steps = along_depth ? steps + p.steps[first + i] : std::max(steps, p.steps[first + i]);
    }
    all_steps = std::max(all_steps, steps);
  }
  p.parts = plan.parts;
  p.leaves = plan.leaves;
  p.leaf_steps = plan.leaf > 0 ? static_cast<int>(plan.leaf / kProductStep) : all_steps;
  p.part_steps = p.leaf_steps * plan.leaves;
  check(p.part_steps * plan.parts >= all_steps && plan.leaves <= 1 << S::kLevels, op,
        ": a product's parts leave some of the depth out");
  p.rows = product.a[0].rows;
  const std::int64_t units = (ceil_div<std::int64_t>(p.rows, kProductCluster * kProductRows) +
                              (p.offsets != nullptr ? p.segments : 0)) *
                             p.tiles * p.parts;
  check(units < std::int64_t{1} << 30, op, ": too many tiles");
  p.units = static_cast<int>(units);
  p.partials = product.partials;
  p.part_stride = product.part_stride;
  p.early = product.early;
  p.scaled = product.scaled;
  p.row_stride = product.row_stride;
  p.column_stride = product.column_stride;
  p.out = product.out;
  // A box ends where the matrix does, and knows nothing of segments.
  p.by_boxes =
      S::kEnd == ProductEnd::kStore && product.offsets == nullptr && along_depth &&
      device::takes_tensor_map(product.out, product.columns[0], p.rows, product.out_stride);
  if (p.by_boxes) {
    auto* const out = static_cast<unsigned short*>(product.out) + product.first_column[0];
    device::set_tensor_map(p.out_map, product.dtype, out, product.columns[0], p.rows,
                           product.out_stride, kProductRows / 2);
  }
  p.base = product.base;
  p.out_stride = product.out_stride;
  check(!p.early || S::kEnd == ProductEnd::kPartials, op, ": an early product has partials");
  check(product.base == nullptr || S::kBase, op, ": tiles with a base have 128 columns");
  if (product.base != nullptr) {
    device::set_tensor_map(p.base_map, product.dtype, product.base, product.columns[0], p.rows,
                           product.base_stride, kProductRows);
  }
  const int most = device::current_device().num_sms / kProductCluster;
  device::Launch l;
  l.grid = dim3(std::min(p.units, plan.clusters > 0 ? plan.clusters : most), kProductCluster);
  l.cluster_y = kProductCluster;
  l.threads = kThreads;
  l.smem = S::kSmem;
  l.stream = stream;
  l.pdl = true;
  device::launch<product_kernel<S>>(op, l, p);
}

struct Launcher {
  const char* op;
  const Product& product;
  const ProductPlan& plan;
  Stream stream;

  template <class T, int kColumns, Major kA, Major kB, ProductEnd kEnd, int kLevels>
  void run() const {
    launch_shape<Shape<T, kColumns, kA, kB, kEnd, kLevels>>(op, product, plan, stream);
  }
  template <class T, Major kB>
  void rows_by_depth() const {
    constexpr Major kA = Major::kDepth;
    using enum ProductEnd;
    if (product.end == kStore) {
      if (plan.columns == 256) return run<T, 256, kA, kB, kStore, 0>();
      return run<T, 128, kA, kB, kStore, 0>();
    }
    if (plan.columns == 128) return run<T, 128, kA, kB, kPartials, 2>();
    run<T, 64, kA, kB, kPartials, 3>();
  }
  template <class T>
  void run_type() const {
    if (product.a[0].rows_dense) {
      constexpr Major kRows = Major::kRows;
      using enum ProductEnd;
      if (plan.columns == 256) return run<T, 256, kRows, kRows, kPartials, 0>();
      if (plan.columns == 128) return run<T, 128, kRows, kRows, kPartials, 0>();
      return run<T, 64, kRows, kRows, kPartials, 0>();
    }
    product.b[0].rows_dense ? rows_by_depth<T, Major::kRows>() : rows_by_depth<T, Major::kDepth>();
  }
};

}  // namespace

bool takes_product(const ProductOperand& o) {
  const std::int64_t dense = o.rows_dense ? o.rows : o.depth;
  return device::takes_tensor_map(o.data, dense, o.rows_dense ? o.depth : o.rows, o.stride);
}

void launch_product(const char* op, const Product& product, const ProductPlan& plan,
                    Stream stream) {
  const Launcher l{op, product, plan, stream};
  if (product.dtype == DType::kFloat16) return l.run_type<__half>();
  l.run_type<__nv_bfloat16>();
}

}  // namespace mortar::lora::cuda
