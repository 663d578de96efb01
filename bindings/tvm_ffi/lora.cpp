// SPDX-License-Identifier: Apache-2.0
// The LoRA ops for TVM-FFI. Calls are packed and flat, in this order:
//
//   lora_shrink  x, h, workspace, scale, zero_rows, GROUPS, WEIGHTS
//   lora_expand  h, y, offset, add_inputs, GROUPS, WEIGHTS
//   lora_apply   x, y, workspace, offset, scale, add_inputs, GROUPS, WEIGHTS
//   lora_weights WEIGHTS
//
//   GROUPS   plan                       or None, sorted_tokens, ids, counts, starts, num_groups
//   WEIGHTS  None, ranks, scales, len(a), *a, *b    or table, dtype, max_rank, hidden, *widths
//
// num_groups: only the first that many segments are looked at. A stacked tensor may have an extra
// dimension of size 1 after its first ([L, 1, R, K]).
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/dtype.h>

#include <algorithm>
#include <array>
#include <vector>

#include "convert.h"
#include "mortar/lora.h"

namespace mortar::ffi {
namespace {

using tvm::ffi::Any;
using tvm::ffi::Array;

/// Reads the arguments of a packed call from left to right.
class ArgReader {
 public:
  ArgReader(PackedArgs args, const char* op) : args_(args), op_(op) {}

  int remaining() const { return args_.size() - next_; }

  Tensor tensor(const char* name) { return to_tensor(take(name), op_, name); }

  template <class T>
  T value(const char* name) {
    const std::optional<T> v = take(name).template try_cast<T>();
    check_type(v.has_value(), op_, ": ", name, " must be a number, got another type");
    return *v;
  }

  DType dtype(const char* name) {
    const std::optional<DLDataType> v = take(name).try_cast<DLDataType>();
    check_type(v.has_value(), op_, ": ", name, " must be a dtype, got another type");
    return to_dtype(*v, op_, name);
  }

  LoraGroups groups() {
    const Tensor plan = tensor("plan");
    if (plan.defined()) return LoraGroups::from_plan(plan);
    const Tensor sorted_tokens = tensor("sorted_tokens");
    Tensor ids = tensor("ids"), counts = tensor("counts");
    const Tensor starts = tensor("starts");
    const std::int64_t num_groups = value<std::int64_t>("num_groups");
    for (Tensor* t : {&ids, &counts}) {
      if (t->ndim == 1) t->shape[0] = std::min(t->shape[0], std::max<std::int64_t>(num_groups, 0));
    }
    return LoraGroups::from_segments(sorted_tokens, ids, counts, starts);
  }

  LoraWeights weights() {
    const Tensor table = tensor("table");
    return table.defined() ? table_weights(table) : stacked_weights();
  }

 private:
  AnyView take(const char* name) {
    check_type(next_ < args_.size(), op_, ": ", name, " is required, got ", args_.size(),
               " arguments");
    return args_[next_++];
  }

  LoraWeights table_weights(const Tensor& table) {
    const DType dtype = this->dtype("dtype");
    const int max_rank = static_cast<int>(
        std::clamp<std::int64_t>(value<std::int64_t>("max_rank"), -1, kLoraMaxRank + 1));
    const std::int64_t hidden = value<std::int64_t>("hidden");
    std::array<std::int64_t, kLoraMaxSlices + 1> widths{};
    const int count = std::min<int>(remaining(), static_cast<int>(widths.size()));
    for (int s = 0; s < count; ++s) widths[s] = value<std::int64_t>("widths");
    return LoraWeights::from_table(table, dtype, max_rank, hidden,
                                   std::span(widths.data(), static_cast<std::size_t>(count)));
  }

  LoraWeights stacked_weights() {
    const Tensor ranks = tensor("ranks"), scales = tensor("scales");
    const std::int64_t num_a = value<std::int64_t>("len(a)");
    check(num_a >= 0 && num_a <= remaining(), op_,
          ": a must hold as many tensors as len(a) = ", num_a, ", got ", remaining());
    // One more than the limit is enough for LoraWeights to see that there are too many.
    std::array<Tensor, kLoraMaxSlices + 1> a, b;
    const std::size_t taken_a = matrices(a, static_cast<int>(num_a), "a");
    const std::size_t taken_b = matrices(b, remaining(), "b");
    return LoraWeights::stacked(std::span(a.data(), taken_a), std::span(b.data(), taken_b), ranks,
                                scales);
  }

  template <std::size_t N>
  std::size_t matrices(std::array<Tensor, N>& out, int count, const char* name) {
    for (int s = 0; s < count; ++s) {
      Tensor t = tensor(name);
      if (t.ndim == 4 && t.shape[1] == 1) {
        t.shape = {t.shape[0], t.shape[2], t.shape[3]};
        t.strides = {t.strides[0], t.strides[2], t.strides[3]};
        t.ndim = 3;
      }
      if (static_cast<std::size_t>(s) < N) out[s] = t;
    }
    return std::min(static_cast<std::size_t>(count), N);
  }

  PackedArgs args_;
  const char* op_;
  int next_ = 0;
};

void shrink(PackedArgs packed, Any*) {
  ArgReader args(packed, "lora_shrink");
  const Tensor x = args.tensor("x"), h = args.tensor("h"), workspace = args.tensor("workspace");
  const auto scale = static_cast<float>(args.value<double>("scale"));
  const Tensor zero_rows = args.tensor("zero_rows");
  const LoraGroups groups = args.groups();
  const LoraWeights weights = args.weights();
  const DeviceGuard guard(x.device);
  lora_shrink(x, weights, groups, h, scale, zero_rows, workspace, current_stream(x.device));
}

void expand(PackedArgs packed, Any*) {
  ArgReader args(packed, "lora_expand");
  const Tensor h = args.tensor("h"), y = args.tensor("y");
  const auto offset = args.value<std::int64_t>("offset");
  const auto add_inputs = args.value<bool>("add_inputs");
  const LoraGroups groups = args.groups();
  const LoraWeights weights = args.weights();
  const DeviceGuard guard(y.device);
  lora_expand(h, weights, groups, y, offset, add_inputs, current_stream(y.device));
}

void apply(PackedArgs packed, Any*) {
  ArgReader args(packed, "lora_apply");
  const Tensor x = args.tensor("x"), y = args.tensor("y"), workspace = args.tensor("workspace");
  const auto offset = args.value<std::int64_t>("offset");
  const auto scale = static_cast<float>(args.value<double>("scale"));
  const auto add_inputs = args.value<bool>("add_inputs");
  const LoraGroups groups = args.groups();
  const LoraWeights weights = args.weights();
  const DeviceGuard guard(x.device);
  lora_apply(x, weights, groups, y, offset, scale, add_inputs, workspace, current_stream(x.device));
}

/// WEIGHTS -> {max_rank, num_adapters, hidden, *widths}, checked.
void describe_weights(PackedArgs packed, Any* result) {
  ArgReader args(packed, "lora_weights");
  const LoraWeights w = args.weights();
  std::vector<std::int64_t> out = {w.max_rank, w.num_adapters, w.hidden};
  out.insert(out.end(), w.widths.begin(), w.widths.begin() + w.num_slices);
  *result = Array<std::int64_t>(out.begin(), out.end());
}

void plan(TensorView token_adapter, std::int64_t num_adapters, TensorView plan) {
  const Tensor ids = to_tensor(token_adapter, "lora_plan", "token_adapter");
  const DeviceGuard guard(ids.device);
  lora_plan(ids, num_adapters, to_tensor(plan, "lora_plan", "plan"), current_stream(ids.device));
}

/// {num_tokens, num_adapters, num_active, num_groups, num_out_of_range, first_out_of_range}
Array<std::int64_t> plan_report(TensorView plan) {
  const Tensor t = to_tensor(plan, "lora_plan_report", "plan");
  const DeviceGuard guard(t.device);
  const LoraPlanReport r = lora_plan_report(t, current_stream(t.device));
  return {r.num_tokens, r.num_adapters,     r.num_active,
          r.num_groups, r.num_out_of_range, r.first_out_of_range};
}

std::int64_t plan_size(std::int64_t num_tokens, std::int64_t num_adapters) {
  return lora_plan_size(num_tokens, num_adapters);
}

/// A workspace depends on sizes and dtypes alone, so the query takes views without data.
template <auto Query>
std::int64_t workspace(bool on_cuda, std::int64_t num_tokens, std::int64_t hidden,
                       DLDataType x_dtype, std::int64_t num_adapters, std::int64_t num_slices,
                       std::int64_t max_rank, DLDataType weight_dtype) {
  const Device device{on_cuda ? DeviceType::kCUDA : DeviceType::kCPU, 0};
  const Tensor x(nullptr, to_dtype(x_dtype, "lora_workspace", "x"), {num_tokens, hidden}, device);
  const Tensor table(nullptr, DType::kInt64, {num_adapters, num_slices, 4}, device);
  const std::vector<std::int64_t> widths(
      static_cast<std::size_t>(std::max<std::int64_t>(num_slices, 0)));
  return Query(x,
               LoraWeights::from_table(table, to_dtype(weight_dtype, "lora_workspace", "weights"),
                                       static_cast<int>(max_rank), hidden, widths));
}

/// {weight_bytes, x_bytes, y_bytes, flops}
Array<std::int64_t> traffic(std::int64_t hidden, const Array<std::int64_t>& widths,
                            const Array<std::int64_t>& ranks, const Array<std::int64_t>& tokens,
                            DLDataType activation, DLDataType weight, bool add_inputs) {
  const std::vector<std::int64_t> w(widths.begin(), widths.end());
  const std::vector<std::int64_t> t(tokens.begin(), tokens.end());
  std::vector<int> r;
  for (std::int64_t rank : ranks) r.push_back(static_cast<int>(rank));
  const LoraTraffic out =
      lora_traffic(hidden, w, r, t, to_dtype(activation, "lora_traffic", "activation"),
                   to_dtype(weight, "lora_traffic", "weight"), add_inputs);
  return {out.weight_bytes, out.x_bytes, out.y_bytes, out.flops};
}

}  // namespace
}  // namespace mortar::ffi

using mortar::ffi::wrapped;

MORTAR_EXPORT_PACKED(lora_shrink, mortar::ffi::shrink);
MORTAR_EXPORT_PACKED(lora_expand, mortar::ffi::expand);
MORTAR_EXPORT_PACKED(lora_apply, mortar::ffi::apply);
MORTAR_EXPORT_PACKED(lora_weights, mortar::ffi::describe_weights);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(lora_plan, wrapped<mortar::ffi::plan>)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(lora_plan_size, wrapped<mortar::ffi::plan_size>)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(lora_plan_report, wrapped<mortar::ffi::plan_report>)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(lora_shrink_workspace,
                              wrapped<mortar::ffi::workspace<mortar::lora_shrink_workspace>>)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(lora_apply_workspace,
                              wrapped<mortar::ffi::workspace<mortar::lora_apply_workspace>>)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(lora_traffic, wrapped<mortar::ffi::traffic>)
