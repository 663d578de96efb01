// SPDX-License-Identifier: Apache-2.0
// A backward of several adapters of so many ranks that products sum over the rows of each: against
// float64, in any strides, and with NaN in one adapter's rows.
#include <cmath>

#include "devices.h"
#include "lora_train_case.h"

namespace mortar::testing {
namespace {

/// Rows 0 to 17, 18 to 73, 74 to 167 and 168 to 298: no adapter ends with a step of a product.
TrainCase wide_ranks() {
  TrainCase c;
  c.x = c.w = c.y = c.grad = c.dx = DType::kBFloat16;
  c.by = RowsBy::kSegments;
  c.rows = 299;
  c.hidden = 144;
  c.widths = {272};
  c.adapters = 4;
  c.ranks = {64, 40, 72, 33};
  return c;
}

std::vector<TrainCase> cases() {
  std::vector<TrainCase> all;
  const auto add = [&](const std::string& name, auto change) {
    TrainCase c = wide_ranks();
    c.name = name;
    change(c);
    all.push_back(c);
  };
  add("plain", [](TrainCase&) {});
  add("long", [](TrainCase& c) { c.rows = 699; });  // all are products
  add("float16", [](TrainCase& c) { c.x = c.w = c.y = c.grad = c.dx = DType::kFloat16; });
  add("rank_64", [](TrainCase& c) { c.ranks = {64, 48, 64, 0}; });
  add("rank_60", [](TrainCase& c) { c.ranks = {60, 48, 33, 8}; });  // dx comes with dA
  add("rank_136", [](TrainCase& c) { c.ranks = {136, 8, 40, 72}; });
  add("rank_260", [](TrainCase& c) { c.ranks = {260, 64, 8, 100}; });
  add("float32_weights", [](TrainCase& c) {
    c.w = c.grad = DType::kFloat32;
    c.ranks = {16, 24, 3, 9};
  });
  add("slices", [](TrainCase& c) {
    c.widths = {136, 40};
    c.ranks = {64, 8, 0, 40, 72, 0, 33, 16};
  });
  add("added", [](TrainCase& c) { c.add = true; });
  add("empty", [](TrainCase& c) { c.empty_segment = true; });
  add("a_frozen", [](TrainCase& c) { c.wants_da = false; });
  for (const LoraDropoutOn on : {LoraDropoutOn::kInput, LoraDropoutOn::kDelta}) {
    for (const int rank : {40, 100, 260}) {
      add(concat(on == LoraDropoutOn::kInput ? "input_" : "delta_", rank), [&](TrainCase& c) {
        c.ranks = {rank, 16, rank, 40};
        c.p = {0.3f, 0.0f, 0.5f, 0.1f};
        c.on = on;
      });
    }
  }
  return all;
}

class LoraTrainSegments : public ::testing::TestWithParam<Device> {};

TEST_P(LoraTrainSegments, WideRanksMatchOracleInAnyStrides) {
  for (const TrainCase& c : cases()) {
    TrainStep step(c, GetParam());
    expect_matches(step);
    if (GetParam().type == DeviceType::kCUDA) expect_strides_change_no_bit(c, GetParam(), c.name);
    if (HasFailure()) {
      ADD_FAILURE() << c.name;
      return;
    }
  }
}

/// NaN in the last row of one adapter, or in the first row of another, which a step has both.
TEST_P(LoraTrainSegments, NanStaysWithItsAdapter) {
  for (const int owner : {1, 2}) {
    TrainStep step(wide_ranks(), GetParam());
    const std::int64_t row = owner == 1 ? 73 : 74;
    ASSERT_EQ(step.map[row], owner);
    ASSERT_NE(step.map[row - 1 + 2 * (owner == 1)], owner);
    for (GuardedMatrix* m : {&step.x, &step.dy[0]}) {
      const Tensor t = m->host();
      store_float(t.data, t.dtype, row * t.strides[0], std::nanf(""));
      m->memory().upload();
    }
    step.run_forward();
    step.run_backward();
    for (int l = 0; l < step.c.adapters; ++l) {
      for (const Tensor& t : {step.da[l].host(), step.db[l].host()}) {
        bool any = false;
        for (std::int64_t i = 0; i < t.shape[0] * t.shape[1]; ++i) {
          const std::int64_t at = i / t.shape[1] * t.strides[0] + i % t.shape[1] * t.strides[1];
          any |= std::isnan(load_float(t.data, t.dtype, at));
        }
        EXPECT_EQ(any, l == owner) << l;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, LoraTrainSegments, ::testing::ValuesIn(devices()),
                         [](const auto& one) { return device_label(one.param); });

}  // namespace
}  // namespace mortar::testing
