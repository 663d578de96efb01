// SPDX-License-Identifier: Apache-2.0
// Launch choices of the CUDA backend as data. They depend on sizes that the host knows (never on
// the device, so a workspace query needs none), and none of them changes a result.
#pragma once

#include <algorithm>
#include <cstdint>

#include "lora/problem.h"

namespace mortar::lora {

enum class ExpandKernel { kParts, kDecode, kPrefill };

struct ShrinkConfig {
  int tile_tokens = 16;  ///< tokens of one adapter per CTA
  int tile_rows = 32;    ///< rank rows per CTA, all kernels but that of decode
  bool split = false;    ///< slabs of partial sums, one per leaf of K
  bool finish = false;  ///< lora_apply: a kernel of its own adds the slabs, not every CTA of expand
  int decode_rows = 0;  ///< rank rows per CTA of the decode kernel
  int per_sm = 0;       ///< CTAs per SM, decode kernel; 0: as many as fit
  int cluster_k = 1;    ///< CTAs that share a tile's K, wgmma kernel
};

struct ExpandConfig {
  ExpandKernel kernel = ExpandKernel::kParts;
  int cols = 128;        ///< columns of a block: what a CTA takes at a time
  int block_cols = 128;  ///< columns whose B lies in a stage of the ring, decode kernel
  int per_sm = 0;        ///< CTAs per SM, decode kernel; 0: as many as fit
};

/// What the choices look at.
struct LoraShape {
  std::int64_t num_tokens, hidden, num_adapters;
  std::int64_t sum_widths, max_width;
  int num_slices, max_rank;
  bool one_type;  ///< x, weights and y of one 16-bit type
};

inline constexpr std::int64_t kNumSms = 132;  ///< H200; fewer or more only shifts the balance
/// Up to here tiles have 16 tokens, as a rule: the loads of weights are the work.
inline constexpr std::int64_t kSmallTileTokens = 256;
/// Tokens times ranks from which on tiles of 64 pay for fewer tokens than that. (200 tokens of one
/// adapter, qkv: rank 64 11.8 us against 12.4, rank 128 16.7 against 34.5; but 128 tokens, rank 64,
/// 11.9 against 9.8.)
inline constexpr std::int64_t kHeavyRanks = 12000;
/// Tokens of an adapter, and those times ranks, up to which tiles of 16 pay for more tokens than
/// that: tiles of 64 would be mostly empty. (512 tokens, gate_up, rank 16: 256 adapters 140 us
/// against 401, 21 adapters 36 against 42, 16 adapters 36 against 33. In parts, 1,024 tokens, down:
/// 128 adapters 84 us against 123, 64 adapters 54 against 68, 32 adapters 44 against 43.)
inline constexpr std::int64_t kLightTokens = 26, kLightPartsTokens = 17, kLightRanks = 1100;
inline constexpr std::int64_t kLightBatch = 16 * 1024;  ///< more were not measured
/// Bytes of slabs of a tile from which on a kernel of its own adds them: every CTA of expand would.
/// (qkv, one adapter, 16 tokens: rank 64 5.6 us against 6.3; but rank 32 5.0 against 4.1.)
inline constexpr std::int64_t kFinishBytes = 48 << 10;
/// Bytes that slabs with their h may take, whatever the problem's size: they stay in L2.
inline constexpr std::int64_t kSlabBudgetFloor = 4 << 20;
/// Elements of B from which on a CTA of the decode kernel has long to stream.
inline constexpr std::int64_t kLongStream = 16 * 1024;
/// Two column blocks of B of a larger rank do not fit an SM beside y.
inline constexpr int kExpandPrefillMaxRank = 128;
/// Rank rows of a CTA of the shrink of parts: with slabs, and where it walks over the leaves of K
/// and keeps totals of all its rows.
inline constexpr int kPartsMaxRows = 128, kPartsMaxTotals = 48;

/// Most tiles that `num_tokens` tokens can make: one token of every adapter and the rest in whole
/// tiles. A CTA too many is launched, looked up and waited for: 32 tokens of one adapter, qkv, take
/// 3.8 us in two tiles and 4.2 with room for a third.
inline std::int64_t max_tiles(std::int64_t num_tokens, std::int64_t num_adapters, int tile_tokens) {
  const std::int64_t groups = std::min(num_tokens, num_adapters);
  return (num_tokens - groups) / tile_tokens + groups;
}

/// Columns of a slice of h in the workspace.
inline std::int64_t h_width(const LoraShape& s) { return round_up(s.max_rank, 8); }

/// Bytes of the slabs of a split shrink.
inline std::int64_t slab_bytes(const LoraShape& s) {
  return num_leaves(s.hidden) * s.num_tokens * s.num_slices * h_width(s) * 4;
}

/// Bytes of h once it is complete: one value per token, slice and rank, no split-K partials.
inline std::int64_t finished_bytes(const LoraShape& s) {
  return s.num_tokens * s.num_slices * h_width(s) * (s.one_type ? 2 : 4);
}

/// Bytes that slabs with their h may take: 1 % of the bytes of a 16-bit x, but at least
/// kSlabBudgetFloor. Writing and reading them then costs little beside what the op moves anyway.
inline std::int64_t slab_budget(const LoraShape& s) {
  const std::int64_t bytes = s.num_tokens * s.hidden * 2;
  return std::max(kSlabBudgetFloor, bytes / 100);
}

/// Tokens of an adapter if all of those loaded have as many.
inline std::int64_t tokens_per_adapter(const LoraShape& s) {
  return ceil_div(s.num_tokens, std::max<std::int64_t>(1, std::min(s.num_tokens, s.num_adapters)));
}

/// Whether all of a split shrink's slabs fit their budget, with h beside them.
inline bool slabs_fit(const LoraShape& s) {
  return slab_bytes(s) + finished_bytes(s) <= slab_budget(s);
}

/// Workspace of the two ops, whatever the launch choices below: slabs where there may be any, and
/// for lora_apply h whole beside them.
inline std::int64_t most_shrink_bytes(const LoraShape& s) {
  return slabs_fit(s) ? slab_bytes(s) : 0;
}
inline std::int64_t most_apply_bytes(const LoraShape& s) {
  return finished_bytes(s) + most_shrink_bytes(s);
}

/// Tiles of 16 start sooner and waste less of a tile on few tokens of an adapter; tiles of 64 read
/// weights less often.
inline int tile_tokens(const LoraShape& s) {
  const std::int64_t tokens = tokens_per_adapter(s);
  if (s.num_tokens <= kSmallTileTokens) {
    const bool heavy =
        s.num_tokens > 64 && tokens >= 32 && s.num_tokens * s.max_rank >= kHeavyRanks;
    return s.one_type && heavy ? 64 : 16;
  }
  // Expand takes tiles of higher ranks in quarters anyway. Without slabs a CTA of tiles of 16 walks
  // over all of K.
  const int ranks = s.max_rank > kExpandPrefillMaxRank ? 64 : s.max_rank;
  const int walk = slabs_fit(s) || s.hidden <= 4096 ? 1 : 2;
  const bool light = tokens <= (s.one_type ? kLightTokens : kLightPartsTokens) &&
                     walk * tokens * ranks <= kLightRanks;
  return light && s.num_tokens <= kLightBatch ? 16 : 64;
}

/// Columns per CTA, close to `cols`, that cut the widest slice into blocks of equal width, so that
/// the last CTA does not get a narrow remainder. The number of blocks is max_width / cols, rounded
/// up where its fraction is 0.4 or more. The result is a multiple of `multiple`.
inline int even_cols(const LoraShape& s, std::int64_t cols, int multiple) {
  const std::int64_t blocks = std::max<std::int64_t>(1, (5 * s.max_width + 3 * cols) / (5 * cols));
  const std::int64_t even = std::max<std::int64_t>(1, ceil_div(s.max_width, blocks));
  return static_cast<int>(round_up<std::int64_t>(even, multiple));
}

/// prefill: its kernel fits the device. The decode kernel, which fits any, takes tiles of 64 tokens
/// in quarters.
inline ExpandConfig choose_expand(const LoraShape& s, bool prefill = true) {
  ExpandConfig c;
  if (!s.one_type) {
    // As many CTAs of 16 or 32 tokens as run at once, three per SM.
    const std::int64_t ctas = tile_tokens(s) == 16 ? max_tiles(s.num_tokens, s.num_adapters, 16)
                                                   : ceil_div<std::int64_t>(s.num_tokens, 32);
    c.cols = even_cols(
        s, std::max<std::int64_t>(128, ceil_div<std::int64_t>(s.sum_widths * ctas, 3 * kNumSms)),
        128);
    return c;
  }
  if (prefill && tile_tokens(s) == 64 && h_width(s) <= kExpandPrefillMaxRank) {
    c.kernel = ExpandKernel::kPrefill;
    return c;
  }
  c.kernel = ExpandKernel::kDecode;
  const std::int64_t tiles = max_tiles(s.num_tokens, s.num_adapters, 16);
  // A stage of the ring is a block of B of 8 to 16 KB: two CTAs fit an SM beside two of shrink.
  c.block_cols = s.max_rank <= 16 ? 256 : s.max_rank <= 64 ? 128 : 32;
  // As many CTAs as run at once (three per SM if each has long to stream), rather fewer, all with
  // as many columns. (256 tokens of 64 adapters, qkv: 16.7 us with 1,536 columns, 19.4 with 1,024.)
  const std::int64_t likely = std::min(s.num_tokens, tiles + tiles / 19);
  std::int64_t cols =
      std::max<std::int64_t>(1, ceil_div<std::int64_t>(s.sum_widths * likely, 2 * kNumSms));
  if (s.max_rank <= 32 && cols * s.max_rank >= kLongStream)
    cols = ceil_div<std::int64_t>(2 * cols, 3);
  // Four blocks of B of rank 64 are all in flight at once, and let a third CTA fit the SM. (32
  // tokens of 32 adapters, qkv: 22.3 us against 25.3, ragged ranks up to 64 17.6 against 21.3.)
  const std::int64_t resident_cols = 4 * c.block_cols;
  const std::int64_t resident = ceil_div<std::int64_t>(s.sum_widths, resident_cols) * tiles;
  if (s.max_rank > 32 && s.max_rank <= 64 && resident > 2 * kNumSms && resident <= 3 * kNumSms) {
    cols = resident_cols;
  }
  // (One token, gate_up, rank 64: 4.2 us with 128 columns against 4.6 with 64; qkv 4.25 and 4.13.)
  if (cols < c.block_cols && (s.max_rank <= 16 || 2 * cols <= c.block_cols)) {
    c.block_cols = std::max(32, c.block_cols / 2);
  }
  c.cols = even_cols(s, cols, c.block_cols);
  return c;
}

/// Rows of 16 tokens along y and z of a grid: z is 1 up to 65,535 rows, the most of y. Batches that
/// have more are tiles of 64, so their number is a multiple of four.
struct TileRowGrid {
  unsigned y = 0, z = 1;
};
inline TileRowGrid tile_row_grid(int num_tiles, int tile_tokens) {
  TileRowGrid grid{static_cast<unsigned>(num_tiles) * static_cast<unsigned>(tile_tokens / 16), 1};
  for (; grid.y > 65535 && grid.y % 2 == 0; grid.y /= 2) grid.z *= 2;
  return grid;
}

inline ShrinkConfig choose_shrink(const LoraShape& s) {
  const int rows = s.num_slices * s.max_rank;
  const std::int64_t leaves = num_leaves(s.hidden);
  ShrinkConfig c;
  c.tile_tokens = tile_tokens(s);
  const std::int64_t tiles = max_tiles(s.num_tokens, s.num_adapters, c.tile_tokens);
  if (!s.one_type) {
    c.split = leaves > 1 && slabs_fit(s);
    c.finish = c.tile_tokens > 16 || s.max_rank > kExpandPrefillMaxRank;
    // Rank rows are shared out until there are two CTAs per SM.
    const std::int64_t ctas = tiles * (c.split ? leaves : 1);
    const std::int64_t shares = std::clamp<std::int64_t>(
        2 * kNumSms / std::max<std::int64_t>(ctas, 1), 1, ceil_div(rows, 16));
    const int own = round_up(static_cast<int>(ceil_div<std::int64_t>(rows, shares)), 16);
    c.tile_rows = std::min(own, c.split ? kPartsMaxRows : kPartsMaxTotals);
    return c;
  }
  if (c.tile_tokens == 16) {
    c.split = slabs_fit(s);
    // Where there are few tiles and leaves, rank rows are shared out as well: two CTAs per SM.
    const std::int64_t ctas = tiles * ceil_div<std::int64_t>(s.hidden, 512);
    const std::int64_t shares = std::clamp<std::int64_t>(
        2 * kNumSms / std::max<std::int64_t>(ctas, 1), 1, ceil_div(rows, 16));
    c.decode_rows = round_up(static_cast<int>(ceil_div<std::int64_t>(rows, shares)), 16);
    c.finish =
        s.max_rank > kExpandPrefillMaxRank ||
        std::min<std::int64_t>(16, tokens_per_adapter(s)) * leaves * h_width(s) * 4 >= kFinishBytes;
    return c;
  }
  c.tile_rows = rows <= 48 ? 48 : 96;
  // Splitting fills the chip; without need it only writes and reads slabs.
  const std::int64_t ctas =
      ceil_div<std::int64_t>(s.num_tokens, 128) * ceil_div<std::int64_t>(rows, 192);
  c.split = leaves > 1 && slabs_fit(s) && 4 * ctas < kNumSms;
  c.finish = true;
  if (!c.split && ctas <= kNumSms) c.cluster_k = 2;
  return c;
}

/// Gives the CTAs of a small batch an SM each. CTAs of later calls, which start early, then prepare
/// themselves on other SMs: beside them a CTA has to wait for its turn in everything. Expand takes
/// whole SMs where those of two calls fit the chip; shrink where both kernels of a call do, as what
/// does not fit starts late. (32 tokens of one adapter, us: qkv 3.4 against 3.8, gate_up 4.6
/// against 4.9, down 3.5 against 4.1; where shrink does not fit, four tokens of four adapters,
/// qkv, 4.5 against 3.5; where expand does not, 32 tokens of one adapter, gate_up, 7.6
/// against 4.9.)
inline void give_room(const LoraShape& s, ShrinkConfig& shrink, ExpandConfig& expand) {
  if (!shrink.split || shrink.finish || expand.kernel != ExpandKernel::kDecode) return;
  constexpr std::int64_t kShrinkPerSm = 4, kExpandPerSm = 3;  // as many as fit
  const std::int64_t tiles = max_tiles(s.num_tokens, s.num_adapters, 16);
  const std::int64_t shrink_ctas = tiles * ceil_div<std::int64_t>(s.hidden, 512) *
                                   ceil_div(s.num_slices * s.max_rank, shrink.decode_rows);
  const std::int64_t expand_ctas = tiles * ceil_div<std::int64_t>(s.sum_widths, expand.cols);
  if (2 * expand_ctas <= kNumSms && expand_ctas + shrink_ctas / kShrinkPerSm <= kNumSms) {
    expand.per_sm = 1;
  }
  const std::int64_t expand_sms =
      expand.per_sm == 1 ? expand_ctas : ceil_div(expand_ctas, kExpandPerSm);
  if (shrink_ctas + expand_sms <= kNumSms) shrink.per_sm = 1;
}

}  // namespace mortar::lora
