// SPDX-License-Identifier: Apache-2.0
// The backward against float64, over every dtype, switch and size.
#include <omp.h>

#include <ostream>

#include "fp8_rmsnorm_operands.h"

namespace mortar::testing {
namespace {

struct GradCase {
  std::int64_t rows = 5, columns = 64;
  DType x = kE4M3, x_scale = kBF16, weight = kF32, dy = kBF16, dw = kF32;
  int x_group = 16;
  float weight_offset = 0.0f;
  bool residual_grad = false, make_dx = true, make_dw = true, accumulate = false;
  enum { kApart, kOnDy, kOnResidual } dx = kApart;
  Layout layout = {};
};

std::ostream& operator<<(std::ostream& out, const GradCase& c) {
  return out << c.rows << " x " << c.columns << " x " << dtype_name(c.x) << "/" << c.x_group
             << " dy " << dtype_name(c.dy) << " weight " << dtype_name(c.weight) << " dw "
             << dtype_name(c.dw) << (c.residual_grad ? " residual" : "")
             << (c.accumulate ? " accumulate" : "") << " dx on " << c.dx << " lead "
             << c.layout.lead << " gap " << c.layout.row_gap;
}

double unit_of(DType dtype) { return dtype == kBF16 ? 0x1p-8 : dtype == kF16 ? 0x1p-11 : 0x1p-24; }

class GradTrial {
 public:
  GradTrial(const GradCase& c_, Device device_, unsigned random) : c(c_), device(device_) {
    std::mt19937 rng(random);
    std::normal_distribution<double> normal;
    std::uniform_real_distribution<double> uniform(0.5, 2.0);
    const auto fill = [&](Array& a, std::int64_t n, auto& distribution) {
      a.resize(static_cast<std::size_t>(n));
      for (double& v : a) v = distribution(rng);
    };
    const std::int64_t elements = c.rows * c.columns;
    fill(x_values, elements, normal);
    fill(dy_values, elements, normal);
    fill(residual_values, elements, normal);
    fill(scale_values, elements / c.x_group, uniform);
    fill(weight_values, c.columns, uniform);
    fill(rstd_values, c.rows, uniform);
    fill(dw_values, c.columns, normal);
  }

  const GradCase c;
  const Device device;
  Array x_values, dy_values, residual_values, scale_values, weight_values, rstd_values, dw_values;
  GuardedTensor x, x_scale, weight, dy, rstd, residual_grad, dx, dw;

  void run() {
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
    GuardedTensor workspace = byte_tensor(fp8_rmsnorm_backward_workspace(x.view()), device);
    fp8_rmsnorm_backward(dy.view(), x.view(), scaled ? x_scale.view() : none, weight.view(),
                         c.weight_offset, rstd.view(),
                         c.residual_grad ? residual_grad.view() : none,
                         c.make_dx ? dx_tensor().view() : none, c.make_dw ? dw.view() : none,
                         c.accumulate, workspace.view(), {});
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

class Fp8RmsNormBackward : public ::testing::TestWithParam<Device> {
 protected:
  void expect_right(const GradCase& c, unsigned random = 1) {
    GradTrial trial(c, GetParam(), random);
    trial.run();
    trial.expect_right();
  }
};
INSTANTIATE_TEST_SUITE_P(Devices, Fp8RmsNormBackward, ::testing::ValuesIn(devices()), device_name);

TEST_P(Fp8RmsNormBackward, SmallEveryDtype) {
  for (DType dy : {kF32, kF16, kBF16}) {
    for (DType x : {kE4M3, kE5M2, kF32, kF16, kBF16}) {
      expect_right({.rows = 20, .columns = 96, .x = x, .dy = dy, .residual_grad = true});
    }
    for (DType w : {kF32, kF16, kBF16}) {
      for (DType dw : {kF32, kF16, kBF16}) {
        expect_right({.x_scale = kF32, .weight = w, .dy = dy, .dw = dw, .accumulate = true});
      }
    }
  }
}

TEST_P(Fp8RmsNormBackward, SmallEverySwitch) {
  for (int flags = 0; flags < 16; ++flags) {
    for (auto dx : {GradCase::kApart, GradCase::kOnDy, GradCase::kOnResidual}) {
      GradCase c{.rows = 35, .columns = 160, .x_group = 32};
      c.residual_grad = flags & 1 || dx == GradCase::kOnResidual;
      c.accumulate = flags & 2;
      c.make_dx = flags & 4;
      c.make_dw = flags & 8;
      c.weight_offset = flags % 2 ? 1.0f : 0.0f;
      c.dx = dx;
      expect_right(c, static_cast<unsigned>(flags));
    }
  }
}

TEST_P(Fp8RmsNormBackward, SmallSizesAndViews) {
  for (std::int64_t columns : {1, 2, 7, 15, 16, 17, 33, 63, 65, 127, 129, 1023, 1024, 1025}) {
    expect_right({.rows = 3, .columns = columns, .x = kBF16, .residual_grad = true});
    expect_right({.rows = 18, .columns = columns, .x = kF32, .dy = kF32});
  }
  for (std::int64_t rows : {1, 2, 15, 16, 17, 31, 33, 64, 65, 127, 129, 255, 257, 1023, 1025}) {
    expect_right({.rows = rows, .columns = 48});
  }
  for (int group : {16, 32, 64, 128}) expect_right({.columns = 384, .x_group = group});
  for (std::int64_t lead : {0, 1, 2, 3, 4, 8}) {
    for (std::int64_t gap : {0, 1, 3, 8}) {
      const Layout layout{.lead = lead, .row_gap = gap};
      expect_right({.rows = 18, .columns = 80, .residual_grad = true, .layout = layout});
      expect_right({.rows = 18, .columns = 77, .x = kBF16, .dy = kF32, .layout = layout});
    }
  }
}

TEST_P(Fp8RmsNormBackward, LargerSizes) {
  expect_right({.rows = 200, .columns = 4096, .residual_grad = true});
  expect_right({.rows = 4099, .columns = 128});
  expect_right({.rows = 3, .columns = 65536});
  expect_right({.rows = 35, .columns = 65535, .x = kBF16});
}

TEST_P(Fp8RmsNormBackward, SmallEmpty) {
  for (bool accumulate : {false, true}) {
    GradTrial trial({.rows = 0, .accumulate = accumulate}, GetParam(), 3);
    trial.run();
    const Array dw = values_of(trial.dw);
    for (std::size_t i = 0; i < dw.size(); ++i) {
      EXPECT_EQ(dw[i],
                accumulate ? static_cast<double>(static_cast<float>(trial.dw_values[i])) : 0);
    }
  }
}

// A NaN in dy spoils its row of dx and its column of dw, and nothing else.
TEST_P(Fp8RmsNormBackward, SmallNaNStaysInItsRowAndColumn) {
  const std::int64_t rows = 40, columns = 64;
  GradTrial trial({.rows = rows, .columns = columns}, GetParam(), 5);
  trial.dy_values[static_cast<std::size_t>(7 * columns + 9)] = std::nan("");
  trial.run();
  const Array dx = values_of(trial.dx), dw = values_of(trial.dw);
  for (std::int64_t m = 0; m < rows; ++m) {
    for (std::int64_t n = 0; n < columns; ++n) {
      EXPECT_EQ(std::isnan(dx[static_cast<std::size_t>(m * columns + n)]), m == 7) << m << "," << n;
    }
  }
  for (std::int64_t n = 0; n < columns; ++n) {
    EXPECT_EQ(std::isnan(dw[static_cast<std::size_t>(n)]), n == 9) << n;
  }
}

TEST_P(Fp8RmsNormBackward, RepeatsAreTheSameBits) {
  Bytes dx, dw;
  for (int repeat = 0; repeat < 5; ++repeat) {
    GradTrial trial({.rows = 700, .columns = 1040}, GetParam(), 7);
    trial.run();
    if (repeat == 0) {
      dx = bytes_of(trial.dx);
      dw = bytes_of(trial.dw);
    }
    EXPECT_TRUE(bytes_of(trial.dx) == dx && bytes_of(trial.dw) == dw) << "repeat " << repeat;
  }
}

// Bits do not depend on the number of threads, nor on how many rows each of them has.
TEST(Fp8RmsNormThreads, SmallBitsAreTheSameForAnyNumber) {
  const int usual = omp_get_max_threads();
  Bytes dx, dw;
  for (int threads : {1, 2, 3, 7}) {
    omp_set_num_threads(threads);
    GradTrial trial({.rows = 333, .columns = 528}, Device{}, 9);
    trial.run();
    if (threads == 1) {
      dx = bytes_of(trial.dx);
      dw = bytes_of(trial.dw);
    }
    EXPECT_TRUE(bytes_of(trial.dx) == dx && bytes_of(trial.dw) == dw) << threads << " threads";
  }
  omp_set_num_threads(usual);
}

}  // namespace
}  // namespace mortar::testing
