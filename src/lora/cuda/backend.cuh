// SPDX-License-Identifier: Apache-2.0
// The passes of the CUDA backend, as the host sees them.
#pragma once

#include <cstdint>

#include "lora/config.h"
#include "lora/cuda/params.cuh"
#include "mortar/stream.h"

namespace mortar::lora {
struct LaunchPlan;
}

namespace mortar::lora::cuda {

/// While it lives, calls of this thread run the kernels of `plan`, which must outlive it, and
/// refuse problems that it was not made for. For tests and benchmarks.
class InjectedPlan {
 public:
  explicit InjectedPlan(const LaunchPlan& plan);
  ~InjectedPlan();
  InjectedPlan(const InjectedPlan&) = delete;
  InjectedPlan& operator=(const InjectedPlan&) = delete;
};

void plan(const IdsView& token_adapter, std::int64_t num_tokens, std::int64_t num_adapters,
          std::int32_t* plan, Stream stream);
void read_plan_header(const std::int32_t* plan, std::int32_t* header, Stream stream);

/// Slabs of h = x A^T for tiles of 16 tokens, on tensor cores: x and A of one 16-bit type, aligned.
void shrink_decode(const ShrinkParams& p, const ShrinkPlan& c, Stream stream);
/// The same on sm_90 for many tiles of few tokens, of a plan: by persistent warps.
void shrink_stream(const ShrinkParams& p, const ShrinkPlan& c, Stream stream);
/// h, whole or in slabs, for tiles of 64 tokens, on the tensor cores of sm_90a: aligned x and A, of
/// one type, or float32 A under a bfloat16 x.
void shrink_wgmma(const ShrinkParams& p, const ShrinkPlan& c, Stream stream);
/// h whole for the same tiles, of lora_apply and stacked A that the tensor copy engine takes:
/// persistent CTAs, with room for sums (parked_bytes()) at `parked`.
void shrink_walk(const ShrinkParams& p, const ShrinkPlan& c, void* parked, Stream stream);
/// Lines of stacked A of a slice, a row stride apart, up to the last adapter's last rank row.
inline std::int64_t lines_of_a(const WeightsView& w, int slice) {
  const StackedSlice& s = w.slices[slice];
  return (w.num_adapters - 1) * (s.a_adapter_stride / s.a_row_stride) + s.rank;
}
/// The same of stacked B, up to the last adapter's last column.
inline std::int64_t lines_of_b(const WeightsView& w, int slice) {
  const StackedSlice& s = w.slices[slice];
  return (w.num_adapters - 1) * (s.b_adapter_stride / s.b_row_stride) + w.widths[slice];
}
/// h, whole or in slabs, on the tensor cores of any architecture: all that the other two leave.
void shrink_mma(const ShrinkParams& p, const ShrinkPlan& c, Stream stream);
/// The same for every pair of dtypes, on tensor cores that multiply parts of values.
void shrink_parts(const ShrinkParams& p, const ShrinkPlan& c, Stream stream);
/// Adds the slabs of `from`, scales, and writes to.h.
void shrink_finish(const ShrinkParams& to, const HView& from, Stream stream);
/// y (+)= h B^T on tensor cores: B and y of one 16-bit type.
void expand_decode(const ExpandParams& p, Stream stream);
/// The same for tiles of 16 tokens, aligned y and ranks up to kDirectMaxRank.
void expand_direct(const ExpandParams& p, Stream stream);
/// The same of lora_apply's own whole h, by persistent CTAs.
void expand_bulk(const ExpandParams& p, Stream stream);
/// The same of float32 weights that count as two parts.
void expand_direct_parts(const ExpandParams& p, Stream stream);
/// Both passes in one launch on sm_90: tiles of 16 tokens, ranks up to kOneMaxRank, a plan, one
/// 16-bit type, aligned x, A and y.
void apply_decode(const ApplyParams& p, Stream stream);
/// Expand for tiles of 64 tokens, h not in slabs and ranks up to kExpandPrefillMaxRank.
void expand_prefill(const ExpandParams& p, Stream stream);
/// The same for high ranks, on the tensor cores of sm_90a. The first leaves to the others what they
/// are for: a caller's h of float32, and float32 weights, with their shapes.
void expand_wide(const ExpandParams& p, const ExpandPlan& c, Stream stream);
void expand_wide_rounded(const ExpandParams& p, const ExpandPlan& c, Stream stream);
void expand_wide_walk(const ExpandParams& p, const ExpandPlan& c, Stream stream);
void expand_wide_kept(const ExpandParams& p, Stream stream);
void expand_wide_parts(const ExpandParams& p, const ExpandPlan& c, Stream stream);
/// The same for every pair of dtypes, on tensor cores that multiply parts of values.
void expand_parts(const ExpandParams& p, Stream stream);

}  // namespace mortar::lora::cuda
