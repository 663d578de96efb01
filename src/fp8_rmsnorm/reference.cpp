// SPDX-License-Identifier: Apache-2.0
#include "fp8_rmsnorm/reference.h"

#include <algorithm>
#include <cmath>

#include "core/dtype_visitor.h"
#include "core/philox.h"

namespace mortar::fp8_rmsnorm::reference {
namespace {

double largest_value(DType dtype) { return dtype == DType::kFloat8E4M3 ? 448.0 : 57344.0; }

float to_bf16(float v) { return to_float(from_float<BFloat16>(v)); }

/// std::max drops a NaN that comes second.
double max_or_nan(double a, double b) { return std::isnan(a) || a > b ? a : b; }

}  // namespace

Normalised forward(std::int64_t rows, const Array& z, const Array& weight, double eps) {
  Normalised out;
  const std::size_t n = weight.size();
  for (std::int64_t m = 0; m < rows; ++m) {
    const double* row = z.data() + static_cast<std::size_t>(m) * n;
    double squares = 0;
    for (std::size_t i = 0; i < n; ++i) squares += row[i] * row[i];
    const double rstd = 1 / std::sqrt(squares / static_cast<double>(n) + eps);
    out.rstd.push_back(rstd);
    for (std::size_t i = 0; i < n; ++i) out.y.push_back(row[i] * rstd * weight[i]);
  }
  return out;
}

Gradients backward(std::int64_t rows, const Array& dy, const Array& z, const Array& weight,
                   const Array& rstd, const Array& residual_grad) {
  const std::size_t n = weight.size();
  Gradients out{{}, Array(n)};
  for (std::int64_t m = 0; m < rows; ++m) {
    const std::size_t first = static_cast<std::size_t>(m) * n;
    const double r = rstd[static_cast<std::size_t>(m)];
    double mean = 0;
    for (std::size_t i = 0; i < n; ++i) mean += dy[first + i] * weight[i] * z[first + i];
    mean /= static_cast<double>(n);
    for (std::size_t i = 0; i < n; ++i) {
      const double g = dy[first + i] * weight[i], zi = z[first + i];
      const double extra = residual_grad.empty() ? 0.0 : residual_grad[first + i];
      out.dx.push_back(r * (g - zi * r * r * mean) + extra);
      out.dw[i] += dy[first + i] * zi * r;
    }
  }
  return out;
}

Array largest_of_sets(std::int64_t rows, const Array& y, Fp8Scaling scaling, std::int64_t group) {
  const std::size_t n = y.size() / static_cast<std::size_t>(rows);
  Array out(y.size());
  const auto fill = [&](std::size_t begin, std::size_t end) {
    double most = 0;
    for (std::size_t i = begin; i < end; ++i) most = max_or_nan(std::abs(y[i]), most);
    for (std::size_t i = begin; i < end; ++i) out[i] = most;
  };
  if (scaling == Fp8Scaling::kTensor) {
    fill(0, y.size());
    return out;
  }
  const std::size_t size = scaling == Fp8Scaling::kRow ? n : static_cast<std::size_t>(group);
  for (std::size_t row = 0; row < y.size(); row += n) {
    for (std::size_t c = 0; c < n; c += size) fill(row + c, row + std::min(c + size, n));
  }
  return out;
}

double scale_of(double amax, DType q, bool pow2) {
  const double scale = max_or_nan(amax, 1e-10) / largest_value(q);
  return pow2 && std::isfinite(scale) ? std::exp2(std::ceil(std::log2(scale))) : scale;
}

Compat compat(std::int64_t rows, const Floats& z, const Floats& weight, const Floats& rstd, DType q,
              const std::int64_t* rng) {
  Compat out;
  const std::size_t n = weight.size();
  bool first = true;
  for (std::size_t m = 0; m < static_cast<std::size_t>(rows); ++m) {
    double most = 0;
    for (std::size_t i = 0; i < n; ++i) {
      const float y = z[m * n + i] * rstd[m] * weight[i];
      most = max_or_nan(std::abs(y), most);
      out.y.push_back(to_bf16(y));
    }
    const auto largest = static_cast<float>(largest_value(q));
    const float scale = to_bf16((static_cast<float>(most) + 1e-10f) / largest);
    out.amax = static_cast<float>(max_or_nan(most, out.amax));
    out.scale = first ? scale : static_cast<float>(max_or_nan(scale, out.scale));
    first = false;
  }
  out.q = quantise(out.y, out.scale, q, rng);
  return out;
}

Bytes quantise(const Floats& y, float scale, DType q, const std::int64_t* rng) {
  return visit_dtype<Float8DTypes>(q, "reference", [&](auto tag) {
    using T = typename decltype(tag)::type;
    Bytes out;
    for (std::size_t i = 0; i < y.size(); ++i) {
      const float v = y[i] / scale;
      const T code = rng == nullptr ? float8_nearest<T>(v)
                                    : float8_stochastic<T>(
                                          v, philox_draw(static_cast<std::uint64_t>(rng[0]),
                                                         static_cast<std::uint64_t>(rng[1]), i));
      out.push_back(code.bits);
    }
    return out;
  });
}

}  // namespace mortar::fp8_rmsnorm::reference
