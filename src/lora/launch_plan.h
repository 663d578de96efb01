// SPDX-License-Identifier: Apache-2.0
// The launch plan of a LoRA call on CUDA: which kernels it runs, in which shapes. choose() is a
// pure function of sizes and of the device, called once a call.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "core/int_math.h"
#include "lora/config.h"
#include "lora/problem.h"

namespace mortar::lora {

/// What launch choices depend on beside the problem. The defaults are an H200.
struct Machine {
  int sms = 132;
  int arch = 90;          ///< 10 * major + minor
  int max_smem = 232448;  ///< bytes of shared memory that a CTA may have
  int sm_smem = 233472;   ///< of an SM

  friend bool operator==(const Machine&, const Machine&) = default;
};

enum class Op { kApply, kShrink, kExpand };

/// What the choices look at.
struct LoraShape {
  Op op = Op::kApply;
  std::int64_t num_tokens = 0, hidden = 0, num_adapters = 1;
  std::array<std::int64_t, kLoraMaxSlices> widths{};
  int num_slices = 1, max_rank = 0;
  int h_columns = 0;           ///< rank columns that shrink writes per slice
  bool one_type = true;        ///< x, weights and y of one 16-bit type
  bool float_weights = false;  ///< of float32, under bfloat16 x and y
  bool aligned_x = true;  ///< every row of x and A starts at a multiple of 16 bytes, and is whole
  bool aligned_y = true;  ///< the same for the slices of y
  bool b_by_8 = false;    ///< rows of stacked B start at multiples of 8 bytes, not of 16: rank 4
  bool b_runs = false;    ///< stacked B lies without gaps, in whole groups of columns and pieces
                          ///< of four ranks, as many in each slice
  bool segments = false;  ///< groups are no plan
  bool ragged = false;    ///< adapters of stacked weights have ranks of their own
  bool boxes = false;     ///< the tensor copy engine takes A: stacked, all ranks whole boxes
  bool b_boxes = false;   ///< it takes B: so are blocks of columns, and all slices have one rank
  /// Of lora_expand: h is float32; and it is that or of y's type, in rows that start at multiples
  /// of 16 bytes and have whole pieces.
  bool float_h = false, aligned_h = false;

  std::int64_t sum_widths() const;
  std::int64_t max_width() const;
  int rank_rows() const { return num_slices * h_columns; }
  friend bool operator==(const LoraShape&, const LoraShape&) = default;
};

struct LaunchPlan {
  LoraShape shape;
  ShrinkPlan shrink;
  ExpandPlan expand;
  std::int64_t workspace_bytes = 0;

  bool one_kernel() const { return expand.kernel == ExpandKernel::kOne; }
  friend bool operator==(const LaunchPlan&, const LaunchPlan&) = default;
};

/// The chosen plan, and others of every kernel and shape that the device can run.
std::vector<LaunchPlan> candidates(const LoraShape& s, const Machine& m);
/// Bytes of workspace that a plan's kernels use.
std::int64_t workspace_of(const LaunchPlan& plan);
/// The plan of a call.
LaunchPlan choose(const LoraShape& s, const Machine& m);
/// The plan as one line: the problem, the kernels and what each was given.
std::string describe(const LaunchPlan& plan);

/// Columns of a slice of h in the workspace.
inline std::int64_t h_width(const LoraShape& s) { return round_up(s.max_rank, 8); }

/// Bytes of so many split-K partials.
inline std::int64_t partial_bytes(const LoraShape& s, std::int64_t partials) {
  return partials * s.num_tokens * s.num_slices * h_width(s) * 4;
}
/// Of one for each leaf of K.
inline std::int64_t partial_bytes(const LoraShape& s) {
  return partial_bytes(s, num_leaves(s.hidden));
}

/// Partials that wgmma leaves, so many leaves a CTA.
inline std::int64_t wgmma_partials(const LoraShape& s, int leaves) {
  const std::int64_t num = num_leaves(s.hidden);
  return s.one_type ? wgmma_partials(num, leaves) : num;
}
/// Those that a plan's shrink leaves.
inline std::int64_t num_partials(const LoraShape& s, const ShrinkPlan& c) {
  if (!c.split()) return 0;
  return c.kernel == ShrinkKernel::kWgmma ? wgmma_partials(s, c.leaves) : num_leaves(s.hidden);
}

/// Bytes of h once it is complete: one value per token, slice and rank, no split-K partials.
inline std::int64_t finished_bytes(const LoraShape& s) {
  return s.num_tokens * s.num_slices * h_width(s) * (s.one_type ? 2 : 4);
}

/// So many bytes of partials with their h cost little: 4 MB stay in L2, and 1 % of the bytes of a
/// 16-bit x is little beside what the op moves anyway.
inline std::int64_t light_partials(const LoraShape& s) {
  return std::max<std::int64_t>(4 << 20, s.num_tokens * s.hidden * 2 / 100);
}
inline bool partials_are_light(const LoraShape& s) {
  return partial_bytes(s) + finished_bytes(s) <= light_partials(s);
}
/// Bytes that they may take, the documented limit: twice h in float32, and 16 MB, or 24 MB of
/// float32 weights under a bfloat16 x. (us on an H200, with 24 and 16: 411 tokens of one adapter,
/// rank 256, 28,672 to 8,192, 76.2 and 107.7; 673 of one, rank 256, 16,384 to 16,384, 96.6 and
/// 115.1; 2,951 of 7, ranks up to 64, 13,824 to 5,120, 68.8 and 80.8; but with 40 MB 11,599 of one,
/// rank 64, 7,168 to 8,192, 229 and 215.)
inline std::int64_t most_partials(const LoraShape& s) {
  constexpr std::int64_t kMegabyte = 1 << 20;
  return 2 * s.num_tokens * s.num_slices * s.max_rank * 4 + (s.float_weights ? 24 : 16) * kMegabyte;
}
/// Those that the kernels without wgmma take: with split-bf16 more than the light ones do not pay.
/// (1,334 tokens of rank 512, gate_up of 1,024 to 2 x 3,072, float32 adapters: 466 us against 444;
/// 1,538 tokens of 58 adapters, rank 256: 198 against 166.)
inline std::int64_t partial_budget(const LoraShape& s) {
  return s.one_type ? most_partials(s) : light_partials(s);
}
/// Whether all of a split shrink's partials fit their budget, with h beside them, and 32 bits.
inline bool partials_fit(const LoraShape& s, std::int64_t partials, std::int64_t budget) {
  return partials + finished_bytes(s) <= budget && partials < std::int64_t{1} << 32;
}
inline bool partials_fit(const LoraShape& s) {
  return partials_fit(s, partial_bytes(s), partial_budget(s));
}
/// The same of wgmma, so many leaves a CTA.
inline bool wgmma_partials_fit(const LoraShape& s, int leaves = 1) {
  return partials_fit(s, partial_bytes(s, wgmma_partials(s, leaves)), most_partials(s));
}
/// Bytes of the most partials that it may leave.
inline std::int64_t most_wgmma_bytes(const LoraShape& s) {
  for (int leaves = 1; leaves <= most_wgmma_leaves(num_leaves(s.hidden)); ++leaves) {
    if (wgmma_partials_fit(s, leaves)) return partial_bytes(s, wgmma_partials(s, leaves));
  }
  return 0;
}

/// Whether CTAs of lora_apply's shrink may walk, as far as a workspace query can tell.
inline bool may_walk(const LoraShape& s) {
  constexpr int kLeastRank = 65;
  return s.op == Op::kApply && s.one_type && s.max_rank >= kLeastRank;
}
/// Bytes of the sums of half of K that such CTAs leave in the workspace.
inline std::int64_t parked_bytes(const LoraShape& s, const WalkShape& shape) {
  const std::int64_t groups = ceil_div(s.num_slices * s.max_rank, shape.rows);
  const std::int64_t units = max_tiles(s.num_tokens, s.num_adapters, kWalkTokens) * groups;
  return std::min<std::int64_t>(units, kMostWalkers) * kWalkTokens * shape.rows * 4;
}

/// Workspace of the two ops whatever is chosen: partials where there may be any, and for lora_apply
/// h whole beside them.
inline std::int64_t most_workspace(const LoraShape& s) {
  const bool fit = s.float_weights ? wgmma_partials_fit(s) : partials_fit(s);
  std::int64_t partials = fit ? partial_bytes(s) : s.one_type ? most_wgmma_bytes(s) : 0;
  for (const WalkShape& shape : kWalkShapes) {
    if (may_walk(s)) partials = std::max(partials, parked_bytes(s, shape));
  }
  return s.op == Op::kShrink ? partials : finished_bytes(s) + partials;
}

}  // namespace mortar::lora
