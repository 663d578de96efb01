// SPDX-License-Identifier: Apache-2.0
// No launch plan of LoRA training's forward changes a bit, on a GPU.
#include <algorithm>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#if MORTAR_HAS_CUDA
#include "lora/train/cuda/expand_choice.h"
#include "lora/train/cuda/float_plan.h"
#include "lora_train_forward.h"

namespace mortar::testing {
namespace {

using namespace lora::train::cuda;
using enum ShrinkOperands;

constexpr Machine kH200Strided{132, true, false}, kA100{108, false, false};

class LoraTrainShapes : public ::testing::TestWithParam<Device> {};

TEST_P(LoraTrainShapes, NoPlanChangesABit) {
  constexpr DType kBF16 = DType::kBFloat16, kF32 = DType::kFloat32;
  struct Case {
    int rank;
    bool plain;
    DType weight;
  };
  for (const auto& [rank, plain, weight] : {Case{8, false, kBF16},
                                            {24, false, kBF16},
                                            {64, false, kBF16},
                                            {100, false, kBF16},
                                            {16, true, kBF16},
                                            {40, true, kBF16},
                                            {5, false, kF32},
                                            {16, true, kF32}}) {
    TrainCase c;
    c.rows = 333;
    c.hidden = 1104;  // whole groups of dropout
    c.widths = {520};
    c.ranks = {rank};
    c.x = c.y = kBF16;
    c.w = weight;
    const int copies = weight == kF32 ? 3 : 1, width = (rank + 7) / 8 * 8;
    if (!plain) {
      c.p = {0.1f};
      c.base = BaseIs::kApart;
    }
    TrainStep chosen(c, GetParam());
    chosen.run_forward();
    ShrinkPlan shrink = choose_shrink(c.rows, c.hidden, copies * width, 0, !plain, true,
                                      copies > 1 ? kPartColumns : kOneType, kH200Strided);
    for (shrink.rows = 32; shrink.rows <= 128; shrink.rows *= 2) {
      if (!stream_has(shrink.ranks, shrink.rows)) continue;
      for (shrink.parts = kLeaves >> stream_levels(shrink.ranks, shrink.rows);
           shrink.parts <= kLeaves; shrink.parts *= 2) {
        TrainStep other(c, GetParam());
        run_planned(&other, {&shrink, nullptr});
        expect_same_forward(chosen, other, describe(shrink));
      }
    }
    for (int row_warps = 1; row_warps <= 2; ++row_warps) {
      for (const int tile_rows : {16, 100, 1024}) {
        const ExpandPlan expand =
            stream_expand(520, copies > 1 ? 2 * copies * width : width, row_warps, tile_rows);
        TrainStep other(c, GetParam());
        run_planned(&other, {nullptr, &expand});
        expect_same_forward(chosen, other, describe(expand));
      }
    }
  }
}

// Float32 throughout: the kernels of dense rows beside those of any strides.
TEST_P(LoraTrainShapes, NoPlanOfFloatsChangesABit) {
  struct Case {
    RowsBy by;
    std::vector<int> ranks;
  };
  for (const auto& [by, ranks] : {Case{RowsBy::kOne, {5}}, Case{RowsBy::kOne, {16}},
                                  Case{RowsBy::kOne, {40}}, Case{RowsBy::kPlan, {20, 3, 12}}}) {
    TrainCase c;
    c.rows = 333;
    c.hidden = 1104;
    c.widths = {264};
    c.by = by;
    c.adapters = static_cast<int>(ranks.size());
    c.ranks = ranks;
    if (ranks[0] == 16) c.base = BaseIs::kApart;
    const int width = (ranks[0] + 7) / 8 * 8;
    ShrinkPlan any = choose_shrink(c.rows, c.hidden, width, 0, false, false, kSplit, kA100);
    TrainStep first(c, GetParam());
    run_planned(&first, {&any, nullptr});
    ShrinkPlan plan = choose_float_shrink(c.rows, c.hidden, width, 0, false, false, kA100);
    // Boxes where the device and the operands are for them, rings of warps, and sums in a cluster.
    for (const auto& [boxes, fused] :
         {std::pair{false, false}, {false, true}, {true, false}, {true, true}}) {
      plan.boxes = boxes;
      plan.fused = fused;
      for (plan.rows = 32; plan.rows <= 128; plan.rows *= 2) {
        for (plan.parts = kLeaves >> float_levels(plan.ranks); plan.parts <= kLeaves;
             plan.parts *= 2) {
          plan.chunk = plan.parts == kLeaves ? kLongFloatChunk : kFloatChunk;
          TrainStep other(c, GetParam());
          run_planned(&other, {&plan, nullptr});
          expect_same_forward(first, other, describe(plan));
        }
      }
    }
  }
}

// Tiles of several adapters: of as many rows as the plan says, or of sizes that kernels choose as
// if a device had few SMs.
TEST_P(LoraTrainShapes, NoPlanOfSeveralAdaptersChangesABit) {
  for (const RowsBy by : {RowsBy::kSegments, RowsBy::kPlan}) {
    TrainCase c;
    c.rows = 333;
    c.hidden = 328;
    c.widths = {264};
    c.by = by;
    c.adapters = 3;
    c.ranks = {20, 3, 12};
    c.x = c.w = c.y = DType::kBFloat16;
    if (by == RowsBy::kPlan) c.base = BaseIs::kApart;
    TrainStep chosen(c, GetParam());
    chosen.run_forward();
    for (int row_warps = 1; row_warps <= 2; ++row_warps) {
      for (const int tile_rows : {16, 48, 1024}) {
        ExpandPlan expand = stream_expand(264, 24, row_warps, tile_rows);
        for (expand.at_once = 0; expand.at_once <= 14; expand.at_once += 7) {
          TrainStep other(c, GetParam());
          run_planned(&other, {nullptr, &expand});
          expect_same_forward(chosen, other, describe(expand));
        }
      }
    }
  }
}

// The same of float32 weights, whose columns of parts are products from 24 ranks on.
TEST_P(LoraTrainShapes, NoProductOfPartsChangesABit) {
  for (const int rank : {24, 72}) {
    TrainCase c;
    c.rows = 333;
    c.hidden = 1096;
    c.widths = {520};
    c.ranks = {rank};
    c.x = c.y = DType::kBFloat16;
    const ShrinkPlan streamed =
        choose_shrink(c.rows, c.hidden, 3 * rank, 0, false, true, kPartColumns, kH200Strided);
    const ExpandPlan copied =
        choose_expand(c.rows, 520, 6 * rank, 0, 1, Policy::kBFloat16, kH200Strided);
    TrainStep first(c, GetParam());
    run_planned(&first, {&streamed, &copied});
    for (int parts = 1; parts <= kLeaves; parts *= 2) {
      const ShrinkPlan product = product_shrink(c.hidden, {64, parts});
      TrainStep other(c, GetParam());
      run_planned(&other, {&product, nullptr});
      expect_same_forward(first, other, describe(product));
    }
    for (const int columns : {128, 256}) {
      const ExpandPlan product = product_expand(520, {columns, 1});
      TrainStep other(c, GetParam());
      run_planned(&other, {nullptr, &product});
      expect_same_forward(first, other, describe(product));
    }
  }
}

// Clusters that make h's forms of columns of parts, and the stream and the product that split
// float32 weights themselves, beside partial sums and weights that were written out: of either
// dense dimension, of one adapter and of several, with dropout and a base, and with values that are
// not finite.
TEST_P(LoraTrainShapes, NoFusionOfPartsChangesABit) {
  constexpr DType kBF16 = DType::kBFloat16;
  struct Case {
    std::vector<int> ranks;
    RowsBy by = RowsBy::kOne;
    bool plain = true, transposed = false, finite = true;
    std::vector<std::int64_t> widths = {264};
  };
  for (const Case& own :
       {Case{{16}}, Case{{13}, RowsBy::kOne, true, true, false},
        Case{{5}, RowsBy::kOne, true, false, false}, Case{{28}, RowsBy::kOne, true, false, false},
        Case{{32}}, Case{{12}, RowsBy::kOne, false}, Case{{40}},
        Case{{64}, RowsBy::kOne, true, true, false}, Case{{51}, RowsBy::kOne, true, false, false},
        Case{{16, 9}, RowsBy::kOne, true, false, true, {264, 136}},
        Case{{12, 3, 16}, RowsBy::kSegments}, Case{{16, 3, 12}, RowsBy::kPlan, false}}) {
    TrainCase c;
    c.rows = 333;
    c.hidden = 1104;
    c.widths = own.widths;
    c.by = own.by;
    c.adapters = static_cast<int>(own.ranks.size() / own.widths.size());
    c.ranks = own.ranks;
    c.x = c.y = kBF16;
    c.transposed_weights = own.transposed;
    if (!own.plain) {
      c.p = std::vector<float>(c.adapters, 0.1f);
      c.base = BaseIs::kApart;
    }
    const int adapters = own.by == RowsBy::kOne ? 0 : c.adapters;
    const int most = round_up(*std::max_element(own.ranks.begin(), own.ranks.end()), 8);
    const int width = most * static_cast<int>(own.widths.size());
    const auto make = [&](const ForcedPlans& forced) {
      auto step = std::make_unique<TrainStep>(c, GetParam());
      if (!own.finite) {
        constexpr float kInfinity = std::numeric_limits<float>::infinity();
        for (GuardedMatrix* m : {&step->x, step->a.data(), step->b.data()}) {
          const Tensor t = m->host();
          store_float(t.data, t.dtype, 4 * t.strides[0] + 3 * t.strides[1], kInfinity);
          m->memory().upload();
        }
      }
      run_planned(step.get(), forced);
      return step;
    };
    const ShrinkPlan streamed = choose_shrink(c.rows, c.hidden, 3 * width, adapters, !own.plain,
                                              true, kPartColumns, kH200Strided);
    const ExpandPlan copied =
        choose_expand(c.rows, 264, 6 * most, adapters, 2, Policy::kBFloat16, kH200Strided);
    const auto first = make({&streamed, &copied});
    constexpr std::pair<int, int> kTiles[] = {
        {64, 128}, {64, 64}, {kHalfPartTile, 64}, {kWidestPartTile, 64}};  // columns, rows
    for (const auto& [columns, rows] : kTiles) {
      for (int parts = kLeaves / most_split_leaves(columns); parts <= kLeaves; parts *= 2) {
        if (own.by == RowsBy::kPlan || columns < 3 * most) break;
        const ShrinkPlan fused = product_shrink(c.hidden, {columns, parts, 0, true, rows});
        expect_same_forward(*first, *make({&fused, nullptr}), describe(fused));
      }
    }
    for (const int blocks : {1, 5, 100}) {
      if (!own.plain || own.by != RowsBy::kOne) break;
      ExpandPlan expand = choose_parts_expand(c.rows, own.widths[0], most, 132);
      expand.blocks = blocks;
      expect_same_forward(*first, *make({nullptr, &expand}), describe(expand));
    }
    if (most > kMostSplitRanks) continue;
    for (int row_warps = 1; row_warps <= 2; ++row_warps) {
      for (const int tile_rows : {16, 100}) {
        ExpandPlan expand = stream_expand(own.widths[0], 64, row_warps, tile_rows);
        expand.splits = true;
        expect_same_forward(*first, *make({nullptr, &expand}), describe(expand));
      }
    }
  }
}

/// Products of h and of y leave the bits of `first`; numbers of parts grow by the factor `step`.
/// With dropout h is made in clusters, of rows that these have whole.
void expect_products_keep_bits(const TrainCase& c, TrainStep* first, int step) {
  const auto expect = [&](const ForcedPlans& forced, const std::string& what) {
    TrainStep other(c, first->device);
    run_planned(&other, forced);
    expect_same_forward(*first, other, what);
  };
  for (const int columns : {64, 128}) {
    for (int parts = columns / 64; parts <= kLeaves && c.p.empty(); parts *= step) {
      const ShrinkPlan product = product_shrink(c.hidden, {columns, parts});
      expect({&product, nullptr}, describe(product));
    }
    for (int parts = kLeaves / most_split_leaves(columns); parts <= kLeaves; parts *= step) {
      for (const int rows : {128, 64}) {
        if (rows == 64 && (columns == 128 || !c.p.empty())) break;
        const ShrinkPlan split = product_shrink(c.hidden, {columns, parts, 0, true, rows});
        expect({&split, nullptr}, describe(split));
      }
    }
  }
  for (const int columns : {128, 256}) {
    if (columns == 256 && c.base != BaseIs::kNone) continue;
    const ExpandPlan product = product_expand(c.widths[0], {columns, 1});
    expect({nullptr, &product}, describe(product));
  }
}

/// Of two slices, products and the kernels of operands that they do not take leave the same bits.
/// `c` says sizes, a base and dropout.
void expect_products_keep_bits_of_streams(TrainCase c, int rank, Device device) {
  c.rows = 333;
  c.ranks = {rank, 40};
  c.x = c.w = c.y = rank == 104 ? DType::kFloat16 : DType::kBFloat16;
  const bool masked = !c.p.empty() && c.on == LoraDropoutOn::kInput;
  const ShrinkPlan streamed =
      choose_shrink(c.rows, c.hidden, rank + 40, 0, masked, true, kOneType, kH200Strided);
  const ExpandPlan copied =
      choose_expand(c.rows, c.widths[0], rank, 0, 2, Policy::kBFloat16, kA100);
  TrainStep first(c, device);
  run_planned(&first, {&streamed, &copied});
  expect_products_keep_bits(c, &first, 2);
}

TEST_P(LoraTrainShapes, NoProductChangesABit) {
  for (const int rank : {64, 104, 200}) {
    for (const BaseIs base : {BaseIs::kNone, BaseIs::kApart, BaseIs::kInPlace}) {
      TrainCase c;
      c.hidden = 1096;
      c.widths = {520, 520};
      c.base = base;
      expect_products_keep_bits_of_streams(c, rank, GetParam());
    }
  }
}

// The same with dropout on x, or on what y has beside its base.
TEST_P(LoraTrainShapes, NoProductWithDropoutChangesABit) {
  for (const int rank : {64, 104, 200}) {
    for (const LoraDropoutOn on : {LoraDropoutOn::kInput, LoraDropoutOn::kDelta}) {
      TrainCase c;
      c.hidden = 1104;
      c.widths = {528, 272};
      c.base = rank == 64 ? BaseIs::kNone : BaseIs::kApart;
      c.p = {0.1f};
      c.on = on;
      expect_products_keep_bits_of_streams(c, rank, GetParam());
    }
  }
}

// Sums over columns that are one chain, or two: products round them themselves, also those of ranks
// past a slice's own, where a row has Inf; the stream in every shape, the kernel of any strides.
TEST_P(LoraTrainShapes, NoPlanChangesABitOfFewLeaves) {
  for (const auto& [rank, leaves] : {std::pair{60, 1}, {60, 2}, {104, 1}, {204, 1}, {204, 2}}) {
    TrainCase c;
    c.rows = 333;
    c.hidden = 1096;
    c.widths = {264, 264};
    c.ranks = {rank, 36};
    c.x = c.w = c.y = rank == 104 ? DType::kFloat16 : DType::kBFloat16;
    if (rank == 60) c.widths = {264}, c.ranks = {rank};
    const int width = rank == 60 ? 64 : round_up(rank, 8) + 40;
    ShrinkPlan any = choose_shrink(c.rows, c.hidden, width, 0, false, false, kOneType, kA100);
    ShrinkPlan streamed =
        choose_shrink(c.rows, c.hidden, width, 0, false, true, kOneType, kH200Strided);
    any.leaves = any.parts = streamed.leaves = leaves;
    any.leaf = streamed.leaf = leaf_columns(c.hidden, leaves);
    const auto make = [&](const ShrinkPlan& plan) {
      auto step = std::make_unique<TrainStep>(c, GetParam());
      const Tensor x = step->x.host();
      store_float(x.data, x.dtype, 7 * x.strides[0] + 3, std::numeric_limits<float>::infinity());
      step->x.memory().upload();
      run_planned(step.get(), {&plan, nullptr});
      return step;
    };
    const auto first = make(any);
    for (streamed.rows = 32; streamed.rows <= 128; streamed.rows *= 2) {
      if (!stream_has(streamed.ranks, streamed.rows)) continue;
      for (streamed.parts = 1; streamed.parts <= leaves; streamed.parts *= 2) {
        expect_same_forward(*first, *make(streamed), describe(streamed));
      }
    }
    for (const int columns : {64, 128, 192, 256}) {
      if (columns > 128 && leaves > 1) continue;
      const ProductCut cut{columns, leaves, 0, leaves > 1};
      const ShrinkPlan product = product_shrink(c.hidden, cut, leaves);
      expect_same_forward(*first, *make(product), describe(product));
    }
  }
}

// The same of segments, whose tiles end where other adapters' rows begin.
TEST_P(LoraTrainShapes, NoProductOfSegmentsChangesABit) {
  for (const BaseIs base : {BaseIs::kNone, BaseIs::kInPlace}) {
    TrainCase c;
    c.rows = 650;
    c.hidden = 328;
    c.widths = {264, 136};
    c.by = RowsBy::kSegments;
    c.adapters = 4;
    c.ranks = {0, 40, 136, 24, 16, 0, 80, 8};
    c.x = c.w = c.y = DType::kBFloat16;
    c.base = base;
    const ShrinkPlan streamed =
        choose_shrink(c.rows, c.hidden, 176, 4, false, true, kOneType, kH200Strided);
    const ExpandPlan copied = choose_expand(c.rows, 264, 136, 4, 2, Policy::kBFloat16, kA100);
    TrainStep first(c, GetParam());
    run_planned(&first, {&streamed, &copied});
    expect_products_keep_bits(c, &first, 4);
  }
}

INSTANTIATE_TEST_SUITE_P(Gpus, LoraTrainShapes, ::testing::ValuesIn(gpus()),
                         [](const auto& one) { return device_label(one.param); });
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(LoraTrainShapes);

}  // namespace
}  // namespace mortar::testing
#endif
