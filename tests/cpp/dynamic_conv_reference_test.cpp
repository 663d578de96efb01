// SPDX-License-Identifier: Apache-2.0
// The reference itself: worked values, and its gradients against finite differences.
#include "dynamic_conv/reference.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

namespace mortar::dynamic_conv::reference {
namespace {

TEST(DynamicConvReference, SmallWorkedValues) {
  const Sizes sizes{1, 3, 1, 2, 2, false, {}};
  const Array x = {1, 2, 3}, k = {10, 1, 20, 2, 30, 3}, initial = {7, 5};
  const Outputs out = forward(sizes, x, k, initial);
  EXPECT_EQ(out.y, (Array{10 * 5 + 1, 20 * 1 + 2 * 2, 30 * 2 + 3 * 3}));
  EXPECT_EQ(out.final_state, (Array{2, 3}));
  const Sizes packed{1, 3, 1, 2, 2, false, {0, 1, 1, 3}};
  const Outputs parts = forward(packed, x, k, {7, 5, 8, 6, 9, 4});
  EXPECT_EQ(parts.y, (Array{10 * 5 + 1, 20 * 4 + 2 * 2, 30 * 2 + 3 * 3}));
  EXPECT_EQ(parts.final_state, (Array{5, 1, 8, 6, 2, 3}));
}

double loss(const Sizes& sizes, const Array& x, const Array& k, const Array& initial,
            const Array& dy, const Array& dfinal) {
  const Outputs out = forward(sizes, x, k, initial);
  double sum = 0;
  for (std::size_t i = 0; i < dy.size(); ++i) sum += dy[i] * out.y[i];
  for (std::size_t i = 0; i < dfinal.size(); ++i) sum += dfinal[i] * out.final_state[i];
  return sum;
}

TEST(DynamicConvReference, SmallGradientsMatchFiniteDifferences) {
  std::mt19937 rng(37);
  std::normal_distribution<double> normal;
  const auto random = [&](std::size_t n) {
    Array a(n);
    for (double& v : a) v = normal(rng);
    return a;
  };
  for (int width : {1, 2, 3, 4}) {
    for (int length : {width - 1, width}) {
      for (bool silu : {false, true}) {
        const Sizes sizes{1, 7, 2, width, length, silu, {0, 2, 2, 7}};
        const std::size_t tokens = 14, states = static_cast<std::size_t>(3 * 2 * length);
        Array x = random(tokens), k = random(tokens * static_cast<std::size_t>(width));
        Array initial = random(states);
        const Array dy = random(tokens), dfinal = random(states);
        const Gradients g = backward(sizes, x, k, initial, dy, dfinal);
        // Central differences are off by h^2 times a third derivative (at most some tens here) plus
        // roundoff / h.
        const double h = 1e-5;
        const auto expect_gradient = [&](Array& values, const Array& gradient) {
          for (std::size_t i = 0; i < values.size(); ++i) {
            const double middle = values[i];
            values[i] = middle + h;
            const double high = loss(sizes, x, k, initial, dy, dfinal);
            values[i] = middle - h;
            const double low = loss(sizes, x, k, initial, dy, dfinal);
            values[i] = middle;
            EXPECT_NEAR(gradient[i], (high - low) / (2 * h), 1e-8);
          }
        };
        expect_gradient(x, g.dx);
        expect_gradient(k, g.dk);
        expect_gradient(initial, g.dinitial_state);
      }
    }
  }
}

}  // namespace
}  // namespace mortar::dynamic_conv::reference
