// SPDX-License-Identifier: Apache-2.0
// The steps of expand_wide_walk.cu: what a CTA takes, one after the other, and how it learns of it.
#pragma once

#include <cstdint>

#include "device/barrier.cuh"
#include "device/ring.cuh"
#include "device/swizzle.cuh"
#include "lora/config.h"
#include "lora/cuda/expand_tile.cuh"
#include "lora/cuda/expand_wide_traits.cuh"

namespace mortar::lora::cuda::wide_walk {

using wide_expand::kGroupCols, wide_expand::kStepRanks;

template <bool kStaged>
inline constexpr WideShape kShapeOf = kWideShapes[kStaged ? kWideStagedShape : kWideWalkShape];
inline constexpr WideShape kOf = kShapeOf<false>;
inline constexpr int kTiles = 2, kTokens = 64 * kTiles, kCols = kOf.cols;
/// Threads that multiply, that copy, and that describe steps. (With one warpgroup for both of the
/// latter, a step of rank 128 took 2.4 us whatever y did, a fifth more than its share of DRAM.)
inline constexpr int kConsumers = 128 * kTiles, kProducers = 128, kScouts = 128,
                     kFirstScout = kConsumers + kProducers, kThreads = kFirstScout + kScouts,
                     kWarps = kThreads / 32;
static_assert(kOf.tiles == kTiles && kShapeOf<true>.tiles == kTiles && kCols == kTokens &&
                  kTokens == kScouts,
              "one size of blocks of h and B, a token a scout");
inline constexpr int kBlockBytes = kTokens * device::kSwizzleBytes;  ///< 64 ranks of h, or of B
/// Where ranks leave room for it (kStaged), y of two steps lies in shared memory, in rows of which
/// two neighbours' pieces of 64 bytes take all banks.
inline constexpr int kYStages = 2, kYPitch = 2 * kCols + 64;
template <bool kStaged>
struct Room {
  static constexpr int kHBlocks = (kStaged ? kWideStagedMaxRank : kLoraMaxRank) / kStepRanks;
  static constexpr int kStages = kShapeOf<kStaged>.stages;  ///< of B
  static constexpr int kY = (kHBlocks + kStages) * kBlockBytes;
  static constexpr int kRing = kY + (kStaged ? kYStages * kTokens * kYPitch : 0);
};
inline constexpr int kMostHBlocks = kLoraMaxRank / kStepRanks, kMostStages = kOf.stages;
inline constexpr int kSteps = 6;  ///< that are described ahead, with the one that is computed
inline constexpr int kRegisters = 65536 / kThreads / 8 * 8, kProducerRegisters = 72,
                     kScoutRegisters = 72;
inline constexpr int kConsumerRegisters =
    kRegisters + (2 * kRegisters - kProducerRegisters - kScoutRegisters) / kTiles / 8 * 8;

/// A step as its consumers need it, and those who copy.
struct Step {
  int rank;   ///< 0: there are no more steps
  int count;  ///< tokens
  int cols;   ///< columns
  float scale;
  bool fresh;     ///< h is not that of the step before
  bool last;      ///< the next step has another h
  bool vector;    ///< rows of B start at multiples of 16 bytes
  const void* b;  ///< the first column's row
  const void* h;  ///< the first token's row
  std::int64_t b_stride;
  std::int64_t y[kTokens];  ///< element of y of the first column; negative: no token
};

struct Shared {
  Step steps[kSteps];
  device::Mbarrier told[kSteps], used[kSteps];
  device::Mbarrier h_full[kMostHBlocks], h_empty[kMostHBlocks], full[kMostStages],
      empty[kMostStages];
  device::Mbarrier y_full[kYStages], y_empty[kYStages];
  int warp_leaders[kWarps];
  int first;  ///< tile of the first step
};
template <bool kStaged>
inline constexpr int kSmem = Room<kStaged>::kRing + int{sizeof(Shared)};

/// A CTA's steps. Of all steps, run of tokens by run and within it block of columns by block, every
/// group of neighbouring CTAs has a range, whose steps its members take in turn.
struct Range {
  int stride;  ///< CTAs of a group
  std::int64_t begin = 0, end = 0;

  __device__ __forceinline__ Range(std::int64_t runs, int blocks) {
    constexpr int kFew = 4;  // their columns of a row are 1 KB
    const int ctas = static_cast<int>(gridDim.x);
    // Whole rows of y are open at a time where they are long. (us on an H100, groups of all CTAs
    // and of four: 296 blocks 271 and 298, 80 blocks 413 and 439; but 40 blocks, groups of 33, 137
    // and 119.)
    stride = 5 * blocks >= 3 * ctas ? ctas : kFew;
    while (stride > 1 && (ctas % stride != 0 || blocks < stride)) stride /= 2;
    const std::int64_t all = runs * blocks;
    const std::int64_t most = ceil_div<std::int64_t>(all, ctas / stride);
    const int group = static_cast<int>(blockIdx.x) / stride;
    begin = group * most + static_cast<int>(blockIdx.x) % stride;
    end = min((group + 1) * most, all);
  }
};

/// Whether a run of tokens begins with the tile of this entry of the plan.
__device__ __forceinline__ bool leads(const int4& entry) { return entry.w % kTiles == 0; }

/// Describes the steps of a CTA, one after the other. By all scouts, who agree.
struct Scout {
  const ExpandParams& p;
  Shared& shared;
  int num_tiles, index, block, stride;
  std::int64_t step, end;
  int tiles = 0, token = -1;
  Tile tile;
  SliceWeights weights;
  int slice = -1;  ///< whose weights these are; negative: of other tokens
  device::RingCursor<kSteps> at;

  __device__ __forceinline__ void find_run() {
    const int thread = static_cast<int>(threadIdx.x) - kFirstScout;
    const auto* list = reinterpret_cast<const int4*>(p.groups.plan + p.tiles.list);
    const int4 first = __ldcg(list + index);
    const bool more = index + 1 < num_tiles;
    const int4 second = more ? __ldcg(list + index + 1) : make_int4(-1, 0, 0, 0);
    token = -1;
    if (more || thread < 64) {
      token = __ldcg(p.groups.plan + p.tiles.tokens + std::int64_t{index} * 64 + thread);
    }
    const bool both = second.x == first.x && !leads(second);
    tiles = both ? 2 : 1;
    tile = {first.x, first.y, first.z + (both ? second.z : 0)};
    if (thread >= tile.count) token = -1;
    slice = -1;
  }
  __device__ __forceinline__ void advance() {
    const int blocks = p.block_start[p.weights.num_slices];
    step += stride;
    for (block += stride; block >= blocks && step < end; block -= blocks) {
      index += tiles;
      find_run();
    }
  }
  /// The next step that has weights; false: there is none.
  __device__ __forceinline__ bool tell() {
    const int thread = static_cast<int>(threadIdx.x) - kFirstScout;
    if (at.round > 0) shared.used[at.stage].wait((at.round - 1) & 1);
    Step& to = shared.steps[at.stage];
    bool fresh = false;
    Block own;
    for (; step < end; advance()) {
      own = find_block(p, block);
      if (own.slice != slice) {
        weights = weights_of(p, tile, own, true);
        slice = own.slice;
        fresh = true;
      }
      if (weights.rank > 0) break;
    }
    const bool more = step < end;
    if (more) {
      using Half = std::uint16_t;
      const auto* b = static_cast<const Half*>(weights.b);
      to.y[thread] = token < 0 ? -1 : token * p.y.row_stride + own.y_col;
      if (thread == 0) {
        to.rank = weights.rank;
        to.count = tile.count;
        to.cols = own.cols;
        to.scale = weights.scale;
        to.fresh = fresh;
        to.last = step + stride >= end || block + stride >= p.block_start[slice + 1];
        to.vector = reinterpret_cast<std::uintptr_t>(b) % 16 == 0 && weights.b_row_stride % 8 == 0;
        to.b = b + own.first * weights.b_row_stride;
        to.b_stride = weights.b_row_stride;
        to.h = static_cast<const Half*>(p.h.data) + slice * p.h.slice_stride +
               tile.start * p.h.row_stride;
      }
      advance();
    } else if (thread == 0) {
      to.rank = 0;
    }
    shared.told[at.stage].arrive();
    at.next();
    return more;
  }
};

}  // namespace mortar::lora::cuda::wide_walk
