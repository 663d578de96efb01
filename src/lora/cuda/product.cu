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
// shared memory, while the next unit is multiplied; of deep units they are written there then, too.
// A part of the depth is one MMA chain, or some leaves that are one each and are added in pairs, or
// (of tiles of 256 columns that sum over rows) one after the other. Rows may be of segments, each
// with its own b: a unit then has rows of one segment, and those past its end are multiplied but
// not stored. Of sums over rows segments cut the depth: a unit has a chunk of one, with zeros past
// its end. Dropout on a is drawn as its stages pass (product_drop.cuh), that on what is stored
// before a base is added. Wrong where there are few rows: half of the SMs then have nothing to do.
#include "lora/cuda/product.h"

#include <algorithm>

#include "device/cluster.cuh"
#include "device/dtype_visitor.cuh"
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "device/wgmma.cuh"
#include "lora/cuda/product_multiply.cuh"
#include "lora/cuda/product_params.cuh"
#include "lora/cuda/product_store.cuh"
#include "lora/train/cuda/grad_sum.cuh"

namespace mortar::lora::cuda {
namespace {

using namespace product;

/// Copies the stages of all units of the cluster; by one thread.
template <class S>
__device__ __forceinline__ void produce(const Params& p, Ring<S> ring, int units) {
  constexpr std::uint16_t kBoth = (1 << kProductCluster) - 1;
  const int rank = static_cast<int>(blockIdx.y);
  const UnitPlace by(p, static_cast<int>(gridDim.x));
  UnitPlace place(p, static_cast<int>(blockIdx.x));
  for (int u = blockIdx.x; u < units; u += static_cast<int>(gridDim.x), place.advance(p, by)) {
    const Unit<S> unit(p, *ring.segments, place);
    int pair = 0, step = unit.first_step;
    const int stages = unit.steps + (S::kBase && p.base != nullptr ? 1 : 0);
    for (int i = 0; i < stages; ++i, ++step, ring.at.next()) {
      while (!S::kCutsDepth && p.num_groups == 1 && i < unit.steps &&
             step == p.steps[unit.first_b + pair]) {
        ++pair;
        step = 0;
      }
      const CUtensorMap& a = p.a[pair];
      const CUtensorMap& b = p.b[S::kCutsDepth ? 0 : unit.first_b + pair];
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
      const int depth = unit.depth + step * kProductStep;
      if constexpr (S::kA == Major::kDepth) {
        device::copy_box(to, a, depth, unit.row, full);
      } else {
#pragma unroll
        for (int block = 0; block < kProductRows / 64; ++block) {
          const std::uint32_t place = to + block * kBlockBytes;
          // x or dy for the last time, so that partial sums stay in L2 until they are added.
          p.tiles == 1 ? device::copy_box_once(place, a, unit.row + 64 * block, depth, full)
                       : device::copy_box(place, a, unit.row + 64 * block, depth, full);
        }
      }
      to += S::kRowsBytes;
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

/// What the other warps of the copying thread's warpgroup do.
template <class S>
__device__ __forceinline__ void help(const Params& p) {
  constexpr int kHelpers = kWarpgroup - 32;
  const int thread = static_cast<int>(threadIdx.x) - kConsumers - 32;
  if (!S::kAddsBeside || thread < 0) return;
  const int block = static_cast<int>(blockIdx.x * kProductCluster + blockIdx.y);
  const int blocks = static_cast<int>(gridDim.x) * kProductCluster;
  lora::train::cuda::add_grad(p.beside, block * kHelpers + thread, blocks * kHelpers);
}

template <class S>
__global__ void __launch_bounds__(kThreads, 1) product_kernel(const __grid_constant__ Params p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char smem[];
  Ring<S> ring(smem);
  if (threadIdx.x == 0) {
    ring.init_barriers();
    device::Mbarrier::fence_init();
  }
  if (threadIdx.x == kConsumers) {
    device::prefetch_tensor_map(p.a[0]);
    if (p.steps[0] > 0) device::prefetch_tensor_map(p.b[0]);
  }
  device::cluster_arrive();
  device::cluster_wait();
  device::pdl_begin(p.early);
  const int units = find_segments<S>(p, ring.segments);

  if (threadIdx.x >= kConsumers) {
    device::fewer_registers<S::kProducerRegisters>();
    if (threadIdx.x == kConsumers) produce<S>(p, ring, units);
    help<S>(p);
    __syncwarp();
    // Nobody ends while the other block may still copy to its shared memory or free its stages.
    device::cluster_arrive_relaxed();
    device::cluster_wait();
  } else {
    device::more_registers<S::kConsumerRegisters>();
    const int first_row = static_cast<int>(threadIdx.x) / 32 * 16 + threadIdx.x % 32 / 4;
    [[maybe_unused]] lora::train::cuda::Draws draws{};
    if (S::kDropsStored && p.rng != nullptr) draws.read(p.rng);
    [[maybe_unused]] Outgoing<S> outgoing;
    const UnitPlace by(p, static_cast<int>(gridDim.x));
    UnitPlace place(p, static_cast<int>(blockIdx.x));
    for (int u = blockIdx.x; u < units; u += static_cast<int>(gridDim.x), place.advance(p, by)) {
      const Unit<S> unit(p, *ring.segments, place);
      float sum[S::kSums];
      if constexpr (S::kDefers) {
        // The second half when the first one has left shared memory.
        multiply(p, unit, &ring, sum,
                 [&](int step) { outgoing.send(p, ring.tile, 2 * step < unit.steps ? 1 : 2); });
        outgoing.send(p, ring.tile, 2);
      } else {
        multiply(p, unit, &ring, sum);
      }
      if constexpr (S::kEnd == ProductEnd::kPartials) {
        if (S::kA == Major::kRows && p.adds_copies) {
          store_added_partials<S>(p, unit, unit.row + first_row, sum);
        } else {
          store_partials<S>(p, unit, unit.row + first_row, sum);
        }
      } else {
        if (p.scaled) scale_sums<S>(p, unit, sum);
        if constexpr (S::kA == Major::kRows) add_to_zero(sum);
        if constexpr (S::kDropsStored) {
          if (p.rng != nullptr) drop_sums(p, draws, unit, unit.row + first_row, sum);
        }
        if constexpr (S::kBase) {
          if (p.base != nullptr) add_base(&ring, smem, first_row, sum);
        }
        if constexpr (S::kDefers) outgoing.take(unit, sum);
        if (!p.by_boxes) {
          store_rows<S>(p, unit, unit.row + first_row, sum);
          if constexpr (S::kDefers) outgoing.sent = 2;
        } else if constexpr (!S::kDefers) {
          store_boxes(p, unit, ring, sum);
        }
      }
    }
    if constexpr (S::kDefers) outgoing.send(p, ring.tile, 2);
    if constexpr (S::kEnd == ProductEnd::kStore) device::store_boxes_wait();
    if (p.early) device::pdl_wait();  // a block without units too
    device::cluster_arrive_relaxed();
    device::cluster_wait();
  }
#endif
}

// ---- host ---------------------------------------------------------------------------------------

template <class S>
void launch_shape(const char* op, const Product& product, const ProductPlan& plan, Stream stream) {
  const Params p = make_params<S>(op, product, plan);
  const int most = device::current_device().num_sms / kProductCluster;
  const int clusters = std::min(p.units, plan.clusters > 0 ? plan.clusters : most);
  device::launch<product_kernel<S>>(
      op, cluster_launch(clusters, kProductCluster, kThreads, S::kSmem, stream), p);
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
  /// Sums over rows with dropout on a.
  template <class T>
  void run_dropped() const {
    const auto run = [&]<int kColumns>() {
      constexpr auto kRows = Major::kRows;
      launch_shape<Shape<T, kColumns, kRows, kRows, ProductEnd::kPartials, 0, false, true>>(
          op, product, plan, stream);
    };
    if (plan.columns == 64) return run.template operator()<64>();
    if (plan.columns == 128) return run.template operator()<128>();
    run.template operator()<192>();
  }
  template <class T, Major kB>
  void rows_by_depth() const {
    constexpr Major kA = Major::kDepth;
    using enum ProductEnd;
    if (product.end == kStore) {
      if (plan.columns == 256 && plan.defers) {
        return launch_shape<Shape<T, 256, kA, kB, kStore, 0, false, false, false, true>>(
            op, product, plan, stream);
      }
      if (plan.columns == 256) return run<T, 256, kA, kB, kStore, 0>();
      if (plan.columns == 192) return run<T, 192, kA, kB, kStore, 0>();
      if (plan.columns == 64) return run<T, 64, kA, kB, kStore, 0>();
      return run<T, 128, kA, kB, kStore, 0>();
    }
    if (plan.columns == 128) return run<T, 128, kA, kB, kPartials, 2>();
    run<T, 64, kA, kB, kPartials, 3>();
  }
  template <class T>
  void run_type() const {
    if (product.a[0].rows_dense) {
      if (product.rng != nullptr) return run_dropped<T>();
      constexpr Major kRows = Major::kRows;
      using enum ProductEnd;
      if (product.end == kStore) {
        if (plan.columns == 256) return run<T, 256, kRows, kRows, kStore, 0>();
        return run<T, 128, kRows, kRows, kStore, 1>();
      }
      if (plan.columns == 256) return run<T, 256, kRows, kRows, kPartials, 0>();
      if (plan.columns == 192) return run<T, 192, kRows, kRows, kPartials, 0>();
      if (plan.columns == 128) return run<T, 128, kRows, kRows, kPartials, 0>();
      return run<T, 64, kRows, kRows, kPartials, 0>();
    }
    dense_rows_of_b(product) ? rows_by_depth<T, Major::kRows>() : rows_by_depth<T, Major::kDepth>();
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
  check(product.rng == nullptr || !product.a[0].rows_dense || plan.columns <= 192, op,
        ": no product of dropped rows");
  if (product.dtype == DType::kFloat16) return l.run_type<__half>();
  l.run_type<__nv_bfloat16>();
}

}  // namespace mortar::lora::cuda
