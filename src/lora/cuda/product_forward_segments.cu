// SPDX-License-Identifier: Apache-2.0
// h = factor * drop(x) A^T, rounded, and y = h B^T in one launch for the rows of several adapters,
// up to 32 ranks of each, and for one adapter's with dropout, up to 64.
//
// bytes  = 2 M K + 2 M N + 2 M R; A and B of an adapter come from L2 for every tile of its rows
// 4096 rows, K = N = 4096, eight adapters: 68 MB, 15.8 us at 4.28 TB/s
// limit  : DRAM; with dropout also the draws, 240 clocks of all four schedulers for 64 rows and 64
//          columns, for which the DRAM takes some 370
// wrong  : more than eight adapters, whose operands have no room in a launch's parameters; and as
//          product_forward.cu
//
// As product_forward.cu, which see. Each adapter has tiles of its own where all of these run at
// once. Else tiles are windows of the batch, whatever adapters have rows there, so that all are
// full: of a window of two adapters both are multiplied, and each row keeps its own adapter's sum;
// one of more is done in several pieces.
// Seven more warps take stages in turns: they draw and put zeros in place of dropped elements, and
// load rows of B that are no whole pieces of 16 bytes.
#include "core/check.h"
#include "device/cluster.cuh"
#include "device/convert.cuh"
#include "device/launch.cuh"
#include "device/leaf_sums.cuh"
#include "device/pdl.cuh"
#include "device/thread_anew.cuh"
#include "device/wgmma.cuh"
#include "lora/cuda/product_forward.h"
#include "lora/cuda/product_forward_helpers.cuh"
#include "lora/cuda/product_forward_segments.cuh"
#include "lora/cuda/product_forward_segments_y.cuh"
#include "lora/cuda/product_params.cuh"

namespace mortar::lora::cuda {
namespace {

using namespace forward_segments;

/// Asks for the first lines of x and A, the offsets and the seed in L2, before what is before this
/// kernel has ended: of the adapter that would have the rows if all had as many.
__device__ __forceinline__ void ask(const SegmentParams& p) {
  const Part part(p);
  const int row = static_cast<int>(threadIdx.x) / 4, line = static_cast<int>(threadIdx.x) % 4;
  const int column = (part.first_step + line) * kProductStep;
  if (line < min(kAheadSteps, part.steps)) {
    const std::int64_t at = std::int64_t{blockIdx.x} * p.tile_rows + row;
    const int adapter = static_cast<int>(blockIdx.x) * p.segments / p.tiles;
    if (row < p.tile_rows && at < p.rows) device::prefetch_l2(p.x_data + at * p.x_stride + column);
    if (row < p.rank[adapter]) {
      device::prefetch_l2(p.a_data[adapter] + row * p.a_stride[adapter] + column);
    }
  }
  if (threadIdx.x == 0 && p.offsets != nullptr) device::prefetch_l2(p.offsets);
  if (threadIdx.x == 32 && p.rng != nullptr) device::prefetch_l2(p.rng);
}

/// x by A: a warpgroup has half of the adapter's ranks, or (kAdapters = 2) all of one of two.
template <class S, int kAdapters>
__device__ __forceinline__ void multiply(const SegmentParams& p, std::uint32_t smem,
                                         Barriers<S>& bars, device::RingCursor<S::kStages>& at,
                                         std::uint32_t& ready_rounds,
                                         float (&sum)[kAdapters * S::kSums]) {
  const Part part(p);
  const int thread = device::thread_anew();
  constexpr int kOwnRanks = kAdapters * S::kMmaColumns;
  const std::uint32_t own =
      smem + kBlockBytes + thread / kWarpgroup * (kOwnRanks * device::kSwizzleBytes);
  const auto release = [&](int stage) {
    if (stage >= 0 && thread % 32 == 0) bars.empty[stage].arrive();
  };
  // What is not written first would live from tile to tile.
  device::LeafSums<kAdapters * S::kSums, 2> tree{};
#pragma unroll
  for (float& v : sum) v = 0;
  int step = 0;
#pragma unroll 1
  for (int leaf = 0; leaf < p.leaves; ++leaf) {
    const int end = min(part.steps, (leaf + 1) * p.leaf_steps);
    if (step >= end) {
#pragma unroll
      for (float& v : sum) v = 0;
    }
    int last = -1;  // stage of the MMAs in flight
#pragma unroll 1
    for (; step < end; ++step, at.next()) {
      if (p.rng == nullptr) {
        bars.full[at.stage].wait(at.round & 1);
      } else {
        bars.ready[at.stage].wait(ready_rounds >> at.stage & 1);
        ready_rounds ^= 1u << at.stage;
      }
      const auto a = device::wgmma_descriptor(smem + at.stage * S::kStageBytes, kBlockBytes);
      const auto b = device::wgmma_descriptor(own + at.stage * S::kStageBytes, kBlockBytes);
      device::wgmma_keep(sum);
      device::wgmma_fence();
#pragma unroll
      for (int i = 0; i < kProductStep / 16; ++i) {
        device::wgmma<typename S::T, kOwnRanks>(sum, a + i * device::kDescriptorStep,
                                                b + i * device::kDescriptorStep,
                                                i > 0 || last >= 0);
      }
      device::wgmma_commit();
      device::wgmma_wait<1>();
      release(last);
      last = at.stage;
    }
    device::wgmma_wait<0>();
    device::wgmma_keep(sum);
    release(last);
    tree.add(leaf, sum);
  }
}

/// A thread's sums, to the thread blocks whose rows they are of (as send_sums() of
/// product_split.cuh): of two adapters a warpgroup sends its own rows, with all ranks.
template <class S, int kAdapters>
__device__ __forceinline__ void send_own(const SegmentParams& p, const Tile& tile, float* sums,
                                         const float (&sum)[kAdapters * S::kSums],
                                         device::Mbarrier* received) {
  const int thread = device::thread_anew(), lane = thread % 32, warpgroup = thread / kWarpgroup;
  const bool upper = lane % 2 == 1;
  const int row = thread % kWarpgroup / 32 * 16 + lane / 4 + (upper ? 8 : 0);
  const int own_rows = p.tile_rows / p.parts, owner = row / own_rows;
  const int column = (kAdapters == 1 ? warpgroup * S::kMmaColumns : 0) + lane % 4 / 2 * 4;
  float* to =
      sums + (static_cast<int>(blockIdx.y) * own_rows + row % own_rows) * S::kColumns + column;
  const bool sends = row < p.tile_rows && (kAdapters == 1 || (row < tile.cut) == (warpgroup == 0));
#pragma unroll
  for (int j = 0; j < kAdapters * S::kSums / 4; ++j) {
    const float4 four = trade_pairs(sum + 4 * j, upper);
    if (sends) device::send_to_cluster(to + 8 * j, four, received, owner);
  }
}

/// Sums this thread block's rows of h, stores them and sends them to the whole cluster.
template <class S>
__device__ __forceinline__ void share_hidden(const SegmentParams& p, const Tile& tile,
                                             const float* sums, unsigned char* hidden,
                                             device::Mbarrier* came) {
  constexpr int kOctets = S::kColumns / 8;
  const int own_rows = p.tile_rows / p.parts;
  for (int i = static_cast<int>(threadIdx.x); i < own_rows * kOctets; i += kConsumers) {
    const int own_row = i / kOctets, octet = i % kOctets;
    const int at = static_cast<int>(blockIdx.y) * own_rows + own_row;
    const int owner = tile.owner(at);
    const uint4 words = round_received<typename S::T, S>(sums, p.parts, own_rows, own_row,
                                                         8 * octet, p.factor[owner], p.rank[owner]);
    auto* to = reinterpret_cast<float*>(hidden + device::swizzled(at, octet));
    for (int rank = 0; rank < p.parts; ++rank) {
      device::send_to_cluster(to, as_floats(words), came, rank);
    }
    if (at >= tile.count || 8 * octet >= p.h_columns) continue;
    *reinterpret_cast<uint4*>(p.h + (tile.row + at) * p.h_stride + 8 * octet) = words;
  }
}

template <class S>
__global__ void __launch_bounds__(kSegmentThreads, 1)
    forward_segments_kernel(const __grid_constant__ SegmentParams p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char smem[];
  __shared__ Barriers<S> bars;
  __shared__ Rows rows;
  const int sum_bytes = p.tile_rows * S::kColumns * 4, share_bytes = p.tile_rows * S::kColumns * 2;
  if (threadIdx.x == 0) {
    bars.init(p.helps());
    bars.received.arrive_and_expect(sum_bytes);
    bars.came.arrive_and_expect(share_bytes);
  }
  if (threadIdx.x == kCopyAt) {
    device::prefetch_tensor_map(p.x);
    device::prefetch_tensor_map(p.y);
    for (int i = 0; i < p.segments; ++i) {
      device::prefetch_tensor_map(p.a[i]);
      if (p.b_data[i] == nullptr) device::prefetch_tensor_map(p.b[i]);
    }
  }
  device::cluster_arrive_relaxed();  // fence_init() has shown the barriers
  if (threadIdx.x < kConsumers) ask(p);
  device::cluster_wait();  // all blocks run, and their barriers are there
  device::pdl_begin(false);
  rows.read(p);
  __syncthreads();
  const std::uint32_t base = device::smem_address(smem);
  Walk walk(rows);
  if (threadIdx.x >= kCopyAt) {
    if (threadIdx.x == kCopyAt) copy_stages<S>(p, walk, base, bars);
    return;
  }
  if (threadIdx.x >= kConsumers) return help<S>(p, walk, smem, bars);
  auto* const sums = reinterpret_cast<float*>(smem + S::kSumsAt);
  device::RingCursor<S::kStages> at;
  std::uint32_t parity = 0, ready_rounds = 0;
#pragma unroll 1
  for (Tile tile; walk.next(p, &tile); parity ^= 1) {
    const bool two = S::kAdapters > 1 && tile.two();
    const auto make_h = [&](auto adapters) {
      constexpr int kAdapters = decltype(adapters)::value;
      float sum[kAdapters * S::kSums];
      multiply<S, kAdapters>(p, base, bars, at, ready_rounds, sum);
      send_own<S, kAdapters>(p, tile, sums, sum, &bars.received);
    };
    two ? make_h(std::integral_constant<int, S::kAdapters>())
        : make_h(std::integral_constant<int, 1>());
    bars.received.wait(parity);
    // For the next tile, whose sums others send once they have this thread's share of h.
    if (threadIdx.x == 0) bars.received.arrive_and_expect(sum_bytes);
    share_hidden<S>(p, tile, sums, smem + S::kHiddenAt, &bars.came);
    bars.came.wait(parity);
    // The same: others send theirs once they have this thread's sums of the next tile.
    if (threadIdx.x == 0) bars.came.arrive_and_expect(share_bytes);
    device::fence_async_proxy();
    two ? make_y<S, S::kAdapters>(p, tile, smem, bars, at) : make_y<S, 1>(p, tile, smem, bars, at);
  }
#endif
}

/// Rows of B that are a line of 128 bytes together, of 16 ranks side by side.
int rows_of_line(const SegmentForward& f, const ForwardPlan& plan) {
  constexpr int kRanks = 16, kShare = 4;
  bool pays = plan.parts == 2 && f.base.data == nullptr && f.b[0].rows % kShare == 0;
  for (int i = 0; i < f.h.segments; ++i) {
    pays = pays && f.b[i].depth == kRanks && f.b[i].stride == kRanks && takes_product(f.b[i]);
  }
  return pays ? kShare : 1;
}

template <class S>
void launch_shape(const char* op, const SegmentForward& f, const ForwardPlan& plan, Stream stream) {
  SegmentParams p{};
  static_assert(sizeof(p) <= 4096, "parameters of a launch");
  const Product& h = f.h;
  const ProductOperand &x = h.a[0], &first = f.b[0];
  device::set_tensor_map(p.x, h.dtype, x.data, x.depth, x.rows, x.stride, plan.rows);
  device::set_tensor_map(p.y, h.dtype, f.y, first.rows, x.rows, f.y_stride, plan.rows);
  p.adds_base = f.base.data != nullptr;
  if (p.adds_base) {
    device::set_tensor_map(p.base, h.dtype, f.base.data, first.rows, x.rows, f.base.stride,
                           plan.rows);
  }
  for (int i = 0; i < h.segments; ++i) {
    const ProductOperand &a = h.b[i], &b = f.b[i];
    device::set_tensor_map(p.a[i], h.dtype, a.data, a.depth, a.rows, a.stride, S::kRanks);
    if (S::kShare > 1) {
      device::set_tensor_map(p.b[i], h.dtype, b.data, kProductStep, b.rows / S::kShare,
                             kProductStep, S::kLines);
    } else if (takes_product(b)) {
      device::set_tensor_map(p.b[i], h.dtype, b.data, b.depth, b.rows, b.stride, S::kLines);
    } else {
      p.b_data[i] = static_cast<const unsigned short*>(b.data);
      p.b_stride[i] = b.stride;
      p.by_fours[i] = b.stride % 4 == 0 && reinterpret_cast<std::uintptr_t>(b.data) % 8 == 0;
      p.loads = true;
    }
    p.a_data[i] = static_cast<const unsigned short*>(a.data);
    p.a_stride[i] = a.stride;
    p.rank[i] = static_cast<int>(a.rows);
    p.factor[i] = h.factor[i];
    p.threshold[i] = h.rng == nullptr ? 0 : h.thresholds[i];
  }
  p.x_data = static_cast<const unsigned short*>(x.data);
  p.x_stride = x.stride;
  p.offsets = h.offsets;
  p.segments = h.segments;
  p.rng = h.rng;
  p.mask_columns = h.mask_columns;
  p.mask_first = h.mask_first;
  p.rows = x.rows;
  p.out_columns = first.rows;
  p.tiles = static_cast<int>(ceil_div<std::int64_t>(x.rows, plan.rows));
  p.tile_rows = plan.rows;
  p.parts = plan.parts;
  p.leaves = plan.leaves;
  p.leaf_steps = static_cast<int>(plan.leaf / kProductStep);
  p.part_steps = p.leaf_steps * plan.leaves;
  p.steps = static_cast<int>(ceil_div<std::int64_t>(x.depth, kProductStep));
  check(p.part_steps * plan.parts >= p.steps && plan.leaves <= kMostForwardLeaves, op,
        ": parts that leave some columns out");
  p.column_tiles = static_cast<int>(ceil_div<std::int64_t>(first.rows, kForwardColumns));
  p.h = static_cast<unsigned short*>(h.out) + h.first_column[0];
  p.h_columns = static_cast<int>(h.columns[0]);
  p.h_stride = h.out_stride;
  p.y_data = static_cast<unsigned short*>(f.y);
  p.y_stride = f.y_stride;
  // Tiles of segments apart are as many more as leave their last one half empty.
  const int most = p.tiles + p.segments - 1;
  const int clusters = plan.clusters > 0 ? std::min(most, plan.clusters) : p.tiles;
  device::Launch l = cluster_launch(clusters, plan.parts, kSegmentThreads, S::kSmem, stream);
  l.carve_out = true;
  device::launch<forward_segments_kernel<S>>(op, l, p);
}

template <class T>
void launch_type(const char* op, const SegmentForward& f, const ForwardPlan& plan, Stream stream) {
  if (rows_of_line(f, plan) > 1) {
    return launch_shape<SegmentShape<T, 32, 4>>(op, f, plan, stream);
  }
  f.h.columns[0] <= 32 ? launch_shape<SegmentShape<T, 32, 1>>(op, f, plan, stream)
                       : launch_shape<SegmentShape<T, 64, 1>>(op, f, plan, stream);
}

}  // namespace

bool takes_forward(const SegmentForward& f) {
  const Product& h = f.h;
  const ProductOperand& x = h.a[0];
  bool takes = h.pairs == 1 && h.segments <= kMostProductPairs &&
               h.columns[0] <= (h.segments > 1 ? kForwardRanks / 2 : kForwardRanks) &&
               takes_product(x) && (f.base.data == nullptr || takes_product(f.base)) &&
               device::takes_tensor_map(f.y, f.b[0].rows, x.rows, f.y_stride) &&
               (h.rng == nullptr || (h.mask_columns | h.mask_first) % train::kMaskGroup == 0);
  for (int i = 0; i < h.segments; ++i) {
    takes = takes && h.b[i].data != nullptr && takes_product(h.b[i]) && !h.b[i].rows_dense &&
            f.b[i].data != nullptr && !f.b[i].rows_dense;
  }
  return takes;
}

void launch_forward(const char* op, const SegmentForward& f, const ForwardPlan& plan,
                    Stream stream) {
  check(takes_forward(f) && plan.parts > 1 && plan.parts <= kMostProductParts && plan.rows > 0 &&
            plan.rows <= kForwardRows && plan.rows % kForwardRowUnit == 0,
        op, ": no h and y of segments in one launch");
  f.h.dtype == DType::kFloat16 ? launch_type<__half>(op, f, plan, stream)
                               : launch_type<__nv_bfloat16>(op, f, plan, stream);
}

}  // namespace mortar::lora::cuda
