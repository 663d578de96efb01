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
// cluster, which take neighbouring runs of tokens and the same columns: B comes to both at once. y
// of a step comes to L2 during the step before, and to the registers of the two warpgroups that
// multiply while they do; or (kStaged), for ranks up to 256 and many tokens, to shared memory two
// steps ahead. Float32 goes through the registers of those who copy and becomes planes of parts
// (expand_wide_walk_parts.cuh), those of h once for all columns. The sum is one chain over ranks
// from zero, as in the other kernels; the permutation of columns is theirs too.
#include <algorithm>
#include <cstdint>

#include "device/async_copy.cuh"
#include "device/cluster.cuh"
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "device/ring.cuh"
#include "device/swizzle.cuh"
#include "device/vector.cuh"
#include "device/wgmma.cuh"
#include "lora/cuda/backend.cuh"
#include "lora/cuda/expand_tile.cuh"
#include "lora/cuda/expand_wide_walk.cuh"
#include "lora/cuda/expand_wide_walk_boxes.cuh"
#include "lora/cuda/expand_wide_walk_copies.cuh"
#include "lora/cuda/expand_wide_walk_parts.cuh"

namespace mortar::lora::cuda {
namespace {

using namespace wide_walk;

/// y of a thread's two rows, 8 columns of each group of 32.
struct YPart {
  static constexpr int kGroups = kCols / kGroupCols;
  uint4 v[2][kGroups];

  template <class T>
  __device__ __forceinline__ void load(const ExpandParams& p, const T* y, const Step& t, int row0,
                                       int col0) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int64_t at = p.add_inputs ? t.y(p, row0 + 8 * half) : -1;
      const int cols = at >= 0 ? t.cols - col0 : 0;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        v[half][g] = make_uint4(0, 0, 0, 0);
        device::load_if(cols > g * kGroupCols, v[half][g], y + at + g * kGroupCols + col0);
      }
    }
  }
  /// Of what lies in shared memory.
  __device__ __forceinline__ void load(const unsigned char* rows, int row0, int col0) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto* from =
          reinterpret_cast<const uint4*>(rows + (row0 + 8 * half) * kYPitch + 2 * col0);
#pragma unroll
      for (int g = 0; g < kGroups; ++g) v[half][g] = from[g * kGroupCols / 8];
    }
  }
};

template <class T, bool kStaged, class Element>
struct Consumer {
  using Own = Room<kStaged, Element>;
  static constexpr int kHBlocks = Own::kHBlocks, kStages = Own::kStages;
  const WalkParams& p;
  Shared<kStaged, Element>& shared;
  std::uint32_t ring;
  const unsigned char* y_rows;
  T* y;
  int row0, col0;
  device::RingCursor<Own::kSteps> now;
  device::RingCursor<kStages> at;
  device::RingCursor<kHBlocks> h_first;
  device::RingCursor<kYStages> y_at;

  /// Lets a stage of B be filled again, in both CTAs if either copies to both.
  __device__ __forceinline__ void leave(int stage) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (p.cluster > 1) {
      if (lane < kPair) shared.empty[stage].arrive_in_cluster(lane);
    } else if (lane == 0) {
      shared.empty[stage].arrive();
    }
  }

  /// acc = h B^T of a warpgroup's 64 tokens and all columns.
  __device__ __forceinline__ void multiply(const Step& t, float (&acc)[kCols / 2]) {
    const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
    const int rank = __shfl_sync(0xffffffffu, t.rank, 0);
    const bool live = __shfl_sync(0xffffffffu, t.count, 0) > warpgroup * 64;
    const bool fresh = t.fresh, leaves = t.last && threadIdx.x % 32 == 0;
#pragma unroll
    for (float& v : acc) v = 0;
    device::RingCursor<kHBlocks> h_at = h_first;
    int last = -1, last_h = 0;  // stages of the products in flight
#pragma unroll 1
    for (int first = 0; first < rank; first += kStepRanks, at.next(), h_at.next()) {
      if (fresh) shared.h_full[h_at.stage].wait(h_at.round & 1);
      shared.full[at.stage].wait(at.round & 1);
      if (live) {
        if (!p.b_boxes) device::fence_async_proxy();  // cp.async is of the generic proxy
        device::wgmma_keep(acc);
        device::wgmma_fence();
        constexpr int kBlock = Own::kParts * kBlockBytes, kPlane = kBlockBytes / 16;
        const auto h = device::wgmma_descriptor(ring + h_at.stage * kBlock +
                                                warpgroup * 64 * device::kSwizzleBytes);
        const auto b = device::wgmma_descriptor(ring + (kHBlocks + at.stage) * kBlock);
#pragma unroll
        for (int i = 0; i < kStepRanks / 16; ++i) {
#pragma unroll
          for (int h_part = 0; h_part < Own::kParts; ++h_part) {
#pragma unroll
            for (int b_part = 0; h_part + b_part < Own::kParts; ++b_part) {
              device::wgmma<T, kCols>(acc, h + i * device::kDescriptorStep + h_part * kPlane,
                                      b + i * device::kDescriptorStep + b_part * kPlane, 1);
            }
          }
        }
        device::wgmma_commit();
        device::wgmma_wait<1>();
      } else {
        __syncwarp();  // all lanes have seen the stage before it is filled again
      }
      if (last >= 0) leave(last);
      if (last >= 0 && leaves) shared.h_empty[last_h].arrive();
      last = at.stage;
      last_h = h_at.stage;
    }
    device::wgmma_wait<0>();
    device::wgmma_keep(acc);
    leave(last);
    if (leaves) shared.h_empty[last_h].arrive();
    if (t.last) h_first = h_at;
  }

  /// y of a step to L2, whatever a predecessor may still write there: two lines a row and two
  /// threads.
  __device__ __forceinline__ void ask_for(const Step& t) const {
    if (t.rank == 0 || !p.add_inputs) return;
    const std::int64_t row = t.y(p, static_cast<int>(threadIdx.x) / 2);
    const int col = static_cast<int>(threadIdx.x) % 2 * 64;
    if (row >= 0 && col < t.cols) device::prefetch_l2(y + row + col);
  }

  /// Adds the products to y. (All sums of a row before its first store, and one question whether
  /// there is a row: a step ended some 500 clocks later with one for each store.)
  __device__ __forceinline__ void store(const Step& t, const YPart& own,
                                        const float (&acc)[kCols / 2]) const {
    const float scale = t.scale;
    const int cols = t.cols - col0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int64_t row = t.y(p, row0 + 8 * half);
      if (row < 0) continue;
      T* const to = y + row + col0;
      uint4 sum[YPart::kGroups];
#pragma unroll
      for (int g = 0; g < YPart::kGroups; ++g) {
        const auto& products = reinterpret_cast<const float(&)[4][4]>(acc[g * 16]);
        sum[g] = add_products<T>(own.v[half][g], products, half, scale, p.add_inputs);
      }
#pragma unroll
      for (int g = 0; g < YPart::kGroups; ++g) {
        if (cols > g * kGroupCols) *reinterpret_cast<uint4*>(to + g * kGroupCols) = sum[g];
      }
    }
  }

  /// Computes a step whose y is on its way, and asks for that of the next one; false after the last
  /// one. (Of two steps in registers at once the compiler waits for both.)
  __device__ __forceinline__ bool step(YPart& own) {
    const int slot = now.stage;
    const Step& t = shared.steps[slot];
    now.next();
    shared.told[now.stage].wait(now.round & 1);
    const Step& coming = shared.steps[now.stage];
    const bool more = coming.rank > 0;
    if constexpr (!kStaged) ask_for(coming);
    float acc[kCols / 2];
    multiply(t, acc);
    if constexpr (kStaged) {
      if (p.add_inputs) {
        shared.y_full[y_at.stage].wait(y_at.round & 1);
        own.load(y_rows + y_at.stage * kTokens * kYPitch, row0, col0);
        __syncwarp();
        if (threadIdx.x % 32 == 0) shared.y_empty[y_at.stage].arrive();
        y_at.next();
      }
    }
    store(t, own, acc);
    __syncwarp();
    if (threadIdx.x % 32 == 0) shared.used[slot].arrive();
    if constexpr (!kStaged) {
      if (more) own.load(p, y, coming, row0, col0);
    }
    return more;
  }
};

template <class T, bool kStaged, class Element>
__global__ void __launch_bounds__(kThreads, 1)
    expand_wide_walk_kernel(const __grid_constant__ WalkParams p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char smem[];
  using Own = Room<kStaged, Element>;
  auto& shared = *reinterpret_cast<Shared<kStaged, Element>*>(smem + Own::kRing);
  const std::uint32_t ring = device::smem_address(smem);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  device::pdl_begin(p.early);

  // The CTA's steps, and the tile of the first one
  const int4 head = __ldcg(reinterpret_cast<const int4*>(p.groups.plan));
  const bool of_batch = is_plan_of(head, p.tiles, p.weights.num_adapters);
  const RunList tiles{p.groups, p.tiles, of_batch ? min(head.w, p.tiles.num) : 0};
  int runs = 0;
  for (int base = 0; base < tiles.num; base += kThreads) {
    runs += __syncthreads_count(tiles.leads(base + thread));
  }
  const Share share(p, runs);
  if (share.left == 0) return device::pdl_leave();
  if (warp == 0) {
    const int first = tiles.leader<8>(0, share.run);
    if (lane == 0) shared.first = first;
  }
  if (thread == 0) {
    const int copiers = p.b_boxes ? 1 : kProducers;
    for (int i = 0; i < Own::kSteps; ++i) {
      shared.told[i].init(kScouts);
      shared.used[i].init(kConsumers / 32 + copiers);
    }
    for (int i = 0; i < Own::kHBlocks; ++i) {
      shared.h_full[i].init(copiers);
      shared.h_empty[i].init(kConsumers / 32);
    }
    for (int i = 0; i < Own::kStages; ++i) {
      shared.full[i].init(copiers);
      shared.empty[i].init(p.cluster * kConsumers / 32);
    }
    for (int i = 0; i < kYStages; ++i) {
      shared.y_full[i].init(kScouts);
      shared.y_empty[i].init(kConsumers / 32);
    }
    device::Mbarrier::fence_init();
  }
  __syncthreads();
  if (p.cluster > 1) device::cluster_arrive();
  const auto wait_for_other = [&] {  // until its barriers are there
    if (p.cluster > 1) device::cluster_wait();
  };

  // Look up
  if (thread >= kFirstScout) {
    device::fewer_registers<Own::kScoutRegisters>();
    Scout<kStaged, Element> scout(p, shared, share, tiles);
    wait_for_other();
    if constexpr (kStaged) {
      if (p.add_inputs) {
        tell_and_copy<T>(p, shared, scout, ring + Own::kY);
        return;
      }
    }
#pragma unroll 1
    while (scout.tell()) {
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
  Consumer<T, kStaged, Element> consumer{
      p, shared, ring, smem + Own::kY, y, thread / 32 * 16 + thread % 32 / 4, thread % 4 * 8};
  shared.told[0].wait(0);
  const Step& first = shared.steps[0];
  consumer.ask_for(first);
  device::pdl_wait();
  if (first.rank > 0) {
    YPart own;
    if (!kStaged || !p.add_inputs) {
      own.load(p, y, first, consumer.row0, consumer.col0);
    }
#pragma unroll 1
    while (consumer.step(own)) {
    }
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
  WalkParams walk{p, {}, {}, {}};
  if (p.b_boxes) set_maps(walk);
  const std::int64_t steps = max_tiles(p.tiles.num_tokens, p.weights.num_adapters, kTokens) *
                             p.block_start[p.weights.num_slices];
  const std::int64_t ctas = std::min<std::int64_t>(steps, device::current_device().num_sms);
  device::Launch l;
  l.grid = dim3(static_cast<unsigned>(round_up<std::int64_t>(ctas, p.cluster)));
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
