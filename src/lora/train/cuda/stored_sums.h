// SPDX-License-Identifier: Apache-2.0
// Whether products store dA and dB themselves, in place of partial sums, and in what tiles: by a
// model of time. No bit depends on it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/int_math.h"
#include "lora/train/cuda/config.h"
#include "mortar/lora.h"
#include "mortar/stream.h"

namespace mortar::lora::train::cuda {

/// Chunks of rows whose sums a thread of tiles of 128 columns has room for; those of 256 carry the
/// sum of the chunks before in memory.
inline constexpr int kMostStoredChunks = 2;
/// What stored tiles have of the gradient's dense dimension.
inline constexpr int kStoredTile = 128, kWideStoredTile = 256;

/// What becomes of dA and dB of products: as the model says, partial sums, stored in tiles of 128
/// or 256 columns where they can be, or in these after dx, side by side.
enum class StoredBy { kModel, kPartials, kTiles, kWideTiles, kTogether };

/// dA or dB of one adapter: sums over chunks of `rows` rows of `width` ranks by `columns`. The
/// lines of dA are ranks, those of dB columns.
struct GradSizes {
  std::int64_t rows, columns;
  int width;
  std::int64_t chunk_rows;
  bool of_a;
  bool adds = false;  ///< to what is there, which comes as a tile of 128 columns

  std::int64_t lines() const { return of_a ? width : columns; }
  std::int64_t dense() const { return of_a ? columns : width; }
  std::int64_t chunks() const { return ceil_div(rows, chunk_rows); }
};

/// Clusters' tiles of what is stored.
inline std::int64_t stored_tiles(const GradSizes& g, int tile) {
  return ceil_div<std::int64_t>(g.lines(), lora::cuda::kProductCluster * lora::cuda::kProductRows) *
         ceil_div<std::int64_t>(g.dense(), tile);
}

/// Whether wide tiles store it: what they carry has the workspace of the partial sums.
inline bool stores_wide(const GradSizes& g) {
  const std::int64_t carried = stored_tiles(g, kWideStoredTile) * lora::cuda::kProductCluster *
                               lora::cuda::kProductRows * kWideStoredTile;
  return !g.adds && (g.chunks() == 1 || carried <= g.chunks() * g.columns * g.width);
}

/// Microseconds of so many tiles that sum `depth` rows: a step of 128 and of 256 columns.
inline double tiles_us(std::int64_t tiles, std::int64_t depth, int tile, int sms) {
  constexpr double kStepUs = 0.43, kWideStepUs = 0.72;
  const double step = tile > kStoredTile ? kWideStepUs * tile / kWideStoredTile : kStepUs;
  const std::int64_t steps = ceil_div<std::int64_t>(depth, lora::cuda::kProductStep);
  return static_cast<double>(ceil_div<std::int64_t>(tiles, sms / lora::cuda::kProductCluster) *
                             steps) *
         step;
}
/// The same of stored tiles, with what they carry from chunk to chunk.
inline double stored_us(const GradSizes& g, std::int64_t tiles, int tile, int sms) {
  constexpr double kCarryUs = 3;
  const double carried = tile > kStoredTile ? static_cast<double>(g.chunks() - 1) * kCarryUs : 0;
  return tiles_us(tiles, g.rows, tile, sms) + carried;
}
/// Of partial sums, whose chunks are thread blocks of their own, and of the launch that adds them.
inline double summed_us(const GradSizes& g, int sms) {
  constexpr double kSumBytesPerUs = 1.5e6;
  const int tile = rows_launch_tile(g.width, 1);
  const std::int64_t tiles =
      ceil_div<std::int64_t>(g.columns, lora::cuda::kProductCluster * lora::cuda::kProductRows) *
      ceil_div(g.width, tile) * g.chunks();
  return tiles_us(tiles, g.chunk_rows, tile, sms) +
         4.0 * static_cast<double>(g.chunks() * g.columns) * g.width / kSumBytesPerUs;
}

/// Columns of a stored tile; 0: partial sums take less time, as more thread blocks are at work.
/// Those of dA, whose rows are ranks, are two thread blocks' at least. (us of a backward, sums /
/// stored: on an H200, rank 256, 4096 x 8192 x 8192 154 / 128, rank 128, 2048 x 8192 x 8192 61.8 /
/// 57.5; on an H100, rank 512, 2048 x 4096 x 4096 85.5 / 70.4; but rank 256, 8192 x 4096 x 4096, on
/// an H200, 134 / 145.)
inline int stored_columns(const GradSizes& g, int sms, StoredBy by = StoredBy::kModel) {
  constexpr double kTie = 1.05;
  if (by == StoredBy::kPartials) return 0;
  if (by == StoredBy::kTiles) return g.chunks() <= kMostStoredChunks ? kStoredTile : 0;
  if (by == StoredBy::kWideTiles) return stores_wide(g) ? kWideStoredTile : 0;
  if (g.width <= (g.of_a ? kStoredTile : kStoredTile / 2)) return 0;
  int best = 0;
  double least = summed_us(g, sms);
  const auto offer = [&](int tile) {
    const double us = kTie * stored_us(g, stored_tiles(g, tile), tile, sms);
    if (us >= least) return;
    least = us;
    best = tile;
  };
  if (g.chunks() <= kMostStoredChunks) offer(kStoredTile);
  if (g.dense() > kStoredTile && stores_wide(g)) offer(kWideStoredTile);
  return best;
}

/// Whether dB and dA are stored in wide tiles after dx, side by side: where neither of them fills
/// the SMs but both do. Wide tiles store both.
inline bool stores_together(const GradSizes& db, const GradSizes& da, int sms) {
  const auto apart_us = [&](const GradSizes& g) {
    const int tile = stored_columns(g, sms);
    return tile > 0 ? stored_us(g, stored_tiles(g, tile), tile, sms) : summed_us(g, sms);
  };
  const std::int64_t tiles = stored_tiles(db, kWideStoredTile) + stored_tiles(da, kWideStoredTile);
  if (db.width <= kStoredTile || tiles > sms / lora::cuda::kProductCluster) return false;
  const double us = std::max(stored_us(db, tiles, kWideStoredTile, sms),
                             stored_us(da, tiles, kWideStoredTile, sms));
  return us < apart_us(db) + apart_us(da);
}

/// Columns of the tiles of a pass's operands whose gradients its product stores; 0: it does not.
struct StoredSums {
  int columns[kLoraMaxSlices + 1] = {};
};
struct PanelParams;
void panel_products(const PanelParams& p, const StoredSums& stored, Policy policy, Stream stream);

}  // namespace mortar::lora::train::cuda
