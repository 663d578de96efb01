// SPDX-License-Identifier: Apache-2.0
// h = factor * x A^T, rounded, and y = h B^T in one launch, for up to 64 ranks.
//
// h[m, j] = factor sum_k x[m, k] A[j, k],  y[m, n] = sum_j h[m, j] B[n, j]
// bytes  = 2 M K + 2 M N + 2 M R; A and B come from L2 for every 64 rows
// FLOP   = 2 M R (K + N): never the limit
// 4096 rows, K = N = 4096, R = 64: 68 MB, 15.8 us at 4.28 TB/s
// limit  : DRAM, which mostly reads at first and writes at the end
// wrong  : so many rows that clusters have several tiles each (12345 x 2560 x 2560, rank 24: 50 us
//          for 43 apart), and few thread blocks for a wide y, of which each takes 0.3 to 0.5 us for
//          128 columns whatever its rows are (512 x 4096 x 14336, rank 8: 14.1 us for 10.6)
//
// A cluster has up to 64 rows, as few as let all tiles run at once (an MMA's other rows are not
// looked at), and each of its thread blocks some of the leaves of K, as in product_split.cu: stages
// come by TMA, sums pass by st.async. A thread block rounds h of some rows, stores it and sends it
// to all others of the cluster; then each makes every so many columns of y. B comes through the
// same ring and is there before h is, and so does a base. Apart, y begins some 3 us after the last
// sum of h: h's stores, the end of a kernel, the start of the next, and h from L2. x leaves L2
// first, as nobody reads it again: 1 us of 23.
#include "device/cluster.cuh"
#include "device/convert.cuh"
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "device/stmatrix.cuh"
#include "device/wgmma.cuh"
#include "lora/cuda/product_forward.h"
#include "lora/cuda/product_forward_lines.cuh"
#include "lora/cuda/product_forward_params.cuh"
#include "lora/cuda/product_multiply.cuh"
#include "lora/cuda/product_split.cuh"

namespace mortar::lora::cuda {
namespace {

using namespace product;

/// kRanks: 32 or 64. A stage has room for 64 columns of x and A, or for 128 columns of B.
/// kShare: columns of B that share a row of 128 bytes, as they lie side by side.
template <class T_, int kRanks, int kShare_>
struct ForwardShape
    : Shape<T_, kRanks, Major::kDepth, Major::kDepth, ProductEnd::kStore, 2, true, false, true> {
  static constexpr int kShare = kShare_, kLines = kForwardColumns / kShare;
  static constexpr int kStageBytes = kForwardColumns * device::kSwizzleBytes;
  static constexpr int kSumBytes = kForwardRows * kRanks * 4;
  static constexpr int kHiddenBytes = kForwardRows * device::kSwizzleBytes;
  /// Two blocks of 64 rows and columns of each warpgroup, on their way out.
  static constexpr int kOutBytes = 4 * kBlockBytes;
  static constexpr int kTileBytes = kHiddenBytes + kOutBytes + kSumBytes;
  static constexpr int kStages = (kStoreRingBytes - kTileBytes) / kStageBytes;
  static constexpr int kSmem = kStages * kStageBytes + kTileBytes +
                               2 * kStages * static_cast<int>(sizeof(device::Mbarrier)) +
                               static_cast<int>(sizeof(Segments));
};

/// Sums this thread block's rows of h, stores them and sends them to the whole cluster.
template <class S>
__device__ __forceinline__ void share_hidden(const ForwardParams& q, const Unit<S>& unit,
                                             const float* sums, unsigned char* hidden,
                                             device::Mbarrier* came) {
  const Params& p = q.h;
  constexpr int kOctets = S::kColumns / 8;
  const int own_rows = q.rows / p.parts, plane = own_rows * S::kColumns;
  const float factor = p.factor[0];
  const int live = p.live[0];
  for (int i = threadIdx.x; i < own_rows * kOctets; i += kConsumers) {
    const int own_row = i / kOctets, octet = i % kOctets;
    std::uint32_t words[4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float4 v[kMostProductParts];
      const float* from = sums + own_row * S::kColumns + octet * 8 + 4 * half;
#pragma unroll
      for (int part = 0; part < kMostProductParts; ++part) {
        if (part < p.parts) v[part] = *reinterpret_cast<const float4*>(from + part * plane);
      }
      const float4 all = device::sum_of_parts(v, p.parts);
      const auto scaled = [&](float one, int k) {
        return octet * 8 + 4 * half + k < live ? factor * one : 0.0f;
      };
      words[2 * half] = device::pack2<typename S::T>(scaled(all.x, 0), scaled(all.y, 1));
      words[2 * half + 1] = device::pack2<typename S::T>(scaled(all.z, 2), scaled(all.w, 3));
    }
    const int tile_row = unit.part * own_rows + own_row;
    auto* to = reinterpret_cast<float*>(hidden + device::swizzled(tile_row, octet));
    const float4 four = make_float4(__uint_as_float(words[0]), __uint_as_float(words[1]),
                                    __uint_as_float(words[2]), __uint_as_float(words[3]));
    for (int rank = 0; rank < p.parts; ++rank) device::send_to_cluster(to, four, came, rank);
    if (unit.row + tile_row >= unit.end || 8 * octet >= unit.columns) continue;
    auto* out = static_cast<unsigned short*>(p.out) + (unit.row + tile_row) * p.out_stride +
                p.groups[0].first_column + 8 * octet;
    *reinterpret_cast<uint4*>(out) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

/// y of this thread block's columns: a warpgroup has 64 of the 128 that a stage has weights of.
template <class S>
__device__ __forceinline__ void make_y(const ForwardParams& q, const Unit<S>& unit, Ring<S>* ring,
                                       unsigned char* smem) {
  using T = typename S::T;
  constexpr int kSums = 64 / 2;
  const int warpgroup = static_cast<int>(threadIdx.x) / kWarpgroup;
  const int warp = static_cast<int>(threadIdx.x) / 32 % 4,
            lane = static_cast<int>(threadIdx.x) % 32;
  const bool asks = threadIdx.x % kWarpgroup == 0;
  const auto take_stage = [&] { ring->full[ring->at.stage].wait(ring->at.round & 1); };
  const auto free_stage = [&] {
    release(*ring, ring->at.stage);
    ring->at.next();
  };
  const auto a = device::wgmma_descriptor(ring->tile, kBlockBytes);
  const int row = 16 * warp + lane / 4;
  const std::uint32_t blocks = ring->tile + S::kHiddenBytes + 2 * warpgroup * kBlockBytes;
  const std::uint32_t put = device::swizzled(16 * warp + lane / 8 % 2 * 8 + lane % 8, lane / 16);
  [[maybe_unused]] unsigned char* const tile_bytes = smem + S::kStages * S::kStageBytes;
  std::uint32_t block = blocks;
  for (int tile = unit.part; tile < q.column_tiles; tile += q.h.parts) {
    take_stage();
    const auto b =
        device::wgmma_descriptor(ring->stage() + warpgroup * kBlockBytes / S::kShare, kBlockBytes);
    float sum[kSums];
    device::wgmma_keep(sum);
    device::wgmma_fence();
    if constexpr (S::kShare > 1) {
      multiply_lines<S>(a, b, sum);
    } else {
#pragma unroll
      for (int k = 0; k < S::kColumns / 16; ++k) {
        device::wgmma<T, 64, Major::kDepth, Major::kDepth>(sum, a + k * device::kDescriptorStep,
                                                           b + k * device::kDescriptorStep, k > 0);
      }
    }
    device::wgmma_commit();
    if (asks) device::store_boxes_wait_read<1>();
    meet_warpgroup(warpgroup);
    device::wgmma_wait<0>();
    device::wgmma_keep(sum);
    free_stage();
    if (S::kShare == 1 && q.adds_base) {
      take_stage();
      const unsigned char* base =
          smem + ring->at.stage * S::kStageBytes + warpgroup * kBlockBytes + lane % 4 * 4;
#pragma unroll
      for (int i = 0; i < kSums / 2; ++i) {
        const auto* two =
            reinterpret_cast<const std::uint32_t*>(base + device::swizzled(row + i % 2 * 8, i / 2));
        const float2 v = device::unpack2<T>(*two);
        sum[2 * i] = v.x + sum[2 * i];
        sum[2 * i + 1] = v.y + sum[2 * i + 1];
      }
      __syncwarp();
      free_stage();
    }
    if constexpr (S::kShare > 1) {
      if (16 * warp < q.rows) put_lines<S>(tile_bytes + (block - ring->tile), sum);
    } else {
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        if (16 * warp >= q.rows) break;
        std::uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* v = sum + 4 * j + 2 * i;
          words[i] = device::pack2<T>(v[0], v[1]);
        }
        device::stmatrix_x4((block + put) ^ j * 16, words);
      }
    }
    device::fence_async_proxy();
    meet_warpgroup(warpgroup);
    if (asks) {
      device::store_box(q.out, tile * kForwardColumns + 64 * warpgroup, unit.row, block);
      device::store_boxes_commit();
    }
    block = 2 * blocks + kBlockBytes - block;
  }
  if (asks) device::store_boxes_wait_read();
}

/// Copies the stages of B, and of the base, after those of x and A; by one thread.
template <class S>
__device__ __forceinline__ void produce_weights(const ForwardParams& q, Ring<S>& ring,
                                                const Unit<S>& unit) {
  const auto next = [&](int rows) {
    ring.empty[ring.at.stage].wait((ring.at.round & 1) ^ 1);
    ring.full[ring.at.stage].arrive_and_expect(rows * device::kSwizzleBytes);
    return ring.full + ring.at.stage;
  };
  for (int tile = unit.part; tile < q.column_tiles; tile += q.h.parts) {
    const int column = tile * kForwardColumns;
    device::copy_box(ring.stage(), q.weights, 0, tile * S::kLines, next(S::kLines));
    ring.at.next();
    if (!q.adds_base) continue;
    device::Mbarrier* full = next(2 * q.rows);
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      device::copy_box(ring.stage() + block * kBlockBytes, q.h.base_map, column + 64 * block,
                       unit.row, full);
    }
    ring.at.next();
  }
}

template <class S>
__global__ void __launch_bounds__(kForwardThreads, 1)
    forward_kernel(const __grid_constant__ ForwardParams q) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char smem[];
  __shared__ device::Mbarrier received, came;
  const Params& p = q.h;
  Ring<S> ring(smem);
  const int sum_bytes = q.rows * S::kColumns * 4, share_bytes = q.rows * S::kColumns * 2;
  if (threadIdx.x == 0) {
    ring.init_barriers();
    received.init(1);
    came.init(1);
    device::Mbarrier::fence_init();
    received.arrive_and_expect(sum_bytes);
    came.arrive_and_expect(share_bytes);
  }
  if (threadIdx.x == kConsumers) {
    device::prefetch_tensor_map(p.a[0]);
    device::prefetch_tensor_map(p.b[0]);
    device::prefetch_tensor_map(q.weights);
    device::prefetch_tensor_map(q.out);
  }
  if (threadIdx.x < kConsumers) ask<S>(q, *ring.segments, static_cast<int>(blockIdx.x));
  device::cluster_arrive();
  device::cluster_wait();  // all blocks run, and their barriers are there
  device::pdl_begin(false);
  if (threadIdx.x >= kConsumers) {
    if (threadIdx.x == kConsumers) {
      for (int i = blockIdx.x; i < p.units; i += static_cast<int>(gridDim.x)) {
        const auto unit = unit_of<S>(q, *ring.segments, i);
        produce<S, true>(p, ring, unit, q.rows);
        produce_weights<S>(q, ring, unit);
      }
    }
    return;
  }
  unsigned char* const hidden = smem + S::kStages * S::kStageBytes;
  auto* const sums = reinterpret_cast<float*>(hidden + S::kHiddenBytes + S::kOutBytes);
  std::uint32_t parity = 0;
#pragma unroll 1
  for (int i = blockIdx.x; i < p.units; i += static_cast<int>(gridDim.x), parity ^= 1) {
    const auto unit = unit_of<S>(q, *ring.segments, i);
    float sum[S::kSums];
    multiply(p, unit, &ring, sum);
    send_sums<S>(unit.part, p.parts, sums, sum, &received, q.rows);
    received.wait(parity);
    // For the next tile, whose sums others send once they have this thread's share of h.
    if (threadIdx.x == 0) received.arrive_and_expect(sum_bytes);
    share_hidden(q, unit, sums, hidden, &came);
    came.wait(parity);
    // The same: others send theirs once they have this thread's sums of the next tile.
    if (threadIdx.x == 0) came.arrive_and_expect(share_bytes);
    device::fence_async_proxy();
    make_y(q, unit, &ring, smem);
  }
#endif
}

/// Rows of B that are a line of 128 bytes together, where these are 16 or 32 ranks side by side. Of
/// few rows of x the longer way of a column's sums to their place costs more than the copies.
int rows_of_line(const ForwardProduct& product, const ForwardPlan& plan) {
  const ProductOperand& b = product.b;
  constexpr int kFewRows = 56;  // of 32 ranks
  const bool pays = plan.parts == 2 && product.base.data == nullptr && b.stride == b.depth;
  const int share = b.depth == 16 ? 4 : b.depth == 32 && plan.rows >= kFewRows ? 2 : 1;
  return pays && b.rows % share == 0 ? share : 1;
}

template <class S>
void launch_shape(const char* op, const ForwardProduct& product, const ForwardPlan& plan,
                  Stream stream) {
  const ForwardParams q = make_forward_params<S>(op, product, plan);
  device::launch<forward_kernel<S>>(op, forward_launch<S>(q, plan, stream), q);
}

template <class T>
void launch_type(const char* op, const ForwardProduct& product, const ForwardPlan& plan,
                 Stream stream) {
  const int share = rows_of_line(product, plan);
  if (share == 4) return launch_shape<ForwardShape<T, 32, 4>>(op, product, plan, stream);
  if (share == 2) return launch_shape<ForwardShape<T, 32, 2>>(op, product, plan, stream);
  product.h.columns[0] <= 32 ? launch_shape<ForwardShape<T, 32, 1>>(op, product, plan, stream)
                             : launch_shape<ForwardShape<T, 64, 1>>(op, product, plan, stream);
}

}  // namespace

bool takes_forward(const ForwardProduct& product) {
  const Product& h = product.h;
  return h.offsets == nullptr && h.pairs == 1 && h.columns[0] <= kWideForwardRanks &&
         h.b[0].data != nullptr && !h.a[0].rows_dense && !h.b[0].rows_dense &&
         !product.b.rows_dense && takes_product(h.a[0]) && takes_product(h.b[0]) &&
         takes_product(product.b) &&
         (product.base.data == nullptr || takes_product(product.base)) &&
         device::takes_tensor_map(product.y, product.b.rows, h.a[0].rows, product.y_stride);
}

void launch_forward(const char* op, const ForwardProduct& product, const ForwardPlan& plan,
                    Stream stream) {
  check(takes_forward(product) && plan.parts > 1 && plan.parts <= kMostProductParts &&
            plan.rows > 0 && plan.rows % kForwardRowUnit == 0,
        op, ": no h and y in one launch");
  if (product.h.columns[0] > kForwardRanks || plan.rows > kForwardRows) {
    return launch_wide_forward(op, product, plan, stream);
  }
  product.h.dtype == DType::kFloat16 ? launch_type<__half>(op, product, plan, stream)
                                     : launch_type<__nv_bfloat16>(op, product, plan, stream);
}

}  // namespace mortar::lora::cuda
