// SPDX-License-Identifier: Apache-2.0
// The product of product.cu, rounded, where there are few tiles of long sums: h and ds of LoRA from
// 64 ranks on, up to some 8,192 rows.
//
// Bytes and FLOP as there, but that b comes from L2 for every 128 rows. h of 4096 rows, depth 4096,
// 64 ranks: 34 MB, 11.1 us at 3.03 TB/s.
//
// A cluster has one tile of 128 rows, and each of its thread blocks some of the leaves of the
// depth, which pass through a ring of stages filled by TMA. Then blocks send each other their sums
// by st.async, and each adds those of some rows, in the tree's order, and rounds them: no partial
// sums in memory, and no kernel that waits for this one to add them. Where b has columns of parts
// of float32 weights, three make one value, which leaves in all the forms that others read.
#include <type_traits>

#include "device/cluster.cuh"
#include "device/convert.cuh"
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "device/wgmma.cuh"
#include "lora/cuda/product.h"
#include "lora/cuda/product_multiply.cuh"
#include "lora/cuda/product_params.cuh"
#include "lora/cuda/product_split.cuh"
#include "lora/cuda/product_split_forms.cuh"

namespace mortar::lora::cuda {
namespace {

using namespace product;

/// This thread block's share of the tile's rows: all blocks' sums, rounded.
template <class T, class S>
__device__ __forceinline__ void store_share(const Params& p, const Unit<S>& unit,
                                            const float* sums) {
  constexpr int kOctets = S::kColumns / 8;
  const int own_rows = S::kRows / p.parts;
  const float factor = p.scaled ? p.factor[unit.first_b] : 1.0f;
  const int live = p.scaled ? p.live[unit.first_b] - unit.column : S::kColumns;
  for (int i = threadIdx.x; i < own_rows * kOctets; i += kConsumers) {
    const int row = unit.row + unit.part * own_rows + i / kOctets, column = i % kOctets * 8;
    if (row >= unit.end || unit.column + column >= unit.columns) continue;
    const uint4 words =
        round_received<T, S>(sums, p.parts, own_rows, i / kOctets, column, factor, live);
    auto* to = static_cast<unsigned short*>(p.out) + row * p.out_stride +
               p.groups[unit.group].first_column + unit.column + column;
    *reinterpret_cast<uint4*>(to) = words;
  }
}

/// Whether boxes of x come before A's columns of parts are there, which the kernel before writes.
/// (us of a forward on an H100, after it / before it: rank 32, 2048 x 5120 x 13824 43.6 / 42.7;
/// rank 64, 4096 x 4096 x 4096 51.6 / 49.6; but with dropout, rank 16, 37.3 / 38.9, and a backward
/// of 512 rows 20.4 / 20.9.)
template <class S>
__device__ __forceinline__ bool asks_ahead(const Params& p) {
  return !S::kDrops && S::kB == Major::kDepth && p.forms;
}

template <class S>
__global__ void __launch_bounds__(kThreads, 1)
    split_product_kernel(const __grid_constant__ Params p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char smem[];
  __shared__ device::Mbarrier received;
  Ring<S> ring(smem);
  if (threadIdx.x == 0) {
    ring.init_barriers();
    received.init(1);
    device::Mbarrier::fence_init();
    received.arrive_and_expect(S::kTileBytes);
  }
  if (threadIdx.x == kConsumers) {
    device::prefetch_tensor_map(p.a[0]);
    device::prefetch_tensor_map(p.b[0]);
  }
  device::cluster_arrive_relaxed();  // fence_init() has shown the barriers
  device::cluster_wait();            // all blocks run, and their barriers are there
  const bool ahead = asks_ahead<S>(p) && p.offsets == nullptr && threadIdx.x >= kConsumers;
  if (!ahead) device::pdl_begin(false);
  const int index = static_cast<int>(blockIdx.x);
  if (index >= find_segments<S>(p, ring.segments)) return;
  const Unit<S> unit(p, *ring.segments, index);
  if (threadIdx.x >= kConsumers) {
    device::fewer_registers<S::kProducerRegisters>();
    if (threadIdx.x == kConsumers) produce<S>(p, ring, unit, asks_ahead<S>(p));
    return;
  }
  device::more_registers<S::kConsumerRegisters>();
  auto* const sums = reinterpret_cast<float*>(smem + S::kStages * S::kStageBytes);
  device::visit_checked_dtype(Float16DTypes(), p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    float sum[S::kSums];
    multiply<S, T>(p, unit, &ring, sum);
    send_sums<S>(unit.part, p.parts, sums, sum, &received);
    received.wait(0);
    // Made anew: kept, what it has would take registers of sums.
    int same = index;
    asm volatile("" : "+r"(same));
    const Unit<S> stored(p, *ring.segments, same);
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {  // whose parts are no float16
      if (p.forms) return store_forms_share<S>(p, stored, sums);
    }
    store_share<T, S>(p, stored, sums);
  });
#endif
}

template <class S>
void launch_shape(const char* op, const Product& product, const ProductPlan& plan, Stream stream) {
  const Params p = make_params<S>(op, product, plan);
  device::launch<split_product_kernel<S>>(
      op, cluster_launch(p.units, plan.parts, kThreads, S::kSmem, stream), p);
}

template <Major kB, bool kDrops>
void launch_columns(const char* op, const Product& product, const ProductPlan& plan,
                    Stream stream) {
  const auto run = [&]<int kColumns, int kLevels, bool kByColumns>() {
    launch_shape<Shape<AnyFloat16, kColumns, Major::kDepth, kB, ProductEnd::kStore, kLevels, true,
                       kDrops, kByColumns>>(op, product, plan, stream);
  };
  if (plan.columns == 192) return run.template operator()<192, 2, true>();
  if constexpr (kB == Major::kDepth) {
    if (plan.columns == 96) return run.template operator()<96, 2, true>();
    if (plan.rows < kProductRows) return run.template operator()<64, 2, true>();
  }
  if (plan.columns == 128) return run.template operator()<128, 1, false>();
  run.template operator()<64, 2, false>();
}
template <Major kB>
void launch_columns(const char* op, const Product& product, const ProductPlan& plan,
                    Stream stream) {
  product.rng != nullptr ? launch_columns<kB, true>(op, product, plan, stream)
                         : launch_columns<kB, false>(op, product, plan, stream);
}

}  // namespace

void launch_split_product(const char* op, const Product& product, const ProductPlan& plan,
                          Stream stream) {
  const bool forms = product.end == ProductEnd::kForms;
  bool one_tile = true;
  for (int i = 0; i < product.pairs; ++i) {
    one_tile = one_tile && product.columns[i] <= plan.columns;
  }
  check(product.end != ProductEnd::kPartials && (!forms || one_tile) && product.base == nullptr &&
            !product.early && !product.a[0].rows_dense &&
            (!product.along_depth || product.pairs == 1) && plan.parts > 1 &&
            plan.parts <= kMostProductParts,
        op, ": no product of clusters that share the depth");
  check(!forms || product.dtype == DType::kBFloat16, op, ": parts are bfloat16");
  dense_rows_of_b(product) ? launch_columns<Major::kRows>(op, product, plan, stream)
                           : launch_columns<Major::kDepth>(op, product, plan, stream);
}

}  // namespace mortar::lora::cuda
