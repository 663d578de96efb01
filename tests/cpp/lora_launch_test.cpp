// SPDX-License-Identifier: Apache-2.0
// Launch plans of LoRA on a GPU: every kernel in every shape, forced by injection, gives the bits
// of the plan that is chosen, which agrees with fp64. No test is generated without a GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "lora_case.h"
#if MORTAR_HAS_CUDA
#include "lora_every_plan.h"

namespace mortar::testing {
namespace {

/// Few and many tokens of an adapter, short and long K chunks, an odd number of them, more than are
/// added at once, edges of tiles, columns and ranks.
std::vector<LoraCase> every_plan_cases() {
  std::vector<LoraCase> cases = {
      case_of(7, 1040, {96, 40}, {16, 8, 24}),
      case_of(150, 1544, {264, 40}, {16}),
      case_of(197, 4616, {384, 136}, {32, 8, 24}),
      case_of(260, 776, {520}, {64, 5, 40}),
      case_of(333, 1288, {264, 72, 64}, {48, 64, 3}),
      case_of(200, 1032, {264, 128}, {128, 100, 64}),
      case_of(90, 1032, {288}, {4, 12, 2}),
      case_of(25, 34824, {264}, {4, 16, 12}),
      case_of(130, 520, {264, 40}, {200, 129, 40}),
      case_of(130, 520, {264, 40}, {201, 129, 40}, DType::kFloat16),
      case_of(150, 264, {520, 40}, {4, 2, 3}),
      case_of(150, 264, {520, 40}, {4, 2, 3}, DType::kFloat16),
  };
  LoraCase long_run = case_of(200, 264, {264, 136}, {8, 40, 512});
  long_run.map = Map::kOneAdapter;
  cases.push_back(long_run);
  for (const auto& [tokens, hidden, rank, dtype] :
       {std::tuple{333, 1288, 128, DType::kBFloat16}, std::tuple{600, 520, 192, DType::kFloat16}}) {
    LoraCase boxes = case_of(tokens, hidden, {264, 136}, {rank}, dtype);
    boxes.one_rank = true;
    cases.push_back(boxes);
  }
  LoraCase strided = case_of(133, 1040, {96, 40}, {16, 8, 24});
  strided.strided = true;
  cases.push_back(strided);
  return cases;
}

/// A problem, and whether its groups are segments: a sanitizer needs minutes for one.
class LoraEveryPlan : public LaunchTest,
                      public ::testing::WithParamInterface<std::tuple<Device, LoraCase, bool>> {
 protected:
  LoraEveryPlan() : LaunchTest(std::get<Device>(GetParam())) {}
};

TEST_P(LoraEveryPlan, GivesTheSameBits) {
  expect_same_bits(std::get<LoraCase>(GetParam()), std::get<bool>(GetParam()));
}

class LoraLaunch : public LaunchTest, public ::testing::WithParamInterface<Device> {
 protected:
  LoraLaunch() : LaunchTest(GetParam()) {}
};

TEST_P(LoraLaunch, EveryShapeIsAmongThesePlans) {
  for (const LoraCase& c : every_plan_cases()) {
    for (const LaunchPlan& plan : plans_to_run(LoraOperands(c, device_))) note(plan);
  }
  expect_all_shapes_ran(false);
  EXPECT_TRUE(stages_ran_.contains(lora::kFewDecodeStages));
  EXPECT_TRUE(dense_shrink_ran_);
  EXPECT_EQ(chunks_ran_, (std::set{1, 2, 4}));
  EXPECT_EQ(dense_ran_, (std::set{lora::kDenseExpandStages, lora::kDecodeExpandStages}));
  if (this_machine().arch != 90) return;
  EXPECT_EQ(groups_ran_, (std::set{1, lora::kDirectGroups}));
  for (std::size_t i = 0; i < std::size(lora::kMmaShapes); ++i) {
    EXPECT_TRUE(ran_.contains({static_cast<int>(lora::ShrinkKernel::kMma), static_cast<int>(i)}))
        << "row " << i << " of kMmaShapes never ran";
  }
}

/// Inf and NaN of B reach their own columns alone, also where groups of columns share a step.
TEST_P(LoraLaunch, InfAndNanOfBStayInTheirColumns) {
  constexpr std::int64_t kInfinite = 37, kNan = 900;
  for (const int rank : {4, 8}) {
    for (const std::int64_t tokens : {5, 70}) {
      LoraCase c = case_of(tokens, 264, {1032, 264}, {rank});
      c.map = Map::kDistinct;
      LoraOperands clean(c, device_), dirty(c, device_);
      dirty.set_b(0, 1, kInfinite, 0, std::numeric_limits<float>::infinity());
      dirty.set_b(0, 1, kNan, rank - 1, std::numeric_limits<float>::quiet_NaN());
      const GuardedTensor original = clean.y;
      for (const LaunchPlan& plan : plans_to_run(clean)) {
        if (plan.expand.kernel != lora::ExpandKernel::kDirect) continue;
        const lora::cuda::InjectedPlan injected(plan);
        for (LoraOperands* op : {&clean, &dirty}) {
          restore_y(*op, original);
          run_apply(*op);
          op->y.download();
        }
        const Tensor y = clean.y.host();
        for (std::int64_t t = 0; t < tokens; ++t) {
          for (std::int64_t n = 0; n < y.shape[1]; ++n) {
            const float want = clean.y.get(t * y.strides[0] + n);
            const float got = dirty.y.get(t * y.strides[0] + n);
            const bool bad = clean.map[t] == 1 && (n == kInfinite || n == kNan);
            ASSERT_TRUE(bad ? !std::isfinite(got) : got == want)
                << describe(plan) << ": token " << t << ", column " << n;
          }
        }
      }
    }
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

/// Inf times a value is Inf, of x by A, of h by B and of B by h, though of the parts that are
/// multiplied some are small.
TEST_P(LoraLaunch, EveryPlanOfFloatWeightsKeepsInf) {
  LoraCase c = case_of(200, 264, {264, 40}, {1});
  c.w = DType::kFloat32;
  c.map = Map::kOneAdapter;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  LoraOperands op(c, device_);
  op.x.set(3 * op.x.host().strides[0] + 17, -kInfinity);
  op.x.upload();
  op.set_b(0, c.adapters - 1, 5, 0, kInfinity);
  const GuardedTensor original = op.y;
  const LoraWeights host = op.host_weights();
  const auto h = lora::reference_shrink(op.x.host(), host, op.map, c.scale);
  const auto expected = lora::reference_expand(h, host, op.map, op.y.host(), c.offset, c.add);
  run_apply(op);
  op.y.download();
  const Tensor y = op.y.host();
  int infinite = 0;
  for (std::int64_t t = 0; t < y.shape[0]; ++t) {
    for (std::int64_t n = 0; n < y.shape[1]; ++n) {
      const double want = expected[t * y.shape[1] + n].value;
      const double got = op.y.get(t * y.strides[0] + n);
      EXPECT_EQ(std::isnan(got), std::isnan(want)) << t << ", " << n;
      if (!std::isinf(want)) continue;
      EXPECT_EQ(got, want) << t << ", " << n;
      ++infinite;
    }
  }
  EXPECT_GE(infinite, y.shape[0] + y.shape[1] - 2);
  expect_candidates_give(bytes_of(op.y), op, original);
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
  // All but the persistent ones and those of float32 weights, which are lora_apply's.
  const auto own = std::count_if(
      std::begin(lora::kWideShapes), std::end(lora::kWideShapes),
      [](const lora::WideShape& shape) { return !shape.walks && !shape.float_weights; });
  EXPECT_EQ(wide_ran_.size(), has_wide ? static_cast<std::size_t>(own) : 0u);
}

/// The decode expand cuts columns by the tiles that there are: into more blocks than the plan's,
/// fewer, and as many; of several slices; where an adapter has all tokens, and where many have.
TEST_P(LoraLaunch, ColumnsAreCutByTheTilesThatThereAre) {
  for (const std::vector<int>& ranks : {std::vector<int>{16, 5, 0}, {64, 24, 40}}) {
    for (const Map map : {Map::kOneAdapter, Map::kRandom}) {
      LoraCase c = case_of(40, 40, {2056, 1288, 520}, ranks);
      c.adapters = 24;
      c.map = map;
      Solved problem(c, device_);
      for (LaunchPlan plan : lora::candidates(shape_of(problem.op), this_machine())) {
        if (plan.expand.kernel != lora::ExpandKernel::kDecode || plan.expand.round == 0) continue;
        plan.expand.cols = 1024;
        for (const int round : {15, 20, 60, 150}) {
          plan.expand.round = round;
          expect_plan_gives(plan, problem);
        }
        break;
      }
    }
  }
}

TEST_P(LoraLaunch, AnotherProblemsPlanIsRefused) {
  LoraOperands op(case_of(7, 1040, {96, 40}, {16}), device_);
  lora::LoraShape other = shape_of(op);
  ++other.num_tokens;
  const LaunchPlan plan = lora::choose(other, this_machine());
  const lora::cuda::InjectedPlan injected(plan);
  EXPECT_THROW(run_apply(op), Error);
  op.y.download();
  EXPECT_TRUE(op.y.all_unchanged());
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(LoraEveryPlan);
INSTANTIATE_TEST_SUITE_P(Gpu, LoraEveryPlan,
                         ::testing::Combine(::testing::ValuesIn(gpus()),
                                            ::testing::ValuesIn(every_plan_cases()),
                                            ::testing::Bool()),
                         [](const auto& test) { return "cuda_" + std::to_string(test.index); });
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(LoraLaunch);
INSTANTIATE_TEST_SUITE_P(Gpu, LoraLaunch, ::testing::ValuesIn(gpus()),
                         [](const auto&) { return std::string("cuda"); });

}  // namespace
}  // namespace mortar::testing

#endif  // MORTAR_HAS_CUDA
