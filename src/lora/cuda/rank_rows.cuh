// SPDX-License-Identifier: Apache-2.0
// The rank rows of an adapter's slices taken as one list, so that shrink reads x once for all of
// them and every adapter costs its own ranks only.
#pragma once

#include <cstdint>

#include "device/async_copy.cuh"
#include "device/pdl.cuh"
#include "lora/cuda/params.cuh"

namespace mortar::lora::cuda {

/// A thread's rank row, where all adapters have the same ranks, as long as its adapter is unknown.
struct RowAhead {
  bool known = false;
  const char* row = nullptr;  ///< of adapter 0; null: none, or a padding row
  std::int64_t step = 0;      ///< bytes from an adapter's to the next one's
};

/// What is known of neighbouring rows of the list, in shared memory.
struct RankRowList {
  const void** weights;  ///< row of A; null: a padding row, whose h is zero
  std::int64_t* place;   ///< element offset of the row's column in h
  float* scale;
  int* count;

  /// At most `most` rows from `first` on. Called by the whole CTA; a barrier must follow before
  /// use.
  __device__ __forceinline__ void fill(const ShrinkParams& p, int adapter, int first, int most) {
    // Warps past the last row would only delay the others.
    if (static_cast<int>(threadIdx.x & ~31u) >= most) return;
    // Each lane looks up one slice, so that the loads of all slices are one trip.
    const int size = p.weights.dtype == DType::kFloat32 ? 4 : 2;
    const int own_slice = min(static_cast<int>(threadIdx.x % 32), p.weights.num_slices - 1);
    const SliceWeights own = p.weights.get(adapter, own_slice);
    const int own_rank = min(own.rank, p.h.width);
    for (int base = 0; base < most; base += blockDim.x) {
      const int i = base + static_cast<int>(threadIdx.x);
      int before = 0, slice = -1, r = 0;
      for (int s = 0; s < p.weights.num_slices; ++s) {
        const int listed = p.pad ? p.h.width : __shfl_sync(0xffffffffu, own_rank, s);
        if (first + i >= before && first + i < before + listed) {
          slice = s;
          r = first + i - before;
        }
        before += listed;
      }
      const int from = max(slice, 0);
      const int rank = __shfl_sync(0xffffffffu, own_rank, from);
      const auto a = reinterpret_cast<const char*>(
          __shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(own.a), from));
      const auto stride = __shfl_sync(0xffffffffu, static_cast<long long>(own.a_row_stride), from);
      const float own_scale = __shfl_sync(0xffffffffu, own.scale, from);
      if (i < most) {
        weights[i] = slice >= 0 && r < rank ? a + r * stride * size : nullptr;
        place[i] = slice * p.h.slice_stride + r;
        scale[i] = p.h.own ? 1.0f : p.scale * own_scale;
      }
      if (i == 0) *count = max(0, min(before - first, most));
    }
  }
};

/// Rows [first, first + kRows) of the list, in shared memory.
template <int kRows>
struct RankRows {
  const void* weights[kRows];
  std::int64_t place[kRows];
  float scale[kRows];
  int count;

  /// The part of fill() that needs no adapter, of a row a thread: its instructions run while the
  /// CTA's tile is looked up. Where ranks differ by adapter there is none.
  __device__ __forceinline__ RowAhead fill_ahead(const ShrinkParams& p, int first) {
    const WeightsView& w = p.weights;
    RowAhead ahead;
    ahead.known = w.table == nullptr && w.ranks == nullptr;
    if (!ahead.known) return ahead;
    const int size = w.dtype == DType::kFloat32 ? 4 : 2, i = static_cast<int>(threadIdx.x);
    int before = 0, slice = -1, r = 0;
    for (int s = 0; s < w.num_slices; ++s) {
      const int listed = p.pad ? p.h.width : min(w.slices[s].rank, p.h.width);
      if (first + i >= before && first + i < before + listed) {
        slice = s;
        r = first + i - before;
      }
      before += listed;
    }
    if (i < kRows) {
      const StackedSlice& own = w.slices[max(slice, 0)];
      if (slice >= 0 && r < min(own.rank, p.h.width)) {
        ahead.row = static_cast<const char*>(own.a) + r * own.a_row_stride * size;
      }
      ahead.step = own.a_adapter_stride * size;
      place[i] = slice * p.h.slice_stride + r;
      scale[i] = p.h.own ? 1.0f : p.scale;
    }
    if (i == 0) count = max(0, min(before - first, kRows));
    return ahead;
  }
  /// The rest of it, or all.
  __device__ __forceinline__ void fill(const ShrinkParams& p, int adapter, int first,
                                       const RowAhead& ahead) {
    if (!ahead.known) return fill(p, adapter, first);
    const int i = static_cast<int>(threadIdx.x);
    if (i >= kRows) return;
    weights[i] = ahead.row == nullptr ? nullptr : ahead.row + adapter * ahead.step;
    if (!p.h.own && p.weights.scales != nullptr) scale[i] = p.scale * p.weights.scales[adapter];
  }

  __device__ __forceinline__ void fill(const ShrinkParams& p, int adapter, int first,
                                       int most = kRows) {
    RankRowList{weights, place, scale, &count}.fill(p, adapter, first, most);
  }
};

/// Asks for ranks and scales of up to 1,024 adapters in L2, while a CTA still looks for the tile
/// that says whose it needs.
__device__ __forceinline__ void ask_for_ranks(const WeightsView& w) {
  const std::int64_t first = std::int64_t{threadIdx.x} * 32;
  if (w.table != nullptr || threadIdx.x >= 32 || first >= w.num_adapters) return;
  if (w.ranks != nullptr) device::prefetch_l2(w.ranks + first);
  if (w.scales != nullptr) device::prefetch_l2(w.scales + first);
}

/// Rows that a CTA past the tiles looks after.
inline constexpr int kZeroRows = 64;

/// For CTAs past the tiles: write zeros to the rows of h whose entry in p.zero_rows is no adapter.
/// Called by the whole CTA. The entries, unlike weights and groups, may come from the kernel right
/// before this one, so they are read after the wait.
__device__ __forceinline__ void zero_base_rows(const ShrinkParams& p) {
  const std::int64_t block = static_cast<std::int64_t>(blockIdx.z) - p.tiles.num;
  const bool mine = p.zero_rows.data != nullptr && block >= 0 && blockIdx.x == 0 && blockIdx.y == 0;
  if (!mine) return device::pdl_leave();
  device::pdl_wait();
  // Each lane reads the entry of one of its warp's rows: one trip to memory for all of them.
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const auto row_of = [&](int i) { return block * kZeroRows + warp + i * warps; };
  bool zero = warp + lane * warps < kZeroRows && row_of(lane) < p.tiles.num_tokens;
  if (zero) {
    const int id = p.zero_rows.get(row_of(lane));
    zero = id < 0 || id >= p.weights.num_adapters;
  }
  for (unsigned rows = __ballot_sync(0xffffffffu, zero); rows != 0; rows &= rows - 1) {
    const std::int64_t row = row_of(__ffs(rows) - 1);
    for (int c = lane; c < p.weights.num_slices * p.h.width; c += 32) {
      const std::int64_t at =
          c / p.h.width * p.h.slice_stride + row * p.h.row_stride + c % p.h.width;
      device::store_from_float(p.h.data, p.h.dtype, at, 0.0f);
    }
  }
}

/// CTAs along z: tiles, and then the rows to zero.
inline unsigned shrink_depth(const ShrinkParams& p) {
  const std::int64_t zero_blocks =
      p.zero_rows.data == nullptr ? 0 : ceil_div<std::int64_t>(p.tiles.num_tokens, kZeroRows);
  return static_cast<unsigned>(p.tiles.num + zero_blocks);
}

/// Most rank rows of an adapter, with those that are only zeros in h.
inline int rank_rows(const ShrinkParams& p) {
  return p.weights.num_slices * (p.pad ? p.h.width : p.weights.max_rank);
}

/// Grid of a shrink kernel: rank rows, leaves of K, tiles.
inline dim3 shrink_grid(const ShrinkParams& p, const ShrinkPlan& c) {
  return dim3(static_cast<unsigned>(ceil_div(rank_rows(p), c.rows)),
              static_cast<unsigned>(p.h.num_slabs), shrink_depth(p));
}

}  // namespace mortar::lora::cuda
