// SPDX-License-Identifier: Apache-2.0
// The scheduler warp (scout) of the prefill expand. It runs a few steps ahead of the warps that
// compute, and finds out for each step which tile of tokens and which block of columns it takes,
// where its data lie, and when B must be copied.
#pragma once

#include <cstdint>

#include "device/async_copy.cuh"
#include "lora/cuda/expand_tile.cuh"

namespace mortar::lora::cuda {

constexpr int kLogStepTokens = 6;                 ///< log2 of the tokens in a step's tile
constexpr int kStepTokens = 1 << kLogStepTokens;  ///< tokens in a step's tile

/// What all warps of a CTA need to know about one step; a ring of these lies in shared memory. The
/// scheduler warp, the CTA's last, fills in a slot before its step begins. Only the slots of the
/// first steps are filled in by the warps that compute, which have nothing else to do yet.
struct StepSlot {
  int4 entry;  ///< the tile's entry in the plan: {adapter, start, count, -}
  int tokens[kStepTokens];
  const void* b;                          ///< B of the block's first column
  std::int64_t b_stride;                  ///< elements between columns
  std::int64_t h_at;                      ///< elements before the slice in a row of h
  std::int64_t y[kStepTokens];            ///< byte offset of each token's part of the block
  std::uint32_t there[kStepTokens / 32];  ///< a bit for each place: whether it has a token
  int block;
  int cols, rank;
  float scale;  ///< of the finished sums
  int b_slot;   ///< slot of shared memory that holds this step's B
  bool live;    ///< the step has tokens and a rank above 0
  bool fresh;   ///< B differs from the last step's: it is copied ahead, with the step's other data
  bool late;    ///< B differs, but its slot is still in use then: copied a step before this one
};

/// Fills the slots of a CTA's steps. A run is 2^log_run consecutive tiles with one block of
/// columns; runs are numbered with the block changing first, and a CTA takes every gridDim.x-th.
template <class Tr>
struct Scout {
  const ExpandParams& p;
  const GroupsView& groups;
  StepSlot* slots;
  int num_blocks, num_tiles;

  // What the last assigned step had.
  int last_block = -1, last_adapter = -1, b_slot = 0;
  int b_end[Tr::kBSlots];  ///< first step that no longer uses the slot

  __device__ __forceinline__ Scout(const ExpandParams& params, const GroupsView& g, StepSlot* s,
                                   int tiles)
      : p(params), groups(g), slots(s), num_tiles(tiles) {
    num_blocks = p.block_start[p.weights.num_slices];
    for (int& end : b_end) end = -(1 << 20);
  }
  __device__ __forceinline__ int num_steps() const {
    const int items = ((num_tiles + (1 << p.log_run) - 1) >> p.log_run) * num_blocks;
    const int cta = static_cast<int>(blockIdx.x), ctas = static_cast<int>(gridDim.x);
    return cta < items ? ((items - 1 - cta) / ctas + 1) << p.log_run : 0;
  }

  /// The run of step s, which is item `item` of all runs' blocks, and its tile.
  __device__ __forceinline__ int tile_of(int s, unsigned* item, unsigned* run) const {
    *item = blockIdx.x + static_cast<unsigned>(s >> p.log_run) * gridDim.x;
    *run = *item / static_cast<unsigned>(num_blocks);
    return static_cast<int>(*run << p.log_run) + (s & ((1 << p.log_run) - 1));
  }
  /// Of a step that was looked up when the tiles were not counted yet. By the same warp.
  __device__ __forceinline__ void confirm(int s) {
    unsigned item, run;
    if (tile_of(s, &item, &run) >= num_tiles && threadIdx.x % 32 == 0) {
      slots[s % Tr::kSlots].live = false;
    }
  }
  /// Tile and tokens of step s. With a plan the copy is in flight on return. Called by a warp.
  __device__ __forceinline__ void look_up(int s) {
    const int lane = threadIdx.x % 32;
    StepSlot& slot = slots[s % Tr::kSlots];
    unsigned item, run;
    const int tile = tile_of(s, &item, &run);
    const int index = p.tiles.first + tile;
    bool live;
    if (Tr::kOwnH || groups.plan != nullptr) {
      // The list has room for all tiles that the host expects, whether they exist or not.
      if (tile < p.tiles.num && lane < kStepTokens / 4) {
        device::cp_async_16(&slot.tokens[lane * 4],
                            groups.plan + p.tiles.tokens + index * kStepTokens + lane * 4);
      } else if (tile < p.tiles.num && lane == kStepTokens / 4) {
        device::cp_async_16(&slot.entry, groups.plan + p.tiles.list + kPlanEntryWords * index);
      }
      live = tile < num_tiles;
    } else {
      Tile t;
      live = tile < num_tiles &&
             find_segment_tile(groups, p.weights.num_adapters, kStepTokens, index, &t);
      if (live) {
        for (int i = lane; i < kStepTokens; i += 32) {
          slot.tokens[i] = sorted_token(groups, p.tiles, t, i);
        }
        if (lane == 0) slot.entry = make_int4(t.adapter, t.start, t.count, 0);
      }
    }
    if (lane == 0) {
      slot.live = live;
      slot.block = static_cast<int>(item - run * static_cast<unsigned>(num_blocks));
    }
  }

  /// What follows from the tile of step s, which has arrived. Called by a warp.
  __device__ __forceinline__ void prepare(int s) {
    const int lane = threadIdx.x % 32;
    StepSlot& slot = slots[s % Tr::kSlots];
    if (!slot.live) return;
    __syncwarp();  // slot.live is written below
    const Block at = find_block(p, slot.block);
    const SliceWeights w = weights_of(p, {slot.entry.x}, at, true);
    for (int i = lane; i < kStepTokens; i += 32) {
      const std::int64_t token = slot.tokens[i];
      // Where there is no token, an address all the same.
      slot.y[i] = 2 * (max(token, std::int64_t{0}) * p.y.row_stride + at.y_col);
      const std::uint32_t there = __ballot_sync(0xffffffffu, token >= 0);
      if (lane == 0) slot.there[i / 32] = there;
    }
    if (lane != 0) return;
    slot.b = static_cast<const typename Tr::T*>(w.b) + at.first * w.b_row_stride;
    slot.b_stride = w.b_row_stride;
    slot.h_at = at.slice * p.h.slice_stride;
    slot.cols = at.cols;
    slot.rank = w.rank;
    slot.scale = w.scale;
    slot.live = slot.rank > 0;
  }

  /// Where B of step s goes, and when. Called by one warp for one step after the other.
  __device__ __forceinline__ void assign(int s) {
    StepSlot& slot = slots[s % Tr::kSlots];
    if (!slot.live) return;
    const int block = slot.block, adapter = slot.entry.x;
    const bool fresh = block != last_block || adapter != last_adapter;
    last_block = block;
    last_adapter = adapter;
    if (fresh) b_slot = b_slot + 1 == Tr::kBSlots ? 0 : b_slot + 1;
    // Step s is issued once step s - kAhead - 1 is through.
    bool late = false;
#pragma unroll
    for (int i = 0; i < Tr::kBSlots; ++i) {
      if (i != b_slot) continue;
      late = fresh && b_end[i] > s - Tr::kAhead;
      b_end[i] = s + 1;
    }
    if (threadIdx.x % 32 != 0) return;
    slot.b_slot = b_slot;
    slot.fresh = fresh && !late;
    slot.late = late;
  }
};

/// Tiles of 64 tokens that the segments make; every warp counts for itself.
__device__ __forceinline__ int count_segment_tiles(const GroupsView& g, std::int64_t num_adapters) {
  int tiles = 0;
  for (int i = threadIdx.x % 32; i < g.num_segments; i += 32) {
    const int count = segment_tokens(g, num_adapters, g.ids[i], g.starts[i], g.counts[i]);
    tiles += runs_of_tokens(count, kLogStepTokens);
  }
  return __reduce_add_sync(0xffffffffu, tiles);
}

}  // namespace mortar::lora::cuda
