// SPDX-License-Identifier: Apache-2.0
// The launch choice of the kernel that takes blocks of rows.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/int_math.h"
#include "fp8_rmsnorm/forward_shape.h"

namespace mortar::fp8_rmsnorm {

/// A thread has the same 16 columns of several adjacent rows. A CTA has all columns of a block of
/// rows, or one of n = kStrips strips of them: strip j has the runs of 512 bytes with the numbers
/// j, j + n, j + 2 n, ...
struct RowBlockPlan {
  static constexpr int kPieces = 8;             ///< of 16 bytes of a block, that a thread has
  static constexpr int kStages = 2;             ///< blocks in shared memory: one on its way
  static constexpr int kStaticSmem = 18 << 10;  ///< bytes at most, with what the system keeps
  static constexpr int kColumns = 16;
  static constexpr int kMostThreads = 512;
  /// Threads of a CTA, at most: conversions by integers take more registers.
  static constexpr int most_threads(bool fp8_instructions) {
    return fp8_instructions ? kMostThreads : kMostThreads / 2;
  }
  static constexpr int kMostWarps = kMostThreads / 32;
  static constexpr int kStrips = 16;
  static constexpr int kRun = 32;        ///< pieces of a run, as many sums as a strip leaves
  static constexpr int kFinishRows = 8;  ///< of a CTA that adds up strips, at a time

  bool possible = false;
  int threads = 0;
  int strips = 1;
  int smem = 0;         ///< bytes, of the stages
  int grid = 0;         ///< a multiple of the strips
  int finish_grid = 0;  ///< CTAs that add up strips

  MORTAR_HOST_DEVICE static constexpr int rows(int x_bytes) { return kPieces / x_bytes; }
  /// Floats that strips leave: their sums, and a maximum.
  std::int64_t partials(std::int64_t rows) const {
    return strips > 1 ? rows * strips * (kRun + 1) : 0;
  }
};

/// Whether the kernel does what is asked of the rows: with scales of rows and q_t, all of it; in
/// strips, where rows are only measured, as tiles make q or nobody wants it.
inline bool row_blocks_take(const ForwardShape& s, int strips) {
  if (s.adds || s.stochastic) return false;
  if (s.scaling == Fp8Scaling::kRow && s.q_t && !s.given_scale) return strips == 1;
  const bool measures = s.scaling == Fp8Scaling::kTensor ? s.q_t || !s.given_scale : !s.q;
  return strips == RowBlockPlan::kStrips && measures;
}

inline RowBlockPlan row_block_plan(const ForwardShape& s, const GpuShape& gpu, int strips) {
  RowBlockPlan plan;
  if (s.rows == 0 || s.hidden == 0) return plan;
  const std::int64_t piece = 16 / s.x_bytes, pieces = ceil_div<std::int64_t>(s.hidden, piece);
  const std::int64_t runs =
      ceil_div(ceil_div<std::int64_t>(pieces, RowBlockPlan::kRun), std::int64_t{strips});
  std::int64_t threads = RowBlockPlan::kRun * ceil_div<std::int64_t>(runs, s.x_bytes);
  // Of a thread's pieces of a row the upper half is added to the lower: a power of two apart.
  if (s.x_bytes > 1) threads = power_of_two_above(threads);
  if (threads > RowBlockPlan::most_threads(gpu.clusters)) return plan;
  plan.smem = RowBlockPlan::kStages * RowBlockPlan::kPieces * 16 * static_cast<int>(threads);
  if (plan.smem > gpu.max_smem - RowBlockPlan::kStaticSmem) return plan;
  plan.possible = true;
  plan.threads = static_cast<int>(threads);
  plan.strips = strips;
  const std::int64_t blocks = ceil_div<std::int64_t>(s.rows, RowBlockPlan::rows(s.x_bytes));
  const int at_once = gpu.num_sms * (RowBlockPlan::kMostThreads / plan.threads);
  plan.grid = strips * static_cast<int>(std::clamp<std::int64_t>(at_once / strips, 1, blocks));
  plan.finish_grid = static_cast<int>(std::min<std::int64_t>(
      ceil_div<std::int64_t>(s.rows, RowBlockPlan::kFinishRows), gpu.num_sms));
  return plan;
}

/// Many rows with scales of their own, and q_t (fewer are faster by rows and tiles: README.md); and
/// rows of which not one fits a CTA's shared memory beside the weights (`held` false).
inline RowBlockPlan choose_row_blocks(const ForwardShape& s, const GpuShape& gpu, bool held) {
  constexpr std::int64_t kLeast = std::int64_t{1} << 25;  // elements
  if (row_blocks_take(s, 1)) {
    return s.rows * s.hidden < kLeast ? RowBlockPlan{} : row_block_plan(s, gpu, 1);
  }
  const bool strips = !held && row_blocks_take(s, RowBlockPlan::kStrips);
  return strips ? row_block_plan(s, gpu, RowBlockPlan::kStrips) : RowBlockPlan{};
}

}  // namespace mortar::fp8_rmsnorm
