// SPDX-License-Identifier: Apache-2.0
// Bad arguments: one sentence with op, argument, expected and got, and nothing written.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "lora_case.h"
#include "mortar/error.h"

namespace mortar::testing {
namespace {

constexpr DType kF32 = DType::kFloat32, kF16 = DType::kFloat16, kI32 = DType::kInt32;

/// A good call of every op; a test spoils one argument. Views only: rows and addresses of a spoilt
/// view are never followed.
struct Call {
  explicit Call(Device device) : operands(make_case(), device) {
    x = operands.x.view();
    y = operands.y.view();
    h_memory = GuardedTensor(kF32, {2, 4, 8}, {}, device);
    h = h_memory.view();
    plan_memory = operands.plan;
    plan = plan_memory.view();
    token_adapter = operands.token_adapter.view();
    workspace_memory = byte_tensor(lora_apply_workspace(x, operands.weights()) + 64, device);
    workspace = workspace_memory.view();
    weights = operands.weights();
    groups = operands.groups();
    plan_memory.download();
    plan_memory.upload();
  }

  static LoraCase make_case() {
    LoraCase c;
    c.tokens = 4;
    c.hidden = 16;
    c.widths = {12, 20};
    c.adapters = 3;
    return c;
  }

  void apply() { lora_apply(x, weights, groups, y, offset, 1.0f, true, workspace, Stream{}); }
  void shrink() { lora_shrink(x, weights, groups, h, 1.0f, zero_rows, workspace, Stream{}); }
  void expand() { lora_expand(h, weights, groups, y, offset, true, Stream{}); }
  void make_plan() { lora_plan(token_adapter, num_adapters, plan, Stream{}); }
  void stacked() {
    weights =
        LoraWeights::stacked(std::vector<Tensor>(weights.a.begin(), weights.a.begin() + num_a),
                             std::vector<Tensor>(weights.b.begin(), weights.b.begin() + num_b),
                             weights.ranks, weights.scales);
  }
  void from_table() { weights = LoraWeights::from_table(table, table_dtype, max_rank, 16, widths); }
  void use_segments() {
    for (Tensor* t : {&sorted_tokens, &ids, &counts, &starts}) {
      *t = Tensor(token_adapter.data, kI32, {t == &starts ? 4 : 3}, token_adapter.device);
    }
    sorted_tokens.shape[0] = 4;
  }
  void apply_segments() {
    groups = LoraGroups::from_segments(sorted_tokens, ids, counts, starts);
    apply();
  }

  bool outputs_untouched() {
    for (GuardedTensor* t : {&operands.y, &h_memory, &plan_memory, &workspace_memory}) {
      t->download();
      if (!t->all_unchanged()) return false;
    }
    return true;
  }

  LoraOperands operands;
  GuardedTensor h_memory, plan_memory, workspace_memory;
  Tensor x, y, h, plan, token_adapter, workspace, zero_rows;
  Tensor sorted_tokens, ids, counts, starts, table;
  LoraWeights weights;
  LoraGroups groups;
  std::int64_t offset = 0, num_adapters = 3;
  int num_a = 2, num_b = 2, max_rank = 8;
  DType table_dtype = kF32;
  std::vector<std::int64_t> widths{12, 20};
};

struct BadCall {
  const char* name;
  std::function<void(Call&)> run;
  ErrorKind kind;
  std::vector<std::string> parts;  ///< of the message: op and argument, expected, got
};
void PrintTo(const BadCall& b, std::ostream* out) { *out << b.name; }

constexpr ErrorKind kValue = ErrorKind::kValue, kType = ErrorKind::kType;

Tensor reshaped(Tensor t, std::initializer_list<std::int64_t> shape) {
  return Tensor(t.data, t.dtype, shape, t.device);
}
Tensor with_dtype(Tensor t, DType dtype) {
  t.dtype = dtype;
  return t;
}
Tensor with_stride(Tensor t, int dim, std::int64_t stride) {
  t.strides[dim] = stride;
  return t;
}
Tensor shifted(Tensor t, std::int64_t bytes) {
  t.data = t.ptr<char>() + bytes;
  return t;
}
/// The other kind of device, at the same address.
Tensor elsewhere(Tensor t) {
  t.device = t.device.type == DeviceType::kCPU ? Device{DeviceType::kCUDA, 0} : Device{};
  return t;
}

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
       {"lora_weights: rank", "must be 1 to 512", "got 0"}},
      {"RankHuge",
       [](Call& c) {
         c.weights.a[0] = reshaped(c.weights.a[0], {3, 513, 16});
         c.stacked();
       },
       kValue,
       {"lora_weights: rank", "must be 1 to 512", "got 513"}},
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
      {"TablePointeeDtype",
       [](Call& c) {
         c.table_dtype = kI32;
         c.from_table();
       },
       kType,
       {"lora_weights: dtype must be float32 or float16 or bfloat16", "got int32"}},
  };
}

std::vector<BadCall> group_calls() {
  return {
      {"PlanSmall",
       [](Call& c) {
         c.groups.plan.shape[0] -= 1;
         c.apply();
       },
       kValue,
       {"lora_apply: plan must have at least", "elements for 4 tokens and 3 adapters", "got"}},
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
         c.apply_segments();
       },
       kValue,
       {"lora_apply: counts must have shape (3)", "got (2)"}},
      {"StartsShort",
       [](Call& c) {
         c.use_segments();
         c.starts.shape[0] = 2;
         c.apply_segments();
       },
       kValue,
       {"lora_apply: starts must have at least 3 elements", "got 2"}},
      {"IdsDtype",
       [](Call& c) {
         c.use_segments();
         c.ids = with_dtype(c.ids, DType::kInt64);
         c.apply_segments();
       },
       kType,
       {"lora_apply: ids must have dtype int32", "got int64"}},
      {"SortedMissing",
       [](Call& c) {
         c.use_segments();
         c.sorted_tokens = {};
         c.apply_segments();
       },
       kValue,
       {"lora_apply: sorted_tokens is required"}},
      {"SortedDevice",
       [](Call& c) {
         c.use_segments();
         c.sorted_tokens = elsewhere(c.ids);
         c.apply_segments();
       },
       kType,
       {"lora_apply: sorted_tokens must be on", "got"}},
      {"MapDims",
       [](Call& c) {
         c.token_adapter = reshaped(c.token_adapter, {2, 2});
         c.make_plan();
       },
       kValue,
       {"lora_plan: token_adapter must have 1 dimension", "got shape (2, 2)"}},
      {"MapDtype",
       [](Call& c) {
         c.token_adapter = with_dtype(c.token_adapter, DType::kInt64);
         c.make_plan();
       },
       kType,
       {"lora_plan: token_adapter must have dtype int32", "got int64"}},
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

class LoraError : public ::testing::TestWithParam<std::tuple<Device, BadCall>> {};

TEST_P(LoraError, SmallNamesTheMistakeAndWritesNothing) {
  const auto& [device, bad] = GetParam();
  Call call(device);
  call.table = Tensor(call.y.data, DType::kInt64, {3, 2, 4}, device);
  std::string message;
  try {
    bad.run(call);
    FAIL() << "no error was thrown";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), bad.kind) << e.what();
    message = e.what();
  }
  EXPECT_EQ(message.find(bad.parts[0]), 0u) << message;
  for (const std::string& part : bad.parts) {
    EXPECT_NE(message.find(part), std::string::npos) << "no '" << part << "' in: " << message;
  }
  EXPECT_EQ(message.find('\n'), std::string::npos);
  EXPECT_TRUE(call.outputs_untouched());
}

/// On a GPU the header cannot be read without a sync: there the kernels refuse such a plan.
TEST(LoraErrorCpu, SmallPlanForAnotherBatch) {
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

#if !MORTAR_HAS_CUDA
TEST(LoraErrorCpu, SmallCudaTensorsInACpuBuild) {
  Call call(Device{});
  try {
    lora_plan(elsewhere(call.token_adapter), 3, elsewhere(call.plan), Stream{});
    FAIL() << "no error was thrown";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kRuntime);
    EXPECT_STREQ(e.what(),
                 "lora_plan: tensors must be on cpu, as this build of Mortar has no CUDA "
                 "backend, got cuda:0");
  }
}
#endif

/// Two matrices that are columns of one buffer share no element.
TEST(LoraErrorCpu, SmallInterleavedColumnsAreNoOverlap) {
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

std::string case_name(const ::testing::TestParamInfo<std::tuple<Device, BadCall>>& info) {
  return device_label(std::get<0>(info.param)) + "_" + std::get<1>(info.param).name;
}

using ::testing::Combine;
using ::testing::ValuesIn;
INSTANTIATE_TEST_SUITE_P(Ops, LoraError, Combine(ValuesIn(devices()), ValuesIn(op_calls())),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Weights, LoraError, Combine(ValuesIn(devices()), ValuesIn(weight_calls())),
                         case_name);
INSTANTIATE_TEST_SUITE_P(Groups, LoraError, Combine(ValuesIn(devices()), ValuesIn(group_calls())),
                         case_name);

}  // namespace
}  // namespace mortar::testing
