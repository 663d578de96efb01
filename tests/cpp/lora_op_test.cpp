// SPDX-License-Identifier: Apache-2.0
// lora_apply, lora_shrink and lora_expand against the float64 oracle, on every device and every
// SIMD level: dtypes, shapes around the edges, layouts, maps, forms of weights and of groups.
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <tuple>
#include <vector>

#include "lora_expect.h"

namespace mortar::testing {
namespace {

constexpr DType kF32 = DType::kFloat32, kF16 = DType::kFloat16, kBF16 = DType::kBFloat16;
constexpr DType kFloats[] = {kF32, kF16, kBF16};

std::string short_name(DType dtype) {
  return dtype == kF32 ? "F32" : (dtype == kF16 ? "F16" : "BF16");
}

/// Every dtype of x, weights and y; plain and awkward layouts take turns. Widths and K are no
/// multiple of a vector, ranks no multiple of 8.
std::vector<LoraCase> dtype_cases() {
  std::vector<LoraCase> cases;
  for (DType x : kFloats) {
    for (DType w : kFloats) {
      for (DType y : kFloats) {
        LoraCase c;
        c.name = "SmallX" + short_name(x) + "W" + short_name(w) + "Y" + short_name(y);
        c.x = x;
        c.w = w;
        c.y = y;
        c.tokens = 37;
        c.hidden = 296;
        c.widths = {72, 24};
        c.adapters = 4;
        c.ranks = {8, 5, 16, 0};
        cases.push_back(c);
        c.name += "Awkward";
        c.strided = c.table = c.segments = true;
        c.hidden = 301;
        c.widths = {67, 31};
        c.offset = 3;
        c.add = false;
        cases.push_back(c);
      }
    }
  }
  return cases;
}

void add_type_triples(std::vector<LoraCase>& cases, LoraCase c) {
  const std::string name = c.name;
  const std::pair<DType, DType> pairs[] = {
      {kF32, kF32}, {kBF16, kBF16}, {kF16, kF16}, {kBF16, kF32}};
  for (const auto& [x, w] : pairs) {
    c.x = c.y = x;
    c.w = w;
    c.name = name + short_name(x) + (x == w ? "" : "W" + short_name(w));
    cases.push_back(c);
  }
}

/// 1, a vector, a tile and their neighbours, for each dimension in turn.
std::vector<LoraCase> edge_cases() {
  std::vector<LoraCase> cases;
  for (std::int64_t hidden :
       {0, 1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 65, 255, 257, 1023, 1025, 2049, 4097, 5000}) {
    LoraCase c;
    c.name = "Hidden" + std::to_string(hidden);
    c.hidden = hidden;
    c.tokens = 5;
    add_type_triples(cases, c);
  }
  for (std::int64_t width : {1, 2, 7, 8, 9, 15, 17, 31, 33, 63, 64, 65, 127, 129, 1025}) {
    LoraCase c;
    c.name = "Width" + std::to_string(width);
    c.widths = {width};
    c.tokens = 5;
    add_type_triples(cases, c);
  }
  for (int rank : {1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 200, 511, 512}) {
    LoraCase c;
    c.name = "Rank" + std::to_string(rank);
    c.ranks = {rank};
    c.hidden = 64;
    add_type_triples(cases, c);
  }
  for (std::int64_t tokens : {1, 2, 3, 4, 5, 6, 7, 15, 16, 17, 47, 49, 63, 64, 65, 130, 257, 300}) {
    LoraCase c;
    c.name = "Tokens" + std::to_string(tokens);
    c.tokens = tokens;
    c.adapters = 2;
    add_type_triples(cases, c);
  }
  return cases;
}

std::vector<LoraCase> form_cases() {
  std::vector<LoraCase> cases;
  LoraCase base;
  base.tokens = 50;
  base.hidden = 200;
  base.widths = {64, 16, 17};
  base.adapters = 5;
  base.ranks = {16, 4, 0, 9, 64};
  const std::pair<const char*, Map> maps[] = {{"Random", Map::kRandom},
                                              {"AllBase", Map::kAllBase},
                                              {"OneAdapter", Map::kOneAdapter},
                                              {"Distinct", Map::kDistinct},
                                              {"OutOfRange", Map::kOutOfRange}};
  for (const auto& [map_name, map] : maps) {
    for (int form = 0; form < 8; ++form) {
      LoraCase c = base;
      c.map = map;
      c.table = form & 1;
      c.segments = form & 2;
      c.add = form & 4;
      c.name = std::string("SmallMap") + map_name + (c.table ? "Table" : "Stacked") +
               (c.segments ? "Segments" : "Plan") + (c.add ? "Add" : "Overwrite");
      cases.push_back(c);
      c.x = c.w = c.y = kBF16;
      c.strided = true;
      c.name += "BF16Strided";
      cases.push_back(c);
    }
  }
  LoraCase c = base;
  c.name = "SmallMoreAdaptersThanTokens";
  c.tokens = 6;
  c.adapters = 300;
  c.map = Map::kDistinct;
  add_type_triples(cases, c);
  c = base;
  c.name = "SmallEightSlices";
  c.widths = {1, 2, 3, 64, 5, 66, 7, 8};
  c.table = true;
  add_type_triples(cases, c);
  c = base;
  c.name = "SmallEmptyBatch";
  c.tokens = 0;
  add_type_triples(cases, c);
  c = base;
  c.name = "SmallWidthZero";
  c.widths = {32, 0, 8};
  add_type_triples(cases, c);
  c = base;
  c.name = "AlignedPrefill";
  c.tokens = 600;
  c.hidden = 512;
  c.widths = {256, 64};
  c.ranks = {16, 64, 8, 32, 128};
  add_type_triples(cases, c);
  c.name = "ShortHidden";  // what two parts leave out is more than sums of three products round
  c.tokens = 150;
  c.hidden = 3;
  c.widths = {128};
  c.ranks = {11, 32, 6};
  c.adapters = 3;
  add_type_triples(cases, c);
  c.name = "ManyChunks";  // h of more rows than the workspace holds at once
  c.tokens = 1500;
  c.hidden = 16;
  c.widths = {16, 8};
  c.ranks = {512, 480};
  c.adapters = 2;
  add_type_triples(cases, c);
  return cases;
}

class LoraOp : public ::testing::TestWithParam<std::tuple<LoraTarget, LoraCase>> {};

TEST_P(LoraOp, ApplyMatchesOracle) {
  const auto& [target, lora_case] = GetParam();
  const UseTarget use(target);
  LoraOperands op(lora_case, target.device);
  expect_apply_matches(op);
}

TEST_P(LoraOp, ShrinkAndExpandMatchOracle) {
  const auto& [target, lora_case] = GetParam();
  const UseTarget use(target);
  LoraOperands op(lora_case, target.device, 2);
  expect_two_ops_match(op, kF32, lora_case.strided);
}

TEST_P(LoraOp, HiddenInTheDtypeOfXMatchesOracle) {
  const auto& [target, lora_case] = GetParam();
  const UseTarget use(target);
  LoraOperands op(lora_case, target.device, 3);
  expect_two_ops_match(op, lora_case.x, !lora_case.strided);
}

class LoraRounding : public ::testing::TestWithParam<LoraTarget> {};

/// h is (big + 1, -big), big + 1 no value of the 16-bit type: B of ones gives 0 if h was rounded
/// to the type of B, and 1 if not.
TEST_P(LoraRounding, SmallHiddenIsRoundedWhereWeightsAndYShareSixteenBits) {
  const UseTarget use(GetParam());
  for (DType x_dtype : kFloats) {
    for (DType w_dtype : kFloats) {
      for (DType y_dtype : kFloats) {
        LoraCase c;
        c.tokens = 3;
        c.hidden = 2;
        c.adapters = 1;
        c.ranks = {2};
        c.widths = {20};
        c.map = Map::kOneAdapter;
        c.x = x_dtype;
        c.w = w_dtype;
        c.y = y_dtype;
        LoraOperands op(c, GetParam().device);
        const float big = w_dtype == kF16 ? 2048.0f : 256.0f;
        GuardedTensor a(w_dtype, {1, 2, 2}, {}, op.device), b(w_dtype, {1, 20, 2}, {}, op.device);
        for (int i = 0; i < 4; ++i) a.set(i, std::array{big, 1.0f, -big, 0.0f}[i]);
        for (int i = 0; i < 40; ++i) b.set(i, 1.0f);
        for (int i = 0; i < 6; ++i) op.x.set(i, 1.0f);
        a.upload();
        b.upload();
        op.x.upload();
        const Tensor as[] = {a.view()}, bs[] = {b.view()};
        const LoraWeights weights = LoraWeights::stacked(as, bs);
        GuardedTensor workspace = op.apply_workspace();
        lora_apply(op.x.view(), weights, op.groups(), op.y.view(), 0, 1.0f, false, workspace.view(),
                   Stream{});
        op.y.download();
        const float want = w_dtype != kF32 && y_dtype == w_dtype ? 0.0f : 1.0f;
        for (int i = 0; i < 60; ++i) {
          ASSERT_EQ(op.y.get(i), want)
              << dtype_name(x_dtype) << ", " << dtype_name(w_dtype) << ", " << dtype_name(y_dtype);
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Targets, LoraRounding, ::testing::ValuesIn(lora_targets()),
                         [](const auto& target) { return target.param.name; });

std::string case_name(const ::testing::TestParamInfo<std::tuple<LoraTarget, LoraCase>>& info) {
  return std::get<0>(info.param).name + "_" + std::get<1>(info.param).name;
}

using ::testing::Combine;
using ::testing::ValuesIn;
INSTANTIATE_TEST_SUITE_P(Dtypes, LoraOp, Combine(ValuesIn(lora_targets()), ValuesIn(dtype_cases())),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Edges, LoraOp, Combine(ValuesIn(lora_targets()), ValuesIn(edge_cases())),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Forms, LoraOp, Combine(ValuesIn(lora_targets()), ValuesIn(form_cases())),
                         case_name);

}  // namespace
}  // namespace mortar::testing
