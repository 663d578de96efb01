// SPDX-License-Identifier: Apache-2.0
// One random backward, run on a device and compared with the exact result.
#pragma once

#include <ostream>
#include <stdexcept>

#include "fp8_rmsnorm/checks.h"
#include "fp8_rmsnorm/cuda/kernels.cuh"
#include "fp8_rmsnorm_operands.h"

namespace mortar::testing {

struct GradCase {
  std::int64_t rows = 5, columns = 64;
  DType x = kE4M3, x_scale = kBF16, weight = kF32, dy = kBF16, dw = kF32;
  int x_group = 16;
  float weight_offset = 0.0f;
  bool residual_grad = false, make_dx = true, make_dw = true, accumulate = false;
  enum { kApart, kOnDy, kOnResidual } dx = kApart;
  Layout layout = {};
};

inline std::ostream& operator<<(std::ostream& out, const GradCase& c) {
  return out << c.rows << " x " << c.columns << " x " << dtype_name(c.x) << "/" << c.x_group
             << " dy " << dtype_name(c.dy) << " weight " << dtype_name(c.weight) << " dw "
             << dtype_name(c.dw) << (c.residual_grad ? " residual" : "")
             << (c.accumulate ? " accumulate" : "") << " dx on " << c.dx << " lead "
             << c.layout.lead << " gap " << c.layout.row_gap;
}

inline double unit_of(DType dtype) {
  return dtype == kBF16 ? 0x1p-8 : dtype == kF16 ? 0x1p-11 : 0x1p-24;
}

class GradTrial {
 public:
  GradTrial(const GradCase& c_, Device device_, unsigned random) : c(c_), device(device_) {
    const std::int64_t elements = c.rows * c.columns;
    Draws draws(random);
    x_values = draws.normal(elements);
    dy_values = draws.normal(elements);
    residual_values = draws.normal(elements);
    scale_values = draws.factors(elements / c.x_group);
    weight_values = draws.factors(c.columns);
    rstd_values = draws.factors(c.rows);
    dw_values = draws.normal(c.columns);
  }

  const GradCase c;
  const Device device;
  Array x_values, dy_values, residual_values, scale_values, weight_values, rstd_values, dw_values;
  GuardedTensor x, x_scale, weight, dy, rstd, residual_grad, dx, dw;

  /// By the CUDA backend's plan where one is given.
  void run(const fp8_rmsnorm::BackwardPlan* plan = nullptr) {
    const std::vector<std::int64_t> shape{c.rows, c.columns};
    x = make_tensor(c.x, shape, x_values, c.layout, device);
    const bool scaled = dtype_size(c.x) == 1;
    if (scaled) {
      x_scale =
          make_tensor(c.x_scale, {c.rows, c.columns / c.x_group}, scale_values, c.layout, device);
    }
    weight = make_tensor(c.weight, {c.columns}, weight_values, {.lead = c.layout.lead}, device);
    dy = make_tensor(c.dy, shape, dy_values, c.layout, device);
    rstd = make_tensor(kF32, {c.rows}, rstd_values, {}, device);
    residual_grad = make_tensor(c.dy, shape, residual_values, c.layout, device);
    dx = GuardedTensor(c.dy, shape, c.layout, device);
    dw = c.accumulate ? make_tensor(c.dw, {c.columns}, dw_values, {.lead = c.layout.lead}, device)
                      : GuardedTensor(c.dw, {c.columns}, {.lead = c.layout.lead}, device);
    exact_ = exact();
    const Tensor none;
    const std::int64_t bytes =
        plan != nullptr ? plan->workspace_bytes : fp8_rmsnorm_backward_workspace(x.view());
    GuardedTensor workspace = make_workspace(bytes, device);
    const Tensor scale = scaled ? x_scale.view() : none;
    const Tensor residual = c.residual_grad ? residual_grad.view() : none;
    const Tensor dx_view = c.make_dx ? dx_tensor().view() : none;
    const Tensor dw_view = c.make_dw ? dw.view() : none;
    if (plan == nullptr) {
      fp8_rmsnorm_backward(dy.view(), x.view(), scale, weight.view(), c.weight_offset, rstd.view(),
                           residual, dx_view, dw_view, c.accumulate, workspace.view(), {});
    } else {
      run_planned(fp8_rmsnorm::check_backward(ArgCheck("test"), dy.view(), x.view(), scale,
                                              weight.view(), c.weight_offset, rstd.view(), residual,
                                              dx_view, dw_view, c.accumulate),
                  *plan, workspace.view());
    }
    for (GuardedTensor* t : {&dy, &residual_grad, &dx, &dw, &workspace}) {
      t->download();
      EXPECT_TRUE(t->guards_intact()) << concat(c);
    }
    if (!c.make_dw) {
      EXPECT_TRUE(dw.all_unchanged());
    }
  }

  GuardedTensor& dx_tensor() {
    return c.dx == GradCase::kOnDy ? dy : c.dx == GradCase::kOnResidual ? residual_grad : dx;
  }

  /// One rounding to the dtype, and of each term of a float32 sum as many as additions it enters:
  /// N / 32 + 16 for a mean over N in 32 or more lanes, some hundreds for a sum over rows in
  /// blocks of at most 256.
  void expect_right() {
    SCOPED_TRACE(concat(c));
    const double least = c.dy == kF16 ? 0x1p-25 : 0x1p-140;
    if (c.make_dx) {
      const Array got = values_of(dx_tensor());
      for (std::size_t i = 0; i < got.size(); ++i) {
        const double tolerance = unit_of(c.dy) * std::abs(exact_.dx[i]) + dx_slack_[i] + least;
        ASSERT_LE(std::abs(got[i] - exact_.dx[i]), tolerance) << "dx " << i << " " << exact_.dx[i];
      }
    }
    if (!c.make_dw) return;
    const Array got = values_of(dw);
    const double rows = static_cast<double>(c.rows);
    const double additions = std::min(rows, 256.0) + rows / 256 + 8;
    for (std::size_t i = 0; i < got.size(); ++i) {
      const double exact = exact_.dw[i] + (c.accumulate ? dw_before_[i] : 0.0);
      const double tolerance = unit_of(c.dw) * std::abs(exact) +
                               additions * 0x1p-24 * (dw_magnitude_[i] + std::abs(exact)) + 0x1p-25;
      ASSERT_LE(std::abs(got[i] - exact), tolerance) << "dw " << i << " " << exact;
    }
  }

 private:
  static void run_planned([[maybe_unused]] fp8_rmsnorm::BackwardProblem problem,
                          [[maybe_unused]] const fp8_rmsnorm::BackwardPlan& plan,
                          [[maybe_unused]] const Tensor& workspace) {
#if MORTAR_HAS_CUDA
    problem.workspace = workspace.ptr<std::byte>();
    problem.workspace_bytes = plan.workspace_bytes;
    fp8_rmsnorm::cuda::backward(problem, &plan, {});
#else
    throw std::runtime_error("built without CUDA");
#endif
  }

  fp8_rmsnorm::reference::Gradients exact() {
    Array z = values_of(x);
    const Array s = dtype_size(c.x) == 1 ? values_of(x_scale) : Array{};
    for (std::size_t i = 0; i < s.size() * static_cast<std::size_t>(c.x_group); ++i) {
      z[i] *= s[i / static_cast<std::size_t>(c.x_group)];
    }
    Array w = values_of(weight), g = values_of(dy);
    for (double& v : w) v += static_cast<double>(c.weight_offset);
    const Array r = values_of(rstd);
    const Array extra = c.residual_grad ? values_of(residual_grad) : Array{};
    if (c.accumulate) dw_before_ = values_of(dw);
    const auto columns = static_cast<std::size_t>(c.columns);
    dw_magnitude_.assign(columns, 0.0);
    const double additions = static_cast<double>(c.columns) / 32 + 16;
    for (std::size_t first = 0; first < z.size(); first += columns) {
      const double rm = r[first / columns];
      double mean = 0;
      for (std::size_t i = 0; i < columns; ++i) {
        mean += std::abs(g[first + i] * w[i] * z[first + i]);
        dw_magnitude_[i] += std::abs(g[first + i] * z[first + i] * rm);
      }
      mean /= static_cast<double>(columns);
      for (std::size_t i = 0; i < columns; ++i) {
        const double direct = std::abs(g[first + i] * w[i]) * rm;
        const double through_mean = std::abs(z[first + i]) * rm * rm * rm * mean;
        const double added = c.residual_grad ? std::abs(extra[first + i]) : 0.0;
        dx_slack_.push_back(0x1p-24 * (8 * (direct + added) + additions * through_mean));
      }
    }
    return fp8_rmsnorm::reference::backward(c.rows, g, z, w, r, extra);
  }

  fp8_rmsnorm::reference::Gradients exact_;
  Array dx_slack_, dw_magnitude_, dw_before_;
};

}  // namespace mortar::testing
