// SPDX-License-Identifier: Apache-2.0
// Launch choices of the CUDA backend's forward as data: what runs, in which grids, with how much
// workspace. A choice is a pure function of sizes and device, prints itself, and changes no bit of
// any result.
#pragma once

#include <algorithm>
#include <cstdint>
#include <ostream>

#include "core/int_math.h"
#include "fp8_rmsnorm/band_config.h"
#include "fp8_rmsnorm/forward_shape.h"
#include "fp8_rmsnorm/row_block_config.h"
#include "fp8_rmsnorm/rows_config.h"

namespace mortar::fp8_rmsnorm {

/// Tiles of kRows x kColumns of y that are quantised and transposed.
struct TilesPlan {
  static constexpr int kRows = 128, kColumns = 128, kThreads = 256;
  static constexpr int kSharedTile = 21 << 10;  ///< bytes at most, but for x
  /// Tiles of x that a CTA keeps in shared memory: the one that it works on, and what is on its way
  /// where an SM then still holds two CTAs.
  static constexpr int stages(int x_bytes) { return x_bytes == 4 ? 1 : 2; }
  static constexpr int stage_bytes(int x_bytes) { return kRows * kColumns * x_bytes; }
  /// Shared memory of a CTA, at most.
  static constexpr int smem(int x_bytes) {
    return kSharedTile + stages(x_bytes) * stage_bytes(x_bytes);
  }
  /// A sector of L2: what is written of it in parts costs more than rows that are made twice (10000
  /// x 2816: 45 us for 36.8 of 10016 x 2816).
  static constexpr int kSector = 32;
  /// Rows that a tile has together with the next, so that each of its columns has the bytes of
  /// whole sectors where rows of q_t do not begin at sectors; `aligned`: but at half of one.
  static constexpr int shared(bool aligned) { return aligned ? kSector / 2 : kSector; }
  /// CTAs of 256 threads whose registers an SM holds, by the bytes of an element of x; `turned`:
  /// with scales of q_t's own rows or groups.
  static constexpr int per_sm(int x_bytes, bool stochastic, bool turned, bool fp8_instructions) {
    const int most = x_bytes != 1 ? 2 : !stochastic ? 4 : turned ? 2 : 3;
    // Conversions by integers take more registers where there are many.
    return most - (!fp8_instructions && (stochastic || (turned && x_bytes == 1)) ? 1 : 0);
  }
  /// Whether the kernels for aligned rows round stochastically too. A block of draws is shared by
  /// 16 elements: float32 would make four blocks where one serves 8-bit x.
  static constexpr bool draws(int x_bytes, bool turned) { return x_bytes <= (turned ? 1 : 2); }

  int step = kRows;  ///< rows from a tile to the next
  std::int64_t tiles = 0;
  int grid = 0;
  bool any = false;    ///< by the kernels for any rows, aligned or not
  bool whole = false;  ///< by a kernel for tiles of which none reaches beyond the matrix
};

/// Rows and tiles in one kernel, whose CTAs wait for each other between the two: each has rows of
/// its own, and keeps as much of them in shared memory as fits.
struct FusedPlan {
  static constexpr int kThreads = HeldRowsPlan::kThreads;
  static constexpr int kColumns = TilesPlan::kColumns;
  static constexpr int kThreadElements = 64;   ///< of a tile
  static constexpr int kStaticSmem = 9 << 10;  ///< at most, with what the system keeps
  static constexpr int kCodes = kThreads * kThreadElements + (4 << 10);  ///< bytes, of tiles' codes
  static constexpr int kStages = 2;  ///< tiles of 8-bit x that a thread has on its way
  static constexpr int kStage = kThreads * kThreadElements;  ///< bytes

  bool possible = false;
  int rows = 16;       ///< of a CTA, a multiple of 16
  int tile_rows = 16;  ///< a power of two that divides them
  int grid = 0;
  HeldRowsPlan held;
  std::int64_t smem = 0;  ///< bytes: weights, what is kept of x, rstd, rows on their way or tiles
};

/// All in one CTA, for a scale of the tensor and few elements: a thread has one piece of x, from
/// the statistics of its row to the codes.
struct SmallPlan {
  static constexpr int kMostThreads = 512;

  bool possible = false;
  int row_threads = 1;  ///< a power of two
  int threads = 0;      ///< whole warps
};

/// The kernels of a call, in their order, and where their workspace lies.
struct ForwardPlan {
  SmallPlan small_plan;  ///< of everything, where it is possible; no other kernel runs then

  bool rows = false;     ///< statistics of rows; q, unless the tiles make it
  bool columns = false;  ///< maxima of the columns
  bool tiles = false;    ///< q_t, and q with a scale per tensor
  bool amax = false;     ///< the CTAs' maxima are brought together by a kernel of their own

  HeldRowsPlan held_plan;  ///< of the rows, where they are aligned and it is possible
  RowsPlan row_plan;       ///< else
  TilesPlan tile_plan;
  FusedPlan fused_plan;     ///< of both, where it is possible
  BandPlan band_plan;       ///< of both, where x is read once
  RowBlockPlan block_plan;  ///< of the rows, with the maxima of columns where they are needed
  std::int64_t maxima_at = 0, column_maxima_at = 0, rstd_at = 0, weights_at = 0;  ///< bytes
  std::int64_t partials_at = 0;  ///< of rows in strips
  std::int64_t workspace_bytes = 0;

  /// q comes from the tiles, with the bytes of q_t.
  bool tiles_make_q = false;
};

/// The number of tiles, so many rows apart.
inline std::int64_t count_tiles(std::int64_t rows, std::int64_t hidden, int step) {
  return ceil_div<std::int64_t>(rows, step) * ceil_div<std::int64_t>(hidden, TilesPlan::kColumns);
}

inline TilesPlan choose_tiles(const ForwardShape& s, const GpuShape& gpu) {
  TilesPlan plan;
  // Groups of q_t's rows lie in one tile.
  if (s.q_t && s.rows % TilesPlan::kSector != 0 && s.scaling != Fp8Scaling::kGroup) {
    plan.step -= TilesPlan::shared(s.rows % 16 == 0);
  }
  plan.tiles = count_tiles(s.rows, s.hidden, plan.step);
  plan.whole = s.q && s.q_t && s.scaling == Fp8Scaling::kTensor && !s.stochastic &&
               s.x_bytes <= 2 && s.rows > 0 && s.rows % TilesPlan::kRows == 0 &&
               s.hidden % TilesPlan::kColumns == 0 && s.rows < (std::int64_t{1} << 31);
  const int registers =
      TilesPlan::per_sm(s.x_bytes, s.stochastic, s.scaling != Fp8Scaling::kTensor, gpu.clusters);
  const int per_sm = std::min(registers, std::max(1, gpu.max_smem / TilesPlan::smem(s.x_bytes)));
  // Without any rows, one CTA writes the scale of zeros.
  plan.grid =
      static_cast<int>(std::clamp<std::int64_t>(plan.tiles, 1, std::int64_t{gpu.num_sms} * per_sm));
  return plan;
}

/// The plan with so many rows of a CTA: a multiple of 16.
inline FusedPlan fused_plan(const ForwardShape& s, const GpuShape& gpu, int rows) {
  FusedPlan plan;
  plan.rows = rows;
  plan.tile_rows = std::min(rows & -rows, TilesPlan::kRows);
  plan.grid = static_cast<int>(ceil_div<std::int64_t>(s.rows, rows));
  if (s.x_bytes > 1 || s.rows % 16 != 0 || s.rows == 0 || plan.grid > gpu.num_sms) return plan;
  const std::int64_t pieces = ceil_div<std::int64_t>(s.hidden, 16 / s.x_bytes);
  constexpr std::int64_t kTiles = FusedPlan::kCodes + FusedPlan::kStages * FusedPlan::kStage;
  for (int row_threads = least_held_threads(s); row_threads <= FusedPlan::kThreads;
       row_threads *= 2) {
    if (FusedPlan::kThreads / row_threads > rows) continue;
    HeldRowsPlan held = held_rows_plan(s, gpu, row_threads);
    if (!held.possible) continue;
    // The larger part of a row that stays, the better: in whole slots and tiles, of which none
    // lies behind its end.
    const int unit = std::max(row_threads * 16, FusedPlan::kColumns * s.x_bytes);
    const int whole = static_cast<int>(pieces * 16) / unit * unit;
    for (int stages = 2; stages > 0; --stages) {
      for (int kept = whole; kept >= 0; kept -= unit) {
        const std::int64_t ring =
            std::int64_t{held.rows_per_step()} * stages * (held.x_bytes - kept + held.scale_bytes);
        plan.smem = held.weight_bytes + rows * (std::int64_t{kept} + 4) + std::max(ring, kTiles);
        if (plan.smem > gpu.max_smem - FusedPlan::kStaticSmem) continue;
        held.kept_bytes = kept;
        held.stages = stages;
        plan.held = held;
        plan.possible = true;
        return plan;
      }
    }
  }
  return plan;
}

inline FusedPlan choose_fused(const ForwardShape& s, const GpuShape& gpu) {
  if (s.scaling != Fp8Scaling::kTensor || s.stochastic) return {};
  if (s.rows % TilesPlan::kSector != 0) return {};  // its runs would share sectors (not timed)
  // Whole multiples of 64 rows, so that runs of q_t are long, and all SMs have as many: 2048 rows,
  // 16 each, take 21.6 us in one kernel and 13.9 in two.
  const std::int64_t least = ceil_div<std::int64_t>(s.rows, gpu.num_sms);
  const std::int64_t rows = round_up<std::int64_t>(least, 64);
  if (least == 0 || rows > 1024 || 10 * s.rows < 9 * rows * gpu.num_sms) return {};
  const FusedPlan plan = fused_plan(s, gpu, static_cast<int>(rows));
  // What is not kept is to come from L2: else rows and tiles are faster, which read it from the end
  // (16384 x 4096 in 108.8 us for 110.3, 131072 x 256 in 58.0 for 60.3; 8192 x 4096 in 52.3 for
  // 49.1).
  const std::int64_t again = s.rows * (s.hidden - plan.held.kept_bytes);
  return again > HeldRowsPlan::read_again(gpu) ? FusedPlan() : plan;
}

/// As much as one CTA does at once: a call then costs one launch and no workspace.
inline SmallPlan choose_small(const ForwardShape& s) {
  const std::int64_t row_threads =
      power_of_two_above(ceil_div<std::int64_t>(s.hidden, 16 / s.x_bytes));
  const bool one_scale = s.scaling == Fp8Scaling::kTensor && !s.given_scale;
  const bool few = s.rows > 0 && s.rows <= SmallPlan::kMostThreads / row_threads;
  if (!one_scale || !few) return {};
  return {.possible = true,
          .row_threads = static_cast<int>(row_threads),
          .threads = static_cast<int>(round_up<std::int64_t>(s.rows * row_threads, 32))};
}

/// Where the plan's workspace lies.
inline void lay_out(ForwardPlan& plan, const ForwardShape& s, const GpuShape& gpu) {
  std::int64_t bytes = 0;
  const auto reserve = [&](std::int64_t size) {
    const std::int64_t at = bytes;
    bytes += round_up<std::int64_t>(size, 16);
    return at;
  };
  // Who asks for the workspace need not know of the residual, which changes the held rows' grid.
  const int held_grid = static_cast<int>(std::min<std::int64_t>(s.rows, gpu.num_sms));
  plan.maxima_at = reserve(
      4 * std::max({held_grid, plan.row_plan.grid, plan.tile_plan.grid, plan.fused_plan.grid,
                    plan.band_plan.grid, plan.block_plan.finish_grid}));
  plan.column_maxima_at = reserve(plan.columns ? 4 * s.hidden : 0);
  plan.rstd_at = reserve(plan.tiles && s.norm ? 4 * s.rows : 0);
  plan.partials_at = reserve(4 * plan.block_plan.partials(s.rows));
  plan.weights_at =
      reserve(plan.row_plan.shared_weights ? 0 : 4 * round_up<std::int64_t>(s.hidden, 16));
  plan.workspace_bytes = bytes;
}

/// What rows do beside tiles: plan.held_plan's, once the others are there.
inline void set_beside_tiles(ForwardPlan& plan, const ForwardShape& s, const GpuShape& gpu) {
  HeldRowsPlan& held = plan.held_plan;
  if (!held.possible || !plan.tiles) return;
  held.late_rows = HeldRowsPlan::read_again(gpu) / held.x_bytes;
  // Where a CTA makes two tiles or three, one of theirs comes early beside one of rows, and rows of
  // the next call need not wait for the last tiles (4096 x 2304 in 17.7 us for 18.7, 4097 x 4096 in
  // 30.8 for 33.5). With one for each they all come at once when the rows are done (2048 x 4096 in
  // 15.1 for 16.2); with more the last ones count for little (8192 x 4096 in 52.6 for 54.4).
  const TilesPlan& tiles = plan.tile_plan;
  const std::int64_t room = gpu.max_smem - HeldRowsPlan::kStaticSmem;
  if (s.x_bytes > 1 || held.smem + TilesPlan::smem(s.x_bytes) > room) return;
  held.alone = tiles.tiles <= tiles.grid || tiles.tiles > 3 * std::int64_t{tiles.grid};
  if (held.alone) held.smem = room;
}

/// The plan of passes over rows and tiles, for any number of elements.
inline ForwardPlan choose_passes(const ForwardShape& s, const GpuShape& gpu) {
  ForwardPlan plan;
  const bool tensor = s.scaling == Fp8Scaling::kTensor;
  plan.tiles = s.q_t || (tensor && !s.given_scale);
  plan.tiles_make_q = plan.tiles && tensor;
  plan.columns = s.q_t && s.scaling == Fp8Scaling::kRow && !s.given_scale;
  plan.rows = s.norm || !plan.tiles_make_q || !s.given_scale;
  plan.amax = tensor && s.given_scale && !(plan.rows && plan.tiles);
  plan.held_plan = choose_held_rows(s, gpu);
  plan.row_plan = choose_rows(s, gpu);
  plan.tile_plan = choose_tiles(s, gpu);
  set_beside_tiles(plan, s, gpu);
  if (plan.tiles_make_q) plan.fused_plan = choose_fused(s, gpu);
  if (plan.rows) {
    plan.band_plan = choose_bands(s, gpu);
    plan.block_plan = choose_row_blocks(s, gpu, plan.held_plan.possible);
  }
  lay_out(plan, s, gpu);
  return plan;
}

inline ForwardPlan choose(const ForwardShape& s, const GpuShape& gpu) {
  ForwardPlan plan;
  plan.small_plan = choose_small(s);
  return plan.small_plan.possible ? plan : choose_passes(s, gpu);
}

inline std::ostream& operator<<(std::ostream& out, const ForwardPlan& p) {
  if (p.small_plan.possible) {
    return out << "one CTA of " << p.small_plan.threads << ", " << p.small_plan.row_threads
               << " threads a row";
  }
  if (const FusedPlan& fused = p.fused_plan; fused.possible) {
    out << "fused " << fused.grid << " x " << FusedPlan::kThreads << ", " << fused.rows
        << " rows each, " << fused.held.row_threads << " threads a row, " << fused.held.kept_bytes
        << " bytes of a row kept, tiles of " << fused.tile_rows << "; else ";
  }
  if (const BandPlan& bands = p.band_plan; bands.possible) {
    out << "bands " << bands.grid << " x " << BandPlan::kThreads << " in clusters of "
        << bands.cluster << ", " << bands.tiles << " tiles each; else ";
  }
  if (const RowBlockPlan& blocks = p.block_plan; blocks.possible) {
    out << "blocks of rows " << blocks.grid << " x " << blocks.threads;
    if (blocks.strips > 1) out << ", in " << blocks.strips << " strips";
    out << (p.columns ? ", with column maxima; else " : "; else ");
  }
  if (p.rows && p.held_plan.possible) {
    out << "aligned rows " << p.held_plan.grid << " x " << HeldRowsPlan::kThreads << ", "
        << p.held_plan.row_threads << " threads a row, " << p.held_plan.slots << " pieces each"
        << (p.held_plan.added_bytes > 0 ? ", with the residual" : "")
        << (p.held_plan.alone ? "; " : ", beside tiles; ");
  }
  if (p.rows) {
    out << (p.held_plan.possible ? "else rows " : "rows ") << p.row_plan.grid << " x "
        << p.row_plan.threads << ", " << p.row_plan.row_threads << " threads a row, "
        << p.row_plan.slots << " pieces of " << p.row_plan.held_rows << " rows each";
    if (!p.row_plan.shared_weights) out << ", weights in the workspace";
    out << "; ";
  }
  if (p.columns) out << "column maxima; ";
  if (p.tiles) {
    out << "tiles " << p.tile_plan.grid << " x " << TilesPlan::kThreads << " of "
        << p.tile_plan.tiles << (p.tile_plan.step < TilesPlan::kRows ? " that overlap" : "")
        << (p.tile_plan.any     ? ", of any rows; "
            : p.tile_plan.whole ? ", all whole; "
                                : "; ");
  }
  if (p.amax) out << "amax; ";
  return out << p.workspace_bytes << " bytes of workspace";
}

}  // namespace mortar::fp8_rmsnorm
