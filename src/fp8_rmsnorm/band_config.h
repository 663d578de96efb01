// SPDX-License-Identifier: Apache-2.0
// The launch choice of the kernel that reads x once: bands of rows, each in the shared memory of a
// cluster of CTAs.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "core/int_math.h"
#include "fp8_rmsnorm/forward_shape.h"

namespace mortar::fp8_rmsnorm {

/// A band is 128 adjacent rows. The CTAs of a cluster share its columns: CTA c has the tiles of 128
/// columns with the numbers c, c + cluster, c + 2 cluster, ...
struct BandPlan {
  static constexpr int kRows = 128, kColumns = 128, kThreads = 256;
  static constexpr int kMostTiles = 8;
  static constexpr int kLeastCluster = 2;  ///< stores to the shared memory of others need one
  static constexpr int kMostCluster = 16;
  static constexpr int kStaticSmem = 256;  ///< at most, with what the system keeps
  static constexpr int kCodes = kRows * kColumns;
  static constexpr int kGroupPitch = kRows + 4;  ///< floats of a group of columns: no bank twice

  bool possible = false;
  int cluster = 2;  ///< a power of two
  int tiles = 1;    ///< of a CTA, at most
  int log2_cluster = 1;
  int log2_groups = 0;  ///< of the number of groups of 128 columns or rows
  int grid = 0;
  /// Where in shared memory what lies, bytes: tiles of x, in whose place come codes by columns.
  int weights_at = 0;     ///< float32, by tiles
  int groups_at = 0;      ///< maxima, then factors, of groups of columns, by tiles
  int scales_at = 0;      ///< of 8-bit x in float32, by tiles and threads
  int sums_at = 0;        ///< of the CTA's part of the rows, from all CTAs
  int row_maxima_at = 0;  ///< likewise
  int columns_at = 0;     ///< in the place of the sums, maxima of columns, by groups of rows
  int rstd_at = 0;        ///< of all rows
  int smem = 0;
};

/// The plan for a cluster of so many CTAs: a power of two.
inline BandPlan band_plan(const ForwardShape& s, const GpuShape& gpu, int cluster) {
  BandPlan plan;
  const std::int64_t across = ceil_div<std::int64_t>(s.hidden, BandPlan::kColumns);
  const std::int64_t tiles = ceil_div<std::int64_t>(across, cluster);
  const std::int64_t bands = ceil_div<std::int64_t>(s.rows, BandPlan::kRows);
  const bool per_group = s.scaling == Fp8Scaling::kGroup;
  const bool scales_known =
      per_group ? !s.given_scale : s.scaling == Fp8Scaling::kTensor && s.given_scale;
  if (!gpu.clusters || !s.q_t || !scales_known || s.adds || s.stochastic || s.x_bytes > 2 ||
      tiles > BandPlan::kMostTiles || bands == 0 || bands * cluster > (1 << 30)) {
    return plan;
  }
  plan.cluster = cluster;
  plan.tiles = static_cast<int>(tiles);
  plan.grid = static_cast<int>(bands) * cluster;
  const auto reserve = [&](int bytes) {
    const int at = plan.smem;
    plan.smem += bytes;
    return at;
  };
  constexpr int kColumnBytes = BandPlan::kColumns * 4;
  const int groups = per_group ? BandPlan::kRows / s.group : 1;
  plan.log2_cluster = std::bit_width(static_cast<unsigned>(cluster)) - 1;
  plan.log2_groups = std::bit_width(static_cast<unsigned>(groups)) - 1;
  const int pieces = BandPlan::kColumns * s.x_bytes / 16 / 8;  // of a thread, in a row
  reserve(plan.tiles * BandPlan::kCodes * s.x_bytes);
  plan.weights_at = reserve(plan.tiles * kColumnBytes);
  plan.groups_at = reserve(per_group ? plan.tiles * groups * BandPlan::kGroupPitch * 4 : 0);
  plan.scales_at = reserve(s.x_bytes == 1 ? plan.tiles * BandPlan::kThreads * 16 : 0);
  const int columns = s.given_scale ? 0 : plan.tiles * groups * kColumnBytes;
  plan.sums_at = plan.columns_at = reserve(std::max(pieces * 8 * BandPlan::kRows * 4, columns));
  plan.row_maxima_at = reserve(per_group ? 0 : BandPlan::kRows * 4);
  plan.rstd_at = reserve(BandPlan::kRows * 4);
  plan.possible = plan.smem <= gpu.max_smem - BandPlan::kStaticSmem;
  return plan;
}

/// The smallest cluster whose CTAs have two tiles at most, so that an SM holds three of them at
/// different phases: it then reads, computes and writes at once. Only where x is more than L2
/// keeps for a second kernel, and not for 8-bit x where its kernels are as fast (README.md).
inline BandPlan choose_bands(const ForwardShape& s, const GpuShape& gpu) {
  constexpr std::int64_t kLeast = std::int64_t{1} << 25;  // elements
  if (s.rows * s.hidden < kLeast || (s.x_bytes == 1 && s.scaling != Fp8Scaling::kGroup)) return {};
  for (int cluster = BandPlan::kLeastCluster; cluster <= BandPlan::kMostCluster; cluster *= 2) {
    const BandPlan plan = band_plan(s, gpu, cluster);
    if (plan.possible && plan.tiles <= 2) return plan;
  }
  return {};
}

}  // namespace mortar::fp8_rmsnorm
