// SPDX-License-Identifier: Apache-2.0
#include "lora/train/reference.h"

#include <cmath>

#include "core/float_element.h"
#include "core/int_math.h"
#include "lora/train/dropout.h"
#include "lora/train/problem.h"

namespace mortar::lora::train {
namespace {

/// The relative error of one rounding, and the absolute one near zero.
double unit_roundoff(DType dtype) {
  return dtype == DType::kBFloat16 ? 0x1p-8 : (dtype == DType::kFloat16 ? 0x1p-11 : 0x1p-24);
}
double smallest(DType dtype) { return dtype == DType::kFloat16 ? 0x1p-24 : 0x1p-126; }

/// Error of a float32 sum of n products over the sum of their absolute values: roundings of random
/// sign grow like sqrt(n); 4 standard deviations and 8 further operations.
double sum_error(double n) { return 4 * (std::sqrt(n) + 8) * 0x1p-24; }

double element(const Tensor& t, std::int64_t row, std::int64_t column) {
  return load_float(t.data, t.dtype, row * t.strides[0] + column * t.strides[1]);
}

/// A sum of products of estimates and exact values.
struct Sum {
  double value = 0, magnitude = 0, carried = 0, terms = 0;
  void add(const Estimate& e, double exact) {
    value += e.value * exact;
    magnitude += std::abs(e.value * exact);
    carried += e.error * std::abs(exact);
    terms += 1;
  }
  Estimate scaled(double factor) const {
    return {value * factor,
            std::abs(factor) * (carried + (terms > 0 ? sum_error(terms) * magnitude : 0))};
  }
};

Estimate rounded(Estimate e, DType dtype) {
  e.error += unit_roundoff(dtype) * (std::abs(e.value) + e.error) + smallest(dtype);
  return e;
}

/// What the loops below need of one call.
struct Oracle {
  Oracle(const LoraTrainProblem& p, std::int64_t rows, std::span<const std::int32_t> map)
      : problem(p), num_rows(rows), row_adapter(map), hidden_width(lora_train_hidden_width(p)) {
    for (int s = 0; s < p.num_slices; ++s) {
      first_hidden.push_back(h_end);
      first_column.push_back(total_width);
      std::int64_t most = 0;
      for (std::size_t i = s; i < p.pairs.size(); i += p.num_slices) {
        if (p.pairs[i].a.defined()) most = std::max(most, p.pairs[i].a.shape[0]);
        if (p.pairs[i].a.defined()) hidden = p.pairs[i].a.shape[1];
      }
      h_end += round_up<std::int64_t>(most, kHiddenGranule);
      total_width += p.widths[s];
    }
    if (p.dropout.rng.defined()) {
      seed = p.dropout.rng.ptr<const std::int64_t>()[0];
      offset = p.dropout.rng.ptr<const std::int64_t>()[1];
    }
  }

  const LoraTrainPair* pair(std::int64_t row, int slice) const {
    // Nothing is left of a delta that is dropped whole, not even a NaN.
    if (row_adapter[row] < 0 || threshold(row) >= kDropAll) return nullptr;
    const LoraTrainPair& p = problem.pairs[row_adapter[row] * problem.num_slices + slice];
    return p.a.defined() ? &p : nullptr;
  }
  std::uint32_t threshold(std::int64_t row) const {
    const auto& p = problem.dropout.p;
    return p.empty() ? 0 : drop_threshold(p[row_adapter[row]]);
  }
  double factor(std::int64_t row, const LoraTrainPair& p) const {
    const float keep = keep_scale(threshold(row));
    return keep == 0 ? 0 : double{p.scale} * keep;
  }
  bool keeps_x(std::int64_t row, std::int64_t k) const {
    return problem.dropout.on != LoraDropoutOn::kInput ||
           keeps(seed, offset, row * hidden + k, threshold(row));
  }
  bool keeps_y(std::int64_t row, int slice, std::int64_t n) const {
    return problem.dropout.on != LoraDropoutOn::kDelta ||
           keeps(seed, offset, row * total_width + first_column[slice] + n, threshold(row));
  }

  std::vector<Estimate> hidden_values(const Tensor& x) const {
    std::vector<Estimate> h(num_rows * hidden_width);
    for (std::int64_t m = 0; m < num_rows; ++m) {
      for (int s = 0; s < problem.num_slices; ++s) {
        const LoraTrainPair* p = pair(m, s);
        if (p == nullptr) continue;
        for (std::int64_t r = 0; r < p->a.shape[0]; ++r) {
          Sum sum;
          for (std::int64_t k = 0; k < hidden; ++k) {
            if (keeps_x(m, k)) sum.add({element(x, m, k), 0}, element(p->a, r, k));
          }
          h[m * hidden_width + first_hidden[s] + r] =
              rounded(sum.scaled(factor(m, *p)), problem.weight_dtype);
        }
      }
    }
    return h;
  }

  const LoraTrainProblem& problem;
  std::int64_t num_rows;
  std::span<const std::int32_t> row_adapter;
  std::int64_t hidden_width, h_end = 0, total_width = 0, hidden = 0;
  std::vector<std::int64_t> first_hidden, first_column;
  std::uint64_t seed = 0, offset = 0;
};

/// dW of one pair: sums over the rows of `adapter`; term(m) gives the two factors.
template <class Term>
Estimate sum_rows(const Oracle& o, std::int64_t adapter, const Term& term) {
  Sum sum;
  for (std::int64_t m = 0; m < o.num_rows; ++m) {
    if (o.row_adapter[m] == adapter && o.threshold(m) < kDropAll) term(m, &sum);
  }
  return sum.scaled(1);
}

Estimate stored(Estimate e, const Tensor& out, bool add, std::int64_t row, std::int64_t column) {
  if (add) {
    const double old = element(out, row, column);
    e.value += old;
    e.error += 0x1p-24 * std::abs(e.value);
  }
  return rounded(e, out.dtype);
}

}  // namespace

Reference reference_forward(const LoraTrainProblem& problem, const LoraTrainForward& forward,
                            std::span<const std::int32_t> row_adapter) {
  const Oracle o(problem, forward.x.shape[0], row_adapter);
  Reference out;
  out.h = o.hidden_values(forward.x);
  for (int s = 0; s < problem.num_slices; ++s) {
    const bool base = !forward.base.empty() && forward.base[s].defined();
    std::vector<Estimate>& y = out.y.emplace_back(o.num_rows * problem.widths[s]);
    for (std::int64_t m = 0; m < o.num_rows; ++m) {
      const LoraTrainPair* p = o.pair(m, s);
      for (std::int64_t n = 0; n < problem.widths[s]; ++n) {
        Sum sum;
        for (std::int64_t r = 0; p != nullptr && o.keeps_y(m, s, n) && r < p->b.shape[1]; ++r) {
          sum.add(out.h[m * o.hidden_width + o.first_hidden[s] + r], element(p->b, n, r));
        }
        y[m * problem.widths[s] + n] =
            stored(sum.scaled(1), base ? forward.base[s] : forward.y[s], base, m, n);
      }
    }
  }
  return out;
}

Reference reference_backward(const LoraTrainProblem& problem, const LoraTrainBackward& backward,
                             std::span<const std::int32_t> row_adapter) {
  const Oracle o(problem, backward.dy[0].shape[0], row_adapter);
  const std::int64_t rows = o.num_rows, hidden = o.hidden;
  Reference out;
  if (backward.h.defined()) {
    for (std::int64_t i = 0; i < rows * o.hidden_width; ++i) {
      out.h.push_back({load_float(backward.h.data, backward.h.dtype, i), 0});
    }
  } else if (backward.x.defined()) {
    out.h = o.hidden_values(backward.x);
  }
  std::vector<Estimate> ds(rows * o.hidden_width);
  for (std::int64_t m = 0; m < rows; ++m) {
    for (int s = 0; s < problem.num_slices; ++s) {
      const LoraTrainPair* p = o.pair(m, s);
      for (std::int64_t r = 0; p != nullptr && r < p->b.shape[1]; ++r) {
        Sum sum;
        for (std::int64_t n = 0; n < problem.widths[s]; ++n) {
          if (o.keeps_y(m, s, n)) sum.add({element(backward.dy[s], m, n), 0}, element(p->b, n, r));
        }
        ds[m * o.hidden_width + o.first_hidden[s] + r] =
            rounded(sum.scaled(o.factor(m, *p)), problem.weight_dtype);
      }
    }
  }
  if (backward.dx.defined()) {
    out.dx.resize(rows * backward.dx.shape[1]);
    for (std::int64_t m = 0; m < rows; ++m) {
      for (std::int64_t k = 0; k < backward.dx.shape[1]; ++k) {
        Sum sum;
        for (int s = 0; s < problem.num_slices; ++s) {
          const LoraTrainPair* p = o.pair(m, s);
          for (std::int64_t r = 0; p != nullptr && o.keeps_x(m, k) && r < p->a.shape[0]; ++r) {
            sum.add(ds[m * o.hidden_width + o.first_hidden[s] + r], element(p->a, r, k));
          }
        }
        out.dx[m * backward.dx.shape[1] + k] =
            stored(sum.scaled(1), backward.dx, backward.add_dx, m, k);
      }
    }
  }
  out.da.resize(backward.grads.size());
  out.db.resize(backward.grads.size());
  for (std::size_t i = 0; i < backward.grads.size(); ++i) {
    const LoraTrainGrads& g = backward.grads[i];
    const int s = static_cast<int>(i % problem.num_slices);
    const auto adapter = static_cast<std::int64_t>(i / problem.num_slices);
    const std::int64_t at = o.first_hidden[s];
    for (std::int64_t r = 0; g.a.defined() && r < g.a.shape[0]; ++r) {
      for (std::int64_t k = 0; k < hidden; ++k) {
        const Estimate sum = sum_rows(o, adapter, [&](std::int64_t m, Sum* to) {
          if (o.keeps_x(m, k)) to->add(ds[m * o.hidden_width + at + r], element(backward.x, m, k));
        });
        out.da[i].push_back(stored(sum, g.a, g.add_a, r, k));
      }
    }
    for (std::int64_t n = 0; g.b.defined() && n < g.b.shape[0]; ++n) {
      for (std::int64_t r = 0; r < g.b.shape[1]; ++r) {
        const Estimate sum = sum_rows(o, adapter, [&](std::int64_t m, Sum* to) {
          if (!o.keeps_y(m, s, n)) return;
          to->add(out.h[m * o.hidden_width + at + r], element(backward.dy[s], m, n));
        });
        out.db[i].push_back(stored(sum, g.b, g.add_b, n, r));
      }
    }
  }
  return out;
}

}  // namespace mortar::lora::train
