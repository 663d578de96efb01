// SPDX-License-Identifier: Apache-2.0
// The steps of expand_wide_walk.cu: what a CTA takes, one after the other, and how it learns of it.
#pragma once

#include <cstdint>

#include "device/barrier.cuh"
#include "device/ring.cuh"
#include "device/swizzle.cuh"
#include "lora/config.h"
#include "lora/cuda/expand_boxes.cuh"
#include "lora/cuda/expand_tile.cuh"
#include "lora/cuda/expand_wide_traits.cuh"
#include "lora/cuda/expand_wide_walk_share.cuh"
#include "lora/cuda/split_rows.cuh"
#include "lora/cuda/tile_pairs.cuh"

namespace mortar::lora::cuda::wide_walk {

using wide_expand::kGroupCols, wide_expand::kStepRanks;

template <bool kStaged>
inline constexpr WideShape kShapeOf = kWideShapes[kStaged ? kWideStagedShape : kWideWalkShape];
inline constexpr WideShape kOf = kShapeOf<false>;
inline constexpr int kTiles = kRunTiles, kTokens = 64 * kTiles, kCols = kOf.cols;
/// Threads that multiply, that copy, and that describe steps. (With one warpgroup for both of the
/// latter, a step of rank 128 took 2.4 us whatever y did, a fifth more than its share of DRAM.)
inline constexpr int kConsumers = 128 * kTiles, kProducers = 128, kScouts = 128,
                     kFirstScout = kConsumers + kProducers, kThreads = kFirstScout + kScouts;
static_assert(kOf.tiles == kTiles && kShapeOf<true>.tiles == kTiles && kCols == kWalkCols &&
                  kCols == kTokens && kTokens == kScouts,
              "one size of blocks of h and B, a token a scout");
inline constexpr int kBlockBytes = kTokens * device::kSwizzleBytes;  ///< 64 ranks of h, or of B
/// Where ranks leave room for it (kStaged), y of two steps lies in shared memory, in rows of which
/// two neighbours' pieces of 64 bytes take all banks.
inline constexpr int kYStages = 2, kYPitch = 2 * kCols + 64;
/// What lies in shared memory, and registers, where weights and h are of 16 bits.
template <bool kStaged, class Element = std::uint16_t>
struct Room {
  static constexpr int kParts = 1;
  static constexpr int kHBlocks = (kStaged ? kWideStagedMaxRank : kLoraMaxRank) / kStepRanks;
  static constexpr int kStages = kShapeOf<kStaged>.stages;  ///< of B
  static constexpr bool kTurns = !kStaged;  ///< a step is one warpgroup's, the next one the other's
  static constexpr int kWarps = (kTurns ? 128 : kConsumers) / 32;  ///< that multiply a step
  /// That are described ahead, with the one that is computed: y is copied once that is done for the
  /// second step after its own.
  static constexpr int kSteps = kStaged ? 6 : 4;
  static constexpr int kY = (kHBlocks + kStages) * kBlockBytes;
  static constexpr int kRing = kY + (kStaged ? kYStages * kTokens * kYPitch : 0);
  static constexpr int kProducerRegisters = 64, kScoutRegisters = 80;
};
/// Where they are float32: a block is two planes of parts. Those who copy have rows in registers.
template <>
struct Room<false, float> {
  static constexpr int kParts = kSplitParts;
  static constexpr bool kTurns = false;
  static constexpr int kWarps = kConsumers / 32;
  static constexpr int kHBlocks = kWideWalkPartsMaxRank / kStepRanks;
  static constexpr int kStages = kWideShapes[kWideWalkPartsShape].stages;
  static constexpr int kSteps = 4;
  static constexpr int kY = (kHBlocks + kStages) * kParts * kBlockBytes, kRing = kY;
  static constexpr int kProducerRegisters = 112, kScoutRegisters = 80;
};
inline constexpr int kMostHBlocks = kLoraMaxRank / kStepRanks, kMostStages = kOf.stages;
inline constexpr int kRegisters = 65536 / kThreads / 8 * 8;
template <bool kStaged, class Element>
inline constexpr int kConsumerRegisters = kRegisters + (2 * kRegisters -
                                                        Room<kStaged, Element>::kProducerRegisters -
                                                        Room<kStaged, Element>::kScoutRegisters) /
                                                           kTiles / 8 * 8;

/// A step as its consumers need it, and those who copy.
struct Step {
  int rank;   ///< 0: there are no more steps
  int count;  ///< tokens
  int cols;   ///< columns
  float scale;
  bool fresh;            ///< h is not that of the step before
  int h_arrivals;        ///< of each warp, which say that it needs h no longer
  int b_taken, h_taken;  ///< blocks of B, and of h, that steps before took
  // Of rows that threads copy:
  bool vector;    ///< those of B start at multiples of 16 bytes
  const void* b;  ///< the first column's row
  const void* h;  ///< the first token's row
  std::int64_t b_stride;
  // Of boxes: both CTAs of a cluster take these columns; groups of columns of B before them, rows
  // of h.
  bool both;
  int slice, b_group, h_line;
  std::int64_t y_col;  ///< of the first column
  int token[kTokens];  ///< negative: none

  /// Element of y of a token's first column; negative: there is none.
  __device__ __forceinline__ std::int64_t y(const ExpandParams& p, int row) const {
    return token[row] < 0 ? -1 : token[row] * p.y.row_stride + y_col;
  }
};

template <bool kStaged, class Element = std::uint16_t>
struct Shared {
  Step steps[Room<kStaged>::kSteps];
  device::Mbarrier told[Room<kStaged>::kSteps], used[Room<kStaged>::kSteps];
  device::Mbarrier h_full[kMostHBlocks], h_empty[kMostHBlocks], full[kMostStages],
      empty[kMostStages];
  device::Mbarrier y_full[kYStages], y_empty[kYStages];
  device::Mbarrier turn[kTiles];  ///< of warpgroups that take turns
};
template <bool kStaged, class Element>
inline constexpr int kSmem = Room<kStaged, Element>::kRing + int{sizeof(Shared<kStaged, Element>)};

struct WalkParams : BoxParams {
  int stride;  ///< of CTAs, or pairs of them: Share
};

/// Describes the steps of a CTA, one after the other. By all scouts, who agree.
template <bool kStaged, class Element = std::uint16_t>
struct Scout {
  const WalkParams& p;
  Shared<kStaged, Element>& shared;
  Share share;
  RunList tiles;
  int index;            ///< the run's first tile
  int next = 0;         ///< that of the run behind it
  bool looked = false;  ///< whether that is known, and the run
  bool done = false;    ///< the step here has been told, or left out
  PairRun run;
  int token = -1;
  Tile tile;
  SliceWeights weights;
  int slice = -1;                           ///< whose weights these are; negative: of other tokens
  int b_taken = 0, h_taken = 0, h_end = 0;  ///< blocks; of h, before this one and with it
  device::RingCursor<Room<kStaged>::kSteps> at;

  __device__ __forceinline__ Scout(const WalkParams& params, Shared<kStaged, Element>& s,
                                   const Share& own, const RunList& list, int first)
      : p(params), shared(s), share(own), tiles(list), index(first) {}

  /// Which of its cluster this CTA is.
  __device__ __forceinline__ int cta() const {
    return static_cast<int>(blockIdx.x) % kPair & (p.cluster - 1);
  }
  /// Finds out about the run; in one trip to memory, so of both runs that may be this CTA's.
  __device__ __forceinline__ void look() {
    const int4 first = tiles.entry(index), first_next = tiles.entry(index + 1);
    const int near_token = token_of(index);
    int4 far, far_next;
    int far_token = -1;
    const bool same_tokens = stays();
    if (p.cluster > 1) {
      const int other = index + (cta() == 0 ? -kRunTiles : kRunTiles);
      const int4 later = tiles.entry(index + kRunTiles);
      far = tiles.entry(other);
      far_next = tiles.entry(other + 1);
      far_token = token_of(other);
      run = PairRun(first.w, later.w);
    }
    next = index + (first_next.w % kRunTiles == 0 ? 1 : kRunTiles);
    if (same_tokens) return;
    if (run.of_other(cta())) {
      take(far, far_next, far_token);
    } else {
      take(first, first_next, near_token);
    }
  }
  /// The token of this thread in the run that begins with a tile.
  __device__ __forceinline__ int token_of(int first) const {
    const int thread = static_cast<int>(threadIdx.x) - kFirstScout;
    const bool there = first >= 0 && first + thread / 64 < tiles.num;
    if (!there) return -1;
    return __ldcg(p.groups.plan + p.tiles.tokens + std::int64_t{first} * 64 + thread);
  }
  __device__ __forceinline__ void take(const int4& first, const int4& second, int own_token) {
    const bool two = second.x == first.x && second.w % kRunTiles != 0;
    tile = {first.x, first.y, first.z + (two ? second.z : 0)};
    token = static_cast<int>(threadIdx.x) - kFirstScout < tile.count ? own_token : -1;
    slice = -1;
  }
  /// Whether after a run comes the second one of two, with the same tokens.
  __device__ __forceinline__ bool stays() const {
    return run.both && !run.second && !share.in_turns;
  }
  __device__ __forceinline__ void advance() {
    share.block += share.stride;
    if (--share.left <= 0 || share.block < share.blocks) return;
    share.block = share.in_turns ? share.block % share.stride : share.block - share.blocks;
    index = share.in_turns && share.groups > 1 ? tiles.leader<2>(next, share.groups - 1) : next;
    looked = false;
  }
  __device__ __forceinline__ bool more() const { return share.left > 0 && index < tiles.num; }
  /// The block of columns of the step that comes `ahead` later in this run. There may be none: then
  /// CTAs that fill their rings together take what their neighbour takes, and leave y alone.
  __device__ __forceinline__ int column_block(int ahead) const {
    const int block = share.block + ahead;
    if (!run.both) return p.cluster * block + cta();
    return run.second ? share.blocks + block : block;
  }
  /// Whether the CTAs take as many steps as each other, of unlike columns.
  __device__ __forceinline__ bool in_step() const { return p.cluster > 1 && !run.both; }
  /// Whether the step that comes `ahead` later has another h, or does not exist.
  __device__ __forceinline__ bool ends(int ahead) const {
    const int steps = ahead * share.stride, next = column_block(steps), blocks = all_blocks(p);
    const bool goes_on = share.block + steps < share.blocks || stays();
    return share.left <= ahead || !goes_on ||
           (in_step() ? min(next, blocks - 1) : next) >= p.block_start[slice + 1];
  }
  /// The next step that has weights; false: there is none.
  __device__ __forceinline__ bool tell() {
    const int thread = static_cast<int>(threadIdx.x) - kFirstScout;
    if (at.round > 0) shared.used[at.stage].wait((at.round - 1) & 1);
    Step& to = shared.steps[at.stage];
    bool fresh = false;
    int place = 0;
    Block columns;
    const int blocks = all_blocks(p);
    for (;; done = true) {
      // Now, and not when the step before was told, which would have waited for the next run.
      if (done && more()) advance();
      done = false;
      if (!more()) break;
      if (!looked) look();
      looked = true;
      place = column_block(0);
      if (place >= blocks && !in_step()) continue;
      columns = find_block(p, min(place, blocks - 1));
      if (columns.slice != slice) {
        weights = weights_of(p, tile, columns, true);
        slice = columns.slice;
        fresh = true;
      }
      if (weights.rank > 0) break;
    }
    const bool there = more();
    done = true;
    if (there) {
      constexpr int kPiece = 16 / int{sizeof(Element)};
      to.token[thread] = token;
      if (thread == 0) {
        to.rank = weights.rank;
        to.y_col = columns.y_col;
        to.count = tile.count;
        to.cols = place < blocks ? columns.cols : 0;
        to.scale = weights.scale;
        to.fresh = fresh;
        // Of warpgroups that take turns each leaves h with its own last step.
        constexpr int kOwnNext = Room<kStaged, Element>::kTurns ? 2 : 1;
        to.h_arrivals = !ends(kOwnNext) ? 0 : fresh && ends(1) ? kOwnNext : 1;
        to.b_taken = b_taken;
        to.h_taken = fresh ? h_end : h_taken;
        to.both = run.both;
        to.slice = slice;
        to.b_group =
            tile.adapter * p.adapter_groups[slice] + static_cast<int>(columns.first) / kGroupCols;
        to.h_line = tile.start;
        if (!p.b_boxes) {
          const auto* b = static_cast<const Element*>(weights.b);
          to.vector =
              reinterpret_cast<std::uintptr_t>(b) % 16 == 0 && weights.b_row_stride % kPiece == 0;
          to.b = b + columns.first * weights.b_row_stride;
          to.b_stride = weights.b_row_stride;
          to.h = static_cast<const Element*>(p.h.data) + slice * p.h.slice_stride +
                 tile.start * p.h.row_stride;
        }
      }
      const int taken = ceil_div(weights.rank, kStepRanks);
      b_taken += taken;
      if (fresh) {
        h_taken = h_end;
        h_end += taken;
      }
    } else if (thread == 0) {
      to.rank = 0;
    }
    shared.told[at.stage].arrive();
    at.next();
    return there;
  }
};

}  // namespace mortar::lora::cuda::wide_walk
