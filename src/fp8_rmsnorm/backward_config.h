// SPDX-License-Identifier: Apache-2.0
// Launch choices of the CUDA backend's backward as data: a pure function of sizes and device, which
// prints itself and changes no bit of any result.
#pragma once

#include <algorithm>
#include <cstdint>
#include <ostream>
#include <utility>

#include "fp8_rmsnorm/config.h"

namespace mortar::fp8_rmsnorm {

/// Sizes of a backward.
struct BackwardShape {
  std::int64_t rows = 0, hidden = 0;
  int x_bytes = 1, dy_bytes = 2;
  bool grouped = true, residual_grad = false;
};

/// How the backward deals out rows and columns. dw is summed in a tree that depends on M, N and the
/// dtypes alone, on any GPU with 160 KB of shared memory: chunks of adjacent rows, in each of them
/// `row_groups` interleaved sums.
struct BackwardPlan {
  static constexpr int kMostThreads = 512;
  static constexpr int kLeastThreads = 256;  ///< where shared memory is too small for more
  static constexpr int kMostPieces = 2;      ///< of a thread
  static constexpr std::int64_t kMostChunks = 128;
  static constexpr int kMostStages = 8;
  static constexpr int kStaticSmem = 2 << 10;  ///< at most, with what the system keeps

  int threads = 0;
  int row_threads = 0;  ///< that share a row: a power of two, or whole warps
  int pieces = 1;       ///< of each of them
  int row_groups = 1;
  int strips = 1;  ///< of columns, of different CTAs
  int stages = 0;  ///< rows of a thread that are in flight
  std::int64_t chunk_rows = 0, chunks = 0;
  std::int64_t smem = 0, weights_at = 0;                           ///< bytes of shared memory
  std::int64_t partials_at = 0, dots_at = 0, workspace_bytes = 0;  ///< bytes
};

/// The plan with at most so many threads, and pieces of each of them.
inline BackwardPlan backward_plan(const BackwardShape& s, const GpuShape& gpu, int most_threads,
                                  int most_pieces) {
  BackwardPlan plan;
  const std::int64_t piece = s.x_bytes == 1 ? 16 : 8, pieces = ceil_div(s.hidden, piece);
  plan.strips = static_cast<int>(ceil_div<std::int64_t>(pieces, most_threads * most_pieces));
  const std::int64_t strip = ceil_div<std::int64_t>(pieces, plan.strips);
  plan.pieces = static_cast<int>(ceil_div<std::int64_t>(strip, most_threads));
  const std::int64_t wanted = ceil_div<std::int64_t>(strip, plan.pieces);
  plan.row_threads = static_cast<int>(wanted <= 32 ? power_of_two_above(wanted)
                                                   : round_up<std::int64_t>(wanted, 32));
  plan.chunk_rows = std::max<std::int64_t>(1, ceil_div(s.rows, BackwardPlan::kMostChunks));
  plan.chunks = ceil_div(s.rows, plan.chunk_rows);
  plan.row_groups = static_cast<int>(std::min<std::int64_t>(
      std::max(1, most_threads / plan.row_threads), power_of_two_above(plan.chunk_rows)));
  plan.threads = static_cast<int>(round_up<std::int64_t>(plan.row_threads * plan.row_groups, 32));
  // Per thread and stage: x, dy, residual_grad, and the 16 bytes that hold the scale.
  const std::int64_t stage_bytes =
      plan.threads * plan.pieces *
      (piece * (s.x_bytes + s.dy_bytes * (s.residual_grad ? 2 : 1)) + (s.grouped ? 16 : 0));
  const std::int64_t strip_columns = std::int64_t{plan.row_threads} * plan.pieces * piece;
  const std::int64_t room = gpu.max_smem - BackwardPlan::kStaticSmem - 4 * strip_columns;
  const std::int64_t steps = ceil_div<std::int64_t>(plan.chunk_rows, plan.row_groups);
  plan.stages = static_cast<int>(std::clamp<std::int64_t>(
      room / stage_bytes, 1, std::min<std::int64_t>(BackwardPlan::kMostStages, steps + 1)));
  // The sums of the row groups meet where the rows were.
  plan.weights_at = std::max(plan.stages * stage_bytes, 4 * plan.row_groups * strip_columns);
  plan.smem = plan.weights_at + 4 * strip_columns;
  // Room for the dots of the narrowest strips: the query knows neither dy nor residual_grad.
  const std::int64_t most_strips = ceil_div<std::int64_t>(pieces, BackwardPlan::kLeastThreads);
  plan.dots_at = round_up<std::int64_t>(4 * plan.chunks * round_up<std::int64_t>(s.hidden, 4), 16);
  plan.workspace_bytes =
      plan.dots_at + (most_strips > 1 ? round_up<std::int64_t>(4 * most_strips * s.rows, 16) : 0);
  return plan;
}

inline BackwardPlan choose(const BackwardShape& s, const GpuShape& gpu) {
  BackwardPlan plan;
  for (const auto& [threads, pieces] : {std::pair{BackwardPlan::kMostThreads, 2},
                                        {BackwardPlan::kMostThreads, 1},
                                        {BackwardPlan::kLeastThreads, 1}}) {
    plan = backward_plan(s, gpu, threads, pieces);
    if (plan.smem <= gpu.max_smem - BackwardPlan::kStaticSmem) break;
  }
  return plan;
}

inline std::ostream& operator<<(std::ostream& out, const BackwardPlan& p) {
  return out << p.chunks << " chunks of " << p.chunk_rows << " rows, " << p.threads << " threads, "
             << p.row_groups << " rows at a time by " << p.row_threads << " threads of " << p.pieces
             << " pieces, " << p.strips << " strips, " << p.stages << " stages, "
             << p.workspace_bytes << " bytes of workspace";
}

}  // namespace mortar::fp8_rmsnorm
