// SPDX-License-Identifier: Apache-2.0
// One random forward (or quantisation alone), run on a device and compared with the exact result.
#pragma once

#include <cstdlib>
#include <ostream>

#include "fp8_rmsnorm_operands.h"

namespace mortar::testing {

struct NormCase {
  std::int64_t rows = 5, columns = 64;
  DType x = kE4M3, x_scale = kBF16, weight = kF32;
  int x_group = 16;
  bool norm = true;  ///< false: fp8_quantize of x
  bool residual = false;
  DType residual_dtype = kBF16;
  float weight_offset = 0.0f;
  Fp8Scaling scaling = Fp8Scaling::kTensor;
  std::int64_t group = 128;
  bool pow2 = false, given = false, compat = false, stochastic = false, by_columns = false;
  DType q = kE4M3;
  bool make_q = true, make_q_t = true, make_rstd = true, make_normed = false, make_amax = true;
  Layout layout = {};  ///< of every matrix
};

inline std::ostream& operator<<(std::ostream& out, const NormCase& c) {
  const char* scalings[] = {"tensor", "row", "group"};
  out << c.rows << " x " << c.columns << (c.norm ? " norm " : " quantize ") << dtype_name(c.x)
      << "/" << c.x_group << " to " << dtype_name(c.q) << " by "
      << scalings[static_cast<int>(c.scaling)] << " " << c.group;
  const std::pair<bool, const char*> flags[] = {
      {c.residual, "residual"}, {c.pow2, "pow2"},     {c.given, "given"},
      {c.compat, "compat"},     {c.make_q, "q"},      {c.stochastic, "stochastic"},
      {c.make_q_t, "q_t"},      {c.by_columns, "col"}};
  for (const auto& [set, name] : flags) out << (set ? " " : "") << (set ? name : "");
  return out << " weight " << dtype_name(c.weight) << " lead " << c.layout.lead << " gap "
             << c.layout.row_gap;
}

class NormTrial {
 public:
  NormTrial(const NormCase& c_, Device device_, unsigned random) : c(c_), device(device_) {
    Draws draws(random);
    x_values = draws.normal(c.rows * c.columns);
    if (is_float8()) x_scale_values = draws.factors(c.rows * c.columns / c.x_group);
    weight_values = draws.factors(c.columns);
    if (c.residual) residual_values = draws.normal(c.rows * c.columns);
    scale = ScaleTensor(c.rows, c.columns, c.scaling, c.group, c.by_columns, device);
    scale_t = ScaleTensor(c.columns, c.rows, c.scaling, c.group, c.by_columns, device);
    if (c.given) {
      scale.fill(draws.engine());
      if (c.scaling != Fp8Scaling::kTensor) scale_t.fill(draws.engine());
    }
  }

  const NormCase c;
  const Device device;
  Array x_values, x_scale_values, weight_values, residual_values;  ///< may be changed before run()
  std::int64_t seed = 5, offset = 9;                               ///< of stochastic rounding
  float eps = 1e-5f;
  GuardedTensor x, x_scale, weight, residual, q, q_t, amax, rstd, normed;
  ScaleTensor scale, scale_t;

  bool is_float8() const { return dtype_size(c.x) == 1; }

  void run() {
    make_inputs();
    call_op();
  }

  void make_inputs() {
    const std::vector<std::int64_t> shape{c.rows, c.columns};
    x = make_tensor(c.x, shape, x_values, c.layout, device);
    if (is_float8()) {
      x_scale = make_tensor(c.x_scale, {c.rows, c.columns / c.x_group}, x_scale_values,
                            {.lead = c.layout.lead, .row_gap = c.layout.row_gap}, device);
    }
    weight = make_tensor(c.weight, {c.columns}, weight_values, {.lead = c.layout.lead}, device);
    if (c.residual) {
      residual = make_tensor(c.residual_dtype, shape, residual_values, c.layout, device);
      residual_values = values_of(residual);
    }
    rng_ = make_rng(seed, offset, device);
    q = GuardedTensor(c.q, shape, c.layout, device);
    q_t = GuardedTensor(c.q, {c.columns, c.rows}, c.layout, device);
    amax = GuardedTensor(kF32, {}, {}, device);
    rstd = GuardedTensor(kF32, {c.rows}, {}, device);
    normed = GuardedTensor(kBF16, shape, c.layout, device);
  }

  void call_op() {
    call();
    for (GuardedTensor* t : outputs()) t->download();
  }

  Fp8Format format() const {
    Fp8Format f;
    f.scaling = c.scaling;
    f.group = c.group;
    f.pow2_scale = c.pow2;
    f.given_scale = c.given;
    f.numerics = c.compat ? Fp8Numerics::kCompat : Fp8Numerics::kFast;
    if (c.stochastic) f.rng = rng_.view();
    return f;
  }
  Fp8Quantized quantized() const {
    const bool whole = c.scaling == Fp8Scaling::kTensor;
    Fp8Quantized out;
    if (c.make_q) out.q = q.view();
    if (c.make_q_t) out.q_t = q_t.view();
    if (c.make_q || whole) out.scale = scale.view;
    if (c.make_q_t && !whole) out.scale_t = scale_t.view;
    if (c.make_amax && whole) out.amax = amax.view();
    return out;
  }

  void expect_right() {
    SCOPED_TRACE(concat(c));
    expect_guards();
    const Array z = z_values();
    const double tolerance = relative_error(c.columns);
    Array y = z;
    if (c.norm) {
      Array w = values_of(weight);
      for (double& v : w) v += static_cast<double>(c.weight_offset);
      const auto exact = fp8_rmsnorm::reference::forward(c.rows, z, w, static_cast<double>(eps));
      y = exact.y;
      const Array r = values_of(rstd);
      for (std::size_t m = 0; m < r.size() && c.make_rstd; ++m) {
        ASSERT_LE(std::abs(r[m] - exact.rstd[m]), tolerance * exact.rstd[m]) << "rstd of " << m;
      }
    }
    if (c.compat) return expect_compat(z, y);
    if (c.scaling == Fp8Scaling::kTensor && c.make_amax) {
      const double most = largest_of_sets(y, false)[0];
      ASSERT_LE(std::abs(get_value(amax, 0) - most), tolerance * most) << "amax";
    }
    if (c.make_q) expect_quantized(y, false, tolerance);
    if (c.make_q_t) {
      expect_quantized(fp8_rmsnorm::reference::transposed(c.rows, y), true, tolerance);
    }
    if (c.make_q && c.make_q_t && c.scaling == Fp8Scaling::kTensor) {
      ASSERT_EQ(bytes_of(q_t), fp8_rmsnorm::reference::transposed(c.rows, bytes_of(q)));
    }
    if (c.make_normed) expect_normed(y, tolerance);
  }

  /// Every byte outside the outputs, and outputs that were not asked for, are as they were.
  void expect_guards() {
    for (GuardedTensor* t : outputs()) EXPECT_TRUE(t->guards_intact()) << concat(c);
    if (!c.make_q) {
      EXPECT_TRUE(q.all_unchanged());
    }
    if (!c.make_q_t) {
      EXPECT_TRUE(q_t.all_unchanged());
    }
    if (c.given) {
      EXPECT_TRUE(scale.memory.all_unchanged() && scale_t.memory.all_unchanged());
    }
    for (GuardedTensor* t : {&x, &weight}) {
      t->download();
      EXPECT_TRUE(t->all_unchanged()) << "an input";
    }
  }

  /// x * x_scale exactly, or the residual that was left, which is that sum rounded once.
  Array z_values() {
    Array z = values_of(x);
    const Array s = is_float8() ? values_of(x_scale) : Array{};
    for (std::size_t i = 0; i < z.size() && is_float8(); ++i) {
      z[i] *= s[i / static_cast<std::size_t>(c.x_group)];
    }
    if (!c.residual) return z;
    const Array sum = values_of(residual);
    // Half a last place, and a little as the sum is made in float32 first.
    const double unit = c.residual_dtype == kBF16 ? 0x1p-8 : c.residual_dtype == kF16 ? 0x1p-11 : 0;
    for (std::size_t i = 0; i < z.size(); ++i) {
      const double exact = z[i] + residual_values[i];
      const double slack = 0x1p-22 * (std::abs(z[i]) + std::abs(residual_values[i])) + 0x1p-25;
      EXPECT_LE(std::abs(sum[i] - exact), unit * std::abs(exact) + slack) << "residual " << i;
    }
    return sum;
  }

  std::vector<GuardedTensor*> outputs() {
    std::vector<GuardedTensor*> list{&q,      &q_t,          &amax,          &rstd,
                                     &normed, &scale.memory, &scale_t.memory};
    if (c.residual) list.push_back(&residual);
    return list;
  }

 private:
  void call() {
    const Fp8Quantized out = quantized();
    const Tensor none;
    if (!c.norm) {
      GuardedTensor workspace =
          make_workspace(fp8_quantize_workspace(x.view(), format(), out), device);
      fp8_quantize(x.view(), format(), out, workspace.view(), {});
      workspace.download();
      EXPECT_TRUE(workspace.guards_intact()) << "workspace of " << concat(c);
      return;
    }
    GuardedTensor workspace =
        make_workspace(fp8_rmsnorm_forward_workspace(x.view(), format(), out), device);
    fp8_rmsnorm_forward(x.view(), is_float8() ? x_scale.view() : none, weight.view(), eps,
                        c.weight_offset, c.residual ? residual.view() : none, format(), out,
                        c.make_rstd ? rstd.view() : none, c.make_normed ? normed.view() : none,
                        workspace.view(), {});
    workspace.download();
    EXPECT_TRUE(workspace.guards_intact()) << "workspace of " << concat(c);
  }

  Array largest_of_sets(const Array& y, bool turned) const {
    return fp8_rmsnorm::reference::largest_of_sets(turned ? c.columns : c.rows, y, c.scaling,
                                                   c.group);
  }

  /// Scales are right, and every value lies within half a step of y / scale.
  void expect_quantized(const Array& y, bool turned, double tolerance) {
    const GuardedTensor& out = turned ? q_t : q;
    const ScaleTensor& scales = turned && c.scaling != Fp8Scaling::kTensor ? scale_t : scale;
    const Array codes = values_of(out), most = largest_of_sets(y, turned);
    const std::int64_t columns = turned ? c.rows : c.columns;
    const double largest = largest_of(c.q);
    for (std::size_t i = 0; i < y.size(); ++i) {
      const auto row = static_cast<std::int64_t>(i) / columns;
      const auto group = static_cast<std::int64_t>(i) % columns / c.group;
      const double s = scales.at(row, c.scaling == Fp8Scaling::kGroup ? group : 0);
      if (!c.given) {
        const double exact = fp8_rmsnorm::reference::scale_of(most[i], c.q, false);
        if (c.pow2) {
          ASSERT_EQ(s, std::exp2(std::ilogb(s))) << "scale of " << i;
          ASSERT_GE(s, exact * (1 - tolerance)) << "scale of " << i;
          ASSERT_LT(s / 2, exact * (1 + tolerance)) << "scale of " << i;
        } else {
          ASSERT_LE(std::abs(s - exact), tolerance * exact) << "scale of " << i;
        }
      }
      const double v = y[i] / s, most_steps = c.stochastic ? 1.0 : 0.5;
      const double wanted = std::clamp(v, -largest, largest);
      const double slack =
          most_steps * step_at(wanted * (1 + tolerance), c.q) + tolerance * std::abs(wanted);
      // Negated, so that a NaN fails.
      if (!(std::abs(codes[i] - wanted) <= slack)) {
        FAIL() << (turned ? "q_t" : "q") << " at " << i << ": got " << codes[i] << ", expected "
               << wanted << " within " << slack;
      }
    }
  }

  void expect_normed(const Array& y, double tolerance) {
    const Array got = values_of(normed);
    for (std::size_t i = 0; i < y.size(); ++i) {
      ASSERT_LE(std::abs(got[i] - y[i]), (0x1p-8 + tolerance) * std::abs(y[i])) << "normed " << i;
    }
  }

  /// COAT's chain to the byte, from the rstd of the op.
  void expect_compat(const Array& z, const Array& y) {
    Floats z32, w32 = floats_of(values_of(weight));
    const Array codes = values_of(x), s = is_float8() ? values_of(x_scale) : Array{};
    for (std::size_t i = 0; i < z.size(); ++i) {
      z32.push_back(!c.residual && is_float8()
                        ? static_cast<float>(codes[i]) *
                              static_cast<float>(s[i / static_cast<std::size_t>(c.x_group)])
                        : static_cast<float>(z[i]));
    }
    for (float& w : w32) w += c.weight_offset;
    const std::int64_t rng[] = {seed, offset};
    const std::int64_t* draws = c.stochastic ? rng : nullptr;
    fp8_rmsnorm::reference::Compat expected;
    if (c.norm) {
      expected =
          fp8_rmsnorm::reference::compat(c.rows, z32, w32, floats_of(values_of(rstd)), c.q, draws);
      if (c.given) {
        expected.q = fp8_rmsnorm::reference::quantise(
            expected.y, static_cast<float>(scale.at(0, 0)), c.q, draws);
      }
    } else {
      expected.y = floats_of(y);
      expected.q = fp8_rmsnorm::reference::quantise(expected.y, static_cast<float>(scale.at(0, 0)),
                                                    c.q, draws);
    }
    if (c.norm && !c.given) {
      ASSERT_EQ(scale.at(0, 0), static_cast<double>(expected.scale));
    }
    if (c.norm && c.make_amax) {
      ASSERT_EQ(get_value(amax, 0), static_cast<double>(expected.amax));
    }
    if (c.make_q) {
      ASSERT_EQ(bytes_of(q), expected.q);
    }
    if (c.make_q_t) {
      ASSERT_EQ(bytes_of(q_t), fp8_rmsnorm::reference::transposed(c.rows, expected.q));
    }
    if (c.make_normed) {
      ASSERT_EQ(floats_of(values_of(normed)), expected.y);
    }
  }

  GuardedTensor rng_;
};

inline void expect_forward_right(const NormCase& c, Device device, unsigned seed = 1) {
  NormTrial trial(c, device, seed);
  trial.run();
  trial.expect_right();
}

/// The bytes of all outputs.
inline std::vector<Bytes> outputs_of(NormTrial& trial) {
  std::vector<Bytes> all;
  for (GuardedTensor* t : trial.outputs()) {
    t->download();
    all.push_back(bytes_of(*t));
  }
  return all;
}

}  // namespace mortar::testing
