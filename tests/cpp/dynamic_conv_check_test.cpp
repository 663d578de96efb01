// SPDX-License-Identifier: Apache-2.0
// Mistakes of the caller: one clear sentence, and no output touched.
#include <functional>

#include "dynamic_conv_case.h"
#include "mortar/error.h"

namespace mortar::testing {
namespace {

std::string message_of(const std::function<void()>& call, ErrorKind kind = ErrorKind::kValue) {
  try {
    call();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), kind) << e.what();
    return e.what();
  }
  ADD_FAILURE() << "no error was thrown";
  return {};
}

class DynamicConvCheck : public ::testing::TestWithParam<Device> {
 protected:
  const Device device = GetParam();
  Operand x{device, DType::kBFloat16, {1, 6, 8}};
  Operand k{device, DType::kBFloat16, {1, 6, 8, 4}};
  Operand y{device, DType::kBFloat16, {1, 6, 8}};
  Operand dy{device, DType::kBFloat16, {1, 6, 8}};
  Operand dx{device, DType::kBFloat16, {1, 6, 8}};
  Operand dk{device, DType::kBFloat16, {1, 6, 8, 4}};
  Operand state{device, DType::kBFloat16, {1, 8, 4}};
  Operand state_out{device, DType::kBFloat16, {1, 8, 4}};

  void SetUp() override {
    for (Operand* o : {&x, &k, &dy, &state}) {
      o->fill(Array(static_cast<std::size_t>(o->view().numel()), 1.0));
    }
  }
  void TearDown() override {
    for (const Operand* o : {&y, &dx, &dk, &state_out, &state}) {
      o->expect_guards_intact("output", true);
    }
  }
  std::string forward_error(const Tensor& x_, const Tensor& k_, const Tensor& starts,
                            const Tensor& initial, const Tensor& y_, const Tensor& final_,
                            ErrorKind kind = ErrorKind::kValue) {
    return message_of([&] { dynamic_conv_forward(x_, k_, starts, initial, y_, final_, false, {}); },
                      kind);
  }
  Operand make(DType dtype, std::vector<std::int64_t> shape) { return {device, dtype, shape}; }
  Operand integers(const std::vector<std::int64_t>& values, DType dtype = DType::kInt32) {
    Operand o(device, dtype, {static_cast<std::int64_t>(values.size())});
    o.fill(Array(values.begin(), values.end()));
    return o;
  }
};
INSTANTIATE_TEST_SUITE_P(Devices, DynamicConvCheck, ::testing::ValuesIn(devices()), device_name);

TEST_P(DynamicConvCheck, SmallShapes) {
  EXPECT_EQ(forward_error(x, make(DType::kBFloat16, {1, 6, 8, 9}), {}, {}, y, {}),
            "dynamic_conv_forward: kernels must have 1 to 8 taps in its last dimension, got 9");
  EXPECT_EQ(forward_error(x, make(DType::kBFloat16, {1, 6, 8, 0}), {}, {}, y, {}),
            "dynamic_conv_forward: kernels must have 1 to 8 taps in its last dimension, got 0");
  EXPECT_EQ(forward_error(x, make(DType::kBFloat16, {1, 5, 8, 4}), {}, {}, y, {}),
            "dynamic_conv_forward: kernels must have shape (1, 6, 8, 4), got (1, 5, 8, 4)");
  EXPECT_EQ(forward_error(x, k, {}, {}, make(DType::kBFloat16, {1, 6, 7}), {}),
            "dynamic_conv_forward: y must have the shape of x (1, 6, 8), got (1, 6, 7)");
  EXPECT_EQ(forward_error(make(DType::kBFloat16, {6, 8}), k, {}, {}, y, {}),
            "dynamic_conv_forward: x must have 3 dimensions, got shape (6, 8)");
  EXPECT_EQ(forward_error({}, k, {}, {}, y, {}),
            "dynamic_conv_forward: x is required, got nothing");
}

TEST_P(DynamicConvCheck, SmallDtypesAndDevices) {
  EXPECT_EQ(forward_error(make(DType::kInt32, {1, 6, 8}), k, {}, {}, y, {}, ErrorKind::kType),
            "dynamic_conv_forward: x must have dtype float32 or float16 or bfloat16, got int32");
  EXPECT_EQ(forward_error(x, k, {}, {}, make(DType::kFloat32, {1, 6, 8}), {}, ErrorKind::kType),
            "dynamic_conv_forward: y must have the dtype of x (bfloat16), got float32");
  EXPECT_EQ(forward_error(x, k, make(DType::kFloat32, {2}), {}, y, {}, ErrorKind::kType),
            "dynamic_conv_forward: cu_seqlens must have dtype int32 or int64, got float32");
  Tensor elsewhere = k.view();
  elsewhere.device = device.type == DeviceType::kCPU ? Device{DeviceType::kCUDA, 0} : Device{};
  EXPECT_EQ(forward_error(x, elsewhere, {}, {}, y, {}, ErrorKind::kType),
            concat("dynamic_conv_forward: kernels must be on ", device_string(device), ", got ",
                   device_string(elsewhere.device)));
}

TEST_P(DynamicConvCheck, SmallStrides) {
  Tensor turned = x.view();
  turned.strides = {48, 1, 6};
  EXPECT_EQ(forward_error(turned, k, {}, {}, y, {}),
            "dynamic_conv_forward: x must have stride 1 in its last dimension, got stride 6");
  Tensor gaps = k.view();
  gaps.strides[2] = 5;
  EXPECT_EQ(
      forward_error(x, gaps, {}, {}, y, {}),
      "dynamic_conv_forward: kernels must be dense in its last two dimensions (strides 4, 1), got "
      "strides (5, 1)");
  Tensor expanded = y.view();
  expanded.strides[1] = 0;
  EXPECT_NE(forward_error(x, k, {}, {}, expanded, {}).find("y must not overlap itself"),
            std::string::npos);
  EXPECT_NE(forward_error(x, k, {}, {}, x, {}).find("y and x must not overlap"), std::string::npos);
  EXPECT_NE(forward_error(x, k, {}, state, y, state)
                .find("final_state and initial_state must not overlap"),
            std::string::npos);
}

TEST_P(DynamicConvCheck, SmallStates) {
  EXPECT_EQ(forward_error(x, k, {}, make(DType::kBFloat16, {1, 8, 2}), y, {}),
            "dynamic_conv_forward: initial_state must have a length of W = 4 or W - 1 = 3 in its "
            "last dimension, got 2");
  EXPECT_EQ(
      forward_error(x, k, {}, make(DType::kBFloat16, {1, 8, 3}), y, state_out),
      "dynamic_conv_forward: final_state must have the length of the other states (3), got 4");
  EXPECT_EQ(forward_error(x, k, {}, make(DType::kBFloat16, {2, 8, 4}), y, {}),
            "dynamic_conv_forward: initial_state must have shape (1, 8, 4), got (2, 8, 4)");
  EXPECT_EQ(forward_error(x, k, {}, make(DType::kFloat32, {1, 8, 4}), y, {}, ErrorKind::kType),
            "dynamic_conv_forward: initial_state must have the dtype of x (bfloat16), got float32");
}

TEST_P(DynamicConvCheck, SmallPackedBatchMustBeOne) {
  Operand x2 = make(DType::kBFloat16, {2, 3, 8}), k2 = make(DType::kBFloat16, {2, 3, 8, 4});
  Operand y2 = make(DType::kBFloat16, {2, 3, 8});
  EXPECT_EQ(forward_error(x2, k2, integers({0, 3}), {}, y2, {}),
            "dynamic_conv_forward: x must have a batch of 1 with cu_seqlens, got 2");
  y2.expect_guards_intact("y", true);
}

TEST_P(DynamicConvCheck, SmallBackward) {
  const auto error = [&](const Tensor& dx_, const Tensor& dk_) {
    return message_of(
        [&] { dynamic_conv_backward(x, k, {}, {}, dy, {}, dx_, dk_, {}, false, {}); });
  };
  EXPECT_EQ(error(dx, make(DType::kBFloat16, {1, 6, 8, 3})),
            "dynamic_conv_backward: dk must have the shape of kernels (1, 6, 8, 4), "
            "got (1, 6, 8, 3)");
  EXPECT_NE(error(x, dk).find("dx and x must not overlap"), std::string::npos);
}

TEST_P(DynamicConvCheck, SmallStep) {
  Operand x1 = make(DType::kBFloat16, {2, 8}), k1 = make(DType::kBFloat16, {2, 8, 4});
  Operand y1 = make(DType::kBFloat16, {2, 8}), states = make(DType::kBFloat16, {2, 8, 4});
  const auto error = [&](const Tensor& states_, const Tensor& slots, const Tensor& y_) {
    return message_of([&] { dynamic_conv_step(x1, k1, states_, slots, y_, false, {}); });
  };
  EXPECT_EQ(error(make(DType::kBFloat16, {2, 8, 5}), {}, y1),
            "dynamic_conv_step: state must have a length of W = 4 or W - 1 = 3 in its last "
            "dimension, got 5");
  EXPECT_EQ(error(make(DType::kBFloat16, {3, 8, 4}), {}, y1),
            "dynamic_conv_step: state must have shape (2, 8, 4), got (3, 8, 4)");
  EXPECT_EQ(error(states, integers({0}), y1),
            "dynamic_conv_step: slots must have shape (2), got (1)");
  EXPECT_EQ(error(states, {}, make(DType::kBFloat16, {2, 7})),
            "dynamic_conv_step: y must have shape (2, 8), got (2, 7)");
  y1.expect_guards_intact("y", true);
  states.expect_guards_intact("state", true);
}

TEST_P(DynamicConvCheck, SmallContents) {
  const auto starts_error = [&](const std::vector<std::int64_t>& starts, DType dtype) {
    Operand o = integers(starts, dtype);
    return message_of([&] { dynamic_conv_check(o, 6, {}, 0, {}); });
  };
  for (DType dtype : {DType::kInt32, DType::kInt64}) {
    EXPECT_EQ(starts_error({1, 6}, dtype), "dynamic_conv_check: cu_seqlens must start at 0, got 1");
    EXPECT_EQ(starts_error({0, 5, 3, 6}, dtype),
              "dynamic_conv_check: cu_seqlens must not decrease, got 3 after 5 at index 2");
    EXPECT_EQ(starts_error({0, 5}, dtype),
              "dynamic_conv_check: cu_seqlens must end at T = 6, got 5");
    Operand good = integers({0, 0, 5, 6, 6}, dtype);
    EXPECT_NO_THROW(dynamic_conv_check(good, 6, {}, 0, {}));
  }
  const auto slots_error = [&](const std::vector<std::int64_t>& slots) {
    Operand o = integers(slots);
    return message_of([&] { dynamic_conv_check({}, 0, o, 4, {}); });
  };
  EXPECT_EQ(slots_error({0, 4}),
            "dynamic_conv_check: slots must lie between -1 and 3, got 4 at index 1");
  EXPECT_EQ(slots_error({-2}),
            "dynamic_conv_check: slots must lie between -1 and 3, got -2 at index 0");
  EXPECT_EQ(slots_error({2, -1, -1, 2}),
            "dynamic_conv_check: slots must not repeat, got slot 2 at index 0 and at index 3");
  Operand good = integers({3, -1, 0, -1});
  EXPECT_NO_THROW(dynamic_conv_check({}, 0, good, 4, {}));
  EXPECT_NO_THROW(dynamic_conv_check({}, 0, Tensor(nullptr, DType::kInt32, {0}, device), 4, {}));
}

// Host memory is checked at once; on a GPU the ops must not leave the tensors, whatever the
// content.
TEST_P(DynamicConvCheck, SmallBadStartsAreHarmless) {
  const std::vector<std::vector<std::int64_t>> bad = {{1, 40},
                                                      {0, 30, 20, 40},
                                                      {0, 20},
                                                      {0, 100},
                                                      {-5, 10, 40},
                                                      {40, 0},
                                                      {3, 3, 3},
                                                      {0, 2147483647, -2147483648, 40},
                                                      {0, 40, 10, 40, 5, 40},
                                                      {39, 40, 41, 42}};
  for (const auto& starts : bad) {
    for (int length : {3, 4}) {
      SCOPED_TRACE(::testing::PrintToString(starts));
      Trial trial(
          {.time = 40, .channels = 16, .silu = true, .cu_seqlens = starts, .state_length = length},
          device, 31);
      if (device.type == DeviceType::kCPU) {
        message_of([&] { trial.forward(); });
        message_of([&] { trial.backward(); });
      } else {
        trial.forward();
        trial.backward();
      }
      trial.expect_guards();
    }
  }
}

TEST_P(DynamicConvCheck, SmallTraffic) {
  const auto t = dynamic_conv_traffic(8, 4096, 3072, 4, 4, 2, 2);
  EXPECT_EQ(t.forward, 1207959552);  // the examples in cuda/fwd.cu and cuda/bwd.cu
  EXPECT_EQ(t.backward, 2214592512);
  EXPECT_EQ(dynamic_conv_traffic(128, 1, 3072, 4, 4, 2, 2).step, 11010048);  // cuda/step.cu
}

}  // namespace
}  // namespace mortar::testing
