// SPDX-License-Identifier: Apache-2.0
// The decode step: a run of steps equals one forward over the same inputs.
#include <algorithm>
#include <cmath>
#include <random>

#include "dynamic_conv_case.h"

namespace mortar::testing {
namespace {

struct StepCase {
  std::int64_t rows = 3, channels = 16;
  int width = 4, length = 4;
  DType x = DType::kBFloat16, k = DType::kBFloat16;
  bool silu = false;
  bool state_by_time = false;
  std::int64_t padding = 0, offset = 0;
  std::int64_t num_slots = 0;            ///< 0: no slots
  std::vector<std::int64_t> slots = {};  ///< one per row
};

std::ostream& operator<<(std::ostream& out, const StepCase& c) {
  return out << "rows " << c.rows << " D" << c.channels << " W" << c.width << " L" << c.length
             << " x " << dtype_name(c.x) << " k " << dtype_name(c.k) << (c.silu ? " silu" : "")
             << (c.state_by_time ? " [N,L,D]" : "") << " pad " << c.padding << " offset "
             << c.offset << " slots " << c.num_slots;
}

bool is_live(const StepCase& c, std::int64_t row) {
  const std::int64_t slot = c.num_slots == 0 ? row : c.slots[static_cast<std::size_t>(row)];
  return slot >= 0 && slot < (c.num_slots == 0 ? c.rows : c.num_slots);
}

class DynamicConvStep : public ::testing::TestWithParam<Device> {
 protected:
  /// Runs `steps` tokens of every row and compares each y, and the state after each, with the
  /// reference's forward from the state before.
  void expect_right(const StepCase& c, int steps = 3) {
    SCOPED_TRACE(concat(c));
    const Device device = GetParam();
    std::mt19937 rng(23);
    const std::int64_t num_slots = c.num_slots == 0 ? c.rows : c.num_slots;
    const auto row_size = static_cast<std::size_t>(c.channels);
    const auto state_size = row_size * static_cast<std::size_t>(c.length);
    Layout state_layout{{}, {0, 0, 0}, c.offset};
    if (c.state_by_time) state_layout = {{0, 2, 1}, {0, c.padding, 0}, c.offset};
    Operand state(device, c.x, {num_slots, c.channels, c.length}, state_layout);
    Array content = random_values(rng, static_cast<std::size_t>(num_slots) * state_size, c.x);
    state.fill(content);
    Operand slots(device, DType::kInt32, {c.rows});
    if (c.num_slots > 0) slots.fill(Array(c.slots.begin(), c.slots.end()));

    for (int i = 0; i < steps; ++i) {
      Operand x(device, c.x, {c.rows, c.channels}, {{}, {0, c.padding}, c.offset});
      Operand k(device, c.k, {c.rows, c.channels, c.width}, {{}, {0, c.padding, 0}, c.offset});
      Operand y(device, c.x, {c.rows, c.channels}, {{}, {0, c.padding}, c.offset});
      const auto rows = static_cast<std::size_t>(c.rows);
      const Array x_values = random_values(rng, rows * row_size, c.x);
      const Array k_values =
          random_values(rng, rows * row_size * static_cast<std::size_t>(c.width), c.k);
      x.fill(x_values);
      k.fill(k_values);
      dynamic_conv_step(x, k, state, c.num_slots > 0 ? slots.view() : Tensor{}, y, c.silu, {});
      finish(device);

      Array expected_y(x_values.size()), magnitude(x_values.size());
      for (std::int64_t row = 0; row < c.rows; ++row) {
        if (!is_live(c, row)) continue;
        const auto r = static_cast<std::size_t>(row);
        const auto slot = static_cast<std::size_t>(c.num_slots == 0 ? row : c.slots[r]);
        const auto part = [](const Array& from, std::size_t i_part, std::size_t size) {
          const auto first = from.begin() + static_cast<std::ptrdiff_t>(i_part * size);
          return Array(first, first + static_cast<std::ptrdiff_t>(size));
        };
        const Array xr = part(x_values, r, row_size);
        const Array kr = part(k_values, r, row_size * static_cast<std::size_t>(c.width));
        const Array before = part(content, slot, state_size);
        Sizes sizes{1, 1, c.channels, c.width, c.length, c.silu, {}};
        const auto out = dynamic_conv::reference::forward(sizes, xr, kr, before);
        std::copy(out.y.begin(), out.y.end(),
                  expected_y.begin() + static_cast<std::ptrdiff_t>(r * row_size));
        std::copy(out.final_state.begin(), out.final_state.end(),
                  content.begin() + static_cast<std::ptrdiff_t>(slot * state_size));
        const auto absolute = [](Array a) {
          for (double& v : a) v = std::abs(v);
          return a;
        };
        sizes.silu = false;
        const auto bound =
            dynamic_conv::reference::forward(sizes, absolute(xr), absolute(kr), absolute(before));
        std::copy(bound.y.begin(), bound.y.end(),
                  magnitude.begin() + static_cast<std::ptrdiff_t>(r * row_size));
      }
      expect_close(y.values(), expected_y, magnitude, c.x, 2 * c.width + 8, "y");
      EXPECT_EQ(state.values(), content) << "state after step " << i;
      y.expect_guards_intact("y");
      state.expect_guards_intact("state");
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Devices, DynamicConvStep, ::testing::ValuesIn(devices()), device_name);

TEST_P(DynamicConvStep, SmallEveryWidthLengthAndDtype) {
  for (int width = 1; width <= kDynamicConvMaxWidth; ++width) {
    for (int length : {width - 1, width}) {
      for (DType dtype : kFloats) {
        expect_right({.channels = 24,
                      .width = width,
                      .length = length,
                      .x = dtype,
                      .k = dtype,
                      .silu = length == width});
        expect_right({.channels = 24,
                      .width = width,
                      .length = length,
                      .x = dtype,
                      .k = dtype,
                      .state_by_time = true,
                      .padding = 2});
      }
    }
  }
}

TEST_P(DynamicConvStep, SmallMixedDtypes) {
  for (DType x : kFloats) {
    for (DType k : kFloats) expect_right({.x = x, .k = k, .silu = true});
  }
}

TEST_P(DynamicConvStep, SmallOddSizesAndMisalignedViews) {
  for (std::int64_t channels : {1, 2, 5, 8, 33}) {
    for (std::int64_t offset : {0, 1, 2}) {
      for (std::int64_t padding : {0, 1, 2}) {
        expect_right({.rows = 2, .channels = channels, .padding = padding, .offset = offset});
        expect_right({.rows = 2,
                      .channels = channels,
                      .width = 3,
                      .length = 2,
                      .padding = padding,
                      .offset = offset});
      }
    }
  }
}

TEST_P(DynamicConvStep, SmallSlotsAndPadding) {
  for (int width : {1, 4}) {
    for (int length : {width - 1, width}) {
      expect_right({.rows = 6,
                    .width = width,
                    .length = length,
                    .silu = true,
                    .num_slots = 9,
                    .slots = {7, -1, 0, 8, -1, 3}});
    }
  }
  expect_right({.rows = 3, .num_slots = 2, .slots = {-1, -1, -1}});
}

TEST_P(DynamicConvStep, SmallSlotsOutOfRangeArePadding) {
  expect_right({.rows = 5, .num_slots = 3, .slots = {2, 3, 1000000000, -2, -2147483648}});
}

TEST_P(DynamicConvStep, SmallEmpty) {
  expect_right({.rows = 0});
  expect_right({.rows = 2, .channels = 0});
}

TEST_P(DynamicConvStep, ManyRowsAndChannels) {
  expect_right({.rows = 70, .channels = 3072}, 2);
  expect_right({.rows = 5, .channels = 2049, .width = 3, .length = 3}, 2);
}

// A step after a forward goes on from its final state: the same bits as one longer forward.
TEST_P(DynamicConvStep, ContinuesAForwardBitwise) {
  const Device device = GetParam();
  const std::int64_t time = 20, channels = 32;
  const int width = 4;
  for (int length : {width - 1, width}) {
    std::mt19937 rng(29);
    Operand x(device, DType::kBFloat16, {1, time + 1, channels});
    Operand k(device, DType::kBFloat16, {1, time + 1, channels, width});
    x.fill(random_values(rng, (time + 1) * channels, DType::kBFloat16));
    k.fill(random_values(rng, (time + 1) * channels * width, DType::kBFloat16));
    Operand y(device, DType::kBFloat16, {1, time + 1, channels});
    Operand y_head(device, DType::kBFloat16, {1, time, channels});
    Operand y_last(device, DType::kBFloat16, {1, channels});
    Operand state(device, DType::kBFloat16, {1, channels, length});
    dynamic_conv_forward(x, k, {}, {}, y, {}, true, {});
    Tensor x_head = x.view(), k_head = k.view();
    x_head.shape[1] = k_head.shape[1] = time;
    dynamic_conv_forward(x_head, k_head, {}, {}, y_head, state, true, {});
    Tensor x_last({}, DType::kBFloat16, {1, channels}, device);
    Tensor k_last({}, DType::kBFloat16, {1, channels, width}, device);
    x_last.data = x.view().ptr<char>() + time * channels * 2;
    k_last.data = k.view().ptr<char>() + time * channels * width * 2;
    dynamic_conv_step(x_last, k_last, state, {}, y_last, true, {});
    finish(device);
    auto bits = y_head.bits();
    const auto last = y_last.bits();
    bits.insert(bits.end(), last.begin(), last.end());
    EXPECT_EQ(bits, y.bits());
  }
}

}  // namespace
}  // namespace mortar::testing
