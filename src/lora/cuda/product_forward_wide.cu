// SPDX-License-Identifier: Apache-2.0
// h = factor * x A^T, rounded, and y = h B^T in one launch, for up to 128 ranks.
//
// bytes  = 2 M K + 2 M N + 2 M R; A and B come from L2 for every tile of rows
// FLOP   = 2 M R (K + N)
// 8192 rows, K = N = 4096, R = 128: 136 MB, 31.8 us at 4.28 TB/s; 17 GFLOP, 24 us at 700 TFLOP/s
// limit  : what passes through an SM's shared memory, 2 MB there at some 52 KB a microsecond
// wrong  : more rows than fit the device in tiles of 128
//
// As product_forward.cu, but a cluster has up to 128 rows, so that A and B come half as often. Each
// warp has 16 rows of h, and a thread block adds those of some warps, whose lanes get the sums of
// the same lanes of other blocks. What they round goes to all thread blocks of the cluster, whose
// warpgroups then make half of the rows of y each, and multiply 128 columns while they store those
// before.
#include "device/cluster.cuh"
#include "device/convert.cuh"
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "device/stmatrix.cuh"
#include "device/tensor_copy.cuh"
#include "device/wgmma.cuh"
#include "lora/cuda/product_forward_params.cuh"
#include "lora/cuda/product_multiply.cuh"
#include "lora/cuda/product_split.cuh"

namespace mortar::lora::cuda {
namespace {

using namespace product;

/// A stage has room for 64 columns of x and A, or for 128 columns of B or of a base.
struct WideForwardShape : Shape<AnyFloat16, kWideForwardRanks, Major::kDepth, Major::kDepth,
                                ProductEnd::kStore, 1, true> {
  static constexpr int kLines = kForwardColumns, kShare = 1;
  static constexpr int kTileRows = kWideForwardRows, kHalves = 2, kBoxes = 1;
  static constexpr int kRankBlock = kWideForwardRows * device::kSwizzleBytes;  ///< 64 ranks of h
  static constexpr int kHiddenBytes = kWideForwardRanks / 64 * kRankBlock;
  /// All parts' sums for a thread block's rows; then boxes of y on their way out, two pairs of each
  /// warpgroup.
  static constexpr int kSumBytes = kWideForwardRows * kWideForwardRanks * 4;
  static_assert(2 * 4 * kBlockBytes <= kSumBytes, "y has room");
  static constexpr int kTileBytes = kHiddenBytes + kSumBytes;
  static constexpr int kStages = (kStoreRingBytes - kTileBytes) / kStageBytes;
  static constexpr int kSmem = kStages * kStageBytes + kTileBytes +
                               2 * kStages * static_cast<int>(sizeof(device::Mbarrier)) +
                               static_cast<int>(sizeof(Segments));
};

/// Which warps' rows a thread block finishes: as many neighbours' as any other, but for the last.
struct Owners {
  int warps, each;  ///< that have rows; of a thread block

  __device__ __forceinline__ Owners(int rows, int parts)
      : warps(rows / 16), each((warps + parts - 1) / parts) {}
  __device__ __forceinline__ int of(int warp) const { return warp / each; }
  __device__ __forceinline__ int count(int part) const {
    return max(0, min(each, warps - part * each));
  }
};

/// The whole sums of this warp's rows, if they are this thread block's; else they go to the one
/// that has them. All parts' lie in its shared memory, warp by warp.
template <class S>
__device__ __forceinline__ bool gather_sums(const Unit<S>& unit, int parts, const Owners& owners,
                                            float4* sums, device::Mbarrier* received,
                                            float (&sum)[S::kSums]) {
  constexpr int kVectors = S::kSums / 4, kLanes = 32;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  if (warp >= owners.warps) return false;
  const int owner = owners.of(warp), plane = owners.each * kVectors * kLanes;
  float4* const first = sums + warp % owners.each * kVectors * kLanes + lane;
  float4* const to = first + unit.part * plane;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    float v[4] = {sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]};
    device::wgmma_keep(v);  // else all sums are words from the start, copied beside MMAs
    const float4 four = make_float4(v[0], v[1], v[2], v[3]);
    if (owner == unit.part) {
      to[i * kLanes] = four;
    } else {
      device::send_to_cluster(reinterpret_cast<float*>(to + i * kLanes), four, received, owner);
    }
  }
  if (owner != unit.part) return false;
  received->wait(0);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    float4 v[kMostProductParts];
#pragma unroll
    for (int part = 0; part < kMostProductParts; ++part) {
      if (part < parts) v[part] = first[part * plane + i * kLanes];
    }
    const float4 all = device::sum_of_parts(v, parts);
    sum[4 * i] = all.x, sum[4 * i + 1] = all.y, sum[4 * i + 2] = all.z, sum[4 * i + 3] = all.w;
  }
  return true;
}

/// Rounds this warp's rows of h, stores them and sends them to the whole cluster.
template <class T, class S>
__device__ __forceinline__ void share_hidden(const Params& p, const Unit<S>& unit, int end,
                                             const float (&sum)[S::kSums], unsigned char* hidden,
                                             device::Mbarrier* came) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int g = 0; g < S::kColumns / 32; ++g) {
    const int octet = 4 * g + lane % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      std::uint32_t words[4];
      round_row<T>(words, sum + 16 * g + 2 * half);
      const int row = 16 * warp + 8 * half + lane / 4;
      auto* to = reinterpret_cast<float*>(hidden + octet / 8 * S::kRankBlock +
                                          device::swizzled(row, octet % 8));
      const float4 four = make_float4(__uint_as_float(words[0]), __uint_as_float(words[1]),
                                      __uint_as_float(words[2]), __uint_as_float(words[3]));
      for (int rank = 0; rank < p.parts; ++rank) device::send_to_cluster(to, four, came, rank);
      if (unit.row + row >= end || 8 * octet >= unit.columns) continue;
      auto* out = static_cast<unsigned short*>(p.out) + (unit.row + row) * p.out_stride +
                  p.groups[0].first_column + 8 * octet;
      *reinterpret_cast<uint4*>(out) = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

/// y of this thread block's columns: each warpgroup has half of the rows, and multiplies 128
/// columns while it stores those before.
template <class T, class S>
class MakeY {
 public:
  __device__ __forceinline__ MakeY(const ForwardParams& q, const Unit<S>& unit, Ring<S>* ring,
                                   unsigned char* smem)
      : q_(q),
        ring_(*ring),
        smem_(smem),
        warpgroup_(static_cast<int>(threadIdx.x) / kWarpgroup),
        asks_(threadIdx.x % kWarpgroup == 0) {
    const int warp = static_cast<int>(threadIdx.x) / 32 % 4,
              lane = static_cast<int>(threadIdx.x) % 32;
    const int own_rows = q.half_rows, first = warpgroup_ * own_rows;
    has_rows_ = 16 * warp < own_rows;
    row_ = first + 16 * warp + lane / 4;
    first_row_ = unit.row + first;
    hidden_ = ring->tile + first * device::kSwizzleBytes;
    put_ = device::swizzled(16 * warp + lane / 8 % 2 * 8 + lane % 8, lane / 16);
    box_ = ring->tile + S::kHiddenBytes + warpgroup_ * kBoxes * kBlockBytes;
    boxes_sum_ = 2 * box_ + kBoxes / 2 * kBlockBytes;
  }

  __device__ __forceinline__ void run(int first_tile) {
    const int step = q_.h.parts;
#pragma unroll 1
    for (int tile = first_tile; tile < q_.column_tiles; tile += 2 * step) {
      float sum[kSums], next_sum[kSums];
      const Stages own = start(sum, true);
      const bool more = tile + step < q_.column_tiles;
      const Stages next = start(next_sum, more);
      device::wgmma_wait<1>();
      finish(sum, own, tile);
      device::wgmma_wait<0>();
      device::wgmma_keep(next_sum);
      if (more) finish(next_sum, next, tile + step);
    }
    if (asks_) device::store_boxes_wait_read();
  }

 private:
  static constexpr int kSums = kForwardColumns / 2, kBoxes = 4;  ///< two for 128 columns
  /// Those of the weights and of the base, and its place in the ring's rounds.
  struct Stages {
    int weights, base;
    std::uint32_t base_round;
  };

  /// Multiplies the next 128 columns; if there are no more, what nobody looks at.
  __device__ __forceinline__ Stages start(float (&sum)[kSums], bool more) {
    Stages own{ring_.at.stage, -1, 0};
    if (more) {
      ring_.full[own.weights].wait(ring_.at.round & 1);
      ring_.at.next();
      if (q_.adds_base) {
        own.base = ring_.at.stage;
        own.base_round = ring_.at.round;
        ring_.at.next();
      }
    }
    const std::uint32_t weights = ring_.stages + own.weights * S::kStageBytes;
    device::wgmma_keep(sum);
    device::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kWideForwardRanks / 64; ++k) {
      const auto h = device::wgmma_descriptor(hidden_ + k * S::kRankBlock);
      const auto b =
          device::wgmma_descriptor(weights + k * kForwardColumns * device::kSwizzleBytes);
#pragma unroll
      for (int i = 0; i < kProductStep / 16; ++i) {
        device::wgmma<T, kForwardColumns>(sum, h + i * device::kDescriptorStep,
                                          b + i * device::kDescriptorStep, k + i > 0);
      }
    }
    device::wgmma_commit();
    return own;
  }

  /// Stores columns that have been multiplied.
  __device__ __forceinline__ void finish(float (&sum)[kSums], const Stages& own, int tile) {
    device::wgmma_keep(sum);
    release(ring_, own.weights);
    if (own.base >= 0) add_base(sum, own);
    if (asks_) device::store_boxes_wait_read<1>();
    meet_warpgroup(warpgroup_);
#pragma unroll
    for (int j = 0; j < kForwardColumns / 8; j += 2) {
      if (!has_rows_) break;
      device::store_rounded<T>((box_ + j / 8 * kBlockBytes + put_) ^ j % 8 * 16, sum + 4 * j);
    }
    device::fence_async_proxy();
    meet_warpgroup(warpgroup_);
    if (asks_) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        device::store_box(q_.out, tile * kForwardColumns + 64 * half, first_row_,
                          box_ + half * kBlockBytes);
      }
      device::store_boxes_commit();
    }
    box_ = boxes_sum_ - box_;
  }

  __device__ __forceinline__ void add_base(float (&sum)[kSums], const Stages& own) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    ring_.full[own.base].wait(own.base_round & 1);
    const unsigned char* from = smem_ + own.base * S::kStageBytes + lane % 4 * 4;
#pragma unroll
    for (int i = 0; i < kSums / 2; ++i) {
      const int half = i / 16;
      const auto* two = reinterpret_cast<const std::uint32_t*>(
          from + half * kWideForwardRows * device::kSwizzleBytes +
          device::swizzled(row_ + i % 2 * 8, i / 2 % 8));
      const float2 v = device::unpack2<T>(*two);
      sum[2 * i] = v.x + sum[2 * i];
      sum[2 * i + 1] = v.y + sum[2 * i + 1];
    }
    __syncwarp();
    release(ring_, own.base);
  }

  const ForwardParams& q_;
  Ring<S>& ring_;
  unsigned char* const smem_;
  const int warpgroup_;
  const bool asks_;  ///< for the copies of its warpgroup
  bool has_rows_;    ///< this warp
  int row_;          ///< of the tile, this thread's first
  int first_row_;    ///< of y, the warpgroup's
  std::uint32_t hidden_, put_;
  std::uint32_t box_, boxes_sum_;  ///< where the next columns leave from, in turns
};

/// Copies the stages of B, and of the base, after those of x and A; by one thread.
template <class S>
__device__ __forceinline__ void produce_weights(const ForwardParams& q, Ring<S>& ring,
                                                const Unit<S>& unit) {
  const auto copy = [&](const CUtensorMap& map, int rows, int column, int row) {
    ring.empty[ring.at.stage].wait((ring.at.round & 1) ^ 1);
    device::Mbarrier* full = ring.full + ring.at.stage;
    full->arrive_and_expect(2 * rows * device::kSwizzleBytes);
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      device::copy_box(ring.stage() + block * kWideForwardRows * device::kSwizzleBytes, map,
                       column + 64 * block, row, full);
    }
    ring.at.next();
  };
  for (int tile = unit.part; tile < q.column_tiles; tile += q.h.parts) {
    const int column = tile * kForwardColumns;
    copy(q.weights, kForwardColumns, 0, column);
    if (q.adds_base) copy(q.h.base_map, q.h.tile_rows, column, unit.row);
  }
}

template <class S>
__global__ void __launch_bounds__(kThreads, 1)
    wide_forward_kernel(const __grid_constant__ ForwardParams q) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char smem[];
  __shared__ device::Mbarrier received, came;
  const Params& p = q.h;
  Ring<S> ring(smem);
  const Owners owners(p.tile_rows, p.parts);
  const int own_sums = owners.count(static_cast<int>(blockIdx.y)) * 16 * S::kColumns;
  make_barriers(q, ring, received, (p.parts - 1) * own_sums * 4, came);
  const Unit<S> unit(p, *ring.segments, static_cast<int>(blockIdx.x));
  ask(q, unit);
  // (8192 x 4096 x 4096, rank 128, on an H200, with a relaxed arrival before the unit: 44.4 us for
  // 44.1.)
  device::cluster_arrive();
  device::cluster_wait();  // all blocks run, and their barriers are there
  device::pdl_begin(false);
  if (threadIdx.x >= kConsumers) {
    device::fewer_registers<S::kProducerRegisters>();
    if (threadIdx.x == kConsumers) {
      produce<S, true>(p, ring, unit);
      produce_weights<S>(q, ring, unit);
    }
    return;
  }
  device::more_registers<S::kConsumerRegisters>();
  unsigned char* const hidden = smem + S::kStages * S::kStageBytes;
  device::visit_checked_dtype(Float16DTypes(), p.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    float sum[S::kSums];
    multiply<S, T>(p, unit, &ring, sum);
    if (gather_sums<S>(unit, p.parts, owners, reinterpret_cast<float4*>(hidden + S::kHiddenBytes),
                       &received, sum)) {
      scale_sums<S>(p, unit, sum);
      share_hidden<T, S>(p, unit, min(unit.end, unit.row + p.tile_rows), sum, hidden, &came);
    }
    came.wait(0);
    device::fence_async_proxy();  // the others' stores of h
    MakeY<T, S>(q, unit, &ring, smem).run(unit.part);
  });
#endif
}

}  // namespace

void launch_wide_forward(const char* op, const ForwardProduct& product, const ForwardPlan& plan,
                         Stream stream) {
  check(
      plan.rows <= kWideForwardRows && plan.rows % 16 == 0 && plan.leaves <= kMostWideForwardLeaves,
      op, ": no h and y of so many ranks in one launch");
  using S = WideForwardShape;
  const ForwardParams q = make_forward_params<S>(op, product, plan);
  device::launch<wide_forward_kernel<S>>(op, forward_launch<S>(q, plan, kThreads, stream), q);
}

}  // namespace mortar::lora::cuda
