// SPDX-License-Identifier: Apache-2.0
// The CPU backend's table of functions.
#include <vector>

#include "core/float16.h"
#include "lora/cpu/groups.h"
#include "lora/cpu/plan.h"
#include "lora/problem.h"

namespace mortar::lora::cpu {
namespace {

void zero_inactive(const ShrinkProblem& p) {
  for (std::int64_t t = 0; p.zero_rows != nullptr && t < p.num_tokens; ++t) {
    if (p.zero_rows[t] >= 0 && p.zero_rows[t] < p.weights.num_adapters) continue;
    for (int s = 0; s < p.weights.num_slices; ++s) {
      for (std::int64_t c = 0; c < p.h.width; ++c) {
        store_float(p.h.data, p.h.dtype, s * p.h.slice_stride + t * p.h.row_stride + c, 0);
      }
    }
  }
}

float shrink_one(const RowsView& x, const WeightsView& weights, const SliceWeights& w, float scale,
                 std::int64_t t, std::int64_t r) {
  float sum = 0;
  for (std::int64_t k = 0; k < weights.hidden; ++k) {
    sum += load_float(x.data, x.dtype, t * x.row_stride + k) *
           load_float(w.a, weights.dtype, r * w.a_row_stride + k);
  }
  return sum * (scale * w.scale);
}

void shrink(const ShrinkProblem& p, Stream) {
  zero_inactive(p);
  const GroupList groups(p.groups, p.num_tokens, p.weights.num_adapters);
  for (std::int64_t g = 0; g < groups.size(); ++g) {
    const Group group = groups.get(g);
    for (std::int64_t i = 0; i < group.count; ++i) {
      const std::int64_t t = groups.token(group.start + i);
      for (int s = 0; t >= 0 && s < p.weights.num_slices; ++s) {
        const SliceWeights w = p.weights.get(group.adapter, s);
        for (std::int64_t r = 0; r < p.h.width; ++r) {
          store_float(p.h.data, p.h.dtype, s * p.h.slice_stride + t * p.h.row_stride + r,
                      r < w.rank ? shrink_one(p.x, p.weights, w, p.scale, t, r) : 0.0f);
        }
      }
    }
  }
}

void expand_one(const float* h, const WeightsView& weights, const SliceWeights& w, const RowsView& y,
                std::int64_t t, std::int64_t column, std::int64_t width, bool add) {
  const bool rounds = weights.dtype != DType::kFloat32 && y.dtype == weights.dtype;
  for (std::int64_t n = 0; n < width; ++n) {
    float sum = 0;
    for (std::int64_t r = 0; r < w.rank; ++r) {
      sum += (rounds ? round_to(h[r], weights.dtype) : h[r]) *
             load_float(w.b, weights.dtype, n * w.b_row_stride + r);
    }
    const std::int64_t at = t * y.row_stride + column + n;
    if (add) sum += load_float(y.data, y.dtype, at);
    store_float(y.data, y.dtype, at, sum);
  }
}

void expand(const ExpandProblem& p, Stream) {
  const GroupList groups(p.groups, p.num_tokens, p.weights.num_adapters);
  float h[kLoraMaxRank];
  for (std::int64_t g = 0; g < groups.size(); ++g) {
    const Group group = groups.get(g);
    for (std::int64_t i = 0; i < group.count; ++i) {
      const std::int64_t t = groups.token(group.start + i);
      std::int64_t column = p.offset;
      for (int s = 0; t >= 0 && s < p.weights.num_slices; column += p.weights.widths[s++]) {
        const SliceWeights w = p.weights.get(group.adapter, s);
        if (w.rank == 0) continue;
        for (int r = 0; r < w.rank; ++r) {
          h[r] = load_float(p.h.data, p.h.dtype, s * p.h.slice_stride + t * p.h.row_stride + r);
        }
        expand_one(h, p.weights, w, p.y, t, column, p.weights.widths[s], p.add_inputs);
      }
    }
  }
}

void apply(const ApplyProblem& p, Stream) {
  const GroupList groups(p.groups, p.num_tokens, p.weights.num_adapters);
  float h[kLoraMaxRank];
  for (std::int64_t g = 0; g < groups.size(); ++g) {
    const Group group = groups.get(g);
    for (std::int64_t i = 0; i < group.count; ++i) {
      const std::int64_t t = groups.token(group.start + i);
      std::int64_t column = p.offset;
      for (int s = 0; t >= 0 && s < p.weights.num_slices; column += p.weights.widths[s++]) {
        const SliceWeights w = p.weights.get(group.adapter, s);
        if (w.rank == 0) continue;
        for (int r = 0; r < w.rank; ++r) h[r] = shrink_one(p.x, p.weights, w, p.scale, t, r);
        expand_one(h, p.weights, w, p.y, t, column, p.weights.widths[s], p.add_inputs);
      }
    }
  }
}

std::int64_t no_workspace(const WorkspaceQuery&) { return 0; }

}  // namespace

const Backend kBackend = {plan,   read_plan_header, shrink,       expand,
                          apply, no_workspace,     no_workspace};

}  // namespace mortar::lora::cpu
