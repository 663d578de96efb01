// SPDX-License-Identifier: Apache-2.0
// Launch plans of LoRA, each forced by injection, on one problem: their outputs have the bits of
// the plan that is chosen, which agrees with fp64.
#pragma once

#include <gtest/gtest.h>

#include <iterator>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "device/launch.cuh"
#include "lora/cuda/backend.cuh"
#include "lora/launch_plan.h"
#include "lora_expect.h"
#include "lora_shape.h"

namespace mortar::testing {

using lora::LaunchPlan;

inline lora::Machine this_machine() {
  const device::DeviceInfo& d = device::current_device();
  return {d.num_sms, d.arch, d.max_smem, d.sm_smem};
}

inline LoraCase case_of(std::int64_t tokens, std::int64_t hidden,
                        const std::vector<std::int64_t>& widths, const std::vector<int>& ranks,
                        DType dtype = DType::kBFloat16) {
  LoraCase c;
  c.x = c.w = c.y = dtype;
  c.tokens = tokens;
  c.hidden = hidden;
  c.widths = widths;
  c.ranks = ranks;
  return c;
}

/// Of the candidates, every shrink with one expand, and every expand with one shrink.
inline std::vector<LaunchPlan> plans_to_run(const LoraOperands& op) {
  const std::vector<LaunchPlan> all = lora::candidates(shape_of(op), this_machine());
  std::vector<LaunchPlan> plans;
  for (const LaunchPlan& plan : all) {
    const bool first = plan.shrink.kernel == all[0].shrink.kernel &&
                       plan.shrink.rows == all[0].shrink.rows && plan.shrink.per_sm == 0 &&
                       plan.shrink.stages == all[0].shrink.stages;
    if (plan.expand == all[0].expand || plan.expand == all.back().expand || first ||
        plan.one_kernel()) {
      plans.push_back(plan);
    }
  }
  return plans;
}

class LaunchTest : public ::testing::Test {
 protected:
  explicit LaunchTest(Device device) : device_(device) {}

  /// A problem, its y before, and the bits that the plan which is chosen makes of it, which agree
  /// with fp64.
  struct Solved {
    LoraOperands op;
    GuardedTensor original;
    std::vector<std::uint8_t> want;

    Solved(const LoraCase& c, Device device) : op(c, device), original(op.y) {
      expect_apply_matches(op);
      want = bytes_of(op.y);
    }
  };

  /// lora_apply by this plan makes `want` of the `original` y.
  static void expect_plan_gives(const std::vector<std::uint8_t>& want, const LaunchPlan& plan,
                                LoraOperands& op, const GuardedTensor& original) {
    const lora::cuda::InjectedPlan injected(plan);
    restore_y(op, original);
    run_apply(op);
    op.y.download();
    EXPECT_TRUE(op.y.guards_intact()) << describe(plan);
    EXPECT_TRUE(bytes_of(op.y) == want) << describe(plan);
  }
  static void expect_plan_gives(const LaunchPlan& plan, Solved& problem) {
    expect_plan_gives(problem.want, plan, problem.op, problem.original);
  }

  /// y after each candidate, with this form of groups: all have the bits of the plan that is chosen
  /// for the other form, or this one, which agrees with fp64. Adds what ran to `ran_`.
  void expect_same_bits(LoraCase c, bool segments) {
    Solved problem(c, device_);
    if (!segments) return expect_candidates_give(problem.want, problem.op, problem.original);
    c.segments = true;
    LoraOperands by_segments(c, device_);
    expect_candidates_give(problem.want, by_segments, problem.original);
  }

  void expect_same_bits(const LoraCase& c) {
    for (const bool segments : {false, true}) expect_same_bits(c, segments);
  }

  void expect_candidates_give(const std::vector<std::uint8_t>& want, LoraOperands& op,
                              const GuardedTensor& original) {
    for (const LaunchPlan& plan : plans_to_run(op)) {
      expect_plan_gives(want, plan, op, original);
      note(plan);
    }
  }

  /// Adds the shapes of this plan's kernels to those that ran.
  void note(const LaunchPlan& plan) {
    if (plan.one_kernel()) {
      one_ran_.insert(plan.expand.cols);
      return;
    }
    ran_.insert({static_cast<int>(plan.shrink.kernel), plan.shrink.shape});
    stages_ran_.insert(plan.shrink.stages);
    dense_shrink_ran_ |= plan.shrink.per_sm == lora::kDenseShrinkPerSm;
    if (plan.shrink.kernel == lora::ShrinkKernel::kDecode) chunks_ran_.insert(plan.shrink.leaves);
    if (plan.expand.kernel == lora::ExpandKernel::kWide) wide_ran_.insert(plan.expand.shape);
    if (plan.expand.kernel == lora::ExpandKernel::kDirect) groups_ran_.insert(plan.expand.groups);
    if (plan.expand.per_sm == lora::kDenseExpandPerSm) dense_ran_.insert(plan.expand.stages);
  }

  /// The same for lora_shrink and an h wider than the ranks. Returns how many plans were one launch
  /// of the decode kernel.
  int expect_same_hidden(const LoraCase& c, DType h_dtype) {
    constexpr int kExtra = 3;
    LoraOperands op(c, device_);
    lora::LoraShape s = shape_of(op);
    s.op = lora::Op::kShrink;
    s.h_columns += kExtra;
    s.b_by_8 = false;
    const auto expected = lora::reference_shrink(op.x.host(), op.host_weights(), op.map, c.scale);
    std::vector<std::uint8_t> want;
    int in_clusters = 0;
    for (const LaunchPlan& plan : lora::candidates(s, this_machine())) {
      const lora::cuda::InjectedPlan injected(plan);
      GuardedTensor h = make_hidden(op, h_dtype, kExtra), workspace = op.shrink_workspace();
      const Tensor ids = c.add ? op.token_adapter.view() : Tensor{};
      lora_shrink(op.x.view(), op.weights(), op.groups(), h.view(), c.scale, ids, workspace.view(),
                  Stream{});
      if (want.empty()) {
        expect_hidden(op, h, expected, h_dtype, c.add);
        want = bytes_of(h);
      }
      EXPECT_TRUE(bytes_of(h) == want) << describe(plan);
      EXPECT_TRUE(h.guards_intact()) << describe(plan);
      in_clusters += plan.shrink.kernel == lora::ShrinkKernel::kDecode && !plan.shrink.split();
    }
    return in_clusters;
  }

  /// Every row of the tables of wgmma for such weights.
  void expect_all_shapes_ran(bool float_weights) const {
    if (this_machine().arch != 90) return;
    for (std::size_t i = 0; i < std::size(lora::kWgmmaShapes); ++i) {
      if (lora::kWgmmaShapes[i].float_weights != float_weights) continue;
      const int row = static_cast<int>(i);
      EXPECT_TRUE(ran_.contains({static_cast<int>(lora::ShrinkKernel::kWgmma), row}))
          << "row " << i << " of kWgmmaShapes never ran";
    }
    for (std::size_t i = 0; i < std::size(lora::kWalkShapes) && !float_weights; ++i) {
      EXPECT_TRUE(ran_.contains({static_cast<int>(lora::ShrinkKernel::kWalk), static_cast<int>(i)}))
          << "row " << i << " of kWalkShapes never ran";
    }
    for (std::size_t i = 0; i < std::size(lora::kWideShapes); ++i) {
      if (lora::kWideShapes[i].float_weights != float_weights) continue;
      EXPECT_TRUE(wide_ran_.contains(static_cast<int>(i)))
          << "row " << i << " of kWideShapes never ran";
    }
  }

  /// The same for lora_expand and an h of the caller's.
  void expect_same_expanded(const LoraCase& c, DType h_dtype) {
    LoraOperands op(c, device_);
    lora::LoraShape s = shape_of(op);
    s.op = lora::Op::kExpand;
    s.aligned_x = true;
    s.b_by_8 = false;
    s.float_weights = op.c.w == DType::kFloat32 && op.c.y == DType::kBFloat16;
    s.float_h = h_dtype == DType::kFloat32;
    s.aligned_h = (s.float_h || (s.one_type && h_dtype == op.c.y)) && op.max_rank() % 8 == 0;
    for (const std::int64_t width : op.c.widths) s.aligned_y = s.aligned_y && width % 8 == 0;
    const LoraWeights host = op.host_weights();
    const auto expected =
        lora::reference_expand(lora::reference_shrink(op.x.host(), host, op.map, c.scale), host,
                               op.map, op.y.host(), 0, c.add);
    GuardedTensor h = make_hidden(op, h_dtype, 0), workspace = op.shrink_workspace();
    lora_shrink(op.x.view(), op.weights(), op.groups(), h.view(), c.scale, {}, workspace.view(),
                Stream{});
    const GuardedTensor original = op.y;
    std::vector<std::uint8_t> want;
    for (const LaunchPlan& plan : lora::candidates(s, this_machine())) {
      const lora::cuda::InjectedPlan injected(plan);
      restore_y(op, original);
      lora_expand(h.view(), op.weights(), op.groups(), op.y.view(), 0, c.add, Stream{});
      if (want.empty()) {
        expect_outputs(op, expected, h_dtype, "lora_expand");
        want = bytes_of(op.y);
      }
      EXPECT_TRUE(bytes_of(op.y) == want) << describe(plan);
      EXPECT_TRUE(op.y.guards_intact()) << describe(plan);
      if (plan.expand.kernel == lora::ExpandKernel::kWide) wide_ran_.insert(plan.expand.shape);
    }
  }

  static std::vector<std::uint8_t> bytes_of(GuardedTensor& t) {
    t.download();
    const Tensor view = t.host();
    const auto* p = t.data<std::uint8_t>();
    return {p, p + view.numel() * dtype_size(view.dtype)};
  }

  Device device_;
  std::set<int> wide_ran_;             ///< rows of kWideShapes
  std::set<int> one_ran_;              ///< columns a CTA of plans of one kernel
  std::set<int> stages_ran_;           ///< of the ring of rank rows
  std::set<int> groups_ran_;           ///< of columns that share an MMA step of the direct expand
  bool dense_shrink_ran_ = false;      ///< the decode shrink in fewer registers
  std::set<int> chunks_ran_;           ///< K chunks of its CTAs
  std::set<int> dense_ran_;            ///< of that of B, where four CTAs of expand share an SM
  std::set<std::pair<int, int>> ran_;  ///< kernels of shrink and rows of their tables
};

}  // namespace mortar::testing
