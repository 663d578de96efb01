// SPDX-License-Identifier: Apache-2.0
// FP8 RMSNorm: check every argument, build the problem, hand it to the device's backend.
#include "mortar/fp8_rmsnorm.h"

#include "core/backend.h"
#include "core/check.h"
#include "fp8_rmsnorm/checks.h"
#include "fp8_rmsnorm/problem.h"

namespace mortar {
namespace {

using fp8_rmsnorm::Backend;

constexpr auto& backend = choose_backend<fp8_rmsnorm::cpu::kBackend, fp8_rmsnorm::cuda::kBackend>;

/// Whether a scale or amax of the whole tensor, or scales of its columns, are written even if it is
/// empty.
bool writes_without_rows(const fp8_rmsnorm::Quantize& q) {
  if (q.scaling == Fp8Scaling::kTensor) return !q.given_scale || q.amax != nullptr;
  return q.scaling == Fp8Scaling::kRow && q.scale_t.given() && !q.given_scale;
}

/// A scale that is given is read, another is written.
const Tensor& if_made(const Tensor& scale, const Fp8Format& format) {
  static const Tensor none;
  return format.given_scale ? none : scale;
}
const Tensor& if_given(const Tensor& scale, const Fp8Format& format) {
  static const Tensor none;
  return format.given_scale ? scale : none;
}

}  // namespace

void fp8_rmsnorm_forward(const Tensor& x, const Tensor& x_scale, const Tensor& weight, float eps,
                         float weight_offset, const Tensor& residual, const Fp8Format& format,
                         const Fp8Quantized& out, const Tensor& rstd, const Tensor& normed,
                         const Tensor& workspace, Stream stream) {
  const ArgCheck arg("fp8_rmsnorm_forward");
  fp8_rmsnorm::ForwardProblem p = fp8_rmsnorm::check_forward(
      arg, x, x_scale, weight, eps, weight_offset, residual, format, out, rstd, normed);
  const Backend& be = backend(arg, x.device);
  p.workspace_bytes = be.forward_workspace(p, x.device);
  p.workspace = fp8_rmsnorm::check_workspace(arg, workspace, p.workspace_bytes, x.device);
  fp8_rmsnorm::check_outputs_apart(arg,
                                   {{out.q, "q"},
                                    {out.q_t, "q_t"},
                                    {if_made(out.scale, format), "scale"},
                                    {if_made(out.scale_t, format), "scale_t"},
                                    {out.amax, "amax"},
                                    {rstd, "rstd"},
                                    {normed, "normed"},
                                    {residual, "residual"},
                                    {workspace, "workspace"}},
                                   {{x, "x"},
                                    {x_scale, "x_scale"},
                                    {weight, "weight"},
                                    {format.rng, "rng"},
                                    {if_given(out.scale, format), "scale"},
                                    {if_given(out.scale_t, format), "scale_t"}});
  if (p.input.rows > 0 || writes_without_rows(p.out)) be.forward(p, stream);
}

void fp8_rmsnorm_backward(const Tensor& dy, const Tensor& x, const Tensor& x_scale,
                          const Tensor& weight, float weight_offset, const Tensor& rstd,
                          const Tensor& residual_grad, const Tensor& dx, const Tensor& dw,
                          bool accumulate_dw, const Tensor& workspace, Stream stream) {
  const ArgCheck arg("fp8_rmsnorm_backward");
  fp8_rmsnorm::BackwardProblem p = fp8_rmsnorm::check_backward(
      arg, dy, x, x_scale, weight, weight_offset, rstd, residual_grad, dx, dw, accumulate_dw);
  const Backend& be = backend(arg, x.device);
  p.workspace_bytes = be.backward_workspace(p, x.device);
  p.workspace = fp8_rmsnorm::check_workspace(arg, workspace, p.workspace_bytes, x.device);
  // dx may be one of these to the element: each is read before its place is written.
  const Tensor none;
  const auto is_dx = [&](const Tensor& t) {
    return t.defined() && dx.defined() && t.data == dx.data &&
           (t.size(0) <= 1 || t.stride(0) == dx.stride(0));
  };
  const Tensor& dy_apart = is_dx(dy) ? none : dy;
  const Tensor& residual_apart = is_dx(residual_grad) ? none : residual_grad;
  fp8_rmsnorm::check_outputs_apart(arg, {{dx, "dx"}, {dw, "dw"}, {workspace, "workspace"}},
                                   {{dy_apart, "dy"},
                                    {residual_apart, "residual_grad"},
                                    {x, "x"},
                                    {x_scale, "x_scale"},
                                    {weight, "weight"},
                                    {rstd, "rstd"}});
  const bool some = dx.defined() || dw.defined();
  if (some && (p.input.rows > 0 || dw.defined())) be.backward(p, stream);
}

void fp8_quantize(const Tensor& y, const Fp8Format& format, const Fp8Quantized& out,
                  const Tensor& workspace, Stream stream) {
  const ArgCheck arg("fp8_quantize");
  fp8_rmsnorm::QuantizeProblem p = fp8_rmsnorm::check_quantize(arg, y, format, out);
  const Backend& be = backend(arg, y.device);
  p.workspace_bytes = be.quantize_workspace(p, y.device);
  p.workspace = fp8_rmsnorm::check_workspace(arg, workspace, p.workspace_bytes, y.device);
  fp8_rmsnorm::check_outputs_apart(arg,
                                   {{out.q, "q"},
                                    {out.q_t, "q_t"},
                                    {if_made(out.scale, format), "scale"},
                                    {if_made(out.scale_t, format), "scale_t"},
                                    {out.amax, "amax"},
                                    {workspace, "workspace"}},
                                   {{y, "y"},
                                    {format.rng, "rng"},
                                    {if_given(out.scale, format), "scale"},
                                    {if_given(out.scale_t, format), "scale_t"}});
  if (p.input.rows > 0 || writes_without_rows(p.out)) be.quantize(p, stream);
}

std::int64_t fp8_rmsnorm_forward_workspace(const Tensor& x, const Fp8Format& format,
                                           const Fp8Quantized& out) {
  const ArgCheck arg("fp8_rmsnorm_forward_workspace");
  const auto p = fp8_rmsnorm::sizes_of_forward(arg, x, format, out);
  return backend(arg, x.device).forward_workspace(p, x.device);
}

std::int64_t fp8_rmsnorm_backward_workspace(const Tensor& x) {
  const ArgCheck arg("fp8_rmsnorm_backward_workspace");
  return backend(arg, x.device)
      .backward_workspace(fp8_rmsnorm::sizes_of_backward(arg, x), x.device);
}

std::int64_t fp8_quantize_workspace(const Tensor& y, const Fp8Format& format,
                                    const Fp8Quantized& out) {
  const ArgCheck arg("fp8_quantize_workspace");
  const auto p = fp8_rmsnorm::sizes_of_quantize(arg, y, format, out);
  return backend(arg, y.device).quantize_workspace(p, y.device);
}

Fp8RmsNormTraffic fp8_rmsnorm_traffic(std::int64_t rows, std::int64_t hidden, std::int64_t x_bytes,
                                      std::int64_t group, std::int64_t scale_bytes, int outputs,
                                      std::int64_t dy_bytes) {
  const std::int64_t elements = rows * hidden;
  const std::int64_t scales = group > 0 ? elements / group * scale_bytes : 0;
  return {.forward = elements * (x_bytes + outputs) + scales,
          .backward = elements * (x_bytes + 2 * dy_bytes) + scales};
}

}  // namespace mortar
