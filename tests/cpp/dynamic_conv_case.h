// SPDX-License-Identifier: Apache-2.0
// One random problem of the dynamic convolution, run on a device and compared with the float64
// reference.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <ostream>
#include <random>

#include "dynamic_conv/reference.h"
#include "dynamic_conv_operands.h"

namespace mortar::testing {

using dynamic_conv::reference::Sizes;

/// What to run. state_length 0: no states.
struct Case {
  std::int64_t batch = 1, time = 1, channels = 1;
  int width = 4;
  DType x = DType::kBFloat16, k = DType::kBFloat16;
  bool silu = false;
  std::vector<std::int64_t> cu_seqlens = {};
  bool wide = false;  ///< int64 cu_seqlens
  int state_length = 0;
  bool has_initial = true;                             ///< of a case with states
  bool state_by_time = false;                          ///< states stored [N, L, D]
  std::int64_t channel_padding = 0, time_padding = 0;  ///< slices of larger tensors
  std::int64_t offset = 0;                             ///< misaligns every operand
};

inline std::ostream& operator<<(std::ostream& out, const Case& c) {
  out << "B" << c.batch << " T" << c.time << " D" << c.channels << " W" << c.width << " x "
      << dtype_name(c.x) << " k " << dtype_name(c.k) << " L" << c.state_length;
  if (c.silu) out << " silu";
  if (!c.cu_seqlens.empty()) out << " packed " << c.cu_seqlens.size() - 1;
  if (c.state_length > 0)
    out << (c.has_initial ? " initial" : "") << (c.state_by_time ? " [N,L,D]" : "");
  return out << " pad " << c.channel_padding << "," << c.time_padding << " offset " << c.offset;
}

inline Sizes sizes_of(const Case& c) {
  return {c.batch, c.time, c.channels, c.width, c.state_length, c.silu, c.cu_seqlens};
}

/// Operands and reference results of one case.
class Trial {
 public:
  Trial(const Case& c, Device device, unsigned seed)
      : c_(c), device_(device), sizes_(sizes_of(c)), rng_(seed) {
    const std::int64_t tokens = c.batch * c.time * c.channels;
    const auto count = static_cast<std::size_t>(tokens);
    x = random_values(rng_, count, c.x);
    k = random_values(rng_, count * static_cast<std::size_t>(c.width), c.k);
    dy = random_values(rng_, count, c.x);
    const auto states =
        static_cast<std::size_t>(sizes_.num_sequences() * c.channels * c.state_length);
    if (c.has_initial) initial = random_values(rng_, states, c.x);
    dfinal = random_values(rng_, states, c.x);
  }

  Array x, k, dy, initial, dfinal;  ///< may be changed before a run

  void forward() {
    make_inputs();
    y = signal();
    if (c_.state_length > 0) final_state = state();
    dynamic_conv_forward(*x_, *k_, optional(starts_), optional(initial_), *y, optional(final_state),
                         c_.silu, {});
    finish(device_);
  }

  void backward() {
    make_inputs();
    dy_ = signal();
    dy_->fill(dy);
    dx = signal();
    dk = taps();
    if (c_.state_length > 0) {
      dfinal_ = state();
      dfinal_->fill(dfinal);
      dinitial = state();
    }
    dynamic_conv_backward(*x_, *k_, optional(starts_), optional(initial_), *dy_, optional(dfinal_),
                          *dx, *dk, optional(dinitial), c_.silu, {});
    finish(device_);
  }

  void expect_forward_right() {
    const auto expected = dynamic_conv::reference::forward(sizes_, x, k, initial);
    // |silu'| < 1.1, and exp and the division are within a few units.
    expect_close(y->values(), expected.y, sum_magnitudes(), c_.x, 2 * c_.width + 8, label("y"));
    y->expect_guards_intact("y");
    if (final_state == nullptr) return;
    EXPECT_EQ(final_state->values(), expected.final_state) << label("final_state");
    final_state->expect_guards_intact("final_state");
  }

  void expect_backward_right() {
    const auto expected = dynamic_conv::reference::backward(sizes_, x, k, initial, dy, dfinal);
    // The gradient g of s carries 1.1 |dy| and, as |silu''| <= 1/2, half the error of s.
    Sizes plain = sizes_;
    plain.silu = false;
    Array g = absolute(dy);
    const Array sums = sum_magnitudes();
    for (std::size_t i = 0; i < g.size() && c_.silu; ++i) g[i] *= 1.1 + 0.5 * sums[i];
    const auto magnitude = dynamic_conv::reference::backward(
        plain, absolute(x), absolute(k), absolute(initial), g, absolute(dfinal));
    const double ulps = 3 * c_.width + 12;
    expect_close(dx->values(), expected.dx, magnitude.dx, c_.x, ulps, label("dx"));
    expect_close(dk->values(), expected.dk, magnitude.dk, c_.k, ulps, label("dk"));
    dx->expect_guards_intact("dx");
    dk->expect_guards_intact("dk");
    if (dinitial == nullptr) return;
    expect_close(dinitial->values(), expected.dinitial_state, magnitude.dinitial_state, c_.x, ulps,
                 label("dinitial_state"));
    dinitial->expect_guards_intact("dinitial_state");
  }

  /// Nothing outside any output has changed.
  void expect_guards() const {
    for (const auto* o : {&y, &final_state, &dx, &dk, &dinitial}) {
      if (*o != nullptr) (*o)->expect_guards_intact("output");
    }
  }

  std::unique_ptr<Operand> y, final_state, dx, dk, dinitial;

 private:
  using Pointer = std::unique_ptr<Operand>;

  static const Tensor& optional(const Pointer& p) {
    static const Tensor none;
    return p == nullptr ? none : p->view();
  }
  static Array absolute(Array a) {
    for (double& v : a) v = std::abs(v);
    return a;
  }
  Array sum_magnitudes() const {
    Sizes plain = sizes_;
    plain.silu = false;
    return dynamic_conv::reference::forward(plain, absolute(x), absolute(k), absolute(initial)).y;
  }
  std::string label(const char* what) const { return concat(what, " of ", c_); }

  Pointer signal() const {
    return std::make_unique<Operand>(
        device_, c_.x, std::vector<std::int64_t>{c_.batch, c_.time, c_.channels},
        Layout{{}, {0, c_.time_padding, c_.channel_padding}, c_.offset});
  }
  Pointer taps() const {
    return std::make_unique<Operand>(
        device_, c_.k, std::vector<std::int64_t>{c_.batch, c_.time, c_.channels, c_.width},
        Layout{{}, {0, c_.time_padding, c_.channel_padding, 0}, c_.offset});
  }
  Pointer state() const {
    Layout layout{{}, {0, 0, 0}, c_.offset};
    if (c_.state_by_time) layout = {{0, 2, 1}, {0, c_.channel_padding, 0}, c_.offset};
    return std::make_unique<Operand>(
        device_, c_.x,
        std::vector<std::int64_t>{sizes_.num_sequences(), c_.channels, c_.state_length}, layout);
  }
  void make_inputs() {
    x_ = signal();
    x_->fill(x);
    k_ = taps();
    k_->fill(k);
    if (c_.state_length > 0 && c_.has_initial) {
      initial_ = state();
      initial_->fill(initial);
    }
    if (!c_.cu_seqlens.empty()) {
      starts_ = std::make_unique<Operand>(
          device_, c_.wide ? DType::kInt64 : DType::kInt32,
          std::vector<std::int64_t>{static_cast<std::int64_t>(c_.cu_seqlens.size())});
      starts_->fill(Array(c_.cu_seqlens.begin(), c_.cu_seqlens.end()));
    }
  }

  Case c_;
  Device device_;
  Sizes sizes_;
  std::mt19937 rng_;
  Pointer x_, k_, initial_, dy_, dfinal_, starts_;
};

/// cu_seqlens of `count` sequences in `time` steps at random, with empty ones among them.
inline std::vector<std::int64_t> random_starts(std::int64_t count, std::int64_t time,
                                               unsigned seed) {
  std::mt19937 rng(seed);
  std::vector<std::int64_t> starts = {0, time};
  std::uniform_int_distribution<std::int64_t> place(0, time);
  while (static_cast<std::int64_t>(starts.size()) < count + 1) starts.push_back(place(rng));
  std::sort(starts.begin(), starts.end());
  return starts;
}

inline constexpr DType kFloats[] = {DType::kBFloat16, DType::kFloat16, DType::kFloat32};

}  // namespace mortar::testing
