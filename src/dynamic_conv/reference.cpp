// SPDX-License-Identifier: Apache-2.0
#include "dynamic_conv/reference.h"

#include <cmath>
#include <functional>

namespace mortar::dynamic_conv::reference {
namespace {

/// Where the inputs of one sequence and channel lie: `at(j)` for j = -L .. length - 1, negative j
/// being the initial state. Null: an input that is zero by definition.
struct Line {
  const Sizes& sizes;
  std::int64_t first_token, length, sequence, channel;

  std::int64_t token(std::int64_t t) const { return (first_token + t) * sizes.channels + channel; }
  std::int64_t state(std::int64_t position) const {
    return (sequence * sizes.channels + channel) * sizes.state_length + position;
  }
  template <class Array>
  auto at(Array& x, Array& initial, std::int64_t j) const -> decltype(&x[0]) {
    if (j >= 0) return &x[static_cast<std::size_t>(token(j))];
    const std::int64_t position = sizes.state_length + j;
    if (position < 0 || initial.empty()) return nullptr;
    return &initial[static_cast<std::size_t>(state(position))];
  }
};

void for_each_line(const Sizes& sizes, const std::function<void(const Line&)>& body) {
  const bool packed = !sizes.cu_seqlens.empty();
  for (std::int64_t n = 0; n < sizes.num_sequences(); ++n) {
    const auto i = static_cast<std::size_t>(n);
    const std::int64_t first = packed ? sizes.cu_seqlens[i] : n * sizes.time;
    const std::int64_t length = packed ? sizes.cu_seqlens[i + 1] - first : sizes.time;
    for (std::int64_t d = 0; d < sizes.channels; ++d) body({sizes, first, length, n, d});
  }
}

double sigmoid(double s) { return 1 / (1 + std::exp(-s)); }

double value(const double* p) { return p == nullptr ? 0 : *p; }

double convolve(const Line& line, const Array& x, const Array& k, const Array& initial,
                std::int64_t t) {
  const int width = line.sizes.width;
  double s = 0;
  for (int w = 0; w < width; ++w) {
    s += k[static_cast<std::size_t>(line.token(t) * width + w)] *
         value(line.at(x, initial, t + w - width + 1));
  }
  return s;
}

}  // namespace

std::int64_t Sizes::num_sequences() const {
  return cu_seqlens.empty() ? batch : static_cast<std::int64_t>(cu_seqlens.size()) - 1;
}

Outputs forward(const Sizes& sizes, const Array& x, const Array& k, const Array& initial) {
  Outputs out;
  out.y.resize(x.size());
  out.final_state.resize(
      static_cast<std::size_t>(sizes.num_sequences() * sizes.channels * sizes.state_length));
  for_each_line(sizes, [&](const Line& line) {
    for (std::int64_t t = 0; t < line.length; ++t) {
      const double s = convolve(line, x, k, initial, t);
      out.y[static_cast<std::size_t>(line.token(t))] = sizes.silu ? s * sigmoid(s) : s;
    }
    for (int j = 0; j < sizes.state_length; ++j) {
      out.final_state[static_cast<std::size_t>(line.state(j))] =
          value(line.at(x, initial, line.length - sizes.state_length + j));
    }
  });
  return out;
}

Gradients backward(const Sizes& sizes, const Array& x, const Array& k, const Array& initial,
                   const Array& dy, const Array& dfinal) {
  Gradients out;
  out.dx.resize(x.size());
  out.dk.resize(k.size());
  out.dinitial_state.resize(
      static_cast<std::size_t>(sizes.num_sequences() * sizes.channels * sizes.state_length));
  const int width = sizes.width;
  const auto add = [](double* to, double g) {
    if (to != nullptr) *to += g;
  };
  for_each_line(sizes, [&](const Line& line) {
    for (std::int64_t t = 0; t < line.length; ++t) {
      double g = dy[static_cast<std::size_t>(line.token(t))];
      if (sizes.silu) {
        const double s = convolve(line, x, k, initial, t);
        g *= sigmoid(s) * (1 + s * (1 - sigmoid(s)));
      }
      for (int w = 0; w < width; ++w) {
        const auto tap = static_cast<std::size_t>(line.token(t) * width + w);
        out.dk[tap] = g * value(line.at(x, initial, t + w - width + 1));
        add(line.at(out.dx, out.dinitial_state, t + w - width + 1), g * k[tap]);
      }
    }
    for (int j = 0; j < sizes.state_length && !dfinal.empty(); ++j) {
      add(line.at(out.dx, out.dinitial_state, line.length - sizes.state_length + j),
          dfinal[static_cast<std::size_t>(line.state(j))]);
    }
  });
  return out;
}

}  // namespace mortar::dynamic_conv::reference
