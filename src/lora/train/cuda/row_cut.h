// SPDX-License-Identifier: Apache-2.0
// How rows of several adapters are cut into tiles, or chunks.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/int_math.h"

namespace mortar::lora::train::cuda {

/// How rows are cut into tiles, of which each has the rows of one adapter. A tile has `rows`; or,
/// where adapters' rows are few tiles each, kernels try 32 sizes from `rows` to almost four times
/// that, and take the one whose tiles all end first (rows_of): one wave of tiles that are nearly
/// full, in place of a second wave for those that are not.
struct RowCut {
  int rows = 0;
  int unit = 1;        ///< whole steps
  int blocks = 1;      ///< thread blocks side by side that have the same rows
  int at_once = 0;     ///< thread blocks that run at a time; 0: `rows` as they are
  int fixed_rows = 0;  ///< that take as long as a tile's start and end

  bool operator==(const RowCut&) const = default;
  /// Whether every tile's rows, of whichever size, are whole steps of `step`.
  [[nodiscard]] MORTAR_HOST_DEVICE constexpr bool in_steps(int step) const {
    return rows % step == 0 && (at_once == 0 || unit % step == 0);
  }
};
inline constexpr int kMostEvenAdapters = 32;  ///< of which each lane of a warp has one
inline constexpr int kMostCutRows = 1 << 24;  ///< of the smallest size

/// Rows of a tile: one of kMostEvenAdapters sizes, 16 for every doubling.
MORTAR_HOST_DEVICE constexpr int even_size(const RowCut& cut, int i) {
  static_assert(std::int64_t{kMostCutRows} * 31 < std::int64_t{1} << 30);
  const unsigned rows = (static_cast<unsigned>(cut.rows) * (16u + i % 16u) / 16u) << (i / 16);
  return static_cast<int>(round_up(rows, static_cast<unsigned>(cut.unit)));
}
/// Waves in which tiles of `adapters` may at least be cut as needed: twice as many as adapters fit.
constexpr std::int64_t even_waves(std::int64_t adapters, std::int64_t blocks, int at_once) {
  return std::max<std::int64_t>(ceil_div<std::int64_t>(2 * adapters * blocks, at_once), 1);
}
/// A cut for up to kMostEvenAdapters adapters.
constexpr RowCut even_cut(std::int64_t rows, std::int64_t adapters, int unit, std::int64_t blocks,
                          int at_once, int fixed_rows) {
  const std::int64_t tiles =
      std::max<std::int64_t>(even_waves(adapters, blocks, at_once) * at_once / blocks, 1);
  const std::int64_t least =
      round_up<std::int64_t>(ceil_div(std::max<std::int64_t>(rows, 1), tiles), unit);
  return {static_cast<int>(std::min<std::int64_t>(least, kMostCutRows / unit * unit)), unit,
          static_cast<int>(blocks), at_once, fixed_rows};
}

}  // namespace mortar::lora::train::cuda
