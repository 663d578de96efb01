// SPDX-License-Identifier: Apache-2.0
// The LoRA ops for TVM-FFI. Calls are packed and flat, in this order:
//
//   lora_shrink  x, h, workspace, scale, zero_rows, GROUPS, WEIGHTS
//   lora_expand  h, y, offset, add_inputs, GROUPS, WEIGHTS
//   lora_apply   x, y, workspace, offset, scale, add_inputs, GROUPS, WEIGHTS
//   lora_weights WEIGHTS -> handle
//
//   GROUPS   plan, num_tokens, num_adapters
//            or None, sorted_tokens, ids, counts, starts, None, num_groups, no_lora
//            or None, sorted_tokens, ids, counts, starts, a tensor on the CPU that holds
//               num_groups, no_lora
//   WEIGHTS  None, ranks, scales, len(a), *a, *b    or table, dtype, max_rank, hidden, *widths
//            or handle: the same, read and checked before; whoever made it keeps the memory alive
//
// num_groups: only the first that many segments are looked at. no_lora: a bool or uint8 on the
// CPU: where it is not zero, the op returns without any write, and torch_<op> -1; or None, but for
// torch_<op>. A stacked tensor may have an extra dimension of size 1 after its first
// ([L, 1, R, K]).
//
// A workspace that is None is memory of the framework's allocator, for the time of the call; the
// torch_ functions say how much they need instead (packed_call.h), and take in front of their other
// numbers the stream that a kept workspace is for (call_workspace.h).
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/dtype.h>
#include <tvm/ffi/object.h>

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "call_workspace.h"
#include "convert.h"
#include "mortar/lora.h"
#include "packed_call.h"

namespace mortar::ffi {
namespace {

using tvm::ffi::Any;
using tvm::ffi::Array;

/// A handle of weights that Python keeps.
class WeightsObj : public tvm::ffi::Object {
 public:
  explicit WeightsObj(const LoraWeights& w) : weights(w) {}
  LoraWeights weights;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("mortar.LoraWeights", WeightsObj, tvm::ffi::Object);
};
class WeightsRef : public tvm::ffi::ObjectRef {
 public:
  explicit WeightsRef(tvm::ffi::ObjectPtr<WeightsObj> object) : ObjectRef(std::move(object)) {}
  TVM_FFI_DEFINE_OBJECT_REF_METHODS_NOTNULLABLE(WeightsRef, ObjectRef, WeightsObj);
};

template <class Source>
class LoraArgs : public ArgReader<Source> {
 public:
  using ArgReader<Source>::ArgReader;
  using ArgReader<Source>::integer;
  using ArgReader<Source>::op;
  using ArgReader<Source>::remaining;
  using ArgReader<Source>::remaining_tensors;
  using ArgReader<Source>::tensor;

  LoraGroups groups() {
    const Tensor plan = tensor("plan");
    if (plan.defined()) {
      const std::int64_t num_tokens = integer("num_tokens");
      return LoraGroups::from_plan(plan, num_tokens, integer("num_adapters"));
    }
    const Tensor sorted_tokens = tensor("sorted_tokens");
    Tensor ids = tensor("ids"), counts = tensor("counts");
    const Tensor starts = tensor("starts");
    const Tensor counted = tensor("num_groups");
    const std::int64_t num_groups = counted.defined() ? number_in(counted) : integer("num_groups");
    for (Tensor* t : {&ids, &counts}) {
      if (t->ndim == 1) t->shape[0] = std::min(t->shape[0], std::max<std::int64_t>(num_groups, 0));
    }
    no_lora_ = this->flag("no_lora");
    return LoraGroups::from_segments(sorted_tokens, ids, counts, starts);
  }

  /// Whether the groups, which have been read, say that there is nothing to do; then that is the
  /// result.
  bool no_lora(Any* result) const {
    if (no_lora_) *result = kNothing;
    return no_lora_;
  }

  /// Valid as long as the reader and the arguments.
  const LoraWeights& weights() {
    if (remaining() > 0) {
      if (const auto* handle = this->peek().template as<WeightsObj>()) return handle->weights;
    }
    const Tensor table = tensor("table");
    if (table.defined()) return read_weights_.emplace(table_weights(table));
    const Tensor ranks = tensor("ranks"), scales = tensor("scales");
    return read_weights_.emplace(stacked_weights(ranks, scales, integer("len(a)")));
  }

 private:
  std::int64_t number_in(const Tensor& t) {
    const bool wide = t.dtype == DType::kInt64;
    check_type((wide || t.dtype == DType::kInt32) && t.device.type == DeviceType::kCPU, op(),
               ": num_groups must be a number or an int32 or int64 tensor on the CPU, got ",
               dtype_name(t.dtype), " on ", device_string(t.device));
    check(t.numel() == 1, op(), ": num_groups must have one element, got shape ", shape_string(t));
    return wide ? *t.ptr<const std::int64_t>() : *t.ptr<const std::int32_t>();
  }

  LoraWeights table_weights(const Tensor& table) {
    const DType dtype = this->dtype("dtype");
    constexpr std::int64_t kLargest = std::numeric_limits<int>::max();
    const int max_rank =
        static_cast<int>(std::clamp<std::int64_t>(integer("max_rank"), -1, kLargest));
    const std::int64_t hidden = integer("hidden");
    std::array<std::int64_t, kLoraMaxSlices + 1> widths{};
    const int count = std::min<int>(remaining(), static_cast<int>(widths.size()));
    for (int s = 0; s < count; ++s) widths[s] = integer("widths");
    return LoraWeights::from_table(table, dtype, max_rank, hidden,
                                   std::span(widths.data(), static_cast<std::size_t>(count)));
  }

  LoraWeights stacked_weights(const Tensor& ranks, const Tensor& scales, std::int64_t num_a) {
    check(num_a >= 0 && num_a <= remaining_tensors(), op(),
          ": a must hold as many tensors as len(a) = ", num_a, ", got ", remaining_tensors());
    // At most one tensor more than the limit is kept: LoraWeights then sees that there are too
    // many. The arrays are thread_local because clearing their two kilobytes in every call would
    // take as long as all the rest of this function.
    static thread_local constinit std::array<Tensor, kLoraMaxSlices + 1> a, b;
    const std::size_t taken_a = matrices(a, static_cast<int>(num_a), "a");
    const std::size_t taken_b = matrices(b, remaining_tensors(), "b");
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

  std::optional<LoraWeights> read_weights_;
  bool no_lora_ = false;
};

template <class Source>
void shrink(PackedArgs packed, Any* result) {
  LoraArgs<Source> args(packed, "lora_shrink");
  const Tensor x = args.tensor("x"), h = args.tensor("h"), given = args.tensor("workspace");
  const std::int64_t kept_for = read_stream_of_workspace(args);
  const auto scale = static_cast<float>(args.template value<double>("scale"));
  const Tensor zero_rows = args.tensor("zero_rows");
  const LoraGroups groups = args.groups();
  if (args.no_lora(result)) return;
  const LoraWeights& weights = args.weights();
  const typename Source::Call call(x.device);
  const auto workspace = kept_workspace<Source>(given, kept_for, x.device, call.stream,
                                                [&] { return lora_shrink_workspace(x, weights); });
  lora_shrink(x, weights, groups, h, scale, zero_rows, workspace, call.stream);
}

template <class Source>
void expand(PackedArgs packed, Any* result) {
  LoraArgs<Source> args(packed, "lora_expand");
  const Tensor h = args.tensor("h"), y = args.tensor("y");
  const auto offset = args.integer("offset");
  const auto add_inputs = args.template value<bool>("add_inputs");
  const LoraGroups groups = args.groups();
  if (args.no_lora(result)) return;
  const LoraWeights& weights = args.weights();
  const typename Source::Call call(y.device);
  lora_expand(h, weights, groups, y, offset, add_inputs, call.stream);
}

template <class Source>
void apply(PackedArgs packed, Any* result) {
  LoraArgs<Source> args(packed, "lora_apply");
  const Tensor x = args.tensor("x"), y = args.tensor("y"), given = args.tensor("workspace");
  const std::int64_t kept_for = read_stream_of_workspace(args);
  const auto offset = args.integer("offset");
  const auto scale = static_cast<float>(args.template value<double>("scale"));
  const auto add_inputs = args.template value<bool>("add_inputs");
  const LoraGroups groups = args.groups();
  if (args.no_lora(result)) return;
  const LoraWeights& weights = args.weights();
  const typename Source::Call call(x.device);
  const auto workspace = kept_workspace<Source>(given, kept_for, x.device, call.stream,
                                                [&] { return lora_apply_workspace(x, weights); });
  lora_apply(x, weights, groups, y, offset, scale, add_inputs, workspace, call.stream);
}

template <class Source>
void plan(PackedArgs packed, Any*) {
  LoraArgs<Source> args(packed, "lora_plan");
  const Tensor ids = args.tensor("token_adapter");
  const auto num_adapters = args.integer("num_adapters");
  const Tensor out = args.tensor("plan");
  const typename Source::Call call(ids.device);
  lora_plan(ids, num_adapters, out, call.stream);
}

/// x, y, offset, WEIGHTS -> text
void launch_plan(PackedArgs packed, Any* result) {
  LoraArgs<FfiObjects> args(packed, "lora_launch_plan");
  const Tensor x = args.tensor("x"), y = args.tensor("y");
  const auto offset = args.integer("offset");
  const DeviceGuard guard(x.device);
  *result = tvm::ffi::String(lora_launch_plan(x, args.weights(), y, offset));
}

void make_weights(PackedArgs packed, Any* result) {
  LoraArgs<FfiObjects> args(packed, "lora_weights");
  *result = WeightsRef(tvm::ffi::make_object<WeightsObj>(args.weights()));
}

/// {max_rank, num_adapters, hidden, *widths}
Array<std::int64_t> describe_weights(const WeightsRef& ref) {
  const LoraWeights& w = ref->weights;
  std::vector<std::int64_t> out = {w.max_rank, w.num_adapters, w.hidden};
  out.insert(out.end(), w.widths.begin(), w.widths.begin() + w.num_slices);
  return Array<std::int64_t>(out.begin(), out.end());
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
std::int64_t apply_workspace(bool on_cuda, std::int64_t num_tokens, std::int64_t hidden,
                             DLDataType x_dtype, std::int64_t num_adapters, std::int64_t num_slices,
                             std::int64_t max_rank, DLDataType weight_dtype) {
  const Device device{on_cuda ? DeviceType::kCUDA : DeviceType::kCPU, 0};
  const Tensor x(nullptr, to_dtype(x_dtype, "lora_workspace", "x"), {num_tokens, hidden}, device);
  const Tensor table(nullptr, DType::kInt64, {num_adapters, num_slices, 4}, device);
  const std::vector<std::int64_t> widths(
      static_cast<std::size_t>(std::max<std::int64_t>(num_slices, 0)));
  return lora_apply_workspace(
      x, LoraWeights::from_table(table, to_dtype(weight_dtype, "lora_workspace", "weights"),
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

MORTAR_EXPORT_PACKED(lora_plan, mortar::ffi::plan<mortar::ffi::FfiObjects>);
MORTAR_EXPORT_PACKED(lora_shrink, mortar::ffi::shrink<mortar::ffi::FfiObjects>);
MORTAR_EXPORT_PACKED(lora_expand, mortar::ffi::expand<mortar::ffi::FfiObjects>);
MORTAR_EXPORT_PACKED(lora_apply, mortar::ffi::apply<mortar::ffi::FfiObjects>);
MORTAR_EXPORT_PACKED(lora_weights, mortar::ffi::make_weights);
MORTAR_EXPORT_PACKED(lora_launch_plan, mortar::ffi::launch_plan);

MORTAR_EXPORT_TORCH(torch_lora_plan, plan, TorchObjects);
MORTAR_EXPORT_TORCH(torch_lora_shrink, shrink, TorchObjects);
MORTAR_EXPORT_TORCH(torch_lora_expand, expand, TorchObjects);
MORTAR_EXPORT_TORCH(torch_lora_apply, apply, TorchObjects);

TVM_FFI_DLL_EXPORT_TYPED_FUNC(lora_weights_describe, wrapped<mortar::ffi::describe_weights>)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(lora_plan_size, wrapped<mortar::ffi::plan_size>)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(lora_plan_report, wrapped<mortar::ffi::plan_report>)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(lora_apply_workspace, wrapped<mortar::ffi::apply_workspace>)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(lora_traffic, wrapped<mortar::ffi::traffic>)
