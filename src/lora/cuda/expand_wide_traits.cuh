// SPDX-License-Identifier: Apache-2.0
// Shapes of the wide expand: a CTA's tile, and what lies in its shared memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "device/barrier.cuh"
#include "device/swizzle.cuh"
#include "lora/config.h"
#include "lora/cuda/expand_boxes.cuh"
#include "lora/cuda/split_rows.cuh"
#include "lora/cuda/tile_run.cuh"

namespace mortar::lora::cuda::wide_expand {

inline constexpr int kStepRanks = kBoxRanks;      ///< of a stage
inline constexpr int kGroupCols = kPermutedCols;  ///< columns that are permuted together

/// kFloatH_: h is the caller's and float32 beside 16-bit weights: rounded to T as it comes.
template <class T_, int kShape, bool kVectorY_, bool kFloatH_ = false>
struct Traits {
  using T = T_;
  static constexpr WideShape kOf = kWideShapes[kShape];
  static constexpr bool kVectorY = kVectorY_;  ///< y moves as whole, aligned 16-byte packs
  static constexpr int kTiles = kOf.tiles, kTokens = 64 * kTiles, kCols = kOf.cols;
  static constexpr int kStages = kOf.stages, kMinCtas = kOf.per_sm;
  static constexpr int kConsumers = 128 * kTiles;
  /// B and h are float32, split into planes of parts as they come.
  static constexpr bool kFloatWeights = kOf.float_weights;
  static constexpr bool kFloatH = kFloatH_;
  using TW = std::conditional_t<kFloatWeights, float, T>;
  using TH = std::conditional_t<kFloatH, float, TW>;
  /// Consumers split their rows of h, which lie as they came in front of the planes of B.
  static constexpr bool kRawH = kFloatWeights && kTiles > 1;
  /// The tensor copy engine brings h and B where it can.
  static constexpr bool kBoxes = kVectorY && !kFloatWeights && !kFloatH;
  using Params = std::conditional_t<kBoxes, BoxParams, ExpandParams>;
  static constexpr int kProducers = kRawH ? 256 : 128;
  static constexpr int kThreads = kConsumers + kProducers;
  static constexpr int kTokenBytes = kTokens * device::kSwizzleBytes * (kRawH ? 2 : 1);
  static constexpr int kPlaneBytes = kCols * device::kSwizzleBytes + (kRawH ? 0 : kTokenBytes);
  static constexpr int kStageBytes =
      (kFloatWeights ? kSplitParts : 1) * kPlaneBytes + (kRawH ? kTokenBytes : 0);
  /// Steps whose float32 rows of B wait in shared memory.
  static constexpr int kAhead = kOf.ahead;
  static constexpr int kRowRing = kStages * kStageBytes;  ///< where they begin
  static constexpr int kRing = kRowRing + kAhead * kCols * 2 * device::kSwizzleBytes;
  // Registers at the launch, a multiple of 8, then those of the two kinds of warpgroups.
  static constexpr int kRegisters = 65536 / (kMinCtas * kThreads) / 8 * 8;
  static constexpr int kProducerRegisters = kFloatWeights || kFloatH ? 72 : 48;
  static_assert(!kFloatH || kTiles == 1, "no registers for more rows of h");
  static constexpr int kConsumerRegisters =
      kRegisters + (kRegisters - kProducerRegisters) * kProducers / kConsumers / 8 * 8;
  /// y is on its way while h and B are multiplied: where a thread has registers for it.
  static constexpr bool kRoom = kTiles == 1 || kMinCtas == 1;
  static constexpr bool kEarlyY = kRoom && kVectorY && !kFloatWeights;
  /// Columns of one wgmma.
  static constexpr int kMmaCols = kRoom && !kFloatWeights ? kCols : 64;
  static_assert(kCols % kMmaCols == 0 && kConsumers >= kCols, "a thread looks up a column");
  static_assert(kCols % kBoxCols == 0, "whole boxes");
};

/// What lies in shared memory behind the ring.
template <class Tr>
struct Shared {
  /// Row of h from the slice on of each token, then row of B of each permuted column; null: none.
  const void* rows[Tr::kTokens + Tr::kCols];
  std::int64_t y[Tr::kTokens];  ///< element of y of the block's first column; negative: no token
  device::Mbarrier full[Tr::kStages], empty[Tr::kStages];
  TileRun<Tr::kTiles, Tr::kThreads> run;

  /// By one thread, before the barrier that all meet at.
  __device__ __forceinline__ void begin(bool boxes) {
    const int arrivals = Tr::kFloatH || Tr::kRawH ? 2 * Tr::kProducers : Tr::kProducers;
    for (int i = 0; i < Tr::kStages; ++i) {
      full[i].init(boxes ? 1 : arrivals);
      empty[i].init(Tr::kRawH ? Tr::kConsumers : Tr::kConsumers / 32);
    }
    if (boxes) device::Mbarrier::fence_init();
  }
};
template <class Tr>
constexpr int kSmem = Tr::kRing + int{sizeof(Shared<Tr>)};

}  // namespace mortar::lora::cuda::wide_expand
