// SPDX-License-Identifier: Apache-2.0
// The reference itself: worked values, and its gradients against finite differences.
#include "fp8_rmsnorm/reference.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

namespace mortar::fp8_rmsnorm::reference {
namespace {

TEST(Fp8RmsNormReference, SmallWorkedValues) {
  // mean(z^2) = 25 / 2, so with eps = 3.5 the root is 4.
  const Normalised out = forward(1, {3, 4}, {2, 1}, 3.5);
  EXPECT_EQ(out.rstd, Array{0.25});
  EXPECT_EQ(out.y, (Array{1.5, 1}));
  EXPECT_EQ(largest_of_sets(2, {1, -5, 2, 3}, Fp8Scaling::kTensor, 16), (Array{5, 5, 5, 5}));
  EXPECT_EQ(largest_of_sets(2, {1, -5, 2, 3}, Fp8Scaling::kRow, 16), (Array{5, 5, 3, 3}));
  EXPECT_EQ(largest_of_sets(1, {1, -5, 2}, Fp8Scaling::kGroup, 2), (Array{5, 5, 2}));
  EXPECT_EQ(transposed<int>(2, {1, 2, 3, 4, 5, 6}), (std::vector<int>{1, 4, 2, 5, 3, 6}));
  EXPECT_EQ(scale_of(448, DType::kFloat8E4M3, true), 1);
  EXPECT_EQ(scale_of(449, DType::kFloat8E4M3, true), 2);
  EXPECT_EQ(scale_of(0, DType::kFloat8E4M3, false), 1e-10 / 448);
  EXPECT_EQ(scale_of(57344, DType::kFloat8E5M2, false), 1);
}

// COAT's chain by hand: y = (z * rstd) * w, 1.00390625 is a tie between two bfloat16 and goes to
// 1.0, and 3.0 / 448 rounds to the bfloat16 0.00668334960937.
TEST(Fp8RmsNormReference, SmallWorkedCompat) {
  const Compat out = compat(1, {1.00390625f, -3.0f}, {1, 1}, {1}, DType::kFloat8E4M3, nullptr);
  EXPECT_EQ(out.amax, 3.0f);
  EXPECT_EQ(out.scale, 0x1.b6p-8f);
  EXPECT_EQ(out.y, (Floats{1.0f, -3.0f}));
  // 1 / scale = 149.63, between 144 (0x71) and 160 (0x72); 3 / scale = 448.88 saturates.
  EXPECT_EQ(out.q, (Bytes{0x71, 0xfe}));
}

TEST(Fp8RmsNormReference, SmallGradientsMatchFiniteDifferences) {
  std::mt19937 rng(41);
  std::normal_distribution<double> normal;
  const std::int64_t rows = 3;
  const std::size_t columns = 5;
  const auto random = [&](std::size_t n) {
    Array a(n);
    for (double& v : a) v = normal(rng);
    return a;
  };
  const double eps = 1e-3;
  Array z = random(15), w = random(columns);
  const Array dy = random(15), extra = random(15);
  const auto loss = [&] {
    const Array y = forward(rows, z, w, eps).y;
    double sum = 0;
    for (std::size_t i = 0; i < y.size(); ++i) sum += dy[i] * y[i] + extra[i] * z[i];
    return sum;
  };
  const Gradients g = backward(rows, dy, z, w, forward(rows, z, w, eps).rstd, extra);
  // Central differences are off by h^2 times a third derivative (some tens here) plus
  // roundoff / h.
  const double h = 1e-5;
  const auto expect_gradient = [&](Array& values, const Array& gradient) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      const double middle = values[i];
      values[i] = middle + h;
      const double high = loss();
      values[i] = middle - h;
      const double low = loss();
      values[i] = middle;
      EXPECT_NEAR(gradient[i], (high - low) / (2 * h), 1e-7);
    }
  };
  expect_gradient(z, g.dx);
  expect_gradient(w, g.dw);
}

}  // namespace
}  // namespace mortar::fp8_rmsnorm::reference
