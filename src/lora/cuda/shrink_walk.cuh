// SPDX-License-Identifier: Apache-2.0
// The units of shrink_walk.cu: what a CTA takes, one after the other, and how it learns of it.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "core/int_math.h"
#include "device/barrier.cuh"
#include "device/ring.cuh"
#include "device/swizzle.cuh"
#include "lora/config.h"
#include "lora/cuda/params.cuh"
#include "lora/cuda/tile_pairs.cuh"

namespace mortar::lora::cuda::walk_units {

inline constexpr int kTileK = device::kSwizzleBytes / 2;  ///< elements of a stage
inline constexpr int kTokens = kWalkTokens, kTiles = kTokens / 64;
static_assert(kTiles == kRunTiles);
/// Threads that multiply, that copy x, and of the warps of which one looks up units and one asks
/// for A.
inline constexpr int kConsumers = 128 * kTiles, kProducers = 128, kHelpers = 128,
                     kFirstHelper = kConsumers + kProducers, kThreads = kFirstHelper + kHelpers;
inline constexpr int kTokenBytes = kTokens * device::kSwizzleBytes;
inline constexpr int kBoxBytes = kWalkBoxRows * device::kSwizzleBytes;
inline constexpr int kUnits = 3;  ///< that are described, with the one that is computed

template <int kShape>
struct Traits {
  static constexpr int kRows = kWalkShapes[kShape].rows, kStages = kWalkShapes[kShape].stages;
  static constexpr int kSums = kRows / 2;                ///< of a thread
  static constexpr int kKept = kSums <= 64 ? kSums : 1;  ///< of the first half of K, in registers
  static constexpr int kBoxes = kRows / kWalkBoxRows;
  static constexpr int kStageBytes = kTokenBytes + kRows * device::kSwizzleBytes;
  static constexpr int kRing = kStages * kStageBytes;
  static constexpr int kSumBytes = kConsumers * kSums * 4;
  static constexpr int kProducerRegisters = 48, kHelperRegisters = 32, kConsumerRegisters = 216;
  static_assert(kRows % kWalkBoxRows == 0, "whole boxes");
};
static_assert(256 * 216 + 128 * (48 + 32) <= 65536, "the registers of an SM");

struct Params : ShrinkParams {
  CUtensorMap a[kLoraMaxSlices];      ///< rank rows of all adapters of a slice
  int adapter_lines[kLoraMaxSlices];  ///< rows from those of an adapter to the next one's
  int ctas_a_run;                     ///< that share all rank rows of a run of tokens
  float4* parked;                     ///< sums of the first half of K, those of a CTA side by side
};

/// Rank rows that are copied together.
struct Box {
  const CUtensorMap* map;
  int line;   ///< of the first
  int place;  ///< its column of h, from the token's row on
};

/// Up to 128 tokens of one adapter, and some of its rank rows.
template <class Tr>
struct Unit {
  int count;               ///< tokens; 0: there are no more units
  int boxes;               ///< of rank rows
  std::int64_t h;          ///< element at which the first token's row of h begins
  const void* x[kTokens];  ///< rows; null: no token
  Box box[Tr::kBoxes];
};

template <class Tr>
struct Shared {
  Unit<Tr> units[kUnits];
  device::Mbarrier told[kUnits], used[kUnits];
  device::Mbarrier full[Tr::kStages], empty[Tr::kStages];
};
template <class Tr>
inline constexpr int kSmem = Tr::kRing + int{sizeof(Shared<Tr>)};

/// Describes the units of a CTA, one after the other. By one warp, the scheduler.
template <class Tr>
struct Scheduler {
  const Params& p;
  Shared<Tr>& shared;
  RunList tiles;
  int lane, group, index;
  device::RingCursor<kUnits> at;

  __device__ __forceinline__ Scheduler(const Params& params, Shared<Tr>& s)
      : p(params),
        shared(s),
        tiles{params.groups, params.tiles, params.tiles.num},
        lane(static_cast<int>(threadIdx.x) % 32) {
    const int4 head = __ldcg(reinterpret_cast<const int4*>(p.groups.plan));
    group = static_cast<int>(blockIdx.x) % p.ctas_a_run;
    index = tiles.leader<4>(0, static_cast<int>(blockIdx.x) / p.ctas_a_run);
    const bool of_batch = is_plan_of(head, p.tiles, p.weights.num_adapters);
    tiles.num = of_batch ? min(head.w, tiles.num) : 0;
  }
  __device__ __forceinline__ void advance() {
    const int ctas = static_cast<int>(gridDim.x);
    group += ctas % p.ctas_a_run;
    int runs = ctas / p.ctas_a_run;
    if (group >= p.ctas_a_run) {
      group -= p.ctas_a_run;
      ++runs;
    }
    if (runs > 0) index = tiles.leader<4>(index + 1, runs - 1);
  }
  /// The next unit; false: there is none.
  __device__ __forceinline__ bool tell() {
    if (at.round > 0) shared.used[at.stage].wait((at.round - 1) & 1);
    Unit<Tr>& to = shared.units[at.stage];
    const bool more = index < tiles.num;
    if (more) {
      const auto* tokens = p.groups.plan + p.tiles.tokens + std::int64_t{index} * 64;
      const bool next = index + 1 < tiles.num;
      const int4 first = __ldcg(tiles.at(index));
      const int4 second = next ? __ldcg(tiles.at(index + 1)) : make_int4(-1, 0, 0, 0);
      int token[kTokens / 32];
#pragma unroll
      for (int j = 0; j < kTokens / 32; ++j) {
        token[j] = j < 2 || next ? __ldcg(tokens + 32 * j + lane) : -1;
      }
      const bool both = second.x == first.x && second.w % kTiles != 0;
      const int count = first.z + (both ? second.z : 0);
      const auto* x = static_cast<const std::uint16_t*>(p.x.data);
#pragma unroll
      for (int j = 0; j < kTokens / 32; ++j) {
        const bool there = 32 * j + lane < count && token[j] >= 0;
        to.x[32 * j + lane] = there ? x + token[j] * p.x.row_stride : nullptr;
      }
      int row = group * Tr::kRows + lane * kWalkBoxRows, slice = 0;
      for (; slice + 1 < p.weights.num_slices && row >= p.weights.slices[slice].rank; ++slice) {
        row -= p.weights.slices[slice].rank;
      }
      const bool there = lane < Tr::kBoxes && row < p.weights.slices[slice].rank;
      if (there) {
        to.box[lane] = {&p.a[slice], first.x * p.adapter_lines[slice] + row,
                        static_cast<int>(slice * p.h.slice_stride) + row};
      }
      const int boxes = __popc(__ballot_sync(0xffffffffu, there));
      if (lane == 0) {
        to.count = count;
        to.boxes = boxes;
        to.h = first.y * p.h.row_stride;
      }
      advance();
    } else if (lane == 0) {
      to.count = 0;
    }
    shared.told[at.stage].arrive();
    at.next();
    return more;
  }
};

}  // namespace mortar::lora::cuda::walk_units
