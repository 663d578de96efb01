// SPDX-License-Identifier: Apache-2.0
// h = x A^T for many rank rows and tokens, x and A of one 16-bit type, A stacked: the persistent
// kernel of lora_apply.
//
// h[s, t, r] = sum_k x[t, k] A_{a(t), s}[r, k]      K hidden, R = sum over slices of ranks
// bytes  = 2 M K (x) + 2 K sum_a R_a (A of the adapters in use) + h; from L2, of units of 128
//          tokens and 192 rank rows: 2 M K R (1 / 128 + 1 / 192)
// FLOP   = 2 M K R
// 4,096 tokens of one adapter, K=4096, R=768: 26 GFLOP -> 33 us at 790 TFLOP/s
// limit  : the tensor cores, and L2
// wrong  : few tokens of an adapter, low ranks
//
// The grid is as large as fits at once. A CTA walks over units of up to 128 tokens of one adapter,
// 64 for each of two warpgroups that multiply, and kRows of its rank rows. A scheduler warp
// describes units ahead, one thread asks the tensor copy engine for A, 128 threads copy the rows of
// x that the tokens name: through a ring of stages of 64 elements of K, so that those of the next
// unit are under way while sums of this one are added and stored. The sums are those of
// shrink_wgmma.cu where a CTA takes all of K; those of the first half wait in registers, or, of
// more than 128 rank rows, in the workspace.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "device/any_float.cuh"
#include "device/async_copy.cuh"
#include "device/convert.cuh"
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "device/quad_transpose.cuh"
#include "device/ring.cuh"
#include "device/swizzle.cuh"
#include "device/tensor_copy.cuh"
#include "device/wgmma.cuh"
#include "lora/cuda/backend.cuh"
#include "lora/cuda/multiply_stage.cuh"
#include "lora/cuda/rank_rows.cuh"
#include "lora/cuda/shrink_walk.cuh"
#include "lora/cuda/store_sums.cuh"

namespace mortar::lora::cuda {
namespace {

using namespace walk_units;
using device::Bits16;

__device__ __forceinline__ int steps_of(const Params& p) {
  return static_cast<int>(ceil_div<std::int64_t>(p.weights.hidden, kTileK));
}

/// Asks for A of all units; by one thread.
template <class Tr>
__device__ __forceinline__ void ask_for_weights(const Params& p, Shared<Tr>& shared,
                                                std::uint32_t ring) {
  const int steps = steps_of(p);
  device::RingCursor<kUnits> now;
  device::RingCursor<Tr::kStages> at;
#pragma unroll 1
  for (;; now.next()) {
    shared.told[now.stage].wait(now.round & 1);
    const Unit<Tr>& unit = shared.units[now.stage];
    if (unit.count == 0) return;
    const int boxes = unit.boxes;
    Box box[Tr::kBoxes];
#pragma unroll
    for (int i = 0; i < Tr::kBoxes; ++i) box[i] = unit.box[i < boxes ? i : 0];
#pragma unroll 1
    for (int step = 0; step < steps; ++step, at.next()) {
      device::Mbarrier* full = shared.full + at.stage;
      if (at.round > 0) shared.empty[at.stage].wait((at.round - 1) & 1);
      full->arrive_and_expect(boxes * kBoxBytes);
      const std::uint32_t to = ring + at.stage * Tr::kStageBytes + kTokenBytes;
#pragma unroll
      for (int i = 0; i < Tr::kBoxes; ++i) {
        if (i >= boxes) break;
        device::copy_box(to + i * kBoxBytes, *box[i].map, step * kTileK, box[i].line, full);
      }
    }
    shared.used[now.stage].arrive();
  }
}

/// Copies x of all units: a thread 16 bytes of every 16th row.
template <class Tr>
__device__ __forceinline__ void copy_tokens(const Params& p, Shared<Tr>& shared,
                                            std::uint32_t ring) {
  constexpr int kStep = kProducers / 8, kCopies = kTokens / kStep;
  const int thread = static_cast<int>(threadIdx.x) - kConsumers, piece = thread % 8,
            row0 = thread / 8;
  const int hidden = static_cast<int>(p.weights.hidden), steps = steps_of(p);
  const std::uint32_t to = ring + device::swizzled(row0, piece);
  device::pdl_wait();
  device::RingCursor<kUnits> now;
  device::RingCursor<Tr::kStages> at;
#pragma unroll 1
  for (;; now.next()) {
    shared.told[now.stage].wait(now.round & 1);
    const Unit<Tr>& unit = shared.units[now.stage];
    if (unit.count == 0) return;
    const Bits16* rows[kCopies];
    unsigned there = 0;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      rows[i] = static_cast<const Bits16*>(unit.x[row0 + i * kStep]);
      there |= (rows[i] != nullptr ? 1u : 0u) << i;
    }
    asm("" : "+r"(there));  // or the compiler would compare the pointers again in every step
    shared.used[now.stage].arrive();
    int k = piece * 8;
#pragma unroll 1
    for (int step = 0; step < steps; ++step, k += kTileK, at.next()) {
      const int bytes = k < hidden ? 16 : 0;
      if (at.round > 0) shared.empty[at.stage].wait((at.round - 1) & 1);
      const std::uint32_t stage = to + at.stage * Tr::kStageBytes;
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        if ((there >> i & 1) != 0) {
          device::cp_async_16(stage + i * kStep * device::kSwizzleBytes, rows[i] + k, bytes);
        }
      }
      shared.full[at.stage].arrive_after_copies();
    }
  }
}

/// Multiplies all units, and stores their sums.
template <class T, class Tr>
struct Consumer {
  const Params& p;
  Shared<Tr>& shared;
  std::uint32_t ring;
  float4* parked;
  device::RingCursor<Tr::kStages> at;

  /// Sums of the second half of K, and those of the first where registers have room for them: else
  /// they are parked.
  __device__ __forceinline__ void multiply(bool live, float (&first)[Tr::kKept],
                                           float (&total)[Tr::kSums]) {
    const int hidden = static_cast<int>(p.weights.hidden), steps = steps_of(p);
    const int leaf_steps = static_cast<int>(leaf_size(hidden)) / kTileK;
    const int leaves = static_cast<int>(num_leaves(hidden));
    const int middle = static_cast<int>(first_leaves(leaves));
    const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
    const bool signals = threadIdx.x % 32 == 0;
    float sum[Tr::kSums];
#pragma unroll
    for (int i = 0; i < Tr::kSums; ++i) sum[i] = total[i] = 0;
    int step = 0;
#pragma unroll 1
    for (int leaf = 0; leaf < leaves; ++leaf) {
      const int leaf_end = min(steps, step + leaf_steps);
      int last = -1;  // stage of the MMAs in flight
#pragma unroll 1
      for (; step < leaf_end; ++step, at.next()) {
        shared.full[at.stage].wait(at.round & 1);
        if (live) {
          device::fence_async_proxy();  // cp.async wrote through the generic proxy
          device::wgmma_keep(sum);
          device::wgmma_fence();
          const std::uint32_t stage = ring + at.stage * Tr::kStageBytes;
          const auto x = device::wgmma_descriptor(stage + warpgroup * 64 * device::kSwizzleBytes);
          const auto a = device::wgmma_descriptor(stage + kTokenBytes);
          multiply_stage<T, Tr::kRows>(sum, x, a, last >= 0);
          device::wgmma_commit();
          device::wgmma_wait<1>();
        } else {
          __syncwarp();  // all lanes have seen the stage before it is filled again
        }
        if (last >= 0 && signals) shared.empty[last].arrive();
        last = at.stage;
      }
      device::wgmma_wait<0>();
      device::wgmma_keep(sum);
      if (last >= 0 && signals) shared.empty[last].arrive();
#pragma unroll
      for (int i = 0; i < Tr::kSums; ++i) total[i] += sum[i];
      if (leaf + 1 == middle) {
        if constexpr (Tr::kKept < Tr::kSums) {
          put_sums<kConsumers>(parked, total);
        } else {
#pragma unroll
          for (int i = 0; i < Tr::kSums; ++i) first[i] = total[i];
        }
#pragma unroll
        for (int i = 0; i < Tr::kSums; ++i) total[i] = 0;
      }
    }
  }
  __device__ __forceinline__ void store(const Unit<Tr>& unit, const float (&total)[Tr::kSums]) {
    const int quad_lane = static_cast<int>(threadIdx.x) % 4;
    const int row0 = static_cast<int>(threadIdx.x) / 32 * 16 + threadIdx.x % 32 / 4;
    T* const h = static_cast<T*>(p.h.data) + unit.h + row0 * p.h.row_stride + quad_lane * 8;
    const int count = unit.count, boxes = unit.boxes;
#pragma unroll
    for (int box = 0; box < 2 * Tr::kBoxes; ++box) {
      std::uint32_t words[2][4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int at = 16 * box + 4 * k + 2 * i;
          words[i][k] = device::pack2<T>(total[at], total[at + 1]);
        }
      }
      const int place = box / 2 < boxes ? unit.box[box / 2].place + box % 2 * 32 : 0;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        device::transpose_quad(words[i]);
        if (box / 2 >= boxes || row0 + 8 * i >= count) continue;
        *reinterpret_cast<uint4*>(h + i * 8 * p.h.row_stride + place) =
            make_uint4(words[i][0], words[i][1], words[i][2], words[i][3]);
      }
    }
  }
  __device__ __forceinline__ void run() {
    const int thread = static_cast<int>(threadIdx.x);
    device::RingCursor<kUnits> now;
#pragma unroll 1
    for (;; now.next()) {
      shared.told[now.stage].wait(now.round & 1);
      const Unit<Tr>& unit = shared.units[now.stage];
      const int count = __shfl_sync(0xffffffffu, unit.count, 0);
      if (count == 0) return;
      float first[Tr::kKept], total[Tr::kSums];
      const bool live = count > __shfl_sync(0xffffffffu, thread / 128 * 64, 0);
      multiply(live, first, total);
      if (live) {
        if constexpr (Tr::kKept < Tr::kSums) {
          add_sums<kConsumers>(total, parked);
        } else {
#pragma unroll
          for (int i = 0; i < Tr::kSums; ++i) total[i] += first[i];
        }
        store(unit, total);
      }
      __syncwarp();
      if (thread % 32 == 0) shared.used[now.stage].arrive();
    }
  }
};

template <class Tr>
__global__ void __launch_bounds__(kThreads, 1)
    shrink_walk_kernel(const __grid_constant__ Params p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char smem[];
  auto& shared = *reinterpret_cast<Shared<Tr>*>(smem + Tr::kRing);
  const std::uint32_t ring = device::smem_address(smem);
  const int thread = static_cast<int>(threadIdx.x);
  device::pdl_begin(p.early);
  if (thread == 0) {
    for (int i = 0; i < kUnits; ++i) {
      shared.told[i].init(32);
      shared.used[i].init(kConsumers / 32 + kProducers + 1);
    }
    for (int i = 0; i < Tr::kStages; ++i) {
      shared.full[i].init(kProducers + 1);
      shared.empty[i].init(kConsumers / 32);
    }
    device::Mbarrier::fence_init();
  }
  __syncthreads();

  // Look up, and load
  if (thread >= kFirstHelper) {
    device::fewer_registers<Tr::kHelperRegisters>();
    if (thread < kFirstHelper + 32) {
      Scheduler<Tr> scheduler(p, shared);
#pragma unroll 1
      while (scheduler.tell()) {
      }
    } else if (thread == kFirstHelper + 32) {
      ask_for_weights<Tr>(p, shared, ring);
    }
    return;
  }
  if (thread >= kConsumers) {
    device::fewer_registers<Tr::kProducerRegisters>();
    copy_tokens<Tr>(p, shared, ring);
    return;
  }

  // Compute
  device::more_registers<Tr::kConsumerRegisters>();
  device::pdl_wait();
  device::visit_checked_dtype(Float16DTypes(), p.x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    Consumer<T, Tr>{p, shared, ring, p.parked + blockIdx.x * (Tr::kSumBytes / 16)}.run();
  });
#endif
}

// ---- host ---------------------------------------------------------------------------------------

template <class Tr>
void launch_traits(const ShrinkParams& p, void* parked, Stream stream) {
  static_assert(kSmem<Tr> + 1024 <= 228 * 1024, "a CTA fits an SM");
  Params walk{p, {}, {}, ceil_div(rank_rows(p), Tr::kRows), static_cast<float4*>(parked)};
  for (int i = 0; i < p.weights.num_slices; ++i) {
    const StackedSlice& s = p.weights.slices[i];
    walk.adapter_lines[i] = static_cast<int>(s.a_adapter_stride / s.a_row_stride);
    device::set_tensor_map(walk.a[i], p.weights.dtype, s.a, p.weights.hidden,
                           lines_of_a(p.weights, i), s.a_row_stride, kWalkBoxRows);
  }
  const std::int64_t units =
      max_tiles(p.tiles.num_tokens, p.weights.num_adapters, kTokens) * walk.ctas_a_run;
  device::Launch l;
  l.grid = dim3(static_cast<unsigned>(std::min<std::int64_t>(
      {units, device::current_device().num_sms, std::int64_t{kMostWalkers}})));
  l.threads = kThreads;
  l.smem = kSmem<Tr>;
  l.stream = stream;
  l.pdl = true;
  device::launch<shrink_walk_kernel<Tr>>("lora_shrink", l, walk);
}

}  // namespace

void shrink_walk(const ShrinkParams& p, const ShrinkPlan& c, void* parked, Stream stream) {
  check(p.groups.plan != nullptr && p.h.by_position && p.h.vector && p.vector &&
            p.tiles.first == 0 && p.tiles.tile_tokens == 64 && parked != nullptr &&
            p.weights.table == nullptr && p.weights.ranks == nullptr,
        "lora_apply: the persistent shrink needs a plan, its own h, aligned x, stacked A of one "
        "rank, and room for sums");
  device::check_dtype<Float16DTypes>(p.x.dtype, "lora_shrink");
  c.shape == 0 ? launch_traits<Traits<0>>(p, parked, stream)
               : launch_traits<Traits<1>>(p, parked, stream);
}

}  // namespace mortar::lora::cuda
