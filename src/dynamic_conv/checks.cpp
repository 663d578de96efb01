// SPDX-License-Identifier: Apache-2.0
#include "dynamic_conv/checks.h"

#include <unordered_map>

#include "core/check_view.h"

namespace mortar::dynamic_conv {
namespace {

void check_float(const ArgCheck& arg, const Tensor& t, const char* name) {
  arg.dtype(t, name, {DType::kFloat32, DType::kFloat16, DType::kBFloat16});
}

int check_width(const ArgCheck& arg, const Tensor& k) {
  const std::int64_t width = k.size(-1);
  check(width >= 1 && width <= kMaxWidth, arg.op(), ": kernels must have 1 to ", kMaxWidth,
        " taps in its last dimension, got ", width);
  return static_cast<int>(width);
}

/// Channels are dense. Without elements strides mean nothing: PyTorch expands the gradient of an
/// empty sum with strides of 0.
void check_channels_dense(const ArgCheck& arg, const Tensor& t, const char* name) {
  if (t.numel() > 0) arg.last_dim_dense(t, name);
}

/// Channels, and the W taps of each, are dense; dimensions of size 1 have no stride to speak of.
void check_taps_dense(const ArgCheck& arg, const Tensor& t, const char* name) {
  if (t.numel() == 0) return;
  arg.last_dim_dense(t, name);
  const std::int64_t width = t.size(-1);
  check(t.size(-2) <= 1 || t.stride(-2) == width, arg.op(), ": ", name,
        " must be dense in its last ", "two dimensions (strides ", width, ", 1), got strides (",
        t.stride(-2), ", ", t.stride(-1), ")");
}

int check_state_length(const ArgCheck& arg, const Tensor& t, const char* name, int width) {
  const std::int64_t length = t.size(-1);
  check(length == width || length == width - 1, arg.op(), ": ", name,
        " must have a length of W = ", width, " or W - 1 = ", width - 1,
        " in its last dimension, got ", length);
  return static_cast<int>(length);
}

State state_view(const Tensor& t) {
  return {t.numel() > 0 ? t.data : nullptr, t.stride(0), t.stride(1), t.stride(2)};
}

}  // namespace

Signal signal(const Tensor& t) { return {t.data, t.stride(0), t.stride(1)}; }

Shape check_shape(const ArgCheck& arg, const Tensor& x, const Tensor& k, const Tensor& cu_seqlens,
                  bool silu) {
  arg.ndim(x, "x", 3);
  check_extents(arg, x, "x");
  check_float(arg, x, "x");
  check_channels_dense(arg, x, "x");
  arg.ndim(k, "kernels", 4);
  Shape s;
  s.width = check_width(arg, k);
  arg.shape(k, "kernels", {x.size(0), x.size(1), x.size(2), s.width});
  check_float(arg, k, "kernels");
  arg.device(k, "kernels", x.device);
  check_taps_dense(arg, k, "kernels");
  check(x.size(1) <= kMaxTime, arg.op(), ": x must have at most ", kMaxTime, " time steps, got ",
        x.size(1));
  check(x.size(0) <= kMaxTime && x.size(2) <= kMaxTime, arg.op(), ": x must have at most ",
        kMaxTime, " batch rows and channels, got shape ", shape_string(x));
  s.batch = x.size(0);
  s.time = static_cast<int>(x.size(1));
  s.channels = x.size(2);
  s.x_dtype = x.dtype;
  s.k_dtype = k.dtype;
  s.silu = silu;
  s.sequences.time = s.time;
  s.sequences.count = static_cast<int>(s.batch);
  if (!cu_seqlens.defined()) return s;
  check_starts_tensor(arg, cu_seqlens);
  arg.device(cu_seqlens, "cu_seqlens", x.device);
  check(s.batch == 1, arg.op(), ": x must have a batch of 1 with cu_seqlens, got ", s.batch);
  s.sequences.count = static_cast<int>(cu_seqlens.size(0) - 1);
  s.sequences.wide = cu_seqlens.dtype == DType::kInt64;
  if (s.sequences.count > 0) s.sequences.starts = cu_seqlens.data;
  if (x.device.type == DeviceType::kCPU) {
    check_starts(arg, {cu_seqlens.data, s.sequences.wide, cu_seqlens.size(0)}, s.time);
  }
  return s;
}

Signal check_like(const ArgCheck& arg, const Tensor& t, const char* name, const Tensor& model,
                  const char* model_name) {
  arg.ndim(t, name, model.ndim);
  for (int d = 0; d < model.ndim; ++d) {
    check(t.size(d) == model.size(d), arg.op(), ": ", name, " must have the shape of ", model_name,
          " ", shape_string(model), ", got ", shape_string(t));
  }
  check_type(t.dtype == model.dtype, arg.op(), ": ", name, " must have the dtype of ", model_name,
             " (", dtype_name(model.dtype), "), got ", dtype_name(t.dtype));
  arg.device(t, name, model.device);
  if (model.ndim == 4) {
    check_taps_dense(arg, t, name);
  } else {
    check_channels_dense(arg, t, name);
  }
  return signal(t);
}

State check_state(const ArgCheck& arg, const Tensor& t, const char* name, const Tensor& x,
                  Shape* shape) {
  if (!t.defined()) return {};
  arg.ndim(t, name, 3);
  const int length = check_state_length(arg, t, name, shape->width);
  arg.shape(t, name, {shape->sequences.count, shape->channels, length});
  check_type(t.dtype == x.dtype, arg.op(), ": ", name, " must have the dtype of x (",
             dtype_name(x.dtype), "), got ", dtype_name(t.dtype));
  arg.device(t, name, x.device);
  check(shape->state_length == 0 || shape->state_length == length, arg.op(), ": ", name,
        " must have the length of the other states (", shape->state_length, "), got ", length);
  if (t.numel() > 0) shape->state_length = length;
  return state_view(t);
}

StepProblem check_step(const ArgCheck& arg, const Tensor& x, const Tensor& k, const Tensor& state,
                       const Tensor& slots, const Tensor& y, bool silu) {
  arg.ndim(x, "x", 2);
  check_extents(arg, x, "x");
  check_float(arg, x, "x");
  check_channels_dense(arg, x, "x");
  arg.ndim(k, "kernels", 3);
  StepProblem p;
  p.width = check_width(arg, k);
  arg.shape(k, "kernels", {x.size(0), x.size(1), p.width});
  check_float(arg, k, "kernels");
  arg.device(k, "kernels", x.device);
  check_taps_dense(arg, k, "kernels");
  arg.ndim(state, "state", 3);
  check_extents(arg, state, "state");
  p.state_length = check_state_length(arg, state, "state", p.width);
  arg.shape(state, "state", {slots.defined() ? -1 : x.size(0), x.size(1), p.state_length});
  check_type(state.dtype == x.dtype, arg.op(), ": state must have the dtype of x (",
             dtype_name(x.dtype), "), got ", dtype_name(state.dtype));
  arg.device(state, "state", x.device);
  arg.shape(y, "y", {x.size(0), x.size(1)});
  check_type(y.dtype == x.dtype, arg.op(), ": y must have the dtype of x (", dtype_name(x.dtype),
             "), got ", dtype_name(y.dtype));
  arg.device(y, "y", x.device);
  check_channels_dense(arg, y, "y");
  if (slots.defined()) {
    check_slots_tensor(arg, slots);
    arg.device(slots, "slots", x.device);
    arg.shape(slots, "slots", {x.size(0)});
    p.slots = slots.ptr<const std::int32_t>();
  }
  check(x.size(0) <= kMaxTime && x.size(1) <= kMaxTime, arg.op(), ": x must have at most ",
        kMaxTime, " rows and channels, got shape ", shape_string(x));
  p.rows = x.size(0);
  p.channels = x.size(1);
  p.num_slots = state.size(0);
  p.x_dtype = x.dtype;
  p.k_dtype = k.dtype;
  p.silu = silu;
  p.x = {x.data, x.stride(0), 0};
  p.k = {k.data, k.stride(0), 0};
  p.y = {y.data, y.stride(0), 0};
  p.state = state_view(state);
  return p;
}

void check_outputs_apart(const ArgCheck& arg, std::initializer_list<NamedTensor> outputs,
                         std::initializer_list<NamedTensor> inputs) {
  for (const NamedTensor& in : inputs) check_memory(arg, in.tensor, in.name);
  for (auto out = outputs.begin(); out != outputs.end(); ++out) {
    check_memory(arg, out->tensor, out->name);
    arg.no_self_overlap(out->tensor, out->name);
    for (auto other = outputs.begin(); other != out; ++other) {
      arg.disjoint(out->tensor, out->name, other->tensor, other->name);
    }
    for (const NamedTensor& in : inputs) arg.disjoint(out->tensor, out->name, in.tensor, in.name);
  }
}

void check_starts_tensor(const ArgCheck& arg, const Tensor& cu_seqlens) {
  arg.ndim(cu_seqlens, "cu_seqlens", 1);
  arg.dtype(cu_seqlens, "cu_seqlens", {DType::kInt32, DType::kInt64});
  arg.contiguous(cu_seqlens, "cu_seqlens");
  check(cu_seqlens.size(0) >= 1 && cu_seqlens.size(0) <= kMaxTime, arg.op(),
        ": cu_seqlens must have 1 to ", kMaxTime, " elements, got ", cu_seqlens.size(0));
  check_memory(arg, cu_seqlens, "cu_seqlens");
}

void check_slots_tensor(const ArgCheck& arg, const Tensor& slots) {
  arg.ndim(slots, "slots", 1);
  arg.dtype(slots, "slots", {DType::kInt32});
  arg.contiguous(slots, "slots");
  check_memory(arg, slots, "slots");
}

void check_starts(const ArgCheck& arg, const Integers& starts, std::int64_t num_tokens) {
  check(starts[0] == 0, arg.op(), ": cu_seqlens must start at 0, got ", starts[0]);
  for (std::int64_t i = 1; i < starts.size; ++i) {
    check(starts[i] >= starts[i - 1], arg.op(), ": cu_seqlens must not decrease, got ", starts[i],
          " after ", starts[i - 1], " at index ", i);
  }
  check(starts[starts.size - 1] == num_tokens, arg.op(),
        ": cu_seqlens must end at T = ", num_tokens, ", got ", starts[starts.size - 1]);
}

void check_slots(const ArgCheck& arg, const Integers& slots, std::int64_t num_slots) {
  std::unordered_map<std::int64_t, std::int64_t> index_of;
  for (std::int64_t i = 0; i < slots.size; ++i) {
    check(slots[i] >= -1 && slots[i] < num_slots, arg.op(), ": slots must lie between -1 and ",
          num_slots - 1, ", got ", slots[i], " at index ", i);
    if (slots[i] < 0) continue;
    const auto [earlier, is_new] = index_of.emplace(slots[i], i);
    check(is_new, arg.op(), ": slots must not repeat, got slot ", slots[i], " at index ",
          earlier->second, " and at index ", i);
  }
}

}  // namespace mortar::dynamic_conv
