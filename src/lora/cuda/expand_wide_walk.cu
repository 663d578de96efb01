// SPDX-License-Identifier: Apache-2.0
// y (+)= h B^T for high ranks and many tokens of an adapter, B, h and y of one 16-bit type, or B
// and h of float32 under a bfloat16 y: the persistent kernel of lora_apply.
//
// y[t, n] (+)= sum_r h[s, t, r] B_{a(t), s}[n, r]        N hidden out, r rank
// bytes  = 4 M sum_s N_s (y read and written) + 2 sum_a sum_s r N_s (B of adapters in use) + h; of
//          B from L2, for tiles of 128 tokens: 2 r M N / 128, by pairs of CTAs half of it
// FLOP   = 2 M N r
// 7,200 tokens of one adapter, 2 x 18,944 columns, r256: 1.1 GB -> 360 us, 140 GFLOP -> 180 us
// limit  : DRAM; above rank 256 L2 and the tensor cores beside it. Of float32 adapters, twice the
//          bytes of B and three products of parts (src/device/parts.cuh), the warps that split B
// wrong  : few tokens and columns, so that a CTA has one step
//
// The grid is as large as fits at once. A CTA walks over steps of up to 128 tokens of one adapter
// and 128 columns. Warps of their own describe steps, others copy: h of the tokens stays in shared
// memory for as long as they and the slice do, while B comes through a ring of 64 ranks a stage.
// Where the tensor copy engine takes h and B, one thread asks for them, and two CTAs may be a
// cluster, which take neighbouring runs of tokens and the same columns: B comes to both at once.
// Two warpgroups multiply (expand_wide_walk_multiply.cuh). They take steps in turns, and one adds
// its products to y, which has come to L2 meanwhile, as the other multiplies; or, for ranks up to
// 256 and many tokens (kStaged), they share each step, and y comes to shared memory two steps
// ahead. Float32 goes through the registers of those who copy and becomes planes of parts
// (expand_wide_walk_parts.cuh), those of h once for all columns. The sum is one chain over ranks
// from zero, as in the other kernels; the permutation of columns is theirs too.
#include <algorithm>
#include <cstdint>

#include "device/async_copy.cuh"
#include "device/cluster.cuh"
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "device/ring.cuh"
#include "device/wgmma.cuh"
#include "lora/cuda/backend.cuh"
#include "lora/cuda/expand_wide_walk.cuh"
#include "lora/cuda/expand_wide_walk_boxes.cuh"
#include "lora/cuda/expand_wide_walk_copies.cuh"
#include "lora/cuda/expand_wide_walk_multiply.cuh"
#include "lora/cuda/expand_wide_walk_parts.cuh"

namespace mortar::lora::cuda {
namespace {

using namespace wide_walk;

template <class T, bool kStaged, class Element>
__global__ void __launch_bounds__(kThreads, 1)
    expand_wide_walk_kernel(const __grid_constant__ WalkParams p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char smem[];
  using Own = Room<kStaged, Element>;
  auto& shared = *reinterpret_cast<Shared<kStaged, Element>*>(smem + Own::kRing);
  const std::uint32_t ring = device::smem_address(smem);
  const int thread = static_cast<int>(threadIdx.x);
  device::pdl_begin(p.early);
  if (p.b_boxes && thread == kConsumers) {
    device::prefetch_tensor_map(p.h_map);
    device::prefetch_tensor_map(p.b_map[0]);
  }

  const bool scouts = thread >= kFirstScout;
  const RunList most{p.groups, p.tiles, scouts ? p.tiles.num : 0};
  RunLeaders leaders(most);
  const int4 head = __ldcg(reinterpret_cast<const int4*>(p.groups.plan));
  if (thread == 0) {
    const int copiers = p.b_boxes ? 1 : kProducers;
    for (int i = 0; i < Own::kSteps; ++i) {
      shared.told[i].init(kScouts);
      shared.used[i].init(32 * Own::kWarps + copiers);
    }
    for (int i = 0; i < Own::kHBlocks; ++i) {
      shared.h_full[i].init(copiers);
      shared.h_empty[i].init(kConsumers / 32);
    }
    for (int i = 0; i < Own::kStages; ++i) {
      shared.full[i].init(copiers);
      shared.empty[i].init(p.cluster * Own::kWarps);
    }
    for (int i = 0; i < kYStages; ++i) {
      shared.y_full[i].init(kScouts);
      shared.y_empty[i].init(kConsumers);
    }
    for (device::Mbarrier& turn : shared.turn) turn.init(Own::kWarps);
    device::Mbarrier::fence_init();
  }
  __syncthreads();
  if (p.cluster > 1) device::cluster_arrive();
  const auto wait_for_other = [&] {  // until its barriers are there
    if (p.cluster > 1) device::cluster_wait();
  };

  // Look up
  if (scouts) {
    device::fewer_registers<Own::kScoutRegisters>();
    const bool of_batch = is_plan_of(head, p.tiles, p.weights.num_adapters);
    const RunList tiles{p.groups, p.tiles, of_batch ? min(head.w, p.tiles.num) : 0};
    const Share share(p, p.stride, leaders.count(tiles));
    const int first = share.left > 0 ? leaders.find(tiles, share.run) : tiles.num;
    Scout<kStaged, Element> scout(p, shared, share, tiles, first);
    wait_for_other();
    if constexpr (kStaged) {
      tell_and_copy<T>(p, shared, scout, ring + Own::kY);
    } else {
      // Where warpgroups take turns, each learns of the end.
#pragma unroll 1
      for (int ends = 0; ends < (Own::kTurns ? kTiles : 1);) ends += scout.tell() ? 0 : 1;
    }
    return;
  }

  // Load
  if (thread >= kConsumers) {
    device::fewer_registers<Own::kProducerRegisters>();
    wait_for_other();
    if constexpr (Own::kParts > 1) {
      produce_parts(p, shared, smem);
    } else if (!p.b_boxes) {
      produce(shared, RowCopier<T, kStaged>(p, shared, ring));
    } else if (thread == kConsumers) {
      produce(shared, BoxCopier<kStaged>{p, shared, ring});
    }
    return;
  }

  // Compute
  device::more_registers<kConsumerRegisters<kStaged, Element>>();
  wait_for_other();
  T* const y = static_cast<T*>(p.y.data);
  const int first_row = (Own::kTurns ? thread % 128 : thread) / 32 * 16;
  Consumer<T, kStaged, Element> consumer{
      p, shared, ring, smem + Own::kY, y, first_row + thread % 32 / 4, thread % 4 * 8};
  if constexpr (Own::kTurns) {
    consumer.take_turns();
  } else {
    consumer.share_steps();
  }
  if (p.cluster > 1) {  // the other CTA still arrives here, until its products have ended
    device::cluster_arrive_relaxed();
    device::cluster_wait();
  }
#endif
}

template <class T, bool kStaged, class Element = std::uint16_t>
void launch_kernel(const ExpandParams& p, Stream stream) {
  static_assert(kSmem<kStaged, Element> + 1024 <= 228 * 1024, "a CTA fits an SM");
  WalkParams walk{{p, {}, {}, {}}, 0};
  if (p.b_boxes) set_maps(walk, kTokens);
  const std::int64_t steps = max_tiles(p.tiles.num_tokens, p.weights.num_adapters, kTokens) *
                             p.block_start[p.weights.num_slices];
  const std::int64_t ctas = std::min<std::int64_t>(steps, device::current_device().num_sms);
  device::Launch l;
  l.grid = dim3(static_cast<unsigned>(round_up<std::int64_t>(ctas, p.cluster)));
  walk.stride = stride_of(p, static_cast<int>(l.grid.x));
  l.cluster_x = static_cast<unsigned>(p.cluster);
  l.threads = kThreads;
  l.smem = kSmem<kStaged, Element>;
  l.stream = stream;
  l.pdl = true;
  device::launch<expand_wide_walk_kernel<T, kStaged, Element>>("lora_expand", l, walk);
}

}  // namespace

// ---- host ---------------------------------------------------------------------------------------

void expand_wide_walk(const ExpandParams& p, const ExpandPlan& c, Stream stream) {
  check(
      p.groups.plan != nullptr && p.h.by_position && (p.h.vector || p.two_parts) && p.vector_y &&
          p.tiles.first == 0 && p.cols == kCols && (p.cluster == 1 || p.b_boxes) &&
          (c.shape != kWideStagedShape || p.h.width <= kWideStagedMaxRank) &&
          (c.shape != kWideWalkPartsShape || p.h.width <= kWideWalkPartsMaxRank),
      "lora_apply: the persistent wide kernel needs a plan, its own h, aligned y, and room for it");
  if (c.shape == kWideWalkPartsShape) return launch_kernel<__nv_bfloat16, false, float>(p, stream);
  device::visit_dtype<Float16DTypes>(p.y.dtype, "lora_expand", [&](auto tag) {
    using T = typename decltype(tag)::type;
    c.shape == kWideStagedShape ? launch_kernel<T, true>(p, stream)
                                : launch_kernel<T, false>(p, stream);
  });
}

}  // namespace mortar::lora::cuda
