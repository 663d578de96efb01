// SPDX-License-Identifier: Apache-2.0
// Launch choices of the CUDA backend's backward as data: a pure function of sizes and device, which
// prints itself and changes no bit of any result.
#pragma once

#include <algorithm>
#include <cstdint>
#include <ostream>

#include "fp8_rmsnorm/config.h"

namespace mortar::fp8_rmsnorm {

/// Sizes of a backward.
struct BackwardShape {
  std::int64_t rows = 0, hidden = 0;
  int x_bytes = 1, dy_bytes = 2;
  bool residual_grad = false;
};

/// How the backward deals out rows and columns. All but `stages` is a matter of M, N and the dtypes
/// alone, and with it the tree by which dw is summed: row m belongs to row group m % row_groups of
/// chunk m / row_groups % chunks, so that at any time the CTAs work on rows next to each other.
struct BackwardPlan {
  static constexpr int kMostThreads = 512;  ///< of a CTA
  static constexpr int kElements = 16;      ///< of a row, that a thread holds
  static constexpr int kMostStrips = 8;     ///< as many CTAs as a cluster may have
  static constexpr int kMostGroups = 5;     ///< of rows, of a CTA that has strips of them
  static constexpr int kMostStages = 4;
  /// Rows that are asked for early where a thread has up to kFewSteps, and where it has more: they
  /// are in the way of the call before, which still writes, and of dw (2048 x 4096, two, three,
  /// four of them: 15.6, 15.8, 16.1 us; 16384 x 4096: 88.1, 87.5, 87.9).
  static constexpr int kEarlyOfFew = 2, kEarlyOfMany = 3;
  static constexpr std::int64_t kFewSteps = 16;
  static constexpr int kStaticSmem = 3 << 10;  ///< at most, with what the system keeps
  static constexpr int kDwSmem = 19 << 10;     ///< of a CTA of dw.cu, which lies beside this one's

  int threads = 0;
  int row_threads = 0;  ///< that share a row: a power of two, or whole warps
  int row_groups = 1;
  int strips = 1;        ///< of columns, of different CTAs: a power of two
  bool cluster = false;  ///< which bring their sums of a row together, else by a pass of their own
  int stages = 0;        ///< rows of a thread that are in flight
  int early_rows = 0;    ///< of them, those that are asked for in L2 before the predecessors end
  std::int64_t chunks = 0;
  int warp_bytes = 0;  ///< of a stage, for a warp
  int sums_at = 0;     ///< bytes; 0: only when the rows are not needed any more
  std::int64_t smem = 0;
  std::int64_t partials_at = 0, dots_at = 0, workspace_bytes = 0;  ///< bytes

  /// Columns of a strip.
  MORTAR_HOST_DEVICE int strip() const { return row_threads * kElements; }
  /// That CTA has all of dw: it needs no other kernel, and no partial sums.
  MORTAR_HOST_DEVICE bool one_cta() const { return chunks == 1 && strips == 1; }
  /// From a row of a row group to its next.
  MORTAR_HOST_DEVICE std::int64_t row_step() const { return chunks * row_groups; }
};

/// CTAs that the rows are dealt out to, where each takes one of so many strips: of an H200's 132
/// SMs those that clusters leave usable. Part of dw's tree, so the same on every GPU.
constexpr std::int64_t most_chunks(int strips) {
  return strips == 1 ? 132 : strips == 2 ? 66 : 120 / strips;
}

/// Threads that share a strip of a row: a power of two, or whole warps.
constexpr int strip_threads(std::int64_t hidden, int strips) {
  const int least = static_cast<int>(
      ceil_div<std::int64_t>(ceil_div<std::int64_t>(hidden, strips), BackwardPlan::kElements));
  return least <= 32 ? static_cast<int>(power_of_two_above(least)) : round_up(least, 32);
}

/// Strips of a row: one where a CTA has the threads. Else so many that a CTA has two rows at least,
/// if it can, and works on one while the sum of another is on its way from the other CTAs (4096 x
/// 12288 in bfloat16: 86.2 us for 93.8); of such, those with the least work for a thread, and then
/// with the most threads.
constexpr int choose_strips(std::int64_t hidden, int most_threads) {
  if (strip_threads(hidden, 1) <= most_threads) return 1;
  struct Choice {
    int strips, row_threads, threads;
  };
  const auto choice = [&](int strips) {
    const int row_threads = strip_threads(hidden, strips);
    const int groups = std::min(most_threads / row_threads, BackwardPlan::kMostGroups);
    return Choice{strips, row_threads, groups * row_threads};
  };
  Choice best = choice(BackwardPlan::kMostStrips);
  for (int strips = best.strips / 2; strips > 1; strips /= 2) {
    const Choice c = choice(strips);
    if (c.threads == 0 || (c.threads == c.row_threads && best.threads > best.row_threads)) break;
    const std::int64_t work = c.row_threads * most_chunks(best.strips);
    const std::int64_t work_of_best = best.row_threads * most_chunks(c.strips);
    if (work < work_of_best || (work == work_of_best && c.threads >= best.threads)) best = c;
  }
  return best.strips;
}

/// The plan with at most so many threads, and chunks where `chunks` is not 0.
inline BackwardPlan backward_plan(const BackwardShape& s, const GpuShape& gpu, int most_threads,
                                  std::int64_t chunks = 0) {
  constexpr int kElements = BackwardPlan::kElements;
  BackwardPlan plan;
  plan.strips = choose_strips(s.hidden, most_threads);
  plan.cluster = plan.strips > 1 && gpu.clusters;
  plan.row_threads = strip_threads(s.hidden, plan.strips);
  int most_groups = most_threads / plan.row_threads;
  if (plan.strips > 1) most_groups = std::min(most_groups, BackwardPlan::kMostGroups);
  // Rows that one CTA takes at once are its own: a call then costs one launch and no workspace.
  if (chunks == 0) chunks = s.rows <= most_groups ? 1 : most_chunks(plan.strips);
  plan.row_groups =
      static_cast<int>(std::clamp<std::int64_t>(ceil_div(s.rows, chunks), 1, most_groups));
  plan.chunks = std::min(chunks, ceil_div<std::int64_t>(s.rows, plan.row_groups));
  plan.threads = static_cast<int>(round_up<std::int64_t>(plan.row_threads * plan.row_groups, 32));
  plan.warp_bytes = 32 * kElements * (s.x_bytes + s.dy_bytes * (s.residual_grad ? 2 : 1));
  const std::int64_t stage = std::int64_t{plan.threads / 32} * plan.warp_bytes;
  const std::int64_t room = gpu.max_smem - BackwardPlan::kStaticSmem;
  const std::int64_t steps =
      std::max<std::int64_t>(1, ceil_div(s.rows, std::max<std::int64_t>(1, plan.row_step())));
  plan.stages = static_cast<int>(std::clamp<std::int64_t>(
      room / stage, 1, std::min<std::int64_t>(BackwardPlan::kMostStages, steps)));
  plan.early_rows =
      std::min(plan.stages, steps <= BackwardPlan::kFewSteps ? BackwardPlan::kEarlyOfFew
                                                             : BackwardPlan::kEarlyOfMany);
  // The sums of the row groups meet behind the rows where there is room, else where the rows were,
  // which is faster for strips (4096 x 12288: 89.3 us for 91.1).
  const std::int64_t rows = plan.stages * stage;
  const std::int64_t sums = std::int64_t{4} * plan.row_groups * plan.strip();
  const bool beside = rows + sums + BackwardPlan::kDwSmem <= room;
  if (plan.strips == 1 && beside) plan.sums_at = static_cast<int>(rows);
  plan.smem = plan.sums_at > 0 ? rows + sums : std::max(rows, sums);
  if (!plan.one_cta()) {
    plan.dots_at =
        round_up<std::int64_t>(4 * plan.chunks * round_up<std::int64_t>(s.hidden, 4), 16);
  }
  plan.workspace_bytes =
      plan.dots_at +
      (plan.strips > 1 && !plan.cluster ? round_up<std::int64_t>(4 * plan.strips * s.rows, 16) : 0);
  return plan;
}

inline BackwardPlan choose(const BackwardShape& s, const GpuShape& gpu) {
  return backward_plan(s, gpu, BackwardPlan::kMostThreads);
}

inline std::ostream& operator<<(std::ostream& out, const BackwardPlan& p) {
  return out << p.chunks << " chunks of rows, " << p.threads << " threads, " << p.row_groups
             << " rows at a time by " << p.row_threads << " threads, " << p.strips
             << (p.cluster ? " strips of a cluster, " : " strips, ") << p.stages << " stages, "
             << p.workspace_bytes << " bytes of workspace";
}

}  // namespace mortar::fp8_rmsnorm
