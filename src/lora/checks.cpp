// SPDX-License-Identifier: Apache-2.0
#include "lora/checks.h"

#include "core/byte_span.h"
#include "core/check_view.h"

namespace mortar::lora {
namespace {

/// Rows, and slices of rows, that lie one after the other: kernels count rows from the first byte.
void check_rows_ascend(const ArgCheck& arg, const Tensor& t, const char* name) {
  for (int d = 0; d + 1 < t.ndim; ++d) {
    check(t.strides[d] >= 0 || t.shape[d] <= 1, arg.op(), ": ", name,
          " must have strides of 0 or more, got ", t.strides[d], " in dimension ", d);
  }
}

RowsView rows_view(const Tensor& t) {
  RowsView v;
  v.data = t.data;
  v.dtype = t.dtype;
  v.row_stride = t.stride(-2);
  v.slice_stride = t.ndim == 3 ? t.stride(0) : 0;
  v.width = t.size(-1);
  return v;
}

void check_num_tokens(const ArgCheck& arg, const char* name, std::int64_t num_tokens) {
  check(num_tokens <= kLoraMaxTokens, arg.op(), ": ", name, " must have at most ", kLoraMaxTokens,
        " rows, got ", num_tokens);
}

void check_float(const ArgCheck& arg, const Tensor& t, const char* name) {
  arg.dtype(t, name, {DType::kFloat32, DType::kFloat16, DType::kBFloat16});
}

/// A dense int32 vector.
const std::int32_t* check_ints(const ArgCheck& arg, const Tensor& t, const char* name,
                               Device device) {
  arg.ndim(t, name, 1);
  arg.dtype(t, name, {DType::kInt32});
  arg.device(t, name, device);
  arg.contiguous(t, name);
  check_memory(arg, t, name);
  return t.ptr<const std::int32_t>();
}

}  // namespace

RowsView check_x(const ArgCheck& arg, const Tensor& x) {
  arg.ndim(x, "x", 2);
  check_extents(arg, x, "x");
  check_float(arg, x, "x");
  arg.last_dim_dense(x, "x");
  check_rows_ascend(arg, x, "x");
  check_num_tokens(arg, "x", x.shape[0]);
  return rows_view(x);
}

RowsView check_h(const ArgCheck& arg, const Tensor& h, const LoraWeights& weights,
                 std::int64_t num_tokens, Device device) {
  arg.shape(h, "h", {weights.num_slices, num_tokens, -1});
  check_extents(arg, h, "h");
  check_float(arg, h, "h");
  arg.device(h, "h", device);
  arg.last_dim_dense(h, "h");
  check_rows_ascend(arg, h, "h");
  check(h.shape[2] >= weights.max_rank, arg.op(), ": h must have at least ", weights.max_rank,
        " columns (the largest rank), got ", h.shape[2]);
  return rows_view(h);
}

RowsView check_y(const ArgCheck& arg, const Tensor& y, const LoraWeights& weights,
                 std::int64_t offset, std::int64_t num_tokens, Device device) {
  arg.shape(y, "y", {num_tokens, -1});
  check_extents(arg, y, "y");
  check_float(arg, y, "y");
  arg.device(y, "y", device);
  arg.last_dim_dense(y, "y");
  check_rows_ascend(arg, y, "y");
  check_num_tokens(arg, "y", num_tokens);
  arg.no_self_overlap(y, "y");
  check(offset >= 0, arg.op(), ": offset must be at least 0, got ", offset);
  std::int64_t width = 0;
  for (int s = 0; s < weights.num_slices; ++s) width += weights.widths[s];
  check(offset <= y.shape[1] - width, arg.op(),
        ": y must have at least offset + sum of widths = ", offset, " + ", width, " columns, got ",
        y.shape[1]);
  return rows_view(y);
}

void check_form(const ArgCheck& arg, const LoraWeights& weights, Needs needs, Device device) {
  check(weights.num_slices >= 1 && weights.num_slices <= kLoraMaxSlices, arg.op(),
        ": weights must be made by LoraWeights::stacked or LoraWeights::from_table, got ",
        weights.num_slices, " slices");
  if (weights.table.defined()) return arg.device(weights.table, "table", device);
  const bool has_a = weights.a[0].defined(), has_b = weights.b[0].defined();
  check(has_a || needs == Needs::kB, arg.op(), ": weights must hold a, got b alone");
  check(has_b || needs == Needs::kA, arg.op(), ": weights must hold b, got a alone");
  arg.device(has_a ? weights.a[0] : weights.b[0], has_a ? kANames[0] : kBNames[0], device);
}

WeightsView check_weights(const ArgCheck& arg, const LoraWeights& weights, Needs needs,
                          Device device) {
  check_form(arg, weights, needs, device);
  WeightsView v;
  v.num_adapters = weights.num_adapters;
  v.hidden = weights.hidden;
  v.num_slices = weights.num_slices;
  v.max_rank = weights.max_rank;
  v.dtype = weights.dtype;
  for (int s = 0; s < weights.num_slices; ++s) v.widths[s] = weights.widths[s];
  if (weights.table.defined()) {
    v.table = weights.table.ptr<const LoraTableEntry>();
    return v;
  }
  const bool has_a = weights.a[0].defined(), has_b = weights.b[0].defined();
  if (weights.ranks.defined()) v.ranks = weights.ranks.ptr<const std::int32_t>();
  if (weights.scales.defined()) v.scales = weights.scales.ptr<const float>();
  for (int s = 0; s < weights.num_slices; ++s) {
    StackedSlice& slice = v.slices[s];
    if (has_a) {
      const Tensor& a = weights.a[s];
      slice.a = a.data;
      slice.a_adapter_stride = a.strides[0];
      slice.a_row_stride = a.strides[1];
      slice.rank = static_cast<int>(a.shape[1]);
    }
    if (has_b) {
      const Tensor& b = weights.b[s];
      slice.b = b.data;
      slice.b_adapter_stride = b.strides[0];
      slice.b_row_stride = b.strides[1];
      slice.rank = static_cast<int>(b.shape[2]);
    }
  }
  return v;
}

GroupsView check_groups(const ArgCheck& arg, const LoraGroups& groups, std::int64_t num_tokens,
                        std::int64_t num_adapters, Device device) {
  GroupsView v;
  if (groups.plan.defined()) {
    v.plan = check_ints(arg, groups.plan, "plan", device);
    arg.aligned(groups.plan, "plan", kMemoryAlignment);
    check(groups.num_tokens == num_tokens && groups.num_adapters == num_adapters, arg.op(),
          ": plan must be made for ", num_tokens, " tokens and ", num_adapters,
          " adapters, got one for ", groups.num_tokens, " and ", groups.num_adapters);
    const PlanLayout layout = PlanLayout::make(num_tokens, num_adapters);
    const std::int64_t size = layout.size;
    v.sorted = v.plan + layout.sorted;
    v.num_sorted = num_tokens;
    check(groups.plan.shape[0] >= size, arg.op(), ": plan must have at least ", size,
          " elements for ", num_tokens, " tokens and ", num_adapters, " adapters, got ",
          groups.plan.shape[0]);
    if (device.type == DeviceType::kCPU) {
      check(v.plan[kPlanNumTokens] == num_tokens && v.plan[kPlanNumAdapters] == num_adapters,
            arg.op(), ": plan must be made for ", num_tokens, " tokens and ", num_adapters,
            " adapters, got one for ", v.plan[kPlanNumTokens], " and ", v.plan[kPlanNumAdapters]);
    }
    return v;
  }
  check(groups.ids.defined(), arg.op(), ": groups must hold a plan or segments, got neither");
  v.sorted = check_ints(arg, groups.sorted_tokens, "sorted_tokens", device);
  v.ids = check_ints(arg, groups.ids, "ids", device);
  v.counts = check_ints(arg, groups.counts, "counts", device);
  v.starts = check_ints(arg, groups.starts, "starts", device);
  v.num_sorted = groups.sorted_tokens.shape[0];
  v.num_segments = groups.ids.shape[0];
  arg.shape(groups.counts, "counts", {v.num_segments});
  check(groups.starts.shape[0] >= v.num_segments, arg.op(), ": starts must have at least ",
        v.num_segments, " elements as ids has, got ", groups.starts.shape[0]);
  return v;
}

void* check_workspace(const ArgCheck& arg, const Tensor& workspace, std::int64_t bytes,
                      Device device) {
  if (bytes == 0 && !workspace.defined()) return nullptr;
  arg.ndim(workspace, "workspace", 1);
  arg.dtype(workspace, "workspace", {DType::kUInt8});
  arg.device(workspace, "workspace", device);
  arg.contiguous(workspace, "workspace");
  check(workspace.shape[0] >= bytes, arg.op(), ": workspace must have at least ", bytes,
        " bytes, got ", workspace.shape[0]);
  check_memory(arg, workspace, "workspace");
  if (bytes > 0) arg.aligned(workspace, "workspace", kMemoryAlignment);
  return workspace.data;
}

void check_memory_of_weights(const ArgCheck& arg, const LoraWeights& weights, Needs needs) {
  if (weights.table.defined()) return check_memory(arg, weights.table, "table");
  for (int s = 0; s < weights.num_slices; ++s) {
    if (needs != Needs::kB) check_memory(arg, weights.a[s], kANames[s]);
    if (needs != Needs::kA) check_memory(arg, weights.b[s], kBNames[s]);
  }
  check_memory(arg, weights.ranks, "ranks");
  check_memory(arg, weights.scales, "scales");
}

void check_apart(const ArgCheck& arg, const Tensor& out, const char* name,
                 const LoraWeights& weights, const LoraGroups& groups) {
  if (!out.defined()) return;
  const ByteSpan span = byte_span(out);
  const auto apart = [&](const Tensor& t, const char* t_name) {
    if (t.defined() && span.meets(byte_span(t))) [[unlikely]]
      arg.disjoint(out, name, t, t_name);
  };
  apart(groups.plan, "plan");
  apart(groups.sorted_tokens, "sorted_tokens");
  apart(groups.ids, "ids");
  apart(groups.counts, "counts");
  apart(groups.starts, "starts");
  if (weights.table.defined()) return apart(weights.table, "table");
  for (int s = 0; s < weights.num_slices; ++s) {
    apart(weights.a[s], kANames[s]);
    apart(weights.b[s], kBNames[s]);
  }
  apart(weights.ranks, "ranks");
  apart(weights.scales, "scales");
}

}  // namespace mortar::lora
