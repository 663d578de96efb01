// SPDX-License-Identifier: Apache-2.0
// What the kernels of LoRA training share: operands, the table of pairs, and which rows a tile has.
#pragma once

#include <cstdint>

#include "lora/plan_layout.h"
#include "lora/train/cuda/config.h"
#include "lora/train/problem.h"

namespace mortar::lora::train::cuda {

/// One of two matrices, part by part: so what is copied for it stays in registers.
MORTAR_HOST_DEVICE constexpr Matrix pick(bool first, const Matrix& m, const Matrix& n) {
  return {first ? m.data : n.data, first ? m.row_stride : n.row_stride,
          first ? m.col_stride : n.col_stride, first ? m.dtype : n.dtype};
}

/// One (adapter, slice) as kernels read it.
struct PairEntry {
  Matrix a, b, da, db;
  float factor;
  std::uint32_t threshold;
  int rank;
  int adds;  ///< bit 0: to da, bit 1: to db

  MORTAR_HOST_DEVICE constexpr Matrix weight(bool of_a) const { return pick(of_a, a, b); }
  MORTAR_HOST_DEVICE constexpr Matrix grad(bool of_a) const { return pick(of_a, da, db); }
};

/// Pairs that come with every launch, of one adapter or of several. Three tables of them are what
/// fits the 4 KB of a kernel's parameters.
inline constexpr int kOwnPairs = kLoraMaxSlices;

/// Pairs by (adapter, slice): in the parameters themselves if there is room, else in the workspace.
struct PairTable {
  const PairEntry* entries;  ///< null: `own`
  int num_slices;
  PairEntry own[kOwnPairs];

  /// A copy. References to one of two places would have the parameters read as global memory, where
  /// nobody has read them before: 2 us before a thread block's first copy.
  __device__ __forceinline__ PairEntry get(std::int64_t adapter, int slice) const {
    const std::int64_t at = adapter * num_slices + slice;
    if (entries == nullptr) return own[at];
    union Copy {
      uint4 words[sizeof(PairEntry) / sizeof(uint4)];
      PairEntry entry;
      __device__ Copy() {}
    } copy;
    static_assert(sizeof(PairEntry) % sizeof(uint4) == 0, "entries are copied in vectors");
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(PairEntry) / sizeof(uint4)); ++i) {
      copy.words[i] = __ldcg(reinterpret_cast<const uint4*>(entries + at) + i);
    }
    return copy.entry;
  }
};

/// Rows of the batch by adapter: groups of positions, and the row at each. Read past L1, as kernels
/// that begin before their predecessors end must.
struct RowGroups {
  const std::int32_t* offsets;  ///< segments
  const std::int32_t* groups;   ///< of the plan: {adapter, start, count, 0}
  const std::int32_t* sorted;   ///< of the plan: the row at a position
  const std::int32_t* header;   ///< of the plan
  std::int64_t num_rows;
  int num_adapters;
};

/// Rows `start` to `start + count - 1` of an adapter, by position. `adapter` -1: base rows.
struct RowTile {
  int adapter = -1;
  std::int64_t start = 0;
  int count = 0;
};

/// Columns of h that a slice has.
struct HiddenColumns {
  int first[kLoraMaxSlices];
  int rank[kLoraMaxSlices];  ///< R_s
  int num_slices;
  int width;
};

#ifdef __CUDACC__

__device__ inline int group_count(const RowGroups& g) {
  if (g.groups == nullptr) return g.num_adapters;
  const int most = static_cast<int>(g.num_rows < g.num_adapters ? g.num_rows : g.num_adapters);
  return min(max(__ldcg(g.header + kPlanNumGroups), 0), most);
}

/// Group i, cut to the rows that there are.
__device__ inline RowTile group_at(const RowGroups& g, int i) {
  RowTile t;
  std::int64_t start, count;
  if (g.groups != nullptr) {
    t.adapter = __ldcg(g.groups + kPlanEntryWords * i);
    start = __ldcg(g.groups + kPlanEntryWords * i + 1);
    count = __ldcg(g.groups + kPlanEntryWords * i + 2);
  } else if (g.offsets != nullptr) {
    t.adapter = i;
    start = __ldcg(g.offsets + i);
    count = std::int64_t{__ldcg(g.offsets + i + 1)} - start;
  } else {
    t.adapter = 0;
    start = 0;
    count = g.num_rows;
  }
  const bool good =
      t.adapter >= 0 && t.adapter < g.num_adapters && start >= 0 && start < g.num_rows && count > 0;
  t.start = good ? start : 0;
  t.count = good ? static_cast<int>(min(count, g.num_rows - start)) : 0;
  return t;
}

/// The group of a lane, of the first 32: what lookups of one place share, as each is a trip to L2.
__device__ inline RowTile lane_group(const RowGroups& g) {
  const int lane = threadIdx.x % 32;
  return lane < group_count(g) ? group_at(g, lane) : RowTile{};
}

/// Rows that have an adapter, at the plan's first positions.
__device__ inline std::int64_t active_rows(const RowGroups& g) {
  return min(max(std::int64_t{__ldcg(g.header + kPlanNumActive)}, std::int64_t{0}), g.num_rows);
}

/// Rows of a tile by a cut: of 32 sizes, one a lane, that with which waves of tiles take the least
/// time. With `base_rows`, those without an adapter are a group more. Called by whole warps.
/// `first`: lane_group().
__device__ inline int rows_of(const RowGroups& g, const RowCut& cut, bool base_rows,
                              const RowTile& first) {
  if (cut.at_once == 0) return cut.rows;
  const int lane = threadIdx.x % 32, groups = group_count(g);
  const auto own = static_cast<float>(first.count);
  int rows = even_size(cut, lane);
  // Rounded quotients may lie a little above whole numbers of tiles. All kernels round in the same
  // places: those that leave partials and those that add them must agree.
  const float inverse = __frcp_rn(static_cast<float>(rows));
  const auto tiles_of = [&](float count) { return ceilf(__fmaf_rn(count, inverse, -1e-4f)); };
  float tiles = 0;
  for (int i = 0; i < groups; ++i) tiles += tiles_of(__shfl_sync(0xffffffffu, own, i));
  if (base_rows && g.groups != nullptr) {
    tiles += tiles_of(static_cast<float>(g.num_rows - active_rows(g)));
  }
  const float waves = ceilf(
      __fdiv_rn(__fmul_rn(tiles, static_cast<float>(cut.blocks)), static_cast<float>(cut.at_once)));
  float least = __fmul_rn(waves, static_cast<float>(rows + cut.fixed_rows));
  for (int step = 16; step > 0; step /= 2) {
    const float other = __shfl_xor_sync(0xffffffffu, least, step);
    const int other_rows = __shfl_xor_sync(0xffffffffu, rows, step);
    if (other > least || (other == least && other_rows >= rows)) continue;
    least = other;
    rows = other_rows;
  }
  return rows;
}

/// Where tiles of `rows` rows, numbered through all groups, fall. Called by whole warps; found(t,
/// first, tiles) is asked for each group by one lane and says whether it is the one sought, which
/// all lanes then get, with the number of its first tile. `first`: lane_group().
template <class Found>
__device__ inline RowTile find_group(const RowGroups& g, int rows, const RowTile& first,
                                     int* first_tile, const Found& found) {
  const int lane = threadIdx.x % 32, groups = group_count(g);
  int before = 0;
  RowTile own = first;
  for (int base = 0; base < groups; base += 32) {
    if (base > 0) own = base + lane < groups ? group_at(g, base + lane) : RowTile{};
    const int tiles = (own.count + rows - 1) / rows;
    int sum = tiles;
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, sum, step);
      if (lane >= step) sum += other;
    }
    const int begin = before + sum - tiles;
    const unsigned hit = __ballot_sync(0xffffffffu, own.count > 0 && found(own, begin, tiles));
    if (hit != 0) {
      const int source = __ffs(static_cast<int>(hit)) - 1;
      RowTile t;
      t.adapter = __shfl_sync(0xffffffffu, own.adapter, source);
      t.start = __shfl_sync(0xffffffffu, static_cast<int>(own.start), source);
      t.count = __shfl_sync(0xffffffffu, own.count, source);
      *first_tile = __shfl_sync(0xffffffffu, begin, source);
      return t;
    }
    before += __shfl_sync(0xffffffffu, sum, 31);
  }
  *first_tile = before;
  return {};
}

/// Tile `index` of `rows` rows; with count 0 if there are fewer. With `base_rows`, those without an
/// adapter follow the others, in tiles of their own. `own`: lane_group(), of several groups.
__device__ inline RowTile row_tile(const RowGroups& g, int index, int rows, bool base_rows,
                                   const RowTile& own) {
  if (g.groups == nullptr && g.offsets == nullptr) {
    const std::int64_t start = std::int64_t{index} * rows;
    const std::int64_t left = g.num_rows - start;
    return RowTile{0, start, static_cast<int>(max(min(std::int64_t{rows}, left), std::int64_t{0}))};
  }
  int first = 0;
  RowTile t = find_group(g, rows, own, &first, [&](const RowTile&, int begin, int tiles) {
    return index >= begin && index < begin + tiles;
  });
  if (t.count > 0) {
    const int skip = (index - first) * rows;
    t.start += skip;
    t.count = min(rows, t.count - skip);
    return t;
  }
  if (!base_rows || g.groups == nullptr) return t;
  t.start = active_rows(g) + std::int64_t{index - first} * rows;
  t.count = static_cast<int>(max(min(std::int64_t{rows}, g.num_rows - t.start), std::int64_t{0}));
  return t;
}

/// lane_group() where a tile is looked for.
__device__ inline RowTile first_group(const RowGroups& g) {
  return g.groups != nullptr || g.offsets != nullptr ? lane_group(g) : RowTile{};
}
__device__ inline RowTile row_tile(const RowGroups& g, int index, int rows, bool base_rows) {
  return row_tile(g, index, rows, base_rows, first_group(g));
}

/// The same by a cut.
__device__ inline RowTile row_tile(const RowGroups& g, int index, const RowCut& cut,
                                   bool base_rows) {
  const RowTile own = first_group(g);
  return row_tile(g, index, rows_of(g, cut, base_rows, own), base_rows, own);
}

/// The row at a position; positions come from row_tile(). Entries that name no row give -1.
__device__ inline std::int64_t row_at(const RowGroups& g, std::int64_t position) {
  if (g.sorted == nullptr) return position;
  const std::int64_t row = __ldcg(g.sorted + position);
  return row >= 0 && row < g.num_rows ? row : -1;
}

/// The slice that has column j of h; all have whole granules.
__device__ inline int slice_of(const HiddenColumns& hidden, int first_slice, int num_slices,
                               int j) {
  int s = first_slice;
  while (s + 1 < first_slice + num_slices && j >= hidden.first[s + 1]) ++s;
  return s;
}

#endif

}  // namespace mortar::lora::train::cuda
