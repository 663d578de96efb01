// SPDX-License-Identifier: Apache-2.0
// Shapes of expand_prefill.cu, and the product of one tile of tokens and one block of columns.
#pragma once

#include <cstdint>

#include "device/async_copy.cuh"
#include "device/mma.cuh"
#include "device/swizzle.cuh"
#include "device/wgmma.cuh"
#include "lora/cuda/expand_scout.cuh"
#include "lora/cuda/expand_tile.cuh"

namespace mortar::lora::cuda::prefill_expand {

constexpr int kWorkers = 256;            ///< threads that copy and compute
constexpr int kThreads = kWorkers + 32;  ///< and one warp that looks ahead
constexpr int kTokens = kStepTokens;     ///< of a tile
constexpr int kCols = kPrefillCols;      ///< of a block
constexpr int kWarpsM = 4, kWarpsN = 2, kGroups = 2;
constexpr int kYBytes = kTokens * kCols * 2;
/// Segments whose table is copied to shared memory; more of them are looked up in global memory.
constexpr int kSharedSegments = 256;

template <class T_, bool kVectorY_, bool kOwnH_, int kLogPieces_, bool kBy8_ = false>
struct Traits {
  using T = T_;
  using Ranks = RankTile<kLogPieces_, (kLogPieces_ >= 3)>;  ///< in blocks: by wgmma on sm_90a
  static constexpr bool kVectorY = kVectorY_;  ///< y moves as whole, aligned 16-byte packs
  static constexpr bool kOwnH = kOwnH_;  ///< lora_apply's h: rows of T by position, with a plan
  static constexpr bool kBy8 = kBy8_;    ///< rows of B start at multiples of 8 bytes
  /// Stages of y and h: as many as let two CTAs fit an SM (rank 128: one).
  static constexpr int kStages = kLogPieces_ == 1 ? 4 : 3;
  /// Blocks of B. Fewer than stages: where B changes in every step, a block is copied only one step
  /// ahead, once its slot is free.
  static constexpr int kBSlots = kLogPieces_ == 1 ? 4 : kLogPieces_ == 2 ? 3 : 2;
  static constexpr int kStageBytes = kYBytes + kTokens * Ranks::kPitch * 2;
  static constexpr int kBBytes = kCols * Ranks::kPitch * 2;
  static constexpr int kSmem = kStages * kStageBytes + kBSlots * kBBytes;
  static constexpr int kAhead = kStages - 1;     ///< steps whose data is in flight
  static constexpr int kScout = 2 * kAhead + 1;  ///< steps that the scout is ahead
  static constexpr int kSlots = kScout + 1;
};

/// 16-byte piece of a row of the y tile, swizzled: odd rows by 64 bytes, which frees the reads of
/// two rows by a quad each from bank conflicts.
__device__ __forceinline__ int y_place(int row, int piece) {
  return row * kCols * 2 + (piece ^ ((row & 1) << 2)) * 16;
}

/// Copies the table of segments to shared memory, where it is looked through from then on.
__device__ __forceinline__ void keep_segments(GroupsView& groups, int* to) {
  for (int i = threadIdx.x; i < groups.num_segments; i += kThreads) {
    to[i] = groups.ids[i];
    to[kSharedSegments + i] = groups.counts[i];
    to[2 * kSharedSegments + i] = groups.starts[i];
  }
  __syncthreads();
  groups.ids = to;
  groups.counts = to + kSharedSegments;
  groups.starts = to + 2 * kSharedSegments;
}

/// A value that is the same in all threads of the warp, such that the compiler knows: wgmma in
/// branches that might diverge would be issued one by one.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }
__device__ __forceinline__ int warp_index() { return uniform(static_cast<int>(threadIdx.x) / 32); }

/// acc = h B^T for this warp's 16 rows of h and 64 columns of a tile. On sm_90a the four warps that
/// share the columns form a warpgroup, which reads rows of 64 ranks and more as they lie: as
/// wgmma's swizzle. For lower ranks it is no faster (8192 tokens, qkv: rank 16 +0.3 us, rank 64 -4
/// us).
template <class T, class Ranks>
__device__ __forceinline__ void multiply_tile(float (&acc)[kGroups][4][4], const T* h, const T* b,
                                              int warp_m, int warp_n, int num_steps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  if constexpr (Ranks::kInBlocks) {
    auto& sums = reinterpret_cast<float(&)[16 * kGroups]>(acc);
    constexpr int kGroupBytes = 8 * Ranks::kPitch * 2;  // of eight rows
    const auto h_at = device::wgmma_descriptor(device::smem_address(h), 16, kGroupBytes);
    const auto b_at = device::wgmma_descriptor(
        device::smem_address(b + warp_n * 64 * Ranks::kPitch), 16, kGroupBytes);
    device::wgmma_keep(sums);
    device::wgmma_fence();
#pragma unroll
    for (int i = 0; i < Ranks::kPitch / 16; ++i) {
      if (i < num_steps) {
        const std::uint64_t step = Ranks::step_bytes(0, i) / 16;
        device::wgmma<T, 64>(sums, h_at + step, b_at + step, i > 0);
      }
    }
    device::wgmma_commit();
    device::wgmma_wait<0>();
    device::wgmma_keep(sums);
    return;
  }
#endif
  multiply<T, Ranks, kGroups>(acc, a_fragment_row<Ranks>(h, warp_m * 16),
                              b_fragment_row<Ranks>(b, warp_n * 64), num_steps);
}

/// Waits for all but the newest N groups of copies. After the next barrier wgmma sees what landed.
template <int N, class Ranks>
__device__ __forceinline__ void wait_for_copies() {
  device::cp_async_wait<N>();
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  if constexpr (Ranks::kInBlocks) device::fence_async_proxy();
#endif
}

}  // namespace mortar::lora::cuda::prefill_expand
