// SPDX-License-Identifier: Apache-2.0
// Launch choices of the CUDA backend as data. They depend on sizes that the host knows (never on
// the device, so a workspace query needs none), and none of them changes a result.
#pragma once

#include <algorithm>
#include <cstdint>

#include "lora/problem.h"

namespace mortar::lora {

struct ShrinkConfig {
  int tile_tokens;  ///< tokens of one adapter per CTA
  int tile_rows;    ///< rank rows per CTA
  bool split;       ///< one CTA per leaf of K, partial sums in slabs
  bool finish;      ///< a kernel of its own adds the slabs, not every CTA of expand
};

struct ExpandConfig {
  int tile_tokens;
  int cols;           ///< columns per CTA
  int block_cols;     ///< columns whose B lies in shared memory at a time
  int tiles_per_cta;  ///< consecutive tiles that share a block of B
};

/// What the choices look at.
struct LoraShape {
  std::int64_t num_tokens, hidden, num_adapters;
  std::int64_t sum_widths;
  int num_slices, max_rank;
  bool tensor_cores;  ///< x, weights and y of one 16-bit type
};

inline constexpr std::int64_t kNumSms = 132;  ///< H200; fewer or more only shifts the balance
/// Up to here tiles have 16 tokens: the loads of weights are the work, and small tiles start
/// sooner.
inline constexpr std::int64_t kSmallTileTokens = 256;
/// Workspace that an op may take whatever the problem's size.
inline constexpr std::int64_t kWorkspaceFloor = 4 << 20;

/// Upper bound of the tiles that `num_tokens` tokens can make.
inline std::int64_t max_tiles(std::int64_t num_tokens, std::int64_t num_adapters, int tile_tokens) {
  const std::int64_t groups = std::min(num_tokens, num_adapters);
  return std::min(num_tokens, ceil_div<std::int64_t>(num_tokens, tile_tokens) + groups);
}

/// Columns of a slice of h in the workspace.
inline std::int64_t h_width(const LoraShape& s) { return round_up(s.max_rank, 8); }

/// Bytes of the slabs of a split shrink.
inline std::int64_t slab_bytes(const LoraShape& s) {
  return num_leaves(s.hidden) * s.num_tokens * s.num_slices * h_width(s) * 4;
}

/// 1 % of x alone (16-bit), or the floor if that is larger: never more than 1 % of what the op
/// reads and writes.
inline std::int64_t workspace_budget(const LoraShape& s) {
  const std::int64_t bytes = s.num_tokens * s.hidden * 2;
  return std::max(kWorkspaceFloor, bytes / 100);
}

inline ExpandConfig choose_expand(const LoraShape& s) {
  if (!s.tensor_cores) return {16, 128, 128, 1};
  ExpandConfig c{s.num_tokens <= kSmallTileTokens ? 16 : 64, 128, 128, 1};
  const std::int64_t tiles = max_tiles(s.num_tokens, s.num_adapters, c.tile_tokens);
  if (c.tile_tokens == 16) {
    // A ring of four blocks of at most 24 KB: two CTAs fit an SM, with 144 KB in flight.
    c.block_cols = std::clamp(12288 / round_up(s.max_rank, 16) / 32 * 32, 32, 256);
    // As many CTAs as run at once, each with a run of columns; at least two blocks' worth of CTAs.
    const std::int64_t cols = ceil_div<std::int64_t>(s.sum_widths * tiles, 2 * kNumSms);
    c.cols = static_cast<int>(
        round_up<std::int64_t>(std::max<std::int64_t>(cols, c.block_cols), c.block_cols));
    if (cols < c.block_cols) c.cols = c.block_cols = std::max(64, c.block_cols / 2);
  } else {
    const std::int64_t ctas = tiles * ceil_div<std::int64_t>(s.sum_widths, c.cols);
    c.tiles_per_cta = static_cast<int>(std::clamp<std::int64_t>(ctas / (6 * kNumSms), 1, 8));
  }
  return c;
}

inline ShrinkConfig choose_shrink(const LoraShape& s) {
  const int rows = s.num_slices * s.max_rank;
  const std::int64_t leaves = num_leaves(s.hidden);
  ShrinkConfig c{16, 32, false, false};
  if (s.tensor_cores) {
    c.tile_tokens = s.num_tokens <= kSmallTileTokens ? 16 : 64;
    if (c.tile_tokens == 64) {
      c.tile_rows = rows <= 48 ? 48 : 96;
    } else {
      // Rows of 64 halve the CTAs; rows of 32 fill the chip when there are few of them.
      const std::int64_t ctas =
          max_tiles(s.num_tokens, s.num_adapters, 16) * leaves * ceil_div(rows, 64);
      c.tile_rows = rows <= 32 || ctas < kNumSms ? 32 : 64;
    }
  }
  // Splitting fills the chip; without need it only writes and reads slabs.
  const std::int64_t whole =
      ceil_div<std::int64_t>(s.num_tokens, c.tile_tokens) * ceil_div(rows, c.tile_rows);
  const bool few = c.tile_tokens == 16 || whole < kNumSms;
  c.split = leaves > 1 && few && 5 * slab_bytes(s) <= 4 * workspace_budget(s);
  if (c.split && s.tensor_cores) {
    // Expand adds the slabs itself where that is a handful of loads per lane: low ranks, few
    // leaves, and few tokens beside the columns of B that a CTA reads anyway.
    const std::int64_t tile = std::min<std::int64_t>(
        c.tile_tokens, ceil_div(s.num_tokens, std::min(s.num_tokens, s.num_adapters)));
    c.finish = c.tile_tokens == 64 || s.max_rank > 32 || leaves > 16 ||
               16 * leaves * tile > choose_expand(s).cols;
  }
  return c;
}

}  // namespace mortar::lora
