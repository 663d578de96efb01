// SPDX-License-Identifier: Apache-2.0
// h = factor * x A^T, rounded, and y = h B^T in one launch, for up to 64 ranks.
//
// h[m, j] = factor sum_k x[m, k] A[j, k],  y[m, n] = sum_j h[m, j] B[n, j]
// bytes  = 2 M K + 2 M N + 2 M R; A and B come from L2 for every 64 rows
// FLOP   = 2 M R (K + N): never the limit
// 4096 rows, K = N = 4096, R = 64: 68 MB, 15.8 us at 4.28 TB/s
// limit  : DRAM, which mostly reads at first and writes at the end; of few thread blocks what an SM
//          takes in, 66 KB a microsecond, and lets out, 30
// wrong  : so many rows that clusters of 128 have more than two rounds, and few thread blocks for a
//          wide y (512 x 4096 x 14336, rank 8: 14.1 us for 10.6)
//
// A cluster has up to 64 rows, or two halves of up to 64 each, as few as let all tiles run at once
// (an MMA's other rows are not looked at), and each of its thread blocks some of the leaves of K,
// as in product_split.cu: stages come by TMA, sums pass by st.async or, of two
// halves, by the copy engine. A thread block rounds h
// of some rows, stores it and sends it to all others of the cluster; then each makes every so many
// columns of y. B comes through the same ring and is there before h is, and so does a base. Apart,
// y begins some 3 us after the last sum of h: h's stores, the end of a kernel, the start of the
// next, and h from L2. x leaves L2 first, as nobody reads it again: 1 us of 23.
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

/// Floats of a row of sums of so many octets of columns that the copy engine takes: of four rows
/// no two begin at the same banks.
constexpr int padded_sums(int octets) { return 8 * (octets | 1); }

/// kRanks: 32 or 64, of two halves also 16. A stage has room for 64 columns of x and A, or for 128
/// columns of B.
/// kShare: columns of B that share a row of 128 bytes, as they lie side by side. kHalves: of a
/// tile's rows, up to 64 each; a warpgroup makes h of all columns of one of two.
template <int kRanks, int kShare_, int kHalves_>
struct ForwardShape : Shape<AnyFloat16, kRanks, Major::kDepth, Major::kDepth, ProductEnd::kStore, 2,
                            true, false, kHalves_ == 1> {
  static constexpr int kShare = kShare_, kLines = kForwardColumns / kShare, kHalves = kHalves_;
  static constexpr int kTileRows = kHalves * kForwardRows, kBoxes = kHalves;
  static constexpr int kStageBytes = std::max(kForwardColumns * device::kSwizzleBytes,
                                              (kTileRows + kRanks) * device::kSwizzleBytes);
  static constexpr bool kCopiesSums = kHalves == 2;
  static constexpr int kSumsPitch = kCopiesSums ? padded_sums(kRanks / 8) : kRanks;
  static constexpr int kSumBytes = kTileRows * kSumsPitch * 4;
  static constexpr int kHiddenBytes = kTileRows * device::kSwizzleBytes;
  /// Two blocks of 64 rows and columns of each warpgroup, on their way out; sums before that.
  static constexpr int kOutBytes =
      kCopiesSums ? std::max(4 * kBlockBytes, kSumBytes) : 4 * kBlockBytes;
  static constexpr int kTileBytes = kHiddenBytes + kOutBytes + kSumBytes;
  static constexpr int kStages = (kStoreRingBytes - kTileBytes - kBarrierBytes) / kStageBytes;
  static constexpr int kSmem = kStages * kStageBytes + kTileBytes +
                               2 * kStages * static_cast<int>(sizeof(device::Mbarrier)) +
                               static_cast<int>(sizeof(Segments));
};

/// Octets of columns of h whose sums, and then h, pass between thread blocks: all, or (of up to 64
/// rows) those that h has.
template <class S>
__device__ __forceinline__ int sent_octets(const Params& p) {
  return S::kCopiesSums ? S::kColumns / 8 : min((p.columns[0] + 7) / 8, S::kColumns / 8);
}

/// Zeros for the others, which MMAs read as well.
template <class S>
__device__ __forceinline__ void clear_hidden(unsigned char* hidden, int octets) {
  constexpr int kOctets = S::kColumns / 8;
  if (octets == kOctets) return;
  for (int i = static_cast<int>(threadIdx.x); i < S::kTileRows * kOctets; i += kConsumers) {
    if (i % kOctets < octets) continue;
    auto* to = hidden + i / kOctets / kForwardRows * kBlockBytes +
               device::swizzled(i / kOctets % kForwardRows, i % kOctets);
    *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
  }
  device::fence_async_proxy();
  meet_consumers();
}

/// Sums this thread block's rows of h, stores them and sends them to the whole cluster.
template <class T, class S>
__device__ __forceinline__ void share_hidden(const ForwardParams& q, const Unit<S>& unit,
                                             const float* sums, unsigned char* hidden,
                                             device::Mbarrier* came) {
  const Params& p = q.h;
  constexpr int kOctets = S::kColumns / 8;
  const int own_rows = p.tile_rows / p.parts;
  const float factor = p.factor[0];
  const int live = p.live[0], octets = sent_octets<S>(p);
  for (int i = threadIdx.x; i < own_rows * kOctets; i += kConsumers) {
    const int own_row = i / kOctets, octet = i % kOctets;
    if (octet >= octets) continue;
    const int tile_row = unit.part * own_rows + own_row;
    const uint4 words =
        round_received<T, S>(sums, p.parts, own_rows, own_row, 8 * octet, factor, live);
    const int half = tile_row < q.half_rows ? 0 : 1;
    auto* to = reinterpret_cast<float*>(hidden + half * kBlockBytes +
                                        device::swizzled(tile_row - half * q.half_rows, octet));
    for (int rank = 0; rank < p.parts; ++rank) {
      device::send_to_cluster(to, as_floats(words), came, rank);
    }
    if (unit.row + tile_row >= unit.end || 8 * octet >= unit.columns) continue;
    auto* out = static_cast<unsigned short*>(p.out) + (unit.row + tile_row) * p.out_stride +
                p.groups[0].first_column + 8 * octet;
    *reinterpret_cast<uint4*>(out) = words;
  }
}

/// y of this thread block's columns: a warpgroup has 64 of the 128 that a stage has weights of.
template <class T, class S>
__device__ __forceinline__ void make_y(const ForwardParams& q, const Unit<S>& unit, Ring<S>* ring,
                                       unsigned char* smem) {
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
    float sums[S::kHalves][kSums];
#pragma unroll
    for (auto& sum : sums) device::wgmma_keep(sum);
    device::wgmma_fence();
#pragma unroll
    for (int half = 0; half < S::kHalves; ++half) {
      const auto own = a + half * (kBlockBytes / 16);
      if constexpr (S::kShare > 1) {
        multiply_lines<T, S>(own, b, sums[half]);
      } else {
#pragma unroll
        for (int k = 0; k < S::kColumns / 16; ++k) {
          device::wgmma<T, 64, Major::kDepth, Major::kDepth>(
              sums[half], own + k * device::kDescriptorStep, b + k * device::kDescriptorStep,
              k > 0);
        }
      }
    }
    device::wgmma_commit();
#pragma unroll
    for (int half = 0; half < S::kHalves; ++half) {
      auto& sum = sums[half];
      if (asks) device::store_boxes_wait_read<1>();
      meet_warpgroup(warpgroup);
      if (half == 0) {
        device::wgmma_wait<0>();
#pragma unroll
        for (auto& each : sums) device::wgmma_keep(each);
        free_stage();
      }
      if (S::kShare == 1 && q.adds_base) {
        take_stage();
        const unsigned char* base =
            smem + ring->at.stage * S::kStageBytes + warpgroup * kBlockBytes + lane % 4 * 4;
        add_base<T>(base, row, sum);
        __syncwarp();
        free_stage();
      }
      if constexpr (S::kShare > 1) {
        if (16 * warp < q.half_rows) put_lines<T, S>(tile_bytes + (block - ring->tile), sum);
      } else {
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
          if (16 * warp >= q.half_rows) break;
          device::store_rounded<T>((block + put) ^ j * 16, sum + 4 * j);
        }
      }
      device::fence_async_proxy();
      meet_warpgroup(warpgroup);
      if (asks) {
        device::store_box(q.out, tile * kForwardColumns + 64 * warpgroup,
                          unit.row + half * q.half_rows, block);
        device::store_boxes_commit();
      }
      block = 2 * blocks + kBlockBytes - block;
    }
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
    for (int half = 0; half < S::kHalves; ++half, ring.at.next()) {
      device::Mbarrier* full = next(2 * q.half_rows);
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        device::copy_box(ring.stage() + block * kBlockBytes, q.h.base_map, column + 64 * block,
                         unit.row + half * q.half_rows, full);
      }
    }
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
  const int octets = sent_octets<S>(p);
  make_barriers(q, ring, received, p.tile_rows * (S::kCopiesSums ? S::kSumsPitch : 8 * octets) * 4,
                came, 8 * octets);
  // fence_init() has shown the barriers: an arrival that releases would wait for all memory.
  device::cluster_arrive_relaxed();
  const Unit<S> unit(p, *ring.segments, static_cast<int>(blockIdx.x));
  ask(q, unit);
  device::cluster_wait();  // all blocks run, and their barriers are there
  device::pdl_begin(false);
  if (threadIdx.x >= kConsumers) {
    if (threadIdx.x == kConsumers) {
      produce<S, true, S::kHalves>(p, ring, unit);
      produce_weights<S>(q, ring, unit);
    }
    return;
  }
  unsigned char* const hidden = smem + S::kStages * S::kStageBytes;
  auto* const out = reinterpret_cast<float*>(hidden + S::kHiddenBytes);
  float* const sums = out + S::kOutBytes / 4;
  clear_hidden<S>(hidden, octets);
  device::visit_checked_dtype(Float16DTypes(), p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    float sum[S::kSums];
    multiply<S, T>(p, unit, &ring, sum);
    if constexpr (S::kCopiesSums) {
      copy_sums<S>(unit.part, p.parts, sums, out, sum, &received, p.tile_rows);
    } else {
      send_sums<S>(unit.part, p.parts, sums, sum, &received, p.tile_rows, octets);
    }
    received.wait(0);
    share_hidden<T>(q, unit, sums, hidden, &came);
    came.wait(0);
    device::fence_async_proxy();
    make_y<T>(q, unit, &ring, smem);
  });
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
  device::launch<forward_kernel<S>>(op, forward_launch<S>(q, plan, kForwardThreads, stream), q);
}

void launch_ranks(const char* op, const ForwardProduct& product, const ForwardPlan& plan,
                  Stream stream) {
  const std::int64_t ranks = product.h.columns[0];
  if (plan.rows > kForwardRows) {
    if (ranks <= 16) return launch_shape<ForwardShape<16, 1, 2>>(op, product, plan, stream);
    if (ranks <= 32) return launch_shape<ForwardShape<32, 1, 2>>(op, product, plan, stream);
    return launch_shape<ForwardShape<64, 1, 2>>(op, product, plan, stream);
  }
  const int share = rows_of_line(product, plan);
  if (share == 4) return launch_shape<ForwardShape<32, 4, 1>>(op, product, plan, stream);
  if (share == 2) return launch_shape<ForwardShape<32, 2, 1>>(op, product, plan, stream);
  ranks <= 32 ? launch_shape<ForwardShape<32, 1, 1>>(op, product, plan, stream)
              : launch_shape<ForwardShape<64, 1, 1>>(op, product, plan, stream);
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
            plan.rows > 0 && plan.rows <= kTallForwardRows && plan.rows % kForwardRowUnit == 0,
        op, ": no h and y in one launch");
  if (product.h.columns[0] > kForwardRanks) return launch_wide_forward(op, product, plan, stream);
  launch_ranks(op, product, plan, stream);
}

}  // namespace mortar::lora::cuda
