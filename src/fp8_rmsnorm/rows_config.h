// SPDX-License-Identifier: Apache-2.0
// Launch choices of the CUDA backend's passes over rows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "core/int_math.h"
#include "fp8_rmsnorm/forward_shape.h"

namespace mortar::fp8_rmsnorm {

/// A thread holds at most so many pieces of 16 bytes of x, of one row or of several.
inline constexpr int kHeldPieces = 8;

/// How rows are dealt out to threads: `row_threads` of a CTA share a row, of which each holds
/// `slots` pieces at a time, and take `held_rows` rows together.
struct RowsPlan {
  static constexpr int kMostThreads = 512;     ///< of a row
  static constexpr int kThreads = 256;         ///< of a CTA, unless a row needs more
  static constexpr int kStaticSmem = 6 << 10;  ///< at most, with what the system keeps
  static constexpr int kStages = 2;            ///< what is worked on, and what is on its way
  static constexpr int kWaitingSums = 3;       ///< of a thread: of one span of a row, two and four

  int threads = kThreads;
  int row_threads = 32;  ///< a power of two
  int slots = 1, held_rows = 1;
  int spans = 1;   ///< parts of a row, a power of two up to 8, that its threads hold one by one
  int pitch = 32;  ///< between a thread's pieces of a span
  int grid = 0;
  bool shared_weights = true;  ///< weights as float32 in shared memory, else in the workspace
  std::int64_t smem = 0;       ///< bytes

  /// Rows that a CTA takes at a time.
  MORTAR_HOST_DEVICE int rows_per_step() const { return threads / row_threads * held_rows; }
};

/// Quads of float32 weights that a piece of so many elements takes in shared memory: an odd number.
constexpr int held_weight_quads(int elements) { return elements / 4 | 1; }

/// How aligned rows of whole pieces are dealt out: `row_threads` threads share a row, of which each
/// takes `slots` pieces. Rows are copied to shared memory, `stages` of them ahead.
struct HeldRowsPlan {
  static constexpr int kThreads = 512;         ///< of a CTA, the only one of its SM
  static constexpr int kLeastThreads = 8;      ///< of a row: their pieces are a line of 128 bytes
  static constexpr int kMostStages = 4;        ///< rows of a thread in shared memory
  static constexpr int kStaticSmem = 8 << 10;  ///< at most, with what the system keeps
  /// Bytes of x that a second pass over it is to find in L2: 32 MB of 50. Half of it is 3 % slower
  /// (8192 x 4096 bfloat16), half as much again 1 %.
  static std::int64_t read_again(const GpuShape& gpu) {
    return std::int64_t{gpu.l2_bytes} * 61 / 100;
  }

  bool possible = false;
  int row_threads = 32;  ///< a power of two
  int slots = 1, stages = 1;
  /// The last rows, which stay in L2 for a second pass. The others are marked for eviction, which
  /// costs up to 4 % where there is none.
  std::int64_t late_rows = std::numeric_limits<std::int64_t>::max();
  /// No CTA of tiles has room beside one of rows, which then starts late: it asks for its first
  /// rows in L2 before it waits for its predecessors.
  bool alone = true;
  int grid = 0;
  int x_bytes = 0;      ///< of a row in shared memory, zeros behind its end among them
  int kept_bytes = 0;   ///< of these, in a place of their own
  int scale_bytes = 0;  ///< of its scales there; 0: each thread loads its own
  int added_bytes = 0;  ///< of a row of the residual behind them, which has x's type
  int weight_bytes = 0;
  std::int64_t smem = 0;  ///< bytes: weights as float32, rows

  /// Rows that a CTA takes at a time.
  MORTAR_HOST_DEVICE int rows_per_step() const { return kThreads / row_threads; }
};

inline RowsPlan choose_rows(const ForwardShape& s, const GpuShape& gpu) {
  RowsPlan plan;
  const std::int64_t piece = 16 / s.x_bytes, pieces = ceil_div<std::int64_t>(s.hidden, piece);
  // A warp for a row, or a part of one where the row is shorter than a warp's first pieces; more
  // where its threads cannot hold it.
  const std::int64_t least =
      std::max(std::min<std::int64_t>(power_of_two_above(pieces), 32),
               power_of_two_above(ceil_div<std::int64_t>(pieces, kHeldPieces)));
  const std::int64_t held_by_thread =
      kHeldPieces * (RowsPlan::kStages * 16 + (s.x_bytes == 1 ? 4 : 0) + 4) +
      4 * RowsPlan::kWaitingSums;
  const std::int64_t room = gpu.max_smem - RowsPlan::kStaticSmem;
  const int most =
      RowsPlan::kMostThreads * held_by_thread <= room ? RowsPlan::kMostThreads : RowsPlan::kThreads;
  plan.row_threads = static_cast<int>(std::min<std::int64_t>(least, most));
  // Few rows: more threads for each, until every SM has work.
  while (plan.row_threads < RowsPlan::kThreads && plan.row_threads < pieces &&
         ceil_div<std::int64_t>(s.rows, RowsPlan::kThreads / plan.row_threads) < gpu.num_sms) {
    plan.row_threads *= 2;
  }
  plan.threads = std::max(plan.threads, plan.row_threads);
  plan.slots = static_cast<int>(
      std::min<std::int64_t>(ceil_div<std::int64_t>(pieces, plan.row_threads), kHeldPieces));
  plan.spans = static_cast<int>(
      power_of_two_above(ceil_div<std::int64_t>(pieces, plan.row_threads * plan.slots)));
  plan.pitch = plan.spans * plan.row_threads;
  while (plan.slots * (plan.held_rows + 1) <= kHeldPieces &&
         s.rows >= std::int64_t{2} * gpu.num_sms *
                       (plan.rows_per_step() + plan.threads / plan.row_threads)) {
    ++plan.held_rows;
  }
  const std::int64_t held = plan.threads * held_by_thread;
  const std::int64_t weights = s.norm ? pieces * piece * 4 : 0;
  plan.shared_weights = held + weights <= room;
  plan.smem = held + (plan.shared_weights ? weights : 0);
  const std::int64_t per_sm =
      std::max<std::int64_t>(1, gpu.max_smem / (plan.smem + RowsPlan::kStaticSmem));
  plan.grid = static_cast<int>(std::min(ceil_div<std::int64_t>(s.rows, plan.rows_per_step()),
                                        gpu.num_sms * std::min<std::int64_t>(per_sm, 4)));
  return plan;
}

/// The fewest threads of a row that hold it whole, with those of a group side by side.
inline int least_held_threads(const ForwardShape& s) {
  const std::int64_t piece = 16 / s.x_bytes, pieces = ceil_div<std::int64_t>(s.hidden, piece);
  const std::int64_t of_group = s.scaling == Fp8Scaling::kGroup ? s.group / piece : 1;
  return static_cast<int>(
      std::max({std::int64_t{HeldRowsPlan::kLeastThreads}, of_group,
                power_of_two_above(ceil_div<std::int64_t>(pieces, kHeldPieces))}));
}

/// The plan with so many threads of a row: a power of two from the fewest to kThreads.
inline HeldRowsPlan held_rows_plan(const ForwardShape& s, const GpuShape& gpu, int row_threads) {
  HeldRowsPlan plan;
  const std::int64_t piece = 16 / s.x_bytes, pieces = ceil_div<std::int64_t>(s.hidden, piece);
  plan.row_threads = row_threads;
  std::int64_t slots = ceil_div<std::int64_t>(pieces, row_threads);
  // Of zeros, so that every thread uses all its slots and no branch lies between them (2048 x 7168,
  // 8-bit: 20.0 us for 21.8). Only the last slot may have columns behind the row's end.
  if (pieces == (kHeldPieces - 1) * row_threads && s.x_bytes <= 2 && !s.adds) ++slots;
  if (slots > kHeldPieces || row_threads > HeldRowsPlan::kThreads) return plan;
  plan.slots = static_cast<int>(slots);
  const int padded = plan.slots * row_threads;  // pieces
  plan.x_bytes = padded * 16;
  plan.weight_bytes = 16 * held_weight_quads(static_cast<int>(piece)) * padded;
  // Whole copies of 16 bytes of a row's scales.
  if (s.x_group > 0 && gpu.clusters && s.hidden / s.x_group * s.x_scale_bytes % 16 == 0) {
    plan.scale_bytes = static_cast<int>(
        round_up<std::int64_t>(ceil_div(padded * static_cast<int>(piece), s.x_group) *
                                   static_cast<std::int64_t>(s.x_scale_bytes),
                               16));
  }
  plan.added_bytes = s.adds ? plan.x_bytes : 0;
  const std::int64_t step =
      std::int64_t{plan.rows_per_step()} * (plan.x_bytes + plan.scale_bytes + plan.added_bytes);
  const std::int64_t room = gpu.max_smem - HeldRowsPlan::kStaticSmem - plan.weight_bytes;
  plan.stages = static_cast<int>(std::min<std::int64_t>(room / step, HeldRowsPlan::kMostStages));
  plan.possible = plan.stages > 0;
  plan.smem = plan.weight_bytes + plan.stages * step;
  plan.grid = static_cast<int>(
      std::min<std::int64_t>(ceil_div<std::int64_t>(s.rows, plan.rows_per_step()), gpu.num_sms));
  return plan;
}

inline HeldRowsPlan choose_held_rows(const ForwardShape& s, const GpuShape& gpu) {
  constexpr int kThreads = HeldRowsPlan::kThreads;
  const std::int64_t pieces = ceil_div<std::int64_t>(s.hidden, 16 / s.x_bytes);
  int row_threads = std::min(least_held_threads(s), kThreads);
  HeldRowsPlan plan = held_rows_plan(s, gpu, row_threads);
  // Few rows, or long ones of which shared memory has too few: more threads for each.
  while (
      row_threads < kThreads && row_threads < pieces &&
      (plan.stages < 2 || ceil_div<std::int64_t>(s.rows, kThreads / row_threads) < gpu.num_sms)) {
    row_threads *= 2;
    plan = held_rows_plan(s, gpu, row_threads);
  }
  // No more rows on their way than a thread has: the rest of an SM is for CTAs of the tiles, which
  // come early and bring their first x (2048 x 4096, see README.md).
  const std::int64_t at_once = std::int64_t{plan.grid} * plan.rows_per_step();
  const auto of_thread = static_cast<int>(ceil_div<std::int64_t>(
      std::max<std::int64_t>(s.rows, 1), std::max<std::int64_t>(at_once, 1)));
  if (plan.possible && of_thread < plan.stages) {
    plan.smem -= (plan.smem - plan.weight_bytes) / plan.stages * (plan.stages - of_thread);
    plan.stages = of_thread;
  }
  return plan;
}

}  // namespace mortar::fp8_rmsnorm
