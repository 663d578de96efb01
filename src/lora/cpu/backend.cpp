// SPDX-License-Identifier: Apache-2.0
// The ops of the CPU backend, made of the two passes.
#include <algorithm>

#include "core/check.h"
#include "core/int_math.h"
#include "lora/cpu/config.h"
#include "lora/cpu/passes.h"
#include "lora/cpu/plan.h"
#include "lora/problem.h"

namespace mortar::lora::cpu {
namespace {

/// Writes zeros to the rows of h whose entry in zero_rows is no adapter.
void zero_rows(const ShrinkProblem& p, int num_threads) {
  const std::int64_t size = dtype_size(p.h.dtype);
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1)
  for (std::int64_t t = 0; t < p.num_tokens; ++t) {
    const int id = p.zero_rows.get(t);
    if (id >= 0 && id < p.weights.num_adapters) continue;
    for (int s = 0; s < p.weights.num_slices; ++s) {
      char* h = static_cast<char*>(p.h.data) + (s * p.h.slice_stride + t * p.h.row_stride) * size;
      std::fill(h, h + p.h.width * size, 0);
    }
  }
}

std::int64_t sum_widths(const WeightsView& weights) {
  std::int64_t width = 0;
  for (int s = 0; s < weights.num_slices; ++s) width += weights.widths[s];
  return width;
}

void shrink(const ShrinkProblem& p, Stream) {
  const GroupList groups(p.groups, p.num_tokens, p.weights.num_adapters);
  const Batch batch = measure(groups, p.weights, p.weights.hidden);
  if (p.zero_rows.data != nullptr) zero_rows(p, batch.num_threads);
  ShrinkPass pass(p.x, p.weights, groups, {p.h, true, 0}, p.scale, true, {0, batch.num_rows},
                  batch.num_threads);
#pragma omp parallel num_threads(batch.num_threads) if (batch.num_threads > 1)
  pass.run();
}

void expand(const ExpandProblem& p, Stream) {
  const GroupList groups(p.groups, p.num_tokens, p.weights.num_adapters);
  const Batch batch = measure(groups, p.weights, sum_widths(p.weights));
  ExpandPass pass({p.h, true, 0}, p.weights, groups, p.y, p.offset, {}, p.add_inputs,
                  {0, batch.num_rows}, batch.num_threads);
#pragma omp parallel num_threads(batch.num_threads) if (batch.num_threads > 1)
  pass.run();
}

/// Elements of h per token in the workspace.
std::int64_t hidden_width(int num_slices, int max_rank) {
  return static_cast<std::int64_t>(num_slices) * max_rank;
}

std::int64_t rows_per_chunk(int num_slices, int max_rank) {
  return kHiddenBytes /
         (hidden_width(num_slices, max_rank) * static_cast<std::int64_t>(sizeof(float)));
}

void apply(const ApplyProblem& p, Stream) {
  const GroupList groups(p.groups, p.num_tokens, p.weights.num_adapters);
  const WeightsView& w = p.weights;
  const Batch batch = measure(groups, w, w.hidden + sum_widths(w));
  HiddenRows h;
  h.by_token = false;
  h.view.data = p.workspace;
  h.view.dtype = DType::kFloat32;
  h.view.row_stride = h.view.width = hidden_width(w.num_slices, w.max_rank);
  h.view.slice_stride = w.max_rank;
  const std::int64_t step = std::min(p.num_tokens, rows_per_chunk(w.num_slices, w.max_rank));
  for (std::int64_t row = 0; row < batch.num_rows; row += step) {
    const RowRange rows{row, std::min(batch.num_rows, row + step)};
    h.first_row = row;
    ShrinkPass first(p.x, w, groups, h, {}, false, rows, batch.num_threads);
    ExpandPass second(h, w, groups, p.y, p.offset, p.scale, p.add_inputs, rows, batch.num_threads);
#pragma omp parallel num_threads(batch.num_threads) if (batch.num_threads > 1)
    {
      first.run();
#pragma omp barrier
      second.run();
    }
  }
}

std::int64_t shrink_workspace(const WorkspaceQuery&) { return 0; }

/// h in float32, for as many tokens as a chunk holds.
std::int64_t apply_workspace(const WorkspaceQuery& q) {
  const std::int64_t rows = std::min(q.num_tokens, rows_per_chunk(q.num_slices, q.max_rank));
  return rows * hidden_width(q.num_slices, q.max_rank) * static_cast<std::int64_t>(sizeof(float));
}

std::string describe_apply(const ApplyProblem& p) {
  return concat("lora_apply of ", p.num_tokens, " tokens on the CPU: kernels for ",
                kernels().level);
}

}  // namespace

const Backend kBackend = {plan,  read_plan_header, shrink,          expand,
                          apply, shrink_workspace, apply_workspace, describe_apply};

}  // namespace mortar::lora::cpu
