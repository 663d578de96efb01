// SPDX-License-Identifier: Apache-2.0
// Bad arguments of lora_shrink, lora_expand and lora_apply.
#include <limits>
#include <tuple>

#include "lora_bad_call.h"

namespace mortar::testing {
namespace {

std::vector<BadCall> op_calls() {
  return {
      {"XMissing",
       [](Call& c) {
         c.x = {};
         c.apply();
       },
       kValue,
       {"lora_apply: x", "required"}},
      {"XDims",
       [](Call& c) {
         c.x = reshaped(c.x, {4, 4, 4});
         c.apply();
       },
       kValue,
       {"lora_apply: x must have 2 dimensions", "got shape (4, 4, 4)"}},
      {"XDtype",
       [](Call& c) {
         c.x = with_dtype(c.x, kI32);
         c.apply();
       },
       kType,
       {"lora_apply: x must have dtype float32 or float16 or bfloat16", "got int32"}},
      {"XStride",
       [](Call& c) {
         c.x = with_stride(c.x, 1, 2);
         c.shrink();
       },
       kValue,
       {"lora_shrink: x must have stride 1 in its last dimension", "got stride 2"}},
      {"XWidth",
       [](Call& c) {
         c.x = reshaped(c.x, {4, 15});
         c.apply();
       },
       kValue,
       {"lora_apply: x must have K = 16 columns", "got 15"}},
      {"XWidthShrink",
       [](Call& c) {
         c.x = reshaped(c.x, {4, 15});
         c.shrink();
       },
       kValue,
       {"lora_shrink: x must have K = 16 columns", "got 15"}},
      {"XNegativeStride",
       [](Call& c) {
         c.x = with_stride(c.x, 0, -16);
         c.shrink();
       },
       kValue,
       {"lora_shrink: x must have strides of 0 or more", "got -16 in dimension 0"}},
      {"YNegativeStride",
       [](Call& c) {
         c.y = with_stride(c.y, 0, -32);
         c.apply();
       },
       kValue,
       {"lora_apply: y must have strides of 0 or more", "got -32 in dimension 0"}},
      {"HNegativeStride",
       [](Call& c) {
         c.h = with_stride(c.h, 0, -32);
         c.expand();
       },
       kValue,
       {"lora_expand: h must have strides of 0 or more", "got -32 in dimension 0"}},
      {"XTooManyRows",
       [](Call& c) {
         c.x.shape[0] = kLoraMaxTokens + 1;
         c.shrink();
       },
       kValue,
       {"lora_shrink: x must have at most 1048576 rows", "got 1048577"}},
      {"YTooManyRows",
       [](Call& c) {
         c.y.shape[0] = kLoraMaxTokens + 1;
         c.expand();
       },
       kValue,
       {"lora_expand: y must have at most 1048576 rows", "got 1048577"}},
      {"YDims",
       [](Call& c) {
         c.y = reshaped(c.y, {32});
         c.expand();
       },
       kValue,
       {"lora_expand: y must have 2 dimensions", "got shape (32)"}},
      {"YRows",
       [](Call& c) {
         c.y = reshaped(c.y, {3, 32});
         c.apply();
       },
       kValue,
       {"lora_apply: y must have shape (4, any)", "got (3, 32)"}},
      {"YDtype",
       [](Call& c) {
         c.y = with_dtype(c.y, DType::kFloat64);
         c.apply();
       },
       kType,
       {"lora_apply: y must have dtype", "got float64"}},
      {"YDevice",
       [](Call& c) {
         c.y = elsewhere(c.y);
         c.apply();
       },
       kType,
       {"lora_apply: y must be on", "got"}},
      {"YStride",
       [](Call& c) {
         c.y = with_stride(c.y, 1, 2);
         c.apply();
       },
       kValue,
       {"lora_apply: y must have stride 1 in its last dimension", "got stride 2"}},
      {"YColumns",
       [](Call& c) {
         c.y = reshaped(c.y, {4, 31});
         c.apply();
       },
       kValue,
       {"lora_apply: y must have at least offset + sum of widths = 0 + 32 columns", "got 31"}},
      {"YOffset",
       [](Call& c) {
         c.offset = 1;
         c.expand();
       },
       kValue,
       {"lora_expand: y must have at least offset + sum of widths = 1 + 32 columns", "got 32"}},
      {"OffsetNegative",
       [](Call& c) {
         c.offset = -1;
         c.apply();
       },
       kValue,
       {"lora_apply: offset must be at least 0", "got -1"}},
      {"OffsetHuge",
       [](Call& c) {
         c.offset = std::numeric_limits<std::int64_t>::max() - 3;
         c.apply();
       },
       kValue,
       {"lora_apply: y must have at least offset"}},
      {"YExpanded",
       [](Call& c) {
         c.y = with_stride(c.y, 0, 0);
         c.apply();
       },
       kValue,
       {"lora_apply: y must not overlap itself"}},
      {"YRowsOverlap",
       [](Call& c) {
         c.y = with_stride(c.y, 0, 31);
         c.expand();
       },
       kValue,
       {"lora_expand: y must not overlap itself"}},
      {"YIsX",
       [](Call& c) {
         c.y.data = c.x.data;
         c.apply();
       },
       kValue,
       {"lora_apply: y and x must not overlap in memory"}},
      {"YTouchesX",
       [](Call& c) {
         c.y = shifted(c.x, 4 * 63);
         c.y = reshaped(c.y, {4, 32});
         c.apply();
       },
       kValue,
       {"lora_apply: y and x must not overlap in memory"}},
      {"YIsH",
       [](Call& c) {
         c.y.data = c.h.data;
         c.expand();
       },
       kValue,
       {"lora_expand: y and h must not overlap in memory"}},
      {"YIsWorkspace",
       [](Call& c) {
         c.y.data = c.workspace.data;
         c.apply();
       },
       kValue,
       {"lora_apply: y and workspace must not overlap in memory"}},
      {"YIsWeights",
       [](Call& c) {
         c.y.data = c.weights.b[1].data;
         c.apply();
       },
       kValue,
       {"lora_apply: y and b[1] must not overlap in memory"}},
      {"HIsX",
       [](Call& c) {
         c.h.data = c.x.data;
         c.shrink();
       },
       kValue,
       {"lora_shrink: h and x must not overlap in memory"}},
      {"HIsWorkspace",
       [](Call& c) {
         c.h.data = c.workspace.data;
         c.shrink();
       },
       kValue,
       {"lora_shrink: h and workspace must not overlap in memory"}},
      {"WorkspaceIsX",
       [](Call& c) {
         c.workspace.data = c.x.data;
         c.apply();
       },
       kValue,
       {"lora_apply: workspace and x must not overlap in memory"}},
      {"HDims",
       [](Call& c) {
         c.h = reshaped(c.h, {4, 8});
         c.shrink();
       },
       kValue,
       {"lora_shrink: h must have shape (2, 4, any)", "got (4, 8)"}},
      {"HRank",
       [](Call& c) {
         c.h = reshaped(c.h, {2, 4, 7});
         c.shrink();
       },
       kValue,
       {"lora_shrink: h must have at least 8 columns", "got 7"}},
      {"HRankExpand",
       [](Call& c) {
         c.h = reshaped(c.h, {2, 4, 7});
         c.expand();
       },
       kValue,
       {"lora_expand: h must have at least 8 columns", "got 7"}},
      {"HDtype",
       [](Call& c) {
         c.h = with_dtype(c.h, kF16);
         c.shrink();
       },
       kType,
       {"lora_shrink: h must have dtype float32 or that of x (float32)", "got float16"}},
      {"HDevice",
       [](Call& c) {
         c.h = elsewhere(c.h);
         c.expand();
       },
       kType,
       {"lora_expand: h must be on", "got"}},
      {"HExpanded",
       [](Call& c) {
         c.h = with_stride(c.h, 0, 0);
         c.shrink();
       },
       kValue,
       {"lora_shrink: h must not overlap itself"}},
      {"ZeroRowsShape",
       [](Call& c) {
         c.zero_rows = reshaped(c.token_adapter, {3});
         c.shrink();
       },
       kValue,
       {"lora_shrink: zero_rows must have shape (4)", "got (3)"}},
      {"ZeroRowsDtype",
       [](Call& c) {
         c.zero_rows = with_dtype(c.token_adapter, kF32);
         c.shrink();
       },
       kType,
       {"lora_shrink: zero_rows must have dtype int32", "got float32"}},
      {"WorkspaceMissing",
       [](Call& c) {
         c.workspace = {};
         c.apply();
       },
       kValue,
       {"lora_apply: workspace is required"}},
      {"WorkspaceSmall",
       [](Call& c) {
         c.workspace.shape[0] = lora_apply_workspace(c.x, c.weights) - 1;
         c.apply();
       },
       kValue,
       {"lora_apply: workspace must have at least", "bytes, got"}},
      {"WorkspaceDtype",
       [](Call& c) {
         c.workspace = with_dtype(c.workspace, kI32);
         c.apply();
       },
       kType,
       {"lora_apply: workspace must have dtype uint8", "got int32"}},
      {"WorkspaceAlignment",
       [](Call& c) {
         c.workspace = shifted(c.workspace, 8);
         c.workspace.shape[0] -= 8;
         c.apply();
       },
       kValue,
       {"lora_apply: workspace must be aligned to 16 bytes", "got address"}},
      {"WorkspaceDevice",
       [](Call& c) {
         c.workspace = elsewhere(c.workspace);
         c.apply();
       },
       kType,
       {"lora_apply: workspace must be on", "got"}},
      {"WeightsDevice",
       [](Call& c) {
         c.weights.a[0] = elsewhere(c.weights.a[0]);
         c.apply();
       },
       kType,
       {"lora_apply: a[0] must be on", "got"}},
      {"WeightsUnmade",
       [](Call& c) {
         c.weights = {};
         c.apply();
       },
       kValue,
       {"lora_apply: weights must be made by", "got 0 slices"}},
      {"WeightsWithoutA",
       [](Call& c) {
         c.num_a = 0;
         c.stacked();
         c.shrink();
       },
       kValue,
       {"lora_shrink: weights must hold a", "got b alone"}},
      {"WeightsWithoutB",
       [](Call& c) {
         c.num_b = 0;
         c.stacked();
         c.apply();
       },
       kValue,
       {"lora_apply: weights must hold b", "got a alone"}},
  };
}

class LoraOpError : public ::testing::TestWithParam<std::tuple<Device, BadCall>> {};

TEST_P(LoraOpError, SmallNamesTheMistakeAndWritesNothing) {
  expect_error(std::get<0>(GetParam()), std::get<1>(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(Devices, LoraOpError,
                         ::testing::Combine(::testing::ValuesIn(devices()),
                                            ::testing::ValuesIn(op_calls())),
                         bad_call_name);

#if !MORTAR_HAS_CUDA
TEST(LoraOpErrorCpu, SmallCudaTensorsInACpuBuild) {
  Call call(Device{});
  try {
    lora_plan(elsewhere(call.token_adapter), 3, elsewhere(call.plan), Stream{});
    FAIL() << "no error was thrown";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kType);
    EXPECT_STREQ(e.what(),
                 "lora_plan: tensors must be on cpu, as this build of Mortar has no CUDA "
                 "backend, got cuda:0");
  }
}
#endif

/// Two matrices that are columns of one buffer share no element.
TEST(LoraOpErrorCpu, SmallInterleavedColumnsAreNoOverlap) {
  Call call(Device{});
  std::vector<float> buffer(4 * 64, 1.0f);
  call.x = with_stride(Tensor(buffer.data(), kF32, {4, 16}), 0, 64);
  call.y = with_stride(Tensor(buffer.data() + 16, kF32, {4, 32}), 0, 64);
  EXPECT_NO_THROW(call.apply());
  call.y = with_stride(Tensor(buffer.data() + 15, kF32, {4, 32}), 0, 64);
  EXPECT_THROW(call.apply(), Error);
  call.y = with_stride(Tensor(buffer.data() + 33, kF32, {4, 32}), 0, 64);
  EXPECT_THROW(call.apply(), Error);
}

}  // namespace
}  // namespace mortar::testing
