// SPDX-License-Identifier: Apache-2.0
// The dynamic convolution: check every argument, build the problem, hand it to the device's
// backend.
#include "mortar/dynamic_conv.h"

#include <cstddef>
#include <vector>

#include "core/backend.h"
#include "core/check.h"
#include "dynamic_conv/checks.h"
#include "dynamic_conv/problem.h"

namespace mortar {
namespace {

constexpr auto& backend = choose_backend<dynamic_conv::cpu::kBackend, dynamic_conv::cuda::kBackend>;

}  // namespace

void dynamic_conv_forward(const Tensor& x, const Tensor& kernels, const Tensor& cu_seqlens,
                          const Tensor& initial_state, const Tensor& y, const Tensor& final_state,
                          bool silu, Stream stream) {
  const ArgCheck arg("dynamic_conv_forward");
  dynamic_conv::ForwardProblem p;
  p.shape = dynamic_conv::check_shape(arg, x, kernels, cu_seqlens, silu);
  p.x = dynamic_conv::signal(x);
  p.k = dynamic_conv::signal(kernels);
  p.y = dynamic_conv::check_like(arg, y, "y", x, "x");
  p.initial = dynamic_conv::check_state(arg, initial_state, "initial_state", x, &p.shape);
  p.final = dynamic_conv::check_state(arg, final_state, "final_state", x, &p.shape);
  dynamic_conv::check_outputs_apart(arg, {{y, "y"}, {final_state, "final_state"}},
                                    {{x, "x"},
                                     {kernels, "kernels"},
                                     {cu_seqlens, "cu_seqlens"},
                                     {initial_state, "initial_state"}});
  if (p.has_work()) backend(arg, x.device).forward(p, stream);
}

void dynamic_conv_backward(const Tensor& x, const Tensor& kernels, const Tensor& cu_seqlens,
                           const Tensor& initial_state, const Tensor& dy,
                           const Tensor& dfinal_state, const Tensor& dx, const Tensor& dk,
                           const Tensor& dinitial_state, bool silu, Stream stream) {
  const ArgCheck arg("dynamic_conv_backward");
  dynamic_conv::BackwardProblem p;
  p.shape = dynamic_conv::check_shape(arg, x, kernels, cu_seqlens, silu);
  p.x = dynamic_conv::signal(x);
  p.k = dynamic_conv::signal(kernels);
  p.dy = dynamic_conv::check_like(arg, dy, "dy", x, "x");
  p.dx = dynamic_conv::check_like(arg, dx, "dx", x, "x");
  p.dk = dynamic_conv::check_like(arg, dk, "dk", kernels, "kernels");
  p.initial = dynamic_conv::check_state(arg, initial_state, "initial_state", x, &p.shape);
  p.dfinal = dynamic_conv::check_state(arg, dfinal_state, "dfinal_state", x, &p.shape);
  p.dinitial = dynamic_conv::check_state(arg, dinitial_state, "dinitial_state", x, &p.shape);
  dynamic_conv::check_outputs_apart(arg,
                                    {{dx, "dx"}, {dk, "dk"}, {dinitial_state, "dinitial_state"}},
                                    {{x, "x"},
                                     {kernels, "kernels"},
                                     {cu_seqlens, "cu_seqlens"},
                                     {initial_state, "initial_state"},
                                     {dy, "dy"},
                                     {dfinal_state, "dfinal_state"}});
  if (p.has_work()) backend(arg, x.device).backward(p, stream);
}

void dynamic_conv_step(const Tensor& x, const Tensor& kernels, const Tensor& state,
                       const Tensor& slots, const Tensor& y, bool silu, Stream stream) {
  const ArgCheck arg("dynamic_conv_step");
  const dynamic_conv::StepProblem p =
      dynamic_conv::check_step(arg, x, kernels, state, slots, y, silu);
  dynamic_conv::check_outputs_apart(arg, {{y, "y"}, {state, "state"}},
                                    {{x, "x"}, {kernels, "kernels"}, {slots, "slots"}});
  if (p.rows > 0 && p.channels > 0) backend(arg, x.device).step(p, stream);
}

void dynamic_conv_check(const Tensor& cu_seqlens, std::int64_t num_tokens, const Tensor& slots,
                        std::int64_t num_slots, Stream stream) {
  const ArgCheck arg("dynamic_conv_check");
  std::vector<std::byte> bytes;
  const auto on_host = [&](const Tensor& t) {
    bytes.resize(static_cast<std::size_t>(t.size(0) * dtype_size(t.dtype)));
    const dynamic_conv::Backend& be = backend(arg, t.device);
    if (!bytes.empty()) be.read(t.data, bytes.data(), bytes.size(), stream);
    return dynamic_conv::Integers{bytes.data(), t.dtype == DType::kInt64, t.size(0)};
  };
  if (cu_seqlens.defined()) {
    dynamic_conv::check_starts_tensor(arg, cu_seqlens);
    dynamic_conv::check_starts(arg, on_host(cu_seqlens), num_tokens);
  }
  if (slots.defined()) {
    dynamic_conv::check_slots_tensor(arg, slots);
    dynamic_conv::check_slots(arg, on_host(slots), num_slots);
  }
}

DynamicConvTraffic dynamic_conv_traffic(std::int64_t batch, std::int64_t time,
                                        std::int64_t channels, int width, int state_length,
                                        std::int64_t x_bytes, std::int64_t k_bytes) {
  DynamicConvTraffic t;
  t.forward = batch * time * channels * (2 * x_bytes + width * k_bytes);
  t.backward = batch * time * channels * (3 * x_bytes + 2 * width * k_bytes);
  t.step = batch * channels * ((2 + 2 * state_length) * x_bytes + width * k_bytes);
  return t;
}

}  // namespace mortar
