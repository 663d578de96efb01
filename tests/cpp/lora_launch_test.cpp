// SPDX-License-Identifier: Apache-2.0
// Launch plans of LoRA on a GPU: every kernel in every shape, forced by injection, gives the bits
// of the plan that is chosen, which agrees with fp64. No test is generated without a GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "lora_expect.h"
#include "lora_shape.h"
#if MORTAR_HAS_CUDA
#include "device/launch.cuh"
#include "lora/cuda/backend.cuh"
#include "lora/launch_plan.h"

namespace mortar::testing {
namespace {

using lora::LaunchPlan;

lora::Machine this_machine() {
  const device::DeviceInfo& d = device::current_device();
  return {d.num_sms, d.arch, d.max_smem, d.sm_smem};
}

class LoraLaunch : public ::testing::TestWithParam<Device> {
 protected:
  static LoraCase case_of(std::int64_t tokens, std::int64_t hidden,
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

  /// y after each candidate, with both forms of groups, all of which must have the same bits; those
  /// of the first agree with fp64. Adds what ran to `ran_`.
  void expect_same_bits(LoraCase c) {
    LoraOperands op(c, GetParam());
    const GuardedTensor original = op.y;
    expect_apply_matches(op);
    const std::vector<std::uint8_t> want = bytes_of(op.y);
    expect_candidates_give(want, op, original);
    c.segments = true;
    LoraOperands by_segments(c, GetParam());
    expect_candidates_give(want, by_segments, original);
  }

  void expect_candidates_give(const std::vector<std::uint8_t>& want, LoraOperands& op,
                              const GuardedTensor& original) {
    const std::vector<LaunchPlan> all = lora::candidates(shape_of(op), this_machine());
    for (const LaunchPlan& plan : all) {
      // Every shrink with one expand, and every expand with one shrink.
      const bool first = plan.shrink.kernel == all[0].shrink.kernel &&
                         plan.shrink.rows == all[0].shrink.rows && plan.shrink.per_sm == 0 &&
                         plan.shrink.stages == all[0].shrink.stages;
      if (!(plan.expand == all[0].expand) && !(plan.expand == all.back().expand) && !first &&
          !plan.one_kernel())
        continue;
      expect_plan_gives(want, plan, op, original);
      if (plan.one_kernel()) {
        one_ran_.insert(plan.expand.cols);
        continue;
      }
      ran_.insert({static_cast<int>(plan.shrink.kernel), plan.shrink.shape});
      stages_ran_.insert(plan.shrink.stages);
      if (plan.expand.kernel == lora::ExpandKernel::kWide) wide_ran_.insert(plan.expand.shape);
      if (plan.expand.per_sm == lora::kDenseExpandPerSm) dense_ran_.insert(plan.expand.stages);
    }
  }

  /// The same for lora_shrink and an h wider than the ranks. Returns how many plans were one launch
  /// of the decode kernel.
  int expect_same_hidden(const LoraCase& c, DType h_dtype) {
    constexpr int kExtra = 3;
    LoraOperands op(c, GetParam());
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
    for (std::size_t i = 0; i < std::size(lora::kWideShapes); ++i) {
      if (lora::kWideShapes[i].float_weights != float_weights) continue;
      EXPECT_TRUE(wide_ran_.contains(static_cast<int>(i)))
          << "row " << i << " of kWideShapes never ran";
    }
  }

  /// The same for lora_expand and an h of the caller's.
  void expect_same_expanded(const LoraCase& c, DType h_dtype) {
    LoraOperands op(c, GetParam());
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

  std::set<int> wide_ran_;             ///< rows of kWideShapes
  std::set<int> one_ran_;              ///< columns a CTA of plans of one kernel
  std::set<int> stages_ran_;           ///< of the ring of rank rows
  std::set<int> dense_ran_;            ///< of that of B, where four CTAs of expand share an SM
  std::set<std::pair<int, int>> ran_;  ///< kernels of shrink and rows of their tables
};

/// Few and many tokens of an adapter, short and long K chunks, an odd number of them, edges of
/// tiles, columns and ranks.
TEST_P(LoraLaunch, EveryPlanGivesTheSameBits) {
  expect_same_bits(case_of(7, 1040, {96, 40}, {16, 8, 24}));
  expect_same_bits(case_of(150, 1544, {264, 40}, {16}));
  expect_same_bits(case_of(197, 4616, {384, 136}, {32, 8, 24}));
  expect_same_bits(case_of(260, 776, {520}, {64, 5, 40}));
  expect_same_bits(case_of(333, 1288, {264, 72, 64}, {48, 64, 3}));
  expect_same_bits(case_of(200, 1032, {264, 128}, {128, 100, 64}));
  expect_same_bits(case_of(90, 1032, {264}, {4, 12, 2}));
  expect_same_bits(case_of(130, 520, {264, 40}, {200, 129, 40}));
  expect_same_bits(case_of(130, 520, {264, 40}, {201, 129, 40}, DType::kFloat16));
  expect_same_bits(case_of(150, 264, {520, 40}, {4, 2, 3}));
  expect_same_bits(case_of(150, 264, {520, 40}, {4, 2, 3}, DType::kFloat16));
  LoraCase long_run = case_of(200, 264, {264, 136}, {8, 40, 512});
  long_run.map = Map::kOneAdapter;
  expect_same_bits(long_run);
  LoraCase strided = case_of(133, 1040, {96, 40}, {16, 8, 24});
  strided.strided = true;
  expect_same_bits(strided);
  expect_all_shapes_ran(false);
  EXPECT_TRUE(stages_ran_.contains(lora::kFewDecodeStages));
  EXPECT_EQ(dense_ran_, (std::set{lora::kDenseExpandStages, lora::kDecodeExpandStages}));
  if (this_machine().arch != 90) return;
  for (std::size_t i = 0; i < std::size(lora::kMmaShapes); ++i) {
    EXPECT_TRUE(ran_.contains({static_cast<int>(lora::ShrinkKernel::kMma), static_cast<int>(i)}))
        << "row " << i << " of kMmaShapes never ran";
  }
}

/// Plans of one kernel beside those of two: so few elements of K and columns that CTAs of a cluster
/// have none, and as many as fit; tiles that are full, nearly empty and not there; ranks of up to
/// four MMA steps, of a part of one, of none, and of rows of B by 8 bytes; pointer tables; y
/// overwritten.
TEST_P(LoraLaunch, OneKernelGivesTheBitsOfTwo) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    const auto of = [&](std::int64_t tokens, std::int64_t hidden,
                        const std::vector<std::int64_t>& widths, const std::vector<int>& ranks) {
      return case_of(tokens, hidden, widths, ranks, dtype);
    };
    expect_same_bits(of(1, 8, {8}, {16}));
    expect_same_bits(of(7, 264, {96, 40}, {16, 8, 5}));
    expect_same_bits(of(37, 1040, {264, 40, 8}, {16, 0, 3}));
    expect_same_bits(of(90, 3976, {520, 40}, {4, 2, 3}));
    expect_same_bits(of(50, 4096, {4104}, {8, 1}));
    expect_same_bits(of(21, 4104, {136}, {12, 1, 16, 9}));
    expect_same_bits(of(18, 9736, {4112, 1000}, {16, 7}));
    expect_same_bits(of(33, 16384, {264}, {9, 16}));
    expect_same_bits(of(5, 1040, {264, 40}, {64, 3, 20}));
    expect_same_bits(of(21, 4104, {136}, {24, 1, 32, 9}));
    expect_same_bits(of(60, 776, {520, 40}, {64, 40, 0, 57}));
    LoraCase table = of(40, 520, {264, 40}, {16, 0, 5, 11});
    table.table = true;
    expect_same_bits(table);
    LoraCase alone = of(48, 2056, {768, 264}, {16});
    alone.map = Map::kOneAdapter;
    alone.add = false;
    expect_same_bits(alone);
    LoraCase high = of(70, 2056, {264, 72}, {52});
    high.map = Map::kOneAdapter;
    expect_same_bits(high);
    EXPECT_EQ(one_ran_.size(), this_machine().arch == 90 ? 5u : 0u);
    one_ran_.clear();
  }
  LoraCase strided = case_of(7, 264, {96, 40}, {16, 8, 5});
  strided.strided = true;
  expect_same_bits(strided);
  EXPECT_TRUE(one_ran_.empty());
}

/// Clusters of two, four and eight CTAs, some without a K chunk of their own, and such that take
/// turns; tokens without an adapter; more rank rows than a CTA takes; both forms of groups.
TEST_P(LoraLaunch, EveryPlanOfShrinkGivesTheSameBits) {
  int in_clusters = 0;
  for (const bool segments : {false, true}) {
    const auto expect = [&](LoraCase c, DType h_dtype, bool zero_rows) {
      c.segments = segments;
      c.add = zero_rows;
      in_clusters += expect_same_hidden(c, h_dtype);
    };
    expect(case_of(7, 264, {96, 40}, {16, 8, 24}), DType::kBFloat16, true);
    expect(case_of(1, 1040, {96}, {5}), DType::kFloat32, false);
    expect(case_of(37, 2056, {96, 40, 8}, {64, 0, 100}), DType::kFloat32, true);
    expect(case_of(21, 4096, {96, 40}, {16}, DType::kFloat16), DType::kFloat16, false);
    expect(case_of(18, 4616, {96, 40}, {72, 5, 8}), DType::kBFloat16, true);
    expect(case_of(3, 9736, {40}, {200, 24, 8}, DType::kFloat16), DType::kFloat32, true);
  }
  EXPECT_EQ(in_clusters > 0, this_machine().arch == 90);
}

/// The same of float32 weights under bfloat16 x and y: products of parts on both kinds of tensor
/// core instructions.
TEST_P(LoraLaunch, EveryPlanOfFloatWeightsGivesTheSameBits) {
  const auto float_weights = [](LoraCase c) {
    c.w = DType::kFloat32;
    return c;
  };
  expect_same_bits(float_weights(case_of(150, 1544, {264, 40}, {16})));
  expect_same_bits(float_weights(case_of(197, 4616, {384, 136}, {32, 8, 24})));
  expect_same_bits(float_weights(case_of(300, 776, {264, 72, 64}, {48, 64, 3})));
  expect_same_bits(float_weights(case_of(260, 520, {264, 40}, {201, 129, 40})));
  LoraCase table = float_weights(case_of(270, 520, {264, 40}, {5, 0, 64}));
  table.table = true;
  table.add = false;
  expect_same_bits(table);
  LoraCase alone = float_weights(case_of(330, 2056, {520}, {132}));
  alone.map = Map::kOneAdapter;
  expect_same_bits(alone);
  LoraCase strided = float_weights(case_of(133, 1040, {96, 40}, {16, 8, 24}));
  strided.strided = true;
  expect_same_bits(strided);
  for (const bool segments : {false, true}) {
    LoraCase c = float_weights(case_of(150, 1544, {96, 40}, {16, 0, 100}));
    c.segments = segments;
    expect_same_hidden(c, DType::kBFloat16);
    c.add = false;  // without zeros for base rows
    expect_same_hidden(c, DType::kFloat32);
  }
  expect_all_shapes_ran(true);
}

/// Every bucket of ranks, few and many tokens of an adapter, both forms of groups.
TEST_P(LoraLaunch, EveryPlanOfExpandGivesTheSameBits) {
  for (const bool segments : {false, true}) {
    const auto expect = [&](LoraCase c, DType h_dtype) {
      c.segments = segments;
      c.add = !segments;
      expect_same_expanded(c, h_dtype);
    };
    expect(case_of(7, 40, {136}, {16, 8, 5}), DType::kFloat32);
    expect(case_of(150, 40, {264, 40}, {12, 16}), DType::kBFloat16);
    expect(case_of(40, 40, {1544, 40}, {8, 4, 7}), DType::kBFloat16);
    expect(case_of(70, 40, {136, 8}, {32, 0, 24}), DType::kBFloat16);
    expect(case_of(70, 40, {136}, {64, 40}, DType::kFloat16), DType::kFloat16);
    expect(case_of(70, 40, {136}, {128, 72, 40}), DType::kFloat32);
    expect(case_of(19, 40, {72}, {136, 512}), DType::kBFloat16);
    expect(case_of(150, 40, {264, 40}, {200, 129, 0}), DType::kFloat32);
    expect(case_of(300, 40, {264, 13}, {72, 40, 136}), DType::kFloat32);
    expect(case_of(150, 40, {136}, {201, 40}, DType::kFloat16), DType::kFloat32);
    LoraCase alone = case_of(330, 40, {520}, {132, 512}, DType::kFloat16);
    alone.map = Map::kOneAdapter;
    expect(alone, DType::kFloat32);
    LoraCase float_weights = case_of(150, 40, {264, 40}, {200, 129, 0});
    float_weights.w = DType::kFloat32;
    expect(float_weights, DType::kFloat32);
    expect(float_weights, DType::kBFloat16);
    float_weights.ranks = {64, 0, 24};
    expect(float_weights, DType::kFloat32);
  }
  const bool has_wide = this_machine().arch == 90;
  // All but the persistent ones, which are lora_apply's.
  EXPECT_EQ(wide_ran_.size(), has_wide ? std::size(lora::kWideShapes) - 2 : 0u);
}

/// Of the persistent wide expand, whose steps are several to a CTA: full and short runs of one tile
/// and of two, adapters without weights, ranks of a part of a block and of several, other ranks in
/// each slice, rows of B of any address, y overwritten. Without wgmma only the chosen plan runs.
TEST_P(LoraLaunch, PersistentCtasTakeSeveralSteps) {
  const bool has_wide = this_machine().arch == 90;
  const auto expect = [&](LoraCase c, int least_steps) {
    const std::int64_t blocks =
        ceil_div<std::int64_t>(c.widths[0], 128) +
        (c.widths.size() > 1 ? ceil_div<std::int64_t>(c.widths[1], 128) : 0);
    c.tokens += 128 * ceil_div<std::int64_t>(least_steps * this_machine().sms, blocks);
    LoraOperands op(c, GetParam());
    const GuardedTensor original = op.y;
    expect_apply_matches(op);
    const std::vector<std::uint8_t> want = bytes_of(op.y);
    LaunchPlan plan = lora::choose(shape_of(op), this_machine());
    if (plan.shrink.split()) plan.shrink.partials = lora::Partials::kFinish;
    for (int i = 0; i < static_cast<int>(std::size(lora::kWideShapes)); ++i) {
      const lora::WideShape& shape = lora::kWideShapes[i];
      if (!has_wide || shape.float_weights) continue;
      if (i == lora::kWideStagedShape && op.max_rank() > lora::kWideStagedMaxRank) continue;
      plan.expand = {lora::ExpandKernel::kWide, i, 64, shape.cols};
      plan.workspace_bytes = lora::workspace_of(plan);
      expect_plan_gives(want, plan, op, original);
    }
  };
  expect(case_of(77, 40, {264, 40}, {72, 0, 136, 8}), 3);
  LoraCase half = case_of(200, 40, {520}, {130, 65, 64}, DType::kFloat16);
  half.add = false;
  expect(half, 2);
  LoraCase table = case_of(1, 40, {136, 264}, {16, 0, 200});
  table.table = true;
  expect(table, 2);
  LoraCase alone = case_of(60, 40, {648}, {512});
  alone.map = Map::kOneAdapter;
  expect(alone, 2);
}

TEST_P(LoraLaunch, AnotherProblemsPlanIsRefused) {
  LoraOperands op(case_of(7, 1040, {96, 40}, {16}), GetParam());
  lora::LoraShape other = shape_of(op);
  ++other.num_tokens;
  const LaunchPlan plan = lora::choose(other, this_machine());
  const lora::cuda::InjectedPlan injected(plan);
  EXPECT_THROW(run_apply(op), Error);
  op.y.download();
  EXPECT_TRUE(op.y.all_unchanged());
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(LoraLaunch);
INSTANTIATE_TEST_SUITE_P(Gpu, LoraLaunch, ::testing::ValuesIn(gpus()),
                         [](const auto&) { return std::string("cuda"); });

}  // namespace
}  // namespace mortar::testing

#endif  // MORTAR_HAS_CUDA
