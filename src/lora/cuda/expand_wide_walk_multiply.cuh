// SPDX-License-Identifier: Apache-2.0
// What the warps of expand_wide_walk.cu do that multiply: products of a step, and their way to y.
#pragma once

#include <cstdint>

#include "device/async_copy.cuh"
#include "device/pdl.cuh"
#include "device/ring.cuh"
#include "device/swizzle.cuh"
#include "device/vector.cuh"
#include "device/wgmma.cuh"
#include "lora/cuda/expand_tile.cuh"
#include "lora/cuda/expand_wide_walk.cuh"

namespace mortar::lora::cuda::wide_walk {

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

/// The two warpgroups that multiply. Where they take turns (kTurns), each has every other step, of
/// all its tokens; else each has half of the tokens of every step.
template <class T, bool kStaged, class Element>
struct Consumer {
  using Own = Room<kStaged, Element>;
  static constexpr int kHBlocks = Own::kHBlocks, kStages = Own::kStages;
  static constexpr int kMine = Own::kTurns ? kTiles : 1;  ///< tiles of 64 tokens of a warpgroup
  using Sums = float[kMine][kCols / 2];
  const WalkParams& p;
  Shared<kStaged, Element>& shared;
  std::uint32_t ring;
  const unsigned char* y_rows;
  T* y;
  int row0, col0;

  /// Lets a stage of B be filled again, in both CTAs if either copies to both.
  __device__ __forceinline__ void leave(int stage) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (p.cluster > 1) {
      if (lane < kPair) shared.empty[stage].arrive_in_cluster(lane);
    } else if (lane == 0) {
      shared.empty[stage].arrive();
    }
  }
  __device__ __forceinline__ void leave_h(int block, int arrivals) const {
    if (threadIdx.x % 32 != 0) return;
    if (arrivals > 0) shared.h_empty[block].arrive();
    if (Own::kTurns && arrivals > 1) shared.h_empty[block].arrive();
  }

  /// Lets the other warpgroup begin its products, whose blocks are the next ones of the rings.
  __device__ __forceinline__ void pass_on() const {
    const int other = 1 - static_cast<int>(threadIdx.x) / 128;
    if (threadIdx.x % 32 == 0) shared.turn[other].arrive();
  }

  /// acc = h B^T of all columns, and of a warpgroup's 64 tokens, or of 128; where they take turns,
  /// `meanwhile` before the last products.
  template <class Meanwhile>
  __device__ __forceinline__ void multiply(const Step& t, Sums& acc, Meanwhile meanwhile) {
    const int warpgroup = Own::kTurns ? 0 : static_cast<int>(threadIdx.x) / 128;
    const int tokens = __shfl_sync(0xffffffffu, t.count - warpgroup * 64, 0);
    // A branch between products of a stage would have the compiler end them all in each stage.
    if (kMine > 1 && tokens > 64) return multiply_tiles<kMine>(t, acc, meanwhile);
    if (Own::kTurns || tokens > 0) return multiply_tiles<1>(t, acc, meanwhile);
    multiply_tiles<0>(t, acc, meanwhile);
  }
  template <int kLive, class Meanwhile>
  __device__ __forceinline__ void multiply_tiles(const Step& t, Sums& acc, Meanwhile meanwhile) {
    const int warpgroup =
        Own::kTurns ? 0 : __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
    const int rank = __shfl_sync(0xffffffffu, t.rank, 0), h_arrivals = t.h_arrivals;
#pragma unroll
    for (auto& tile : acc) {
#pragma unroll
      for (float& v : tile) v = 0;
    }
    device::RingCursor<kStages> at(__shfl_sync(0xffffffffu, t.b_taken, 0));
    device::RingCursor<kHBlocks> h_at(__shfl_sync(0xffffffffu, t.h_taken, 0));
    int last = -1, last_h = 0;  // stages of the products in flight
#pragma unroll 1
    for (int first = 0; first < rank; first += kStepRanks, at.next(), h_at.next()) {
      shared.h_full[h_at.stage].wait(h_at.round & 1);
      shared.full[at.stage].wait(at.round & 1);
      if (Own::kTurns && first + kStepRanks >= rank) {
        pass_on();
        meanwhile();
      }
      if constexpr (kLive > 0) {
        if (!p.b_boxes) device::fence_async_proxy();  // cp.async is of the generic proxy
#pragma unroll
        for (int tile = 0; tile < kLive; ++tile) device::wgmma_keep(acc[tile]);
        device::wgmma_fence();
        constexpr int kBlock = Own::kParts * kBlockBytes, kPlane = kBlockBytes / 16;
        const std::uint32_t h_tile =
            ring + h_at.stage * kBlock + warpgroup * 64 * device::kSwizzleBytes;
        const auto b = device::wgmma_descriptor(ring + (kHBlocks + at.stage) * kBlock);
#pragma unroll
        for (int tile = 0; tile < kLive; ++tile) {
          const auto h = device::wgmma_descriptor(h_tile + tile * 64 * device::kSwizzleBytes);
#pragma unroll
          for (int i = 0; i < kStepRanks / 16; ++i) {
#pragma unroll
            for (int h_part = 0; h_part < Own::kParts; ++h_part) {
#pragma unroll
              for (int b_part = 0; h_part + b_part < Own::kParts; ++b_part) {
                device::wgmma<T, kCols>(acc[tile],
                                        h + i * device::kDescriptorStep + h_part * kPlane,
                                        b + i * device::kDescriptorStep + b_part * kPlane, 1);
              }
            }
          }
        }
        device::wgmma_commit();
        device::wgmma_wait<1>();
      } else {
        __syncwarp();  // all lanes have seen the stage before it is filled again
      }
      if (last >= 0) {
        leave(last);
        leave_h(last_h, h_arrivals);
      }
      last = at.stage;
      last_h = h_at.stage;
    }
    if constexpr (kLive > 0) {
      device::wgmma_wait<0>();
#pragma unroll
      for (int tile = 0; tile < kLive; ++tile) device::wgmma_keep(acc[tile]);
    }
    leave(last);
    leave_h(last_h, h_arrivals);
  }

  /// y of a step to L2, whatever a predecessor may still write there: two lines a row.
  __device__ __forceinline__ void ask_for(const Step& t) const {
    if (t.rank == 0 || !p.add_inputs) return;
    constexpr int kThreadsOfRow = Own::kTurns ? 1 : 2;
    const int thread = static_cast<int>(threadIdx.x) % (kTokens * kThreadsOfRow);
    const std::int64_t row = t.y(p, thread / kThreadsOfRow);
#pragma unroll
    for (int col = thread % kThreadsOfRow * 64; col < kCols; col += kThreadsOfRow * 64) {
      if (row >= 0 && col < t.cols) device::prefetch_l2(y + row + col);
    }
  }

  /// y of 64 tokens, with their products.
  __device__ __forceinline__ void add(const Step& t, YPart& own,
                                      const float (&acc)[kCols / 2]) const {
    const float scale = t.scale;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int g = 0; g < YPart::kGroups; ++g) {
        const auto& products = reinterpret_cast<const float(&)[4][4]>(acc[g * 16]);
        own.v[half][g] = add_products<T>(own.v[half][g], products, half, scale, p.add_inputs);
      }
    }
  }
  /// Writes it, for the step's tokens from `first` on. (One question whether there is a row: a step
  /// ended some 500 clocks later with one for each store.)
  __device__ __forceinline__ void store(const Step& t, int first, const YPart& own) const {
    const int cols = t.cols - col0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int64_t row = t.y(p, first + row0 + 8 * half);
      if (row < 0) continue;
      T* const to = y + row + col0;
#pragma unroll
      for (int g = 0; g < YPart::kGroups; ++g) {
        if (cols > g * kGroupCols) {
          *reinterpret_cast<uint4*>(to + g * kGroupCols) = own.v[half][g];
        }
      }
    }
  }

  /// Every other step, of all its tokens: the other warpgroup multiplies while this one adds to y.
  __device__ __forceinline__ void take_turns() {
    const int warpgroup = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
    device::RingCursor<Own::kSteps> now(warpgroup);
#pragma unroll 1
    for (int step = 0;; ++step, now.next(), now.next()) {
      shared.told[now.stage].wait(now.round & 1);
      const Step& t = shared.steps[now.stage];
      ask_for(t);
      if (step == 0) device::pdl_wait();
      if (t.rank == 0) return;
      // A barrier of a ring says no more than which of two rounds has ended.
      const int turn = step - 1 + warpgroup;
      if (turn >= 0) shared.turn[warpgroup].wait(turn & 1);
      Sums acc;
      YPart own[kMine];
      multiply(t, acc, [&] { own[0].load(p, y, t, row0, col0); });
#pragma unroll
      for (int tile = 0; tile < kMine; ++tile) {  // y of the next tile comes while this is written
        add(t, own[tile], acc[tile]);
        if (tile + 1 < kMine) own[tile + 1].load(p, y, t, (tile + 1) * 64 + row0, col0);
        store(t, tile * 64, own[tile]);
      }
      shared.used[now.stage].arrive();
    }
  }

  /// All steps, half of the tokens of each.
  __device__ __forceinline__ void share_steps() {
    device::RingCursor<Own::kSteps> now;
    device::RingCursor<kYStages> y_at;
    shared.told[0].wait(0);
    ask_for(shared.steps[0]);
    device::pdl_wait();
    if (shared.steps[0].rank == 0) return;
    YPart own;
    if (!kStaged || !p.add_inputs) own.load(p, y, shared.steps[0], row0, col0);
#pragma unroll 1
    for (bool more = true; more;) {
      const int slot = now.stage;
      const Step& t = shared.steps[slot];
      now.next();
      shared.told[now.stage].wait(now.round & 1);
      const Step& coming = shared.steps[now.stage];
      more = coming.rank > 0;
      if constexpr (!kStaged) ask_for(coming);
      Sums acc;
      multiply(t, acc, [] {});
      if constexpr (kStaged) {
        if (p.add_inputs) {
          shared.y_full[y_at.stage].wait(y_at.round & 1);
          own.load(y_rows + y_at.stage * kTokens * kYPitch, row0, col0);
          shared.y_empty[y_at.stage].arrive();
          y_at.next();
        }
      }
      add(t, own, acc[0]);
      store(t, 0, own);
      shared.used[slot].arrive();
      // Of two steps in registers at once the compiler waits for both.
      if constexpr (!kStaged) {
        if (more) own.load(p, y, coming, row0, col0);
      }
    }
  }
};

}  // namespace mortar::lora::cuda::wide_walk
