// SPDX-License-Identifier: Apache-2.0
#include "fp8_rmsnorm/checks.h"

#include <array>
#include <cmath>
#include <cstddef>

#include "core/byte_span.h"
#include "core/check_view.h"

namespace mortar::fp8_rmsnorm {
namespace {

constexpr DType kF32 = DType::kFloat32, kF16 = DType::kFloat16, kBF16 = DType::kBFloat16;
constexpr DType kE4M3 = DType::kFloat8E4M3, kE5M2 = DType::kFloat8E5M2;

bool is_float8(DType dtype) { return dtype == kE4M3 || dtype == kE5M2; }
bool is_group(std::int64_t n) { return n == 16 || n == 32 || n == 64 || n == 128; }

Rows rows(const Tensor& t) {
  if (!t.defined()) return {};
  return {t.data, t.dtype, t.ndim == 2 ? t.stride(0) : 0};
}

/// [M, N] of any strides that backends take: dense rows that do not run backwards. Without elements
/// strides mean nothing: PyTorch expands the gradient of an empty sum with strides of 0.
void check_rows(const ArgCheck& arg, const Tensor& t, const char* name) {
  if (t.numel() == 0) return;
  arg.last_dim_dense(t, name);
  check(t.size(0) <= 1 || t.stride(0) >= 0, arg.op(), ": ", name,
        " must have a row stride of at least 0, got ", t.stride(0));
}

/// A matrix of dense rows with the shape and device of `model`.
Rows check_matrix(const ArgCheck& arg, const Tensor& t, const char* name, const Tensor& model) {
  arg.shape(t, name, {model.size(0), model.size(1)});
  arg.device(t, name, model.device);
  check_rows(arg, t, name);
  return rows(t);
}

/// A dense vector of `n` elements.
void check_vector(const ArgCheck& arg, const Tensor& t, const char* name, std::int64_t n,
                  Device device) {
  arg.shape(t, name, {n});
  arg.device(t, name, device);
  arg.contiguous(t, name);
}

Rows check_weight(const ArgCheck& arg, const Tensor& weight, const char* name, const Tensor& x) {
  arg.dtype(weight, name, {kF32, kF16, kBF16});
  check_vector(arg, weight, name, x.size(1), x.device);
  return rows(weight);
}

/// What every choice of kernels relies on.
void check_sizes(const ArgCheck& arg, const Tensor& x, const char* name) {
  check_extents(arg, x, name);
  check(x.size(1) >= 1 && x.size(1) <= kFp8RmsNormMaxHidden, arg.op(), ": ", name,
        " must have 1 to ", kFp8RmsNormMaxHidden, " columns, got shape ", shape_string(x));
  check(x.size(0) <= kMaxRows, arg.op(), ": ", name, " must have at most ", kMaxRows,
        " rows, got shape ", shape_string(x));
}

/// x [M, N] and its scales.
Input check_input(const ArgCheck& arg, const Tensor& x, const char* name, const Tensor& x_scale,
                  bool may_be_float8) {
  arg.ndim(x, name, 2);
  if (may_be_float8) {
    arg.dtype(x, name, {kF32, kF16, kBF16, kE4M3, kE5M2});
  } else {
    arg.dtype(x, name, {kF32, kF16, kBF16});
  }
  check_sizes(arg, x, name);
  check_rows(arg, x, name);
  const std::int64_t columns = x.size(1);
  Input in;
  in.rows = x.size(0);
  in.hidden = columns;
  in.x = rows(x);
  if (!is_float8(x.dtype)) {
    check(!x_scale.defined(), arg.op(), ": x_scale must be left out for x of ", dtype_name(x.dtype),
          ", got a tensor");
    return in;
  }
  arg.ndim(x_scale, "x_scale", 2);
  arg.dtype(x_scale, "x_scale", {kF32, kBF16});
  const std::int64_t groups = x_scale.size(1);
  const bool divides = groups > 0 && columns % groups == 0 && is_group(columns / groups);
  check(x_scale.size(0) == in.rows && divides, arg.op(),
        ": x_scale must have shape (M, N / G) with a G of 16, 32, 64 or 128 that divides N, for x ",
        "of shape ", shape_string(x), ", got ", shape_string(x_scale));
  arg.device(x_scale, "x_scale", x.device);
  check_rows(arg, x_scale, "x_scale");
  in.x_scale = rows(x_scale);
  in.x_group = static_cast<int>(columns / groups);
  return in;
}

/// Given scales are read on the CPU alone; a GPU is not waited for.
void check_given(const ArgCheck& arg, const Tensor& t, const char* name) {
  if (t.device.type != DeviceType::kCPU) return;
  const std::int64_t n0 = t.ndim > 0 ? t.size(0) : 1, n1 = t.ndim > 1 ? t.size(1) : 1;
  const std::int64_t s0 = t.ndim > 0 ? t.stride(0) : 0, s1 = t.ndim > 1 ? t.stride(1) : 0;
  for (std::int64_t i = 0; i < n0; ++i) {
    for (std::int64_t j = 0; j < n1; ++j) {
      const float v = t.ptr<const float>()[i * s0 + j * s1];
      if (v > 0 && std::isfinite(v)) [[likely]]
        continue;
      check(false, arg.op(), ": ", name, " must be positive and finite where it is given, got ", v);
    }
  }
}

/// The scales of a matrix of `m` rows of `n` elements; `made`: it is made (or read) at all.
Scales check_scales(const ArgCheck& arg, const Tensor& t, const char* name, std::int64_t m,
                    std::int64_t n, bool made, const Fp8Format& format, Device device) {
  if (!made) {
    check(!t.defined(), arg.op(), ": ", name, " must be left out where nothing is scaled by it, ",
          "got a tensor");
    return {};
  }
  switch (format.scaling) {
    case Fp8Scaling::kTensor:
      arg.shape(t, name, {});
      break;
    case Fp8Scaling::kRow:
      arg.shape(t, name, {m});
      break;
    case Fp8Scaling::kGroup:
      arg.shape(t, name, {m, ceil_div(n, format.group)});
      break;
  }
  arg.dtype(t, name, {kF32});
  arg.device(t, name, device);
  check_memory(arg, t, name);
  if (format.given_scale) check_given(arg, t, name);
  return {t.ptr<float>(), t.ndim > 0 ? t.stride(0) : 0, t.ndim > 1 ? t.stride(1) : 0};
}

void check_format(const ArgCheck& arg, const Fp8Format& format, Device device) {
  check(format.scaling == Fp8Scaling::kTensor || format.scaling == Fp8Scaling::kRow ||
            format.scaling == Fp8Scaling::kGroup,
        arg.op(), ": scaling must be tensor, row or group, got ", static_cast<int>(format.scaling));
  check(format.scaling != Fp8Scaling::kGroup || is_group(format.group), arg.op(),
        ": group must be 16, 32, 64 or 128, got ", format.group);
  check(format.numerics == Fp8Numerics::kFast || format.numerics == Fp8Numerics::kCompat, arg.op(),
        ": numerics must be fast or compat, got ", static_cast<int>(format.numerics));
  if (format.numerics == Fp8Numerics::kCompat) {
    check(format.scaling == Fp8Scaling::kTensor, arg.op(),
          ": scaling must be tensor with numerics compat, got ",
          format.scaling == Fp8Scaling::kRow ? "row" : "group");
    check(!format.pow2_scale, arg.op(),
          ": pow2_scale must be false with numerics compat, got true");
  }
  if (!format.rng.defined()) return;
  arg.dtype(format.rng, "rng", {DType::kInt64});
  check_vector(arg, format.rng, "rng", 2, device);
}

Quantize format_of(const Fp8Format& format, const Fp8Quantized& out) {
  Quantize q;
  q.scaling = format.scaling;
  q.group = static_cast<int>(format.group);
  q.pow2_scale = format.pow2_scale;
  q.given_scale = format.given_scale;
  q.numerics = format.numerics;
  q.rng = format.rng.defined() ? format.rng.ptr<const std::int64_t>() : nullptr;
  q.dtype = out.q.defined() ? out.q.dtype : out.q_t.dtype;
  return q;
}

/// q, q_t, their scales and amax for a y of the shape of x.
Quantize check_quantized(const ArgCheck& arg, const Tensor& x, const Fp8Format& format,
                         const Fp8Quantized& out) {
  check_format(arg, format, x.device);
  check(out.q.defined() || out.q_t.defined(), arg.op(), ": q or q_t is required, got neither");
  const std::int64_t m = x.size(0), n = x.size(1);
  Quantize q = format_of(format, out);
  if (out.q.defined()) {
    arg.dtype(out.q, "q", {kE4M3, kE5M2});
    q.q = check_matrix(arg, out.q, "q", x);
  }
  if (out.q_t.defined()) {
    arg.dtype(out.q_t, "q_t", {kE4M3, kE5M2});
    check_type(out.q_t.dtype == q.dtype, arg.op(), ": q_t must have the dtype of q (",
               dtype_name(q.dtype), "), got ", dtype_name(out.q_t.dtype));
    arg.shape(out.q_t, "q_t", {n, m});
    arg.device(out.q_t, "q_t", x.device);
    check_rows(arg, out.q_t, "q_t");
    q.q_t = rows(out.q_t);
  }
  const bool whole = format.scaling == Fp8Scaling::kTensor;
  q.scale = check_scales(arg, out.scale, "scale", m, n, whole || out.q.defined(), format, x.device);
  q.scale_t = check_scales(arg, out.scale_t, "scale_t", n, m, !whole && out.q_t.defined(), format,
                           x.device);
  if (out.amax.defined()) {
    check(whole, arg.op(), ": amax must be left out with scaling ",
          format.scaling == Fp8Scaling::kRow ? "row" : "group", ", got a tensor");
    arg.shape(out.amax, "amax", {});
    arg.dtype(out.amax, "amax", {kF32});
    arg.device(out.amax, "amax", x.device);
    q.amax = out.amax.ptr<float>();
  }
  return q;
}

float* check_rstd(const ArgCheck& arg, const Tensor& rstd, const Tensor& x) {
  arg.dtype(rstd, "rstd", {kF32});
  check_vector(arg, rstd, "rstd", x.size(0), x.device);
  return rstd.ptr<float>();
}

/// Of a query's problem: pointers tell only whether something is there.
Rows rows_to_be(const Tensor& t) {
  static char something;
  Rows r = rows(t);
  if (t.defined()) r.data = &something;
  return r;
}

Input sizes_of_input(const ArgCheck& arg, const Tensor& x, const char* name) {
  arg.ndim(x, name, 2);
  check_sizes(arg, x, name);
  Input in;
  in.rows = x.size(0);
  in.hidden = x.size(1);
  in.x = rows_to_be(x);
  return in;
}

Quantize sizes_of_quantized(const ArgCheck& arg, Device device, const Fp8Format& format,
                            const Fp8Quantized& out) {
  check_format(arg, format, device);  // plans divide by the group
  static const std::int64_t rng[2] = {};
  Quantize q = format_of(format, out);
  if (format.rng.defined()) q.rng = rng;
  q.q = rows_to_be(out.q);
  q.q_t = rows_to_be(out.q_t);
  return q;
}

}  // namespace

ForwardProblem check_forward(const ArgCheck& arg, const Tensor& x, const Tensor& x_scale,
                             const Tensor& weight, float eps, float weight_offset,
                             const Tensor& residual, const Fp8Format& format,
                             const Fp8Quantized& out, const Tensor& rstd, const Tensor& normed) {
  ForwardProblem p;
  p.input = check_input(arg, x, "x", x_scale, /*may_be_float8=*/true);
  p.weight = check_weight(arg, weight, "weight", x);
  check(eps > 0 && std::isfinite(eps), arg.op(), ": eps must be positive and finite, got ", eps);
  check(std::isfinite(weight_offset), arg.op(), ": weight_offset must be finite, got ",
        weight_offset);
  p.eps = eps;
  p.weight_offset = weight_offset;
  if (residual.defined()) {
    arg.dtype(residual, "residual", {kF32, kF16, kBF16});
    p.residual = check_matrix(arg, residual, "residual", x);
  }
  p.out = check_quantized(arg, x, format, out);
  if (rstd.defined()) p.rstd = check_rstd(arg, rstd, x);
  if (normed.defined()) {
    arg.dtype(normed, "normed", {kBF16});
    p.normed = check_matrix(arg, normed, "normed", x);
  }
  return p;
}

BackwardProblem check_backward(const ArgCheck& arg, const Tensor& dy, const Tensor& x,
                               const Tensor& x_scale, const Tensor& weight, float weight_offset,
                               const Tensor& rstd, const Tensor& residual_grad, const Tensor& dx,
                               const Tensor& dw, bool accumulate_dw) {
  BackwardProblem p;
  p.input = check_input(arg, x, "x", x_scale, /*may_be_float8=*/true);
  arg.dtype(dy, "dy", {kF32, kF16, kBF16});
  p.dy = check_matrix(arg, dy, "dy", x);
  p.weight = check_weight(arg, weight, "weight", x);
  check(std::isfinite(weight_offset), arg.op(), ": weight_offset must be finite, got ",
        weight_offset);
  p.weight_offset = weight_offset;
  p.rstd = check_rstd(arg, rstd, x);
  const auto like_dy = [&](const Tensor& t, const char* name) {
    check_type(t.dtype == dy.dtype, arg.op(), ": ", name, " must have the dtype of dy (",
               dtype_name(dy.dtype), "), got ", dtype_name(t.dtype));
    return check_matrix(arg, t, name, x);
  };
  if (residual_grad.defined()) {
    p.residual_grad = like_dy(residual_grad, "residual_grad");
  }
  if (dx.defined()) p.dx = like_dy(dx, "dx");
  if (dw.defined()) p.dw = check_weight(arg, dw, "dw", x);
  p.accumulate_dw = accumulate_dw;
  return p;
}

QuantizeProblem check_quantize(const ArgCheck& arg, const Tensor& y, const Fp8Format& format,
                               const Fp8Quantized& out) {
  QuantizeProblem p;
  p.input = check_input(arg, y, "y", {}, /*may_be_float8=*/false);
  p.out = check_quantized(arg, y, format, out);
  return p;
}

ForwardProblem sizes_of_forward(const ArgCheck& arg, const Tensor& x, const Fp8Format& format,
                                const Fp8Quantized& out) {
  ForwardProblem p;
  p.input = sizes_of_input(arg, x, "x");
  p.out = sizes_of_quantized(arg, x.device, format, out);
  return p;
}

BackwardProblem sizes_of_backward(const ArgCheck& arg, const Tensor& x) {
  BackwardProblem p;
  p.input = sizes_of_input(arg, x, "x");
  return p;
}

QuantizeProblem sizes_of_quantize(const ArgCheck& arg, const Tensor& y, const Fp8Format& format,
                                  const Fp8Quantized& out) {
  QuantizeProblem p;
  p.input = sizes_of_input(arg, y, "y");
  p.out = sizes_of_quantized(arg, y.device, format, out);
  return p;
}

std::byte* check_workspace(const ArgCheck& arg, const Tensor& workspace, std::int64_t bytes,
                           Device device) {
  if (bytes == 0 && !workspace.defined()) return nullptr;
  arg.ndim(workspace, "workspace", 1);
  arg.dtype(workspace, "workspace", {DType::kUInt8});
  arg.device(workspace, "workspace", device);
  arg.contiguous(workspace, "workspace");
  check(workspace.size(0) >= bytes, arg.op(), ": workspace must have at least ", bytes,
        " bytes, got ", workspace.size(0));
  if (bytes > 0) arg.aligned(workspace, "workspace", kMemoryAlignment);
  return workspace.ptr<std::byte>();
}

void check_outputs_apart(const ArgCheck& arg, std::initializer_list<Named> outputs,
                         std::initializer_list<Named> inputs) {
  // Some fifty pairs: what each tensor spans is looked at once.
  struct Spanned {
    const Named* named;
    ByteSpan span;
  };
  std::array<Spanned, 24> seen;
  std::size_t count = 0;
  const auto meet = [&](const Named& out, const ByteSpan& span) {
    for (std::size_t i = 0; i < count; ++i) {
      if (!seen[i].span.meets(span)) continue;
      arg.disjoint(out.tensor, out.name, seen[i].named->tensor, seen[i].named->name);
    }
  };
  check(outputs.size() + inputs.size() <= seen.size(), arg.op(), ": too many tensors");
  for (const Named& in : inputs) {
    check_memory(arg, in.tensor, in.name);
    if (in.tensor.defined()) seen[count++] = {&in, byte_span(in.tensor)};
  }
  for (const Named& out : outputs) {
    if (!out.tensor.defined()) continue;
    check_memory(arg, out.tensor, out.name);
    arg.no_self_overlap(out.tensor, out.name);
    const ByteSpan span = byte_span(out.tensor);
    meet(out, span);
    seen[count++] = {&out, span};
  }
}

}  // namespace mortar::fp8_rmsnorm
