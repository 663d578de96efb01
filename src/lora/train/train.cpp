// SPDX-License-Identifier: Apache-2.0
// The ops of LoRA training: check every argument, then hand the problem to the device's backend.
#include <algorithm>
#include <vector>

#include "core/backend.h"
#include "core/check.h"
#include "core/check_view.h"
#include "lora/checks.h"
#include "lora/train/checks.h"
#include "lora/train/problem.h"
#include "mortar/lora_train.h"

namespace mortar {
namespace {

using lora::train::Backend;
using lora::train::Checked;
using lora::train::Problem;

constexpr auto& backend = choose_backend<lora::train::cpu::kBackend, lora::train::cuda::kBackend>;

/// What the ops ask beside the checks that they share with the workspace queries.
void check_memory_of(const ArgCheck& arg, std::span<const Tensor> list, const char* name) {
  for (const Tensor& t : list) check_memory(arg, t, name);
}
void check_memory_of(const ArgCheck& arg, const LoraTrainProblem& problem) {
  for (const LoraTrainPair& pair : problem.pairs) {
    check_memory(arg, pair.a, "a");
    check_memory(arg, pair.b, "b");
  }
  check_memory(arg, problem.dropout.rng, "rng");
}

}  // namespace

namespace lora::train {

Pair Problem::pair(std::int64_t adapter, int slice) const {
  const std::size_t i = static_cast<std::size_t>(adapter) * num_slices + slice;
  const LoraTrainPair& from = given->pairs[i];
  Pair to;
  if (!from.a.defined()) return to;
  const auto view = [](const Tensor& t) {
    return t.defined() ? Matrix{t.data, t.strides[0], t.strides[1], t.dtype} : Matrix{};
  };
  const std::uint32_t threshold =
      given->dropout.p.empty() ? 0 : drop_threshold(given->dropout.p[adapter]);
  if (without_dropped && threshold >= kDropAll) return to;
  to.a = view(from.a);
  to.b = view(from.b);
  to.rank = static_cast<int>(from.a.shape[0]);
  to.threshold = threshold;
  const float keep = keep_scale(to.threshold);
  to.factor = keep == 0 ? 0.0f : from.scale * keep;
  if (grads == nullptr) return to;
  to.da = view(grads[i].a);
  to.db = view(grads[i].b);
  to.add_a = grads[i].add_a;
  to.add_b = grads[i].add_b;
  return to;
}

}  // namespace lora::train

std::int64_t lora_train_hidden_width(const LoraTrainProblem& problem) {
  std::int64_t width = 0;
  for (int s = 0; s < problem.num_slices; ++s) {
    std::int64_t most = 0;
    for (std::size_t i = s; i < problem.pairs.size(); i += problem.num_slices) {
      const Tensor& a = problem.pairs[i].a;
      if (a.ndim == 2) most = std::max(most, a.shape[0]);
    }
    width += round_up<std::int64_t>(most, lora::train::kHiddenGranule);
  }
  return width;
}

void lora_train_forward(const LoraTrainProblem& problem, const LoraTrainForward& forward,
                        const Tensor& workspace, Stream stream) {
  const ArgCheck arg("lora_train_forward");
  auto [p, device] = lora::train::check_forward(arg, problem, forward);
  check_memory_of(arg, problem);
  check_memory(arg, forward.x, "x");
  check_memory(arg, forward.h, "h");
  check_memory_of(arg, forward.y, "y");
  check_memory_of(arg, forward.base, "base");
  const Backend& be = backend(arg, device);
  p.workspace = lora::check_workspace(arg, workspace, be.forward_workspace(p), device);
  arg.disjoint(workspace, "workspace", forward.x, "x");
  arg.disjoint(workspace, "workspace", forward.h, "h");
  for (const Tensor& y : forward.y) arg.disjoint(workspace, "workspace", y, "y");
  for (const Tensor& base : forward.base) arg.disjoint(workspace, "workspace", base, "base");
  lora::train::check_apart(arg, workspace, "workspace", problem);
  if (p.num_rows == 0) return;
  be.forward(p, stream);
}

std::int64_t lora_train_forward_workspace(const LoraTrainProblem& problem,
                                          const LoraTrainForward& forward) {
  const ArgCheck arg("lora_train_forward_workspace");
  const auto [p, device] = lora::train::check_forward(arg, problem, forward);
  return backend(arg, device).forward_workspace(p);
}

void lora_train_backward(const LoraTrainProblem& problem, const LoraTrainBackward& backward,
                         const Tensor& workspace, Stream stream) {
  const ArgCheck arg("lora_train_backward");
  auto [p, device] = lora::train::check_backward(arg, problem, backward);
  check_memory_of(arg, problem);
  check_memory(arg, backward.x, "x");
  check_memory(arg, backward.h, "h");
  check_memory(arg, backward.dx, "dx");
  check_memory_of(arg, backward.dy, "dy");
  for (const LoraTrainGrads& grads : backward.grads) {
    check_memory(arg, grads.a, "da");
    check_memory(arg, grads.b, "db");
  }
  const Backend& be = backend(arg, device);
  p.workspace = lora::check_workspace(arg, workspace, be.backward_workspace(p), device);
  arg.disjoint(workspace, "workspace", backward.x, "x");
  arg.disjoint(workspace, "workspace", backward.h, "h");
  arg.disjoint(workspace, "workspace", backward.dx, "dx");
  for (const Tensor& dy : backward.dy) arg.disjoint(workspace, "workspace", dy, "dy");
  for (const LoraTrainGrads& grads : backward.grads) {
    arg.disjoint(workspace, "workspace", grads.a, "da");
    arg.disjoint(workspace, "workspace", grads.b, "db");
  }
  lora::train::check_apart(arg, workspace, "workspace", problem);
  if (p.dx.data == nullptr && !p.wants_da && !p.wants_db) return;
  be.backward(p, stream);
}

std::int64_t lora_train_backward_workspace(const LoraTrainProblem& problem,
                                           const LoraTrainBackward& backward) {
  const ArgCheck arg("lora_train_backward_workspace");
  const auto [p, device] = lora::train::check_backward(arg, problem, backward);
  return mortar::backend(arg, device).backward_workspace(p);
}

void lora_train_check(const Tensor& offsets, std::int64_t num_adapters, std::int64_t num_rows,
                      Stream stream) {
  const ArgCheck arg("lora_train_check");
  arg.shape(offsets, "offsets", {num_adapters + 1});
  arg.dtype(offsets, "offsets", {DType::kInt32});
  arg.contiguous(offsets, "offsets");
  check_memory(arg, offsets, "offsets");
  std::vector<std::int32_t> host(num_adapters + 1);
  backend(arg, offsets.device)
      .read_offsets(offsets.ptr<const std::int32_t>(), num_adapters + 1, host.data(), stream);
  lora::train::check_segments(arg, host.data(), num_adapters, num_rows);
}

LoraTrainTraffic lora_train_traffic(std::int64_t rows, std::int64_t hidden, std::int64_t width,
                                    int rank, DType activation, DType weight, bool base) {
  const std::int64_t x = rows * hidden * dtype_size(activation);
  const std::int64_t y = rows * width * dtype_size(activation);
  const std::int64_t weights = rank * (hidden + width) * dtype_size(weight);
  LoraTrainTraffic traffic;
  traffic.forward_bytes = x + (base ? 2 : 1) * y + weights;
  traffic.backward_bytes = 2 * x + y + 2 * weights;
  traffic.forward_flops = 2 * rows * rank * (hidden + width);
  traffic.backward_flops = 2 * traffic.forward_flops;
  return traffic;
}

}  // namespace mortar
