// SPDX-License-Identifier: Apache-2.0
// Shapes of shrink_decode.cu, and what its CTAs are given.
#pragma once

#include <cstdint>

#include "lora/config.h"
#include "lora/cuda/params.cuh"

namespace mortar::lora::cuda::decode_shrink {

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kTokens = 16;      ///< of a tile
constexpr int kK = kDecodeK;     ///< elements of K per CTA
constexpr int kPitch = kK + 8;   ///< elements; 1040 B rows make ldmatrix free of bank conflicts
constexpr int kPieces = kK / 8;  ///< 16-byte pieces of a row
constexpr int kRowStep = kThreads / kPieces;

template <class T_, bool kWhole_, int kLeaves_, int kStages_ = kDecodeStages, int kAtOnce_ = 1,
          bool kDense_ = false>
struct Traits {
  using T = T_;
  static constexpr bool kWhole = kWhole_;                  ///< h, not slabs
  static constexpr int kLeaves = kLeaves_;                 ///< leaves per CTA
  static constexpr int kStages = kStages_;                 ///< of the ring of rank rows
  static constexpr int kAtOnce = kAtOnce_;                 ///< stages multiplied side by side
  static constexpr int kSteps = kK / 16 / kLeaves;         ///< MMA steps of a leaf
  static constexpr int kStageRows = 8 * kWarps / kLeaves;  ///< rank rows per stage
  static constexpr int kStageElts = kStageRows * kPitch;
  /// Fragments of x stay in registers while a leaf's fit, for the stages that stream past them.
  static constexpr bool kKeepX = kSteps <= 16 && kAtOnce == 1 && !kDense_;
  /// Two leaves per CTA are those of K up to 4,096, which a cluster holds at once.
  static constexpr bool kTurns = kWhole && kLeaves == 1;
  /// Whether CTAs may take several turns at once, and x of half a tile at a time.
  static constexpr bool kShares = !kWhole && kLeaves == 1 && kAtOnce == 1;
  /// Of long leaves as few registers as they need, so that CTAs of expand find room beside them.
  static constexpr int kPerSm = kAtOnce == 2 || kShares || kDense_ ? kDenseShrinkPerSm
                                : kAtOnce == 4                     ? 5
                                                                   : 4;
};

/// An asynchronous copy without a branch, if wanted, of which 16 - `bytes` become zeros.
__device__ __forceinline__ void copy_if(unsigned wanted, std::uint32_t to, const void* from,
                                        int bytes) {
  asm volatile(
      "{\n.reg .pred wanted;\nsetp.ne.b32 wanted, %3, 0;\n"
      "@wanted cp.async.cg.shared.global [%0], [%1], 16, %2;\n}" ::"r"(to),
      "l"(from), "r"(bytes), "r"(wanted)
      : "memory");
}

/// What the kernel is given, and how a CTA that leaves partials takes its share.
struct DecodeParams {
  ShrinkParams shrink;
  int log_turns;  ///< 2^log_turns times kK elements of K, at once
  int x_tokens;   ///< x of so many tokens at a time
};

}  // namespace mortar::lora::cuda::decode_shrink
