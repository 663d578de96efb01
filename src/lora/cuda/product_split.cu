// SPDX-License-Identifier: Apache-2.0
// The product of product.cu, rounded, where there are few tiles of long sums: h and ds of LoRA from
// 64 ranks on, up to some 8,192 rows.
//
// Bytes and FLOP as there, but that b comes from L2 for every 128 rows. h of 4096 rows, depth 4096,
// 64 ranks: 34 MB, 11.1 us at 3.03 TB/s.
//
// A cluster has one tile of 128 rows, and each of its thread blocks some of the leaves of the depth,
// which pass through a ring of stages filled by TMA. Then each block adds all blocks' sums of some
// rows, in the tree's order, through the cluster's shared memory, and rounds them: no partial sums
// in memory, and no kernel that waits for this one to add them.
#include "device/cluster.cuh"
#include "device/convert.cuh"
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "device/wgmma.cuh"
#include "lora/cuda/product.h"
#include "lora/cuda/product_multiply.cuh"
#include "lora/cuda/product_params.cuh"

namespace mortar::lora::cuda {
namespace {

using namespace product;

constexpr int kSplitThreads = kConsumers + 32;  ///< one warp copies

template <class S>
constexpr int kPitch = S::kColumns + 8;  ///< floats of a row of sums, free of bank conflicts

/// Copies the stages of a unit; by one thread.
template <class S>
__device__ __forceinline__ void produce(const Params& p, Ring<S> ring, const Unit<S>& unit) {
  const CUtensorMap& b = p.b[unit.first_b];
  for (int i = 0; i < unit.steps; ++i, ring.at.next()) {
    device::Mbarrier* full = ring.full + ring.at.stage;
    ring.empty[ring.at.stage].wait((ring.at.round & 1) ^ 1);
    full->arrive_and_expect(S::kStageBytes);
    const int depth = (unit.first_step + i) * kProductStep;
    device::copy_box(ring.stage(), p.a[0], depth, unit.row, full);
    const std::uint32_t to = ring.stage() + kRowsBytes;
    if constexpr (S::kB == Major::kDepth) {
      device::copy_box(to, b, depth, unit.column, full);
    } else {
#pragma unroll
      for (int block = 0; block < S::kColumns / 64; ++block) {
        device::copy_box(to + block * kBlockBytes, b, unit.column + 64 * block, depth, full);
      }
    }
  }
}

/// A thread's sums, to rows of shared memory.
template <class S>
__device__ __forceinline__ void park(float* sums, const float (&sum)[S::kSums]) {
  const int thread = static_cast<int>(threadIdx.x);
  float* to = sums + (thread / 32 * 16 + thread % 32 / 4) * kPitch<S> + thread % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int j = 0; j < S::kSums / 4; ++j) {
      *reinterpret_cast<float2*>(to + 8 * half * kPitch<S> + 8 * j) =
          make_float2(sum[4 * j + 2 * half], sum[4 * j + 2 * half + 1]);
    }
  }
}

/// This thread block's share of the tile's rows: all blocks' sums, rounded.
template <class S>
__device__ __forceinline__ void store_share(const Params& p, const Unit<S>& unit,
                                            const float* sums) {
  constexpr int kOctets = S::kColumns / 8;
  const int own_rows = kProductRows / p.parts;
  const float factor = p.scaled ? p.factor[unit.first_b] : 1.0f;
  const int live = p.scaled ? p.live[unit.first_b] - unit.column : S::kColumns;
  for (int i = threadIdx.x; i < own_rows * kOctets; i += kSplitThreads) {
    const int row = unit.part * own_rows + i / kOctets, column = i % kOctets * 8;
    if (unit.row + row >= unit.end || unit.column + column >= unit.columns) continue;
    std::uint32_t words[4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4 v = device::sum_in_cluster<kMostProductParts>(
          sums + row * kPitch<S> + column + 4 * half, p.parts);
      // Past b's rows the copies' zeros may have met Inf or NaN.
      const auto scaled = [&](float sum, int j) {
        return column + 4 * half + j < live ? factor * sum : 0.0f;
      };
      words[2 * half] = device::pack2<typename S::T>(scaled(v.x, 0), scaled(v.y, 1));
      words[2 * half + 1] = device::pack2<typename S::T>(scaled(v.z, 2), scaled(v.w, 3));
    }
    auto* to = static_cast<unsigned short*>(p.out) + (unit.row + row) * p.out_stride +
               p.groups[unit.group].first_column + unit.column + column;
    *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

template <class S>
__global__ void __launch_bounds__(kSplitThreads, 1)
    split_product_kernel(const __grid_constant__ Params p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char smem[];
  Ring<S> ring(smem);
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kStages; ++i) {
      ring.full[i].init(1);
      ring.empty[i].init(S::kArrivals);
    }
    device::Mbarrier::fence_init();
  }
  if (threadIdx.x == kConsumers) device::prefetch_tensor_map(p.a[0]);
  __syncthreads();
  device::pdl_begin(false);
  const int index = static_cast<int>(blockIdx.x);
  if (index >= find_segments<S>(p, ring.segments)) return;
  const Unit<S> unit(p, *ring.segments, index);

  auto* const sums = reinterpret_cast<float*>(smem);
  if (threadIdx.x >= kConsumers) {
    if (threadIdx.x == kConsumers) produce<S>(p, ring, unit);
    __syncwarp();
    __syncthreads();
  } else {
    float sum[S::kSums];
    multiply(p, unit, &ring, sum);
    __syncthreads();  // the ring is free
    park<S>(sums, sum);
  }
  device::cluster_arrive();
  device::cluster_wait();
  store_share<S>(p, unit, sums);
  // Nobody ends while others may still read its shared memory.
  device::cluster_arrive_relaxed();
  device::cluster_wait();
#endif
}

template <class S>
void launch_shape(const char* op, const Product& product, const ProductPlan& plan, Stream stream) {
  static_assert(S::kStages * S::kStageBytes >= kProductRows * kPitch<S> * 4, "sums fit the ring");
  const Params p = make_params<S>(op, product, plan);
  device::Launch l;
  l.grid = dim3(p.units, plan.parts);
  l.cluster_y = plan.parts;
  l.threads = kSplitThreads;
  l.smem = S::kSmem;
  l.stream = stream;
  l.pdl = true;
  device::launch<split_product_kernel<S>>(op, l, p);
}

template <class T, Major kB>
void launch_columns(const char* op, const Product& product, const ProductPlan& plan,
                    Stream stream) {
  constexpr auto kDepth = Major::kDepth;
  constexpr auto kStore = ProductEnd::kStore;
  if (plan.columns == 64) {
    return launch_shape<Shape<T, 64, kDepth, kB, kStore, 2, true>>(op, product, plan, stream);
  }
  launch_shape<Shape<T, 128, kDepth, kB, kStore, 1, true>>(op, product, plan, stream);
}

template <class T>
void launch_type(const char* op, const Product& product, const ProductPlan& plan, Stream stream) {
  dense_rows_of_b(product) ? launch_columns<T, Major::kRows>(op, product, plan, stream)
                           : launch_columns<T, Major::kDepth>(op, product, plan, stream);
}

}  // namespace

void launch_split_product(const char* op, const Product& product, const ProductPlan& plan,
                          Stream stream) {
  check(product.end == ProductEnd::kStore && product.base == nullptr && !product.early &&
            !product.a[0].rows_dense && (!product.along_depth || product.pairs == 1) &&
            plan.parts > 1 && plan.parts <= kMostProductParts,
        op, ": no product of clusters that share the depth");
  if (product.dtype == DType::kFloat16) return launch_type<__half>(op, product, plan, stream);
  launch_type<__nv_bfloat16>(op, product, plan, stream);
}

}  // namespace mortar::lora::cuda
