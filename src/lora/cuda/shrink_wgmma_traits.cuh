// SPDX-License-Identifier: Apache-2.0
// Shapes of shrink_wgmma.cu: a CTA's tile, what lies in its shared memory, and its range of K.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/int_math.h"
#include "device/barrier.cuh"
#include "device/cluster.cuh"
#include "device/ring.cuh"
#include "device/swizzle.cuh"
#include "device/wgmma.cuh"
#include "lora/config.h"
#include "lora/cuda/params.cuh"
#include "lora/cuda/rank_rows.cuh"
#include "lora/cuda/split_rows.cuh"
#include "lora/cuda/store_sums.cuh"
#include "lora/cuda/tile_run.cuh"

namespace mortar::lora::cuda::wgmma_shrink {

constexpr int kTileK = device::kSwizzleBytes / 2;  ///< elements of a stage

/// Producers of a CTA: twice as many where an SM has one CTA and float32 rows are split, or many
/// rows are copied.
constexpr int producers_of(const WgmmaShape& s) {
  const bool many_rows = s.float_weights || 64 * s.tiles + s.rows >= 160;
  return s.per_sm == 1 && many_rows ? 256 : 128;
}

/// Rows of the table for 16-bit weights that differ in stages and CTAs of an SM alone have one
/// kernel, whose launch says how many stages there are.
constexpr bool share_a_kernel(const WgmmaShape& a, const WgmmaShape& b) {
  return !a.float_weights && !b.float_weights && a.rows == b.rows && a.tiles == b.tiles &&
         a.share == b.share && producers_of(a) == producers_of(b);
}
/// The first row whose kernel this one has.
constexpr int kernel_of(int shape) {
  int first = 0;
  while (first < shape && !share_a_kernel(kWgmmaShapes[first], kWgmmaShapes[shape])) ++first;
  return first;
}
/// The largest `field` of the rows whose kernel row `shape` has.
constexpr int most_of(int shape, int WgmmaShape::*field) {
  int most = kWgmmaShapes[shape].*field;
  for (const WgmmaShape& s : kWgmmaShapes) {
    if (share_a_kernel(s, kWgmmaShapes[shape])) most = std::max(most, s.*field);
  }
  return most;
}

template <class T_, int kShape>
struct Traits {
  using T = T_;
  static constexpr WgmmaShape kOf = kWgmmaShapes[kShape];
  static constexpr int kRows = kOf.rows;
  static constexpr int kTiles = kOf.tiles;  ///< of 64 tokens, a consumer warpgroup each
  static constexpr int kTokens = 64 * kTiles;
  static constexpr int kStages = most_of(kShape, &WgmmaShape::stages);
  static constexpr int kMinCtas = most_of(kShape, &WgmmaShape::per_sm);
  /// Whether a launch may have fewer stages.
  static constexpr bool kManyRings = kStages * kMinCtas != kOf.stages * kOf.per_sm;
  static constexpr Share kShare = kOf.share;
  static constexpr int kConsumers = 128 * kTiles;
  static constexpr int kProducers = producers_of(kOf);
  static constexpr int kThreads = kConsumers + kProducers;
  static constexpr int kFillers = 128;     ///< of them, of a stage whose float32 rows they split
  static constexpr int kSums = kRows / 2;  ///< sums of a thread
  static constexpr int kTokenBytes = kTokens * device::kSwizzleBytes;
  /// Float32 rank rows are split into planes of parts as they come.
  static constexpr bool kFloatWeights = kOf.float_weights;
  static constexpr int kPlaneBytes = kRows * device::kSwizzleBytes;
  /// Stages whose float32 rows wait to be split; x of those lies in a ring of its own.
  static constexpr int kAhead = kOf.ahead;
  static constexpr int kTokenStages = kAhead > 0 ? kAhead + kStages : kStages;
  static constexpr int kRowBytes = kRows * 2 * device::kSwizzleBytes;  ///< of float32, a stage
  static constexpr int kStageBytes =
      (kAhead > 0 ? 0 : kTokenBytes) + (kFloatWeights ? kSplitParts : 1) * kPlaneBytes;
  static constexpr int kTokenRing = kStages * kStageBytes;  ///< where it begins
  static constexpr int kRowRing = kTokenRing + kTokenStages * kTokenBytes;
  static constexpr int kRing = kAhead > 0 ? kRowRing + (kAhead * kRowBytes) : kTokenRing;
  static constexpr int kSumBytes = kConsumers * kSums * 4;
  static constexpr int kParked = kFloatWeights            ? 0
                                 : kShare == Share::kAll  ? kSumBytes
                                 : kShare == Share::kHalf ? kSumBytes / 2
                                                          : 0;
  /// Sums of a thread that the CTAs of a cluster exchange at a time: of three row groups or four.
  static constexpr int kGroups = kRows / 16, kPieces = ceil_div(kGroups, 4);
  static constexpr int kPieceSums = kSums / 2 / kPieces;
  static_assert(kGroups % kPieces == 0, "pieces are alike");
  // Registers at the launch, a multiple of 8, then those of the two kinds of warpgroups.
  static constexpr int kRegisters = 65536 / (kMinCtas * kThreads) / 8 * 8;
  /// With two for the pointer of each row that a thread copies.
  static constexpr int kPointerRegisters = round_up(30 + 16 * (kTokens + kRows) / kProducers, 8);
  static constexpr int kProducerRegisters = !kFloatWeights     ? kPointerRegisters
                                            : kProducers > 128 ? (kRows > 64   ? 40
                                                                  : kAhead > 0 ? 48
                                                                               : 72)
                                            : kAhead > 0       ? 56
                                                               : 88;
  static constexpr int kConsumerRegisters = std::min(
      240, kRegisters + (kRegisters - kProducerRegisters) * kProducers / kConsumers / 8 * 8);
  static_assert(kRows == 16 || kRows == 32 || kRows % 64 == 0 || kRows % 48 == 0,
                "there is an MMA of so many columns");
  static_assert(kRows <= kThreads, "a thread looks up a row");
  static_assert(kStageBytes % 1024 == 0, "the swizzle repeats every 1024 bytes");
  static_assert(!kFloatWeights || (kShare != Share::kAll && kSumBytes / 2 <= kStages * kStageBytes),
                "a cluster's sums fit where the ring was");
};

/// What lies in shared memory behind the ring and the sums, parked or of the cluster's other CTA.
template <class Tr>
struct Shared {
  RankRows<Tr::kRows> rows;
  Octets<Tr::kRows> octets;
  const void* tokens[Tr::kTokens];  ///< row of x; null: no token
  device::Mbarrier full[Tr::kStages], empty[Tr::kStages];
  device::Mbarrier exchanged[Tr::kPieces];  ///< a piece of the sums of the other CTA is here
  TileRun<Tr::kTiles, Tr::kThreads> run;

  /// By one thread, before the barrier that all meet at.
  __device__ __forceinline__ void begin() {
    octets.begin();
    for (int i = 0; i < Tr::kStages; ++i) {
      full[i].init(Tr::kFloatWeights && Tr::kAhead == 0 ? 2 * Tr::kFillers : Tr::kProducers);
      empty[i].init(Tr::kConsumers / 32);
    }
    if constexpr (Tr::kShare == Share::kHalf) {
      for (device::Mbarrier& piece : exchanged) piece.init(1);
      device::Mbarrier::fence_init();
      for (device::Mbarrier& piece : exchanged) {
        piece.arrive_and_expect(Tr::kConsumers * Tr::kPieceSums * 4);
      }
    }
  }
};
/// Bytes of a CTA with so many stages, and where Shared begins.
template <class Tr>
MORTAR_HOST_DEVICE constexpr int shared_at(int stages) {
  return Tr::kRing - (Tr::kStages - stages) * Tr::kStageBytes + Tr::kParked;
}
template <class Tr>
constexpr int smem_of(int stages) {
  return shared_at<Tr>(stages) + int{sizeof(Shared<Tr>)};
}

struct RingParams : ShrinkParams {
  int stages = 0;  ///< of the ring, where the kernel has several rows of the table
};
/// The stages of a launch.
template <class Tr>
__device__ __forceinline__ int stages_of(const RingParams& p) {
  return Tr::kManyRings ? p.stages : Tr::kStages;
}
/// RingCursor::next() of so many stages.
template <int kMost>
__device__ __forceinline__ void next_of(device::RingCursor<kMost>& at, int stages) {
  if (++at.stage == stages) {
    at.stage = 0;
    ++at.round;
  }
}

/// Waits until the other CTA of a cluster runs, so that its shared memory is there. All threads
/// have arrived at that barrier early, and call this when nothing else is left to do.
template <class Tr>
__device__ __forceinline__ void meet_cluster() {
  if constexpr (Tr::kShare == Share::kHalf) device::cluster_wait();
}

/// The CTA's part of K: leaves [first, end), the middle of all leaves, and what follows from them.
/// Of Share::kLeaf the leaves before `kept` are left in one slab with it, as they begin a half of
/// K: a chain of sums that begins at +0. Slab `slab` is the first.
struct Range {
  int leaf, first, end, middle, k_begin, k_end, num_steps;
  int kept, slab;
};

template <class Tr>
__device__ __forceinline__ Range range_of(const ShrinkParams& p) {
  const int hidden = static_cast<int>(p.weights.hidden), part = static_cast<int>(blockIdx.y);
  // A leaf is a power of two: no division, for which the first copies would wait.
  const int leaf = static_cast<int>(leaf_size(hidden));
  const int num = max(1, (hidden + leaf - 1) >> (__ffs(leaf) - 1));
  Range r{leaf, 0, num, static_cast<int>(first_leaves(num)), 0, 0, 0, 0, 0};
  if (Tr::kShare == Share::kLeaf && Tr::kFloatWeights) {
    const int own = ceil_div(num, static_cast<int>(gridDim.y));
    r.kept = r.slab = r.first = part * own;
    r.end = min(r.first + own, num);
  } else if (Tr::kShare == Share::kLeaf) {
    // CTAs of the first half of K, then those of the second one.
    const int first_ctas = (static_cast<int>(gridDim.y) + 1) / 2;
    const int own = ceil_div(r.middle, first_ctas);
    const bool second = part >= first_ctas;
    const int at = second ? part - first_ctas : part;
    r.first = (second ? r.middle : 0) + at * own;
    r.end = min(r.first + own, second ? num : r.middle);
    r.kept = at == 0 ? r.end - 1 : r.first;
    r.slab = at == 0 ? 0 : 1 + (at - 1) * own;
    if (second) r.slab += r.middle - own + 1;
  } else if (Tr::kShare == Share::kHalf) {
    if (part == 0) r.end = r.middle;
    if (part == 1) r.first = r.middle;
  }
  r.k_begin = r.first * r.leaf;
  r.k_end = min(r.end * r.leaf, hidden);
  r.num_steps = max(0, ceil_div(r.k_end - r.k_begin, kTileK));
  return r;
}

}  // namespace mortar::lora::cuda::wgmma_shrink
