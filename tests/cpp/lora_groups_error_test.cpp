// SPDX-License-Identifier: Apache-2.0
// Bad plans, segments and maps, and outputs that lie over them.
#include <cstdint>
#include <tuple>
#include <vector>

#include "lora_bad_call.h"

namespace mortar::testing {
namespace {

std::vector<BadCall> group_calls() {
  return {
      {"PlanSmall",
       [](Call& c) {
         c.groups.plan.shape[0] -= 1;
         c.apply();
       },
       kValue,
       {"lora_apply: plan must have at least", "elements for 4 tokens and 3 adapters", "got"}},
      {"PlanOfOtherTokens",
       [](Call& c) {
         c.groups = LoraGroups::from_plan(c.plan, 5, 3);
         c.apply();
       },
       kValue,
       {"lora_apply: plan must be made for 4 tokens and 3 adapters", "got one for 5 and 3"}},
      {"PlanOfOtherAdapters",
       [](Call& c) {
         c.groups = LoraGroups::from_plan(c.plan, 4, 2);
         c.shrink();
       },
       kValue,
       {"lora_shrink: plan must be made for 4 tokens and 3 adapters", "got one for 4 and 2"}},
      {"PlanOfOtherTokensForExpand",
       [](Call& c) {
         c.groups = LoraGroups::from_plan(c.plan, 3, 3);
         c.expand();
       },
       kValue,
       {"lora_expand: plan must be made for 4 tokens and 3 adapters", "got one for 3 and 3"}},
      {"PlanDtype",
       [](Call& c) {
         c.groups.plan = with_dtype(c.plan, kF32);
         c.apply();
       },
       kType,
       {"lora_apply: plan must have dtype int32", "got float32"}},
      {"PlanAlignment",
       [](Call& c) {
         c.groups.plan = shifted(c.plan, 4);
         c.expand();
       },
       kValue,
       {"lora_expand: plan must be aligned to 16 bytes", "got address"}},
      {"PlanDevice",
       [](Call& c) {
         c.groups.plan = elsewhere(c.plan);
         c.apply();
       },
       kType,
       {"lora_apply: plan must be on", "got"}},
      {"YIsPlan",
       [](Call& c) {
         c.y.data = c.plan.data;
         c.apply();
       },
       kValue,
       {"lora_apply: y and plan must not overlap in memory"}},
      {"YIsPlanForExpand",
       [](Call& c) {
         c.y.data = c.plan.data;
         c.expand();
       },
       kValue,
       {"lora_expand: y and plan must not overlap in memory"}},
      {"HIsPlan",
       [](Call& c) {
         c.h.data = c.plan.data;
         c.shrink();
       },
       kValue,
       {"lora_shrink: h and plan must not overlap in memory"}},
      {"WorkspaceIsPlan",
       [](Call& c) {
         c.workspace.data = c.plan.data;
         c.apply();
       },
       kValue,
       {"lora_apply: workspace and plan must not overlap in memory"}},
      {"HIsSegments",
       [](Call& c) {
         c.use_segments();
         c.h.data = c.starts.data;
         c.shrink_segments();
       },
       kValue,
       {"lora_shrink: h and sorted_tokens must not overlap in memory"}},
      {"YIsStarts",
       [](Call& c) {
         c.use_segments();
         c.starts.data = c.y.data;
         c.groups = LoraGroups::from_segments(c.sorted_tokens, c.ids, c.counts, c.starts);
         c.apply();
       },
       kValue,
       {"lora_apply: y and starts must not overlap in memory"}},
      {"YIsRanks",
       [](Call& c) {
         c.y.data = c.weights.ranks.data;
         c.apply();
       },
       kValue,
       {"lora_apply: y and ranks must not overlap in memory"}},
      {"YIsScales",
       [](Call& c) {
         c.y.data = c.weights.scales.data;
         c.expand();
       },
       kValue,
       {"lora_expand: y and scales must not overlap in memory"}},
      {"NoGroups",
       [](Call& c) {
         c.groups = {};
         c.apply();
       },
       kValue,
       {"lora_apply: groups must hold a plan or segments", "got neither"}},
      {"CountsShape",
       [](Call& c) {
         c.use_segments();
         c.counts.shape[0] = 2;
         c.shrink_segments();
       },
       kValue,
       {"lora_shrink: counts must have shape (3)", "got (2)"}},
      {"StartsShort",
       [](Call& c) {
         c.use_segments();
         c.starts.shape[0] = 2;
         c.shrink_segments();
       },
       kValue,
       {"lora_shrink: starts must have at least 3 elements", "got 2"}},
      {"IdsDtype",
       [](Call& c) {
         c.use_segments();
         c.ids = with_dtype(c.ids, DType::kInt64);
         c.shrink_segments();
       },
       kType,
       {"lora_shrink: ids must have dtype int32", "got int64"}},
      {"SortedMissing",
       [](Call& c) {
         c.use_segments();
         c.sorted_tokens = {};
         c.shrink_segments();
       },
       kValue,
       {"lora_shrink: sorted_tokens is required"}},
      {"SortedDevice",
       [](Call& c) {
         c.use_segments();
         c.sorted_tokens = elsewhere(c.ids);
         c.shrink_segments();
       },
       kType,
       {"lora_shrink: sorted_tokens must be on", "got"}},
      {"StartsOfApply",
       [](Call& c) {
         c.use_segments();
         c.starts = with_dtype(c.starts, DType::kInt64);
         c.groups = LoraGroups::from_segments(c.sorted_tokens, c.ids, c.counts, c.starts);
         c.apply();
       },
       kType,
       {"lora_apply: starts must have dtype int32", "got int64"}},
      {"MapDims",
       [](Call& c) {
         c.token_adapter = reshaped(c.token_adapter, {2, 2});
         c.make_plan();
       },
       kValue,
       {"lora_plan: token_adapter must have 1 dimension", "got shape (2, 2)"}},
      {"MapDtype",
       [](Call& c) {
         c.token_adapter = with_dtype(c.token_adapter, kF32);
         c.make_plan();
       },
       kType,
       {"lora_plan: token_adapter must have dtype int32 or int64", "got float32"}},
      {"MapStride",
       [](Call& c) {
         c.token_adapter = with_stride(c.token_adapter, 0, 2);
         c.make_plan();
       },
       kValue,
       {"lora_plan: token_adapter must be contiguous", "got strides (2)"}},
      {"MapTooLong",
       [](Call& c) {
         c.token_adapter.shape[0] = kLoraMaxTokens + 1;
         c.make_plan();
       },
       kValue,
       {"lora_plan: number of tokens must be 0 to 1048576", "got 1048577"}},
      {"NoAdaptersInPlan",
       [](Call& c) {
         c.num_adapters = 0;
         c.make_plan();
       },
       kValue,
       {"lora_plan: num_adapters must be 1 to 4096", "got 0"}},
      {"TooManyAdaptersInPlan",
       [](Call& c) {
         c.num_adapters = 4097;
         c.make_plan();
       },
       kValue,
       {"lora_plan: num_adapters must be 1 to 4096", "got 4097"}},
      {"PlanTooSmallForMap",
       [](Call& c) {
         c.plan.shape[0] = 8;
         c.make_plan();
       },
       kValue,
       {"lora_plan: plan must have at least", "elements for 4 tokens and 3 adapters", "got 8"}},
      {"PlanOnOtherDevice",
       [](Call& c) {
         c.plan = elsewhere(c.plan);
         c.make_plan();
       },
       kType,
       {"lora_plan: plan must be on", "got"}},
      {"PlanIsMap",
       [](Call& c) {
         c.token_adapter.data = c.plan.data;
         c.make_plan();
       },
       kValue,
       {"lora_plan: plan and token_adapter must not overlap in memory"}},
      {"PlanSizeRange",
       [](Call&) { lora_plan_size(-1, 3); },
       kValue,
       {"lora_plan_size: number of tokens must be 0 to 1048576", "got -1"}},
      {"ReportOfTooLittle",
       [](Call& c) {
         c.plan.shape[0] = 7;
         lora_plan_report(c.plan, Stream{});
       },
       kValue,
       {"lora_plan_report: plan must have at least 8 elements", "got 7"}},
      {"TrafficSizes",
       [](Call&) {
         const std::int64_t widths[] = {4, 4}, tokens[] = {1};
         const int ranks[] = {8};
         lora_traffic(16, widths, ranks, tokens, kF32, kF32, true);
       },
       kValue,
       {"lora_traffic: ranks must have one entry per adapter and slice = 1 x 2", "got 1"}},
  };
}

class LoraGroupsError : public ::testing::TestWithParam<std::tuple<Device, BadCall>> {};

TEST_P(LoraGroupsError, SmallNamesTheMistakeAndWritesNothing) {
  expect_error(std::get<0>(GetParam()), std::get<1>(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(Devices, LoraGroupsError,
                         ::testing::Combine(::testing::ValuesIn(devices()),
                                            ::testing::ValuesIn(group_calls())),
                         bad_call_name);

/// On a GPU the header cannot be read without a sync: there the kernels refuse such a plan.
TEST(LoraGroupsErrorCpu, SmallPlanForAnotherBatch) {
  Call call(Device{});
  std::vector<std::int32_t> map(3, 0);
  lora_plan(Tensor(map.data(), kI32, {3}), 3, call.plan, Stream{});
  call.plan_memory.download();
  call.plan_memory.upload();
  try {
    call.apply();
    FAIL() << "no error was thrown";
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(),
                 "lora_apply: plan must be made for 4 tokens and 3 adapters, got one for 3 and 3");
  }
  EXPECT_TRUE(call.outputs_untouched());
}

}  // namespace
}  // namespace mortar::testing
