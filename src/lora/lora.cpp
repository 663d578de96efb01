// SPDX-License-Identifier: Apache-2.0
// The LoRA ops: check every argument, build the problem, hand it to the device's backend.
#include "mortar/lora.h"

#include <algorithm>

#include "core/backend.h"
#include "core/check.h"
#include "core/check_view.h"
#include "lora/checks.h"
#include "lora/problem.h"

namespace mortar {
namespace {

using lora::Backend;
using lora::Needs;

constexpr auto& backend = choose_backend<lora::cpu::kBackend, lora::cuda::kBackend>;

lora::WorkspaceQuery workspace_query(const Tensor& x, const LoraWeights& weights) {
  lora::WorkspaceQuery q;
  q.num_tokens = x.shape[0];
  q.hidden = x.shape[1];
  q.num_adapters = weights.num_adapters;
  q.num_slices = weights.num_slices;
  q.max_rank = weights.max_rank;
  q.activation = x.dtype;
  q.weight = weights.dtype;
  return q;
}

void check_hidden(const ArgCheck& arg, const Tensor& x, const LoraWeights& weights) {
  check(x.shape[1] == weights.hidden, arg.op(), ": x must have K = ", weights.hidden,
        " columns as a has, got ", x.shape[1]);
}

/// x, the weights and y of lora_apply, checked.
lora::ApplyProblem apply_problem(const ArgCheck& arg, const Tensor& x, const LoraWeights& weights,
                                 const Tensor& y, std::int64_t offset) {
  lora::ApplyProblem p;
  p.x = lora::check_x(arg, x);
  p.num_tokens = x.shape[0];
  p.weights = lora::check_weights(arg, weights, Needs::kBoth, x.device);
  check_hidden(arg, x, weights);
  p.y = lora::check_y(arg, y, weights, offset, p.num_tokens, x.device);
  p.offset = offset;
  return p;
}

void check_plan_range(const ArgCheck& arg, std::int64_t num_tokens, std::int64_t num_adapters) {
  check(num_tokens >= 0 && num_tokens <= kLoraMaxTokens, arg.op(),
        ": number of tokens must be 0 to ", kLoraMaxTokens, ", got ", num_tokens);
  check(num_adapters >= 1 && num_adapters <= kLoraMaxAdapters, arg.op(),
        ": num_adapters must be 1 to ", kLoraMaxAdapters, ", got ", num_adapters);
}

/// One id per token, int32 or int64; without `num_tokens`, any number of them.
lora::IdsView check_ids(const ArgCheck& arg, const Tensor& ids, const char* name,
                        std::int64_t num_tokens, Device device) {
  arg.shape(ids, name, {num_tokens});
  arg.dtype(ids, name, {DType::kInt32, DType::kInt64});
  arg.device(ids, name, device);
  arg.contiguous(ids, name);
  check_memory(arg, ids, name);
  return {ids.data, ids.dtype == DType::kInt64};
}

/// The checks that lora_plan_report and lora_plan share.
void check_plan_tensor(const ArgCheck& arg, const Tensor& plan) {
  arg.ndim(plan, "plan", 1);
  arg.dtype(plan, "plan", {DType::kInt32});
  arg.contiguous(plan, "plan");
  arg.aligned(plan, "plan", kMemoryAlignment);
  check_memory(arg, plan, "plan");
}

}  // namespace

std::int64_t lora_plan_size(std::int64_t num_tokens, std::int64_t num_adapters) {
  check_plan_range(ArgCheck("lora_plan_size"), num_tokens, num_adapters);
  return lora::PlanLayout::make(num_tokens, num_adapters).size;
}

void lora_plan(const Tensor& token_adapter, std::int64_t num_adapters, const Tensor& plan,
               Stream stream) {
  const ArgCheck arg("lora_plan");
  arg.ndim(token_adapter, "token_adapter", 1);
  const lora::IdsView ids =
      check_ids(arg, token_adapter, "token_adapter", -1, token_adapter.device);
  const std::int64_t num_tokens = token_adapter.shape[0];
  check_plan_range(arg, num_tokens, num_adapters);
  check_plan_tensor(arg, plan);
  arg.device(plan, "plan", token_adapter.device);
  const std::int64_t size = lora::PlanLayout::make(num_tokens, num_adapters).size;
  check(plan.shape[0] >= size, arg.op(), ": plan must have at least ", size, " elements for ",
        num_tokens, " tokens and ", num_adapters, " adapters, got ", plan.shape[0]);
  arg.disjoint(plan, "plan", token_adapter, "token_adapter");
  backend(arg, plan.device).plan(ids, num_tokens, num_adapters, plan.ptr<std::int32_t>(), stream);
}

LoraPlanReport lora_plan_report(const Tensor& plan, Stream stream) {
  const ArgCheck arg("lora_plan_report");
  check_plan_tensor(arg, plan);
  check(plan.shape[0] >= lora::kPlanHeaderWords, arg.op(), ": plan must have at least ",
        static_cast<int>(lora::kPlanHeaderWords), " elements, got ", plan.shape[0]);
  std::int32_t header[lora::kPlanHeaderWords];
  backend(arg, plan.device).read_plan_header(plan.ptr<const std::int32_t>(), header, stream);
  LoraPlanReport report;
  report.num_tokens = header[lora::kPlanNumTokens];
  report.num_adapters = header[lora::kPlanNumAdapters];
  report.num_active = header[lora::kPlanNumActive];
  report.num_groups = header[lora::kPlanNumGroups];
  report.num_out_of_range = header[lora::kPlanNumOutOfRange];
  report.first_out_of_range = header[lora::kPlanFirstOutOfRange];
  return report;
}

void lora_shrink(const Tensor& x, const LoraWeights& weights, const LoraGroups& groups,
                 const Tensor& h, float scale, const Tensor& zero_rows, const Tensor& workspace,
                 Stream stream) {
  const ArgCheck arg("lora_shrink");
  lora::ShrinkProblem p;
  p.x = lora::check_x(arg, x);
  p.num_tokens = x.shape[0];
  p.weights = lora::check_weights(arg, weights, Needs::kA, x.device);
  check_hidden(arg, x, weights);
  p.h = lora::check_h(arg, h, weights, p.num_tokens, x.device);
  check_type(h.dtype == DType::kFloat32 || h.dtype == x.dtype, arg.op(),
             ": h must have dtype float32 or that of x (", dtype_name(x.dtype), "), got ",
             dtype_name(h.dtype));
  arg.no_self_overlap(h, "h");
  p.groups = lora::check_groups(arg, groups, p.num_tokens, weights.num_adapters, x.device);
  if (zero_rows.defined()) {
    p.zero_rows = check_ids(arg, zero_rows, "zero_rows", p.num_tokens, x.device);
    arg.disjoint(h, "h", zero_rows, "zero_rows");
  }
  const Backend& be = backend(arg, x.device);
  p.workspace = lora::check_workspace(arg, workspace,
                                      be.shrink_workspace(workspace_query(x, weights)), x.device);
  p.scale = scale;
  check_memory(arg, x, "x");
  check_memory(arg, h, "h");
  lora::check_memory_of_weights(arg, weights, Needs::kA);
  arg.disjoint(h, "h", x, "x");
  arg.disjoint(h, "h", workspace, "workspace");
  arg.disjoint(workspace, "workspace", x, "x");
  lora::check_apart(arg, h, "h", weights, groups);
  lora::check_apart(arg, workspace, "workspace", weights, groups);
  if (p.num_tokens == 0) return;
  be.shrink(p, stream);
}

std::int64_t lora_shrink_workspace(const Tensor& x, const LoraWeights& weights) {
  const ArgCheck arg("lora_shrink_workspace");
  lora::check_x(arg, x);
  lora::check_form(arg, weights, Needs::kA, x.device);
  return backend(arg, x.device).shrink_workspace(workspace_query(x, weights));
}

void lora_expand(const Tensor& h, const LoraWeights& weights, const LoraGroups& groups,
                 const Tensor& y, std::int64_t offset, bool add_inputs, Stream stream) {
  const ArgCheck arg("lora_expand");
  lora::ExpandProblem p;
  arg.ndim(y, "y", 2);
  p.num_tokens = y.shape[0];
  p.weights = lora::check_weights(arg, weights, Needs::kB, y.device);
  p.y = lora::check_y(arg, y, weights, offset, p.num_tokens, y.device);
  p.h = lora::check_h(arg, h, weights, p.num_tokens, y.device);
  p.groups = lora::check_groups(arg, groups, p.num_tokens, weights.num_adapters, y.device);
  p.offset = offset;
  p.add_inputs = add_inputs;
  check_memory(arg, y, "y");
  check_memory(arg, h, "h");
  lora::check_memory_of_weights(arg, weights, Needs::kB);
  arg.disjoint(y, "y", h, "h");
  lora::check_apart(arg, y, "y", weights, groups);
  const Backend& be = backend(arg, y.device);
  if (p.num_tokens == 0) return;
  be.expand(p, stream);
}

void lora_apply(const Tensor& x, const LoraWeights& weights, const LoraGroups& groups,
                const Tensor& y, std::int64_t offset, float scale, bool add_inputs,
                const Tensor& workspace, Stream stream) {
  const ArgCheck arg("lora_apply");
  lora::ApplyProblem p = apply_problem(arg, x, weights, y, offset);
  p.groups = lora::check_groups(arg, groups, p.num_tokens, weights.num_adapters, x.device);
  p.scale = scale;
  p.add_inputs = add_inputs;
  const Backend& be = backend(arg, x.device);
  p.workspace = lora::check_workspace(arg, workspace,
                                      be.apply_workspace(workspace_query(x, weights)), x.device);
  check_memory(arg, x, "x");
  check_memory(arg, y, "y");
  lora::check_memory_of_weights(arg, weights, Needs::kBoth);
  arg.disjoint(y, "y", x, "x");
  arg.disjoint(y, "y", workspace, "workspace");
  arg.disjoint(workspace, "workspace", x, "x");
  lora::check_apart(arg, y, "y", weights, groups);
  lora::check_apart(arg, workspace, "workspace", weights, groups);
  if (p.num_tokens == 0) return;
  be.apply(p, stream);
}

std::int64_t lora_apply_workspace(const Tensor& x, const LoraWeights& weights) {
  const ArgCheck arg("lora_apply_workspace");
  lora::check_x(arg, x);
  lora::check_form(arg, weights, Needs::kBoth, x.device);
  return backend(arg, x.device).apply_workspace(workspace_query(x, weights));
}

std::string lora_launch_plan(const Tensor& x, const LoraWeights& weights, const Tensor& y,
                             std::int64_t offset) {
  const ArgCheck arg("lora_launch_plan");
  const lora::ApplyProblem p = apply_problem(arg, x, weights, y, offset);
  const Backend& be = backend(arg, x.device);
  if (p.num_tokens == 0) return "lora_apply of 0 tokens: no kernels";
  return be.describe_apply(p);
}

LoraTraffic lora_traffic(std::int64_t hidden, std::span<const std::int64_t> widths,
                         std::span<const int> ranks, std::span<const std::int64_t> tokens,
                         DType activation, DType weight, bool add_inputs) {
  const ArgCheck arg("lora_traffic");
  check(ranks.size() == tokens.size() * widths.size(), arg.op(),
        ": ranks must have one entry per adapter and slice = ", tokens.size(), " x ", widths.size(),
        ", got ", ranks.size());
  LoraTraffic traffic;
  for (std::size_t a = 0; a < tokens.size(); ++a) {
    bool reads_x = false;
    for (std::size_t s = 0; s < widths.size() && tokens[a] > 0; ++s) {
      const std::int64_t rank = ranks[a * widths.size() + s];
      if (rank <= 0) continue;
      reads_x = true;
      traffic.weight_bytes += rank * (hidden + widths[s]) * dtype_size(weight);
      traffic.y_bytes += tokens[a] * widths[s] * dtype_size(activation) * (add_inputs ? 2 : 1);
      traffic.flops += 2 * tokens[a] * rank * (hidden + widths[s]);
    }
    if (reads_x) traffic.x_bytes += tokens[a] * hidden * dtype_size(activation);
  }
  return traffic;
}

}  // namespace mortar
