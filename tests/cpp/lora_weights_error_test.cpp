// SPDX-License-Identifier: Apache-2.0
// Bad adapter weights.
#include <tuple>

#include "lora_bad_call.h"

namespace mortar::testing {
namespace {

std::vector<BadCall> weight_calls() {
  return {
      {"NoSlices",
       [](Call& c) {
         c.num_a = c.num_b = 0;
         c.stacked();
       },
       kValue,
       {"lora_weights: number of slices must be 1 to 8", "got 0"}},
      {"UnequalSlices",
       [](Call& c) {
         c.num_b = 1;
         c.stacked();
       },
       kValue,
       {"lora_weights: a and b must have one tensor per slice each", "got 2 and 1"}},
      {"ADims",
       [](Call& c) {
         c.weights.a[1] = reshaped(c.weights.a[1], {3, 16});
         c.stacked();
       },
       kValue,
       {"lora_weights: a[1] must have 3 dimensions", "got shape (3, 16)"}},
      {"MixedDtypes",
       [](Call& c) {
         c.weights.b[1] = with_dtype(c.weights.b[1], kF16);
         c.stacked();
       },
       kType,
       {"lora_weights: b[1] must have dtype float32 as a[0] has", "got float16"}},
      {"IntegerWeights",
       [](Call& c) {
         c.weights.a[0] = with_dtype(c.weights.a[0], kI32);
         c.stacked();
       },
       kType,
       {"lora_weights: a[0] must have dtype float32 or float16 or bfloat16", "got int32"}},
      {"MixedDevices",
       [](Call& c) {
         c.weights.b[0] = elsewhere(c.weights.b[0]);
         c.stacked();
       },
       kType,
       {"lora_weights: b[0] must be on", "got"}},
      {"MixedWidths",
       [](Call& c) {
         c.weights.a[1] = reshaped(c.weights.a[1], {3, 8, 15});
         c.stacked();
       },
       kValue,
       {"lora_weights: a[1] must have width K = 16", "got shape (3, 8, 15)"}},
      {"HugeWidth",  // a view with rows of stride 0 may say so
       [](Call& c) {
         c.weights.b[1].shape[1] = std::int64_t{1} << 61;
         c.stacked();
       },
       kValue,
       {"lora_weights: b[1] must have at most 281474976710656 rows", "got shape (3, 2305"}},
      {"MixedAdapters",
       [](Call& c) {
         c.weights.a[1] = reshaped(c.weights.a[1], {2, 8, 16});
         c.stacked();
       },
       kValue,
       {"lora_weights: a[1] must hold 3 adapters", "got shape (2, 8, 16)"}},
      {"RankMismatch",
       [](Call& c) {
         c.weights.b[0] = reshaped(c.weights.b[0], {3, 12, 7});
         c.stacked();
       },
       kValue,
       {"lora_weights: b[0] must have rank 8", "got shape (3, 12, 7)"}},
      {"RankZero",
       [](Call& c) {
         c.weights.a[0] = reshaped(c.weights.a[0], {3, 0, 16});
         c.stacked();
       },
       kValue,
       {"lora_weights: a[0] must have a rank of 1 to 512 in dimension 1", "got shape (3, 0, 16)"}},
      {"RankHuge",
       [](Call& c) {
         c.weights.a[0] = reshaped(c.weights.a[0], {3, 513, 16});
         c.stacked();
       },
       kValue,
       {"lora_weights: a[0] must have a rank of 1 to 512 in dimension 1",
        "got shape (3, 513, 16)"}},
      {"NoAdapters",
       [](Call& c) {
         c.weights.a[0] = reshaped(c.weights.a[0], {0, 8, 16});
         c.stacked();
       },
       kValue,
       {"lora_weights: number of adapters must be 1 to 4096", "got 0"}},
      {"WeightStride",
       [](Call& c) {
         c.weights.b[1] = with_stride(c.weights.b[1], 2, 3);
         c.stacked();
       },
       kValue,
       {"lora_weights: b[1] must have stride 1 in its last dimension", "got stride 3"}},
      {"RanksShape",
       [](Call& c) {
         c.weights.ranks.shape[0] = 2;
         c.stacked();
       },
       kValue,
       {"lora_weights: ranks must have shape (3)", "got (2)"}},
      {"RanksDtype",
       [](Call& c) {
         c.weights.ranks = with_dtype(c.weights.ranks, kF32);
         c.stacked();
       },
       kType,
       {"lora_weights: ranks must have dtype int32", "got float32"}},
      {"ScalesDtype",
       [](Call& c) {
         c.weights.scales = with_dtype(c.weights.scales, kF16);
         c.stacked();
       },
       kType,
       {"lora_weights: scales must have dtype float32", "got float16"}},
      {"TableDims",
       [](Call& c) {
         c.table = reshaped(c.table, {6, 4});
         c.from_table();
       },
       kValue,
       {"lora_weights: table must have 3 dimensions", "got shape (6, 4)"}},
      {"TableShape",
       [](Call& c) {
         c.table = reshaped(c.table, {3, 2, 3});
         c.from_table();
       },
       kValue,
       {"lora_weights: table must have shape (any, 2, 4)", "got (3, 2, 3)"}},
      {"TableDtype",
       [](Call& c) {
         c.table = with_dtype(c.table, kI32);
         c.from_table();
       },
       kType,
       {"lora_weights: table must have dtype int64", "got int32"}},
      {"TableAlignment",
       [](Call& c) {
         c.table = shifted(c.table, 8);
         c.from_table();
       },
       kValue,
       {"lora_weights: table must be aligned to 16 bytes", "got address"}},
      {"TableStride",
       [](Call& c) {
         c.table = with_stride(c.table, 1, 5);
         c.from_table();
       },
       kValue,
       {"lora_weights: table must be contiguous", "got strides"}},
      {"TableMaxRankZero",
       [](Call& c) {
         c.max_rank = 0;
         c.from_table();
       },
       kValue,
       {"lora_weights: max_rank must be 1 to 512", "got 0"}},
      {"TableMaxRankHuge",
       [](Call& c) {
         c.max_rank = 513;
         c.from_table();
       },
       kValue,
       {"lora_weights: max_rank must be 1 to 512", "got 513"}},
      {"TableWidths",
       [](Call& c) {
         c.widths = {1, 2, 3};
         c.from_table();
       },
       kValue,
       {"lora_weights: table must have shape (any, 3, 4)", "got (3, 2, 4)"}},
      {"TableWidthNegative",
       [](Call& c) {
         c.widths = {1, -2};
         c.from_table();
       },
       kValue,
       {"lora_weights: widths must be at least 0", "got -2"}},
      {"TableWidthHuge",  // eight of them would add up to 0
       [](Call& c) {
         c.widths = {1, std::int64_t{1} << 61};
         c.from_table();
       },
       kValue,
       {"lora_weights: widths must be at most 281474976710656", "got 2305843009213693952"}},
      {"TablePointeeDtype",
       [](Call& c) {
         c.table_dtype = kI32;
         c.from_table();
       },
       kType,
       {"lora_weights: dtype must be float32 or float16 or bfloat16", "got int32"}},
  };
}

class LoraWeightsError : public ::testing::TestWithParam<std::tuple<Device, BadCall>> {};

TEST_P(LoraWeightsError, SmallNamesTheMistakeAndWritesNothing) {
  expect_error(std::get<0>(GetParam()), std::get<1>(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(Devices, LoraWeightsError,
                         ::testing::Combine(::testing::ValuesIn(devices()),
                                            ::testing::ValuesIn(weight_calls())),
                         bad_call_name);

}  // namespace
}  // namespace mortar::testing
