// SPDX-License-Identifier: Apache-2.0
// h = x A^T on the warpgroup tensor cores of sm_90a, for many tokens per adapter.
//
// h[s, t, r] = sum_k x[t, k] A_{a(t), s}[r, k]      K hidden, R = sum over slices of ranks
// bytes  = 2 M K (x, once for all slices) + 2 K sum_a R_a (A of the adapters in use) + h
// FLOP   = 2 M K R: 13 us at R = 192 at the rate of wgmma
// 8192 tokens, K=4096, 16 adapters: 73 MB (R=48) -> 17 us, 92 MB (R=192) -> 22 us
// limit  : DRAM, and L2 beside it: 128 tokens read A once, R / 128 of x's bytes
// wrong  : few tokens (tiles of 16 start sooner), rows that are not 16-byte aligned
//
// A CTA takes one to three tiles of 64 tokens of one adapter, a warpgroup each, and up to kRows
// rank rows of all its slices taken together. One further warpgroup or two stream K through a ring
// of cp.async stages in the swizzle that wgmma reads, with the rows' pointers in registers.
// Float32 A under a bfloat16 x is split into parts on its way to the ring: shrink_wgmma_parts.cuh.
// Summation: a leaf of K is one chain of MMA steps from zero, with parts a sum of four; the first
// half of the leaves is added in order, then the second half, then both halves. A cluster of two
// CTAs takes a half each, a grid some leaves each, whose sums are slabs (those that begin a half
// one slab), or one CTA both halves: the same bits.
#include <cstddef>
#include <iterator>
#include <type_traits>
#include <utility>

#include "device/async_copy.cuh"
#include "device/barrier.cuh"
#include "device/cluster.cuh"
#include "device/convert.cuh"
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "device/ring.cuh"
#include "device/swizzle.cuh"
#include "device/wgmma.cuh"
#include "lora/cuda/backend.cuh"
#include "lora/cuda/multiply_stage.cuh"
#include "lora/cuda/row_pieces.cuh"
#include "lora/cuda/shrink_wgmma_parts.cuh"
#include "lora/cuda/shrink_wgmma_traits.cuh"
#include "lora/cuda/store_sums.cuh"

namespace mortar::lora::cuda {
namespace {

using namespace wgmma_shrink;

/// Asks for x of the first stages in L2, whether it is complete yet or not: of a leaf that is half
/// of it or all, and consumers have nothing else to do until the predecessor ends. (us, with and
/// without: 1,281 tokens of 9 adapters, rank 4, 13,312 to 16,384, 32.7 and 34.1; but where a CTA
/// has half of K 19.9 and 19.2, 374 of 23, qkv, ranks up to 64.)
template <class Tr>
__device__ __forceinline__ void ask_for_tokens(const ShrinkParams& p, const Shared<Tr>& shared) {
  if (Tr::kShare != Share::kLeaf || !p.early) return;
  constexpr int kLines = 2;  // of 128 bytes, a stage each, for every one of two threads
  const Range r = range_of<Tr>(p);
  const int thread = static_cast<int>(threadIdx.x), first = thread / Tr::kTokens * kLines;
  const auto* x = static_cast<const typename Tr::T*>(shared.tokens[thread % Tr::kTokens]);
#pragma unroll
  for (int i = first; i < first + kLines; ++i) {
    const int k = r.k_begin + i * kTileK;
    if (x != nullptr && k < r.k_end) device::prefetch_l2(x + k);
  }
}

/// Fills the ring: the weights of the first stages before the predecessor's end is awaited.
template <class Tr>
__device__ __forceinline__ void produce(const RingParams& p, Shared<Tr>& shared,
                                        std::uint32_t ring) {
  using T = typename Tr::T;
  const int thread = static_cast<int>(threadIdx.x) - Tr::kConsumers;
  const int piece = thread % 8, row0 = thread / 8;  // 16 bytes of a row, and the first row
  const Range r = range_of<Tr>(p);
  const std::uint32_t to = ring + device::swizzled(row0, piece);
  const RowPieces<T, Tr::kRows, Tr::kProducers> weights(shared.rows.weights, row0);
  const RowPieces<T, Tr::kTokens, Tr::kProducers> tokens(shared.tokens, row0);
  const auto bytes = [&](int at) { return at < r.k_end ? 16 : 0; };
  const int stages = stages_of<Tr>(p), ahead = min(r.num_steps, stages);
  int k = r.k_begin + piece * 8;
  for (int step = 0; step < ahead; ++step) {
    weights.copy(to + step * Tr::kStageBytes + Tr::kTokenBytes, k + step * kTileK,
                 bytes(k + step * kTileK));
  }
  meet_cluster<Tr>();
  device::pdl_wait();
  device::RingCursor<Tr::kStages> at;
  for (int step = 0; step < r.num_steps; ++step, k += kTileK, next_of(at, stages)) {
    const std::uint32_t stage = to + at.stage * Tr::kStageBytes;
    if (step >= ahead) {
      shared.empty[at.stage].wait((at.round - 1) & 1);
      weights.copy(stage + Tr::kTokenBytes, k, bytes(k));
    }
    tokens.copy(stage, k, bytes(k));
    shared.full[at.stage].arrive_after_copies();
  }
}

/// Sums of a consumer warpgroup over the CTA's part of K (Share::kAll: over the second half of it,
/// with those of the first half parked; Share::kLeaf: given to `leave` leaf by leaf, while copies
/// of the next one are on their way). They start at +0 and leaves are added to them, so that a leaf
/// of -0 gives +0 on all paths.
template <class Tr, class Leave>
__device__ __forceinline__ void consume(const RingParams& p, Shared<Tr>& shared, std::uint32_t ring,
                                        float4* parked, float (&total)[Tr::kSums], Leave&& leave) {
  using T = typename Tr::T;
  const Range r = range_of<Tr>(p);
  const int warpgroup = threadIdx.x / 128, stages = stages_of<Tr>(p);
  const bool signals = threadIdx.x % 32 == 0;
  float sum[Tr::kSums];
#pragma unroll
  for (int i = 0; i < Tr::kSums; ++i) sum[i] = total[i] = 0;
  device::RingCursor<Tr::kStages> at;
  int step = 0;
  for (int leaf = r.first; leaf < r.end; ++leaf) {
    const int leaf_end = min(r.num_steps, step + r.leaf / kTileK);
    int last = -1;  // stage of the MMAs in flight
    for (; step < leaf_end; ++step, next_of(at, stages)) {
      shared.full[at.stage].wait(at.round & 1);
      device::fence_async_proxy();  // cp.async wrote through the generic proxy
      device::wgmma_keep(sum);
      device::wgmma_fence();
      const std::uint32_t stage = ring + at.stage * Tr::kStageBytes;
      const auto x = device::wgmma_descriptor(stage + warpgroup * 64 * device::kSwizzleBytes);
      const auto a = device::wgmma_descriptor(stage + Tr::kTokenBytes);
      multiply_stage<T, Tr::kRows>(sum, x, a, last >= 0);
      device::wgmma_commit();
      device::wgmma_wait<1>();
      if (last >= 0 && signals) shared.empty[last].arrive();
      last = at.stage;
    }
    device::wgmma_wait<0>();
    device::wgmma_keep(sum);
    if (last >= 0 && signals) shared.empty[last].arrive();
#pragma unroll
    for (int i = 0; i < Tr::kSums; ++i) total[i] += sum[i];
    if (Tr::kShare == Share::kLeaf && leaf >= r.kept) {
      leave(leaf);
#pragma unroll
      for (int i = 0; i < Tr::kSums; ++i) total[i] = 0;
    }
    if constexpr (Tr::kShare == Share::kAll) {
      if (leaf + 1 == r.middle) {
        put_sums<Tr::kConsumers>(parked, total);
#pragma unroll
        for (int i = 0; i < Tr::kSums; ++i) total[i] = 0;
      }
    }
  }
}

template <class Tr>
__global__ void __launch_bounds__(Tr::kThreads, Tr::kMinCtas)
    shrink_wgmma_kernel(const __grid_constant__ RingParams p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using T = typename Tr::T;
  extern __shared__ __align__(1024) unsigned char smem[];
  const int shared_from = shared_at<Tr>(stages_of<Tr>(p));
  auto& shared = *reinterpret_cast<Shared<Tr>*>(smem + shared_from);
  // Of float32 weights where the ring was: a cluster's CTAs wait until both have multiplied.
  auto* parked =
      reinterpret_cast<float4*>(smem + (Tr::kFloatWeights ? 0 : shared_from - Tr::kParked));
  const std::uint32_t ring = device::smem_address(smem);

  // Guard
  device::pdl_begin(p.early);
  ask_for_ranks(p.weights);
  int own_token = -1;
  RowAhead row;
  const int first_row = static_cast<int>(blockIdx.x) * Tr::kRows;
  const auto meanwhile = [&] {
    if (threadIdx.x == Tr::kThreads - 1) shared.begin();
    row = shared.rows.fill_ahead(p, first_row);
  };
  if (static_cast<int>(blockIdx.z) >= p.tiles.num ||
      !shared.run.find(p.groups, p.tiles, p.weights.num_adapters, &own_token, meanwhile)) {
    zero_base_rows(p);
    return;
  }

  // Pointers
  if (threadIdx.x < Tr::kTokens) {
    const int place = static_cast<int>(threadIdx.x);
    const int token = place < shared.run.tile.count ? own_token : -1;
    const auto* x = static_cast<const T*>(p.x.data);
    shared.tokens[place] = token < 0 ? nullptr : x + token * p.x.row_stride;
  }
  shared.rows.fill(p, shared.run.tile.adapter, first_row, row);
  // Nothing has to be seen at this barrier, whose other half is meet_cluster().
  if constexpr (Tr::kShare == Share::kHalf) device::cluster_arrive_relaxed();
  __syncthreads();
  if (shared.rows.count == 0) {
    meet_cluster<Tr>();
    device::pdl_leave();
    return;
  }

  // Load
  if (threadIdx.x >= Tr::kConsumers) {
    device::fewer_registers<Tr::kProducerRegisters>();
    if constexpr (Tr::kAhead > 0) {
      produce_ahead<Tr>(p, shared, smem);
    } else if constexpr (Tr::kFloatWeights) {
      produce_parts<Tr>(p, shared, smem);
    } else {
      produce<Tr>(p, shared, ring);
    }
    return;
  }

  // Compute
  device::more_registers<Tr::kConsumerRegisters>();
  shared.octets.template fill<Tr::kConsumers>(shared.rows);
  device::named_barrier<1, Tr::kConsumers>();
  // Rows of h of a thread's two tokens
  const int part = static_cast<int>(blockIdx.y);
  const int first = p.h.by_position ? first_position(p.groups, p.tiles) : 0;
  const Tile tile = shared.run.tile;
  int rows[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int place = static_cast<int>(threadIdx.x) / 32 * 16 + i * 8 + threadIdx.x % 32 / 4;
    const bool there = place < tile.count;
    const int token = there && !p.h.by_position ? shared.run.token(p.groups, p.tiles, place) : 0;
    rows[i] = there ? h_row(p.h, tile, first, place, token) : -1;
  }
  ask_for_tokens<Tr>(p, shared);
  meet_cluster<Tr>();
  device::pdl_wait();
  float total[Tr::kSums];
  const auto leave = [&](int leaf) {  // its slab
    const Range r = range_of<Tr>(p);
    const int slab = r.slab + leaf - r.kept;
    std::int64_t base[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      base[i] = rows[i] < 0 ? -1 : rows[i] * p.h.row_stride + slab * p.h.slab_stride;
    }
    store_sums<float>(p.h, base, shared.rows, shared.octets, 0, total);
  };
  if constexpr (Tr::kFloatWeights) {
    consume_parts<Tr>(p, shared, ring, total, leave);
  } else {
    consume<Tr>(p, shared, ring, parked, total, leave);
  }
  // Reduce and store: the sum of both halves of K
  const auto row_of = [&](int i) { return rows[i] < 0 ? -1 : rows[i] * p.h.row_stride; };
  const std::int64_t base[2] = {row_of(0), row_of(1)};
  if constexpr (Tr::kShare == Share::kAll) {
    add_sums<Tr::kConsumers>(total, parked);
    visit_h(p.h, [&](auto h) {
      store_sums<typename decltype(h)::type>(p.h, base, shared.rows, shared.octets, 0, total);
    });
  } else if constexpr (Tr::kShare == Share::kHalf) {
    // Each CTA of the cluster takes half of the columns. They come in pieces, of which one is
    // stored while the next is on its way: an SM sends some 18 bytes a clock.
    constexpr int kPieces = Tr::kPieces, kPiece = Tr::kPieceSums, kHalf = kPieces * kPiece;
    float own[kPieces][kPiece], other[kPieces][kPiece];
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      own[i / kPiece][i % kPiece] = part == 0 ? total[i] : total[kHalf + i];
      other[i / kPiece][i % kPiece] = part == 0 ? total[kHalf + i] : total[i];
    }
    if constexpr (Tr::kFloatWeights) {
      device::cluster_arrive();
      device::cluster_wait();
    }
    constexpr int kPlaces = kPiece / 4 * Tr::kConsumers;  // of a piece
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      send_sums<Tr::kConsumers>(parked + i * kPlaces, other[i], &shared.exchanged[i], 1 - part);
    }
    visit_h(p.h, [&](auto h) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        shared.exchanged[i].wait(0);
        add_sums<Tr::kConsumers>(own[i], parked + i * kPlaces);
        store_sums<typename decltype(h)::type>(p.h, base, shared.rows, shared.octets,
                                               part * Tr::kRows / 2 + i * kPiece * 2, own[i]);
      }
    });
  }
#endif
}

// ---- host ---------------------------------------------------------------------------------------

/// CTAs that share K, of Share::kLeaf so many leaves each.
int share_ctas(const ShrinkParams& p, Share share, bool float_weights, int leaves) {
  if (share != Share::kLeaf) return share == Share::kHalf ? 2 : 1;
  const int num = static_cast<int>(num_leaves(p.weights.hidden));
  return float_weights ? ceil_div(num, leaves) : static_cast<int>(wgmma_leaf_ctas(num, leaves));
}

template <class Tr>
constexpr bool fits(const WgmmaShape& s) {
  return (smem_of<Tr>(s.stages) + 1024) * s.per_sm <= 228 * 1024;
}

/// By the kernel of row kShape, with the stages of row `shape`.
template <class T, int kShape>
void launch_traits(const ShrinkParams& shrink, int shape, int leaves, Stream stream) {
  using Tr = Traits<T, kShape>;
  const RingParams p{shrink, kWgmmaShapes[shape].stages};
  constexpr bool kCluster = Tr::kShare == Share::kHalf;
  const std::int64_t runs =
      TileRun<Tr::kTiles, Tr::kThreads>::most(p.tiles, p.weights.num_adapters);
  device::Launch l;
  l.grid = dim3(static_cast<unsigned>(ceil_div(rank_rows(p), Tr::kRows)),
                static_cast<unsigned>(share_ctas(p, Tr::kShare, Tr::kFloatWeights, leaves)),
                p.zero_rows.data != nullptr ? shrink_depth(p) : static_cast<unsigned>(runs));
  l.cluster_y = kCluster ? 2 : 1;
  l.threads = Tr::kThreads;
  l.smem = static_cast<std::size_t>(smem_of<Tr>(p.stages));
  l.stream = stream;
  l.pdl = true;
  device::launch<shrink_wgmma_kernel<Tr>>("lora_shrink", l, p);
}

using Launch = void (*)(const ShrinkParams&, int shape, int leaves, Stream);

/// Float32 weights are those of a bfloat16 x.
template <class T, int kShape>
constexpr Launch launch_of() {
  if constexpr (kWgmmaShapes[kShape].float_weights && std::is_same_v<T, __half>) {
    return nullptr;
  } else {
    static_assert(fits<Traits<T, kernel_of(kShape)>>(kWgmmaShapes[kShape]), "CTAs fit an SM");
    return launch_traits<T, kernel_of(kShape)>;
  }
}

template <class T, std::size_t... kShapes>
void launch_shape(const ShrinkPlan& c, const ShrinkParams& p, Stream stream,
                  std::index_sequence<kShapes...>) {
  static constexpr Launch kLaunches[] = {launch_of<T, static_cast<int>(kShapes)>()...};
  check(kLaunches[c.shape] != nullptr, "lora_shrink: wgmma takes no float32 weights with this x");
  kLaunches[c.shape](p, c.shape, c.leaves, stream);
}

}  // namespace

void shrink_wgmma(const ShrinkParams& p, const ShrinkPlan& c, Stream stream) {
  constexpr std::size_t kCount = std::size(kWgmmaShapes);
  check(p.vector && p.tiles.tile_tokens == 64 && static_cast<std::size_t>(c.shape) < kCount &&
            (kWgmmaShapes[c.shape].share == Share::kLeaf) == c.split() &&
            kWgmmaShapes[c.shape].float_weights == (p.weights.dtype == DType::kFloat32) &&
            p.two_parts == (p.weights.dtype == DType::kFloat32) && c.leaves >= 1 &&
            (c.leaves == 1 || c.split()),
        "lora_shrink: wgmma needs tiles of 64 tokens and rows of whole 16-byte pieces, a shape of "
        "the weights' type, and leaves partials from CTAs of K chunks alone");
  device::visit_dtype<Float16DTypes>(p.x.dtype, "lora_shrink", [&](auto tag) {
    launch_shape<typename decltype(tag)::type>(c, p, stream, std::make_index_sequence<kCount>());
  });
}

}  // namespace mortar::lora::cuda
