// SPDX-License-Identifier: Apache-2.0
// The definition of the ops in plain loops: float64 for what is exact, and COAT's chain of
// roundings step by step. The oracle of every backend. Matrices are dense and row by row.
#pragma once

#include <cstdint>
#include <vector>

#include "mortar/fp8_rmsnorm.h"

namespace mortar::fp8_rmsnorm::reference {

using Array = std::vector<double>;
using Floats = std::vector<float>;
using Bytes = std::vector<std::uint8_t>;

struct Normalised {
  Array y, rstd;  ///< [M, N], [M]
};
/// z [M, N] is x * x_scale, or the residual as it was left; weight [N] includes its offset.
Normalised forward(std::int64_t rows, const Array& z, const Array& weight, double eps);

struct Gradients {
  Array dx, dw;
};
/// rstd [M] as the forward gave it; residual_grad [M, N] may be empty.
Gradients backward(std::int64_t rows, const Array& dy, const Array& z, const Array& weight,
                   const Array& rstd, const Array& residual_grad);

/// y^T of y [M, N].
template <class T>
std::vector<T> transposed(std::int64_t rows, const std::vector<T>& y) {
  std::vector<T> t;
  const std::size_t m = static_cast<std::size_t>(rows), n = y.size() / m;
  for (std::size_t c = 0; c < n; ++c) {
    for (std::size_t r = 0; r < m; ++r) t.push_back(y[r * n + c]);
  }
  return t;
}

/// max|y| of each element's set (tensor, row, or group of its row), one for each element. A NaN
/// makes its whole set NaN.
Array largest_of_sets(std::int64_t rows, const Array& y, Fp8Scaling scaling, std::int64_t group);

/// max(amax, 1e-10) / largest of the dtype, or the next power of two not below it.
double scale_of(double amax, DType q, bool pow2);

/// COAT's chain, from z and rstd in float32. With `rng` (seed, offset) values are rounded
/// stochastically.
struct Compat {
  float amax = 0, scale = 0;
  Floats y;  ///< rounded to bfloat16
  Bytes q;
};
Compat compat(std::int64_t rows, const Floats& z, const Floats& weight, const Floats& rstd, DType q,
              const std::int64_t* rng);

/// y / scale in float32, to nearest even or by draws.
Bytes quantise(const Floats& y, float scale, DType q, const std::int64_t* rng);

}  // namespace mortar::fp8_rmsnorm::reference
