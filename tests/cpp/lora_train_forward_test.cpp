// SPDX-License-Identifier: Apache-2.0
// h and y of LoRA training in one launch have the bits of two, on a GPU.
#include <algorithm>
#include <limits>
#include <memory>
#include <string>
#include <utility>

#if MORTAR_HAS_CUDA
#include "lora/train/cuda/forward_plan.h"
#include "lora_train_forward.h"

namespace mortar::testing {
namespace {

using namespace lora::train::cuda;

/// An infinity in x and in all weights.
void spoil(TrainStep* step) {
  for (GuardedMatrix* m : {&step->x, step->a.data(), step->b.data()}) {
    const Tensor t = m->host();
    store_float(t.data, t.dtype, 4 * t.strides[0] + 3 * t.strides[1],
                std::numeric_limits<float>::infinity());
    m->memory().upload();
  }
}

class LoraTrainForward : public ::testing::TestWithParam<Device> {
 protected:
  /// Makes steps of a case, run by given plans; if not `finite`, with infinities.
  static auto maker(const TrainCase& c, bool finite) {
    return [&c, finite](const ForcedPlans& forced) {
      auto step = std::make_unique<TrainStep>(c, GetParam());
      if (!finite) spoil(step.get());
      run_planned(step.get(), forced);
      return step;
    };
  }
};

// Clusters of any size, ranks that fill no MMA step, rows and columns that fill no tile, and values
// that are not finite.
TEST_P(LoraTrainForward, OneLaunchChangesNoBit) {
  constexpr DType kBF16 = DType::kBFloat16;
  constexpr BaseIs kNone = BaseIs::kNone;
  struct Case {
    int rank;
    DType type = DType::kBFloat16;
    bool finite = true;
    BaseIs base = BaseIs::kNone;
    bool float_weights = false;
  };
  for (const auto& [rank, type, finite, base, float_weights] :
       {Case{8}, Case{16, DType::kFloat16, true, BaseIs::kApart}, Case{24, DType::kBFloat16, false},
        Case{32, DType::kBFloat16, true, BaseIs::kInPlace}, Case{40},
        Case{64, DType::kFloat16, false}, Case{16}, Case{32, DType::kFloat16, false},
        Case{16, kBF16, true, kNone, true}, Case{8, kBF16, false, kNone, true},
        Case{12, kBF16, false, kNone, true}}) {
    TrainCase c;
    c.rows = 333;
    c.hidden = 1104;
    c.widths = {840};
    c.ranks = {rank};
    c.x = c.w = c.y = type;
    c.base = base;
    if (float_weights) c.w = DType::kFloat32;
    const auto make = maker(c, finite);
    const lora::cuda::ForwardPlan none{};
    const auto first = make({nullptr, nullptr, &none});
    for (int parts = 2; parts <= kLeaves; parts *= 2) {
      for (const int rows : {128, 72, 64, 40, 8}) {
        const ForwardPlan once = forward_plan(c.hidden, kLeaves, parts, rows);
        expect_same_forward(*first, *make({nullptr, nullptr, &once}),
                            "one launch of clusters of " + std::to_string(parts) + ", tiles of " +
                                std::to_string(rows) + " rows");
      }
    }
  }
}

// The same of more ranks, and in tiles of more rows, of which warps have 16 each.
TEST_P(LoraTrainForward, OneLaunchOfWideRanksChangesNoBit) {
  struct Case {
    int rank;
    std::int64_t hidden;
    DType type = DType::kBFloat16;
    bool finite = true;
    BaseIs base = BaseIs::kNone;
  };
  for (const auto& [rank, hidden, type, finite, base] :
       {Case{128, 520}, Case{72, 1104, DType::kFloat16, false},
        Case{104, 1104, DType::kBFloat16, true, BaseIs::kApart},
        Case{128, 520, DType::kFloat16, true, BaseIs::kInPlace}}) {
    TrainCase c;
    c.rows = 333;
    c.hidden = hidden;
    c.widths = {456};
    c.ranks = {rank};
    c.x = c.w = c.y = type;
    c.base = base;
    const auto make = maker(c, finite);
    const lora::cuda::ForwardPlan none{};
    const auto first = make({nullptr, nullptr, &none});
    const int leaves =
        leaves_of(c.rows, c.hidden, round_up(rank, 8), 0, false, false, ShrinkOperands::kOneType);
    const int fewest = std::max(leaves / lora::cuda::kMostWideForwardLeaves, 2);
    ASSERT_GE(leaves, fewest);
    for (int parts = fewest; parts <= leaves; parts *= 2) {
      for (const int rows : {128, 80, 48, 16}) {
        const ForwardPlan once = forward_plan(c.hidden, leaves, parts, rows);
        expect_same_forward(*first, *make({nullptr, nullptr, &once}),
                            "one launch of clusters of " + std::to_string(parts) + ", tiles of " +
                                std::to_string(rows) + " rows, rank " + std::to_string(rank));
      }
    }
  }
}

// The same of several adapters' rows, of which a tile may have those of many, and with dropout.
TEST_P(LoraTrainForward, OneLaunchOfSegmentsChangesNoBit) {
  struct Case {
    std::vector<int> ranks;
    std::vector<float> p = {};
    DType type = DType::kBFloat16;
    bool finite = true;
    BaseIs base = BaseIs::kNone;
    bool empty = false;
  };
  const Case cases[] = {
      {{4, 8, 20, 32, 5}},
      {{16, 16, 16}, {0.1f, 0.0f, 0.5f}, DType::kFloat16},
      {{12, 24, 8}, {0.25f, 0.0f, 0.1f}, DType::kBFloat16, false, BaseIs::kInPlace},
      {{1, 8, 16, 2, 3, 7, 9, 30}, {}, DType::kFloat16, true, BaseIs::kApart, true},
      {{16}, {0.1f}},
      {{32}, {0.05f}, DType::kFloat16, false},
      {{6}, {0.5f}, DType::kBFloat16, true, BaseIs::kApart},
      {{56}, {0.1f}},
  };
  for (const Case& one : cases) {
    TrainCase c;
    c.rows = 333;
    c.hidden = 1104;
    c.widths = {840};
    c.ranks = one.ranks;
    c.adapters = static_cast<int>(one.ranks.size());
    if (c.adapters > 1) c.by = RowsBy::kSegments;
    c.x = c.w = c.y = one.type;
    c.p = one.p;
    c.base = one.base;
    c.empty_segment = one.empty;
    const auto make = maker(c, one.finite);
    const lora::cuda::ForwardPlan none{};
    const auto first = make({nullptr, nullptr, &none});
    for (int parts = 2; parts <= kLeaves; parts *= 2) {
      // Of 66 clusters adapters have tiles of their own.
      for (const auto& [rows, clusters] : {std::pair{64, 0}, {64, 66}, {40, 2}, {24, 66}, {8, 0}}) {
        const ForwardPlan once = forward_plan(c.hidden, kLeaves, parts, rows, clusters);
        expect_same_forward(*first, *make({nullptr, nullptr, &once}),
                            std::to_string(c.adapters) + " adapters of rank " +
                                std::to_string(one.ranks[0]) + ", clusters of " +
                                std::to_string(parts) + ", tiles of " + std::to_string(rows) +
                                " rows");
      }
    }
  }
}

// Clusters that share the depth, and up to 16 ranks split float32 weights, in more steps than they
// have stages and in tiles that are not full.
TEST_P(LoraTrainForward, SplitWeightsChangeNoBit) {
  for (const auto& [rank, finite] :
       {std::pair{16, true}, {8, false}, {5, true}, {12, false}, {32, false}}) {
    TrainCase c;
    c.rows = 203;
    c.hidden = 2184;
    c.widths = {264};
    c.ranks = {rank};
    c.x = c.y = DType::kBFloat16;
    c.w = DType::kFloat32;
    const auto make = maker(c, finite);
    ShrinkPlan plan;
    plan.leaf = leaf_columns(c.hidden, plan.leaves);
    plan.stream = true;
    const int width = 3 * round_up(rank, 8);
    plan.ranks = std::min(stream_ranks(width), kMostUnfusedRanks);
    plan.parts = unfused_parts(c.rows, width, plan.leaves);
    const auto first = make({&plan, nullptr, nullptr});
    plan.fused = plan.product = true;
    plan.ranks = width <= 64 ? 64 : kHalfPartTile;
    for (plan.parts = 2; plan.parts <= kLeaves; plan.parts *= 2) {
      for (const int rows : {128, 72, 40}) {
        plan.rows = rows;
        expect_same_forward(*first, *make({&plan, nullptr, nullptr}),
                            "clusters of " + std::to_string(plan.parts) + ", tiles of " +
                                std::to_string(rows) + " rows");
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Gpus, LoraTrainForward, ::testing::ValuesIn(gpus()),
                         [](const auto& one) { return device_label(one.param); });
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(LoraTrainForward);

}  // namespace
}  // namespace mortar::testing
#endif
