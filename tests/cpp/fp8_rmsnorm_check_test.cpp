// SPDX-License-Identifier: Apache-2.0
// Tensors of the forward that do not fit: one clear sentence, and nothing written.
#include "fp8_rmsnorm_bad_call.h"

namespace mortar::testing {
namespace {

INSTANTIATE_TEST_SUITE_P(Devices, Fp8RmsNormCheck, ::testing::ValuesIn(devices()), device_name);

TEST_P(Fp8RmsNormCheck, SmallShapes) {
  expect_error([&](Forward& f) { f.x = {}; }, "x is required, got nothing");
  expect_error([&](Forward& f) { f.x = make(kE4M3, {kN}); },
               "x must have 2 dimensions, got shape (64)");
  expect_error(
      [&](Forward& f) {
        f.x = make(kE4M3, {kM, 0});
      },
      "x must have 1 to 65536 columns, got shape (6, 0)");
  expect_error([&](Forward& f) { f.x.shape[1] = 65537; },
               "x must have 1 to 65536 columns, got shape (6, 65537)");
  expect_error([&](Forward& f) { f.x.shape[0] = std::int64_t{1} << 31; },
               "x must have at most 2146435072 rows, got shape (2147483648, 64)");
  expect_error([&](Forward& f) { f.weight = make(kF32, {kN - 1}); },
               "weight must have shape (64), got (63)");
  expect_error(
      [&](Forward& f) {
        f.residual = make(kBF16, {kM, kN + 1});
      },
      "residual must have shape (6, 64), got (6, 65)");
  expect_error(
      [&](Forward& f) {
        f.rstd = make(kF32, {kM, 1});
      },
      "rstd must have shape (6), got (6, 1)");
  expect_error([&](Forward& f) { f.normed = make(kBF16, {kM}); },
               "normed must have shape (6, 64), got (6)");
  expect_error(
      [&](Forward& f) {
        f.out.q = make(kE4M3, {kN, kM});
      },
      "q must have shape (6, 64), got (64, 6)");
  expect_error(
      [&](Forward& f) {
        f.out.q_t = make(kE4M3, {kM, kN});
      },
      "q_t must have shape (64, 6), got (6, 64)");
  expect_error([&](Forward& f) { f.out.amax = make(kF32, {1}); },
               "amax must have shape (), got (1)");
}

/// Queries refuse what the ops do: there is no plan for it, on any device.
TEST_P(Fp8RmsNormCheck, SmallShapesOfQueries) {
  const Forward f = good();
  const auto expect = [&](std::int64_t rows, std::int64_t columns, const std::string& message) {
    Tensor shaped = make(kBF16, {kM, kN});
    shaped.shape[0] = rows;
    shaped.shape[1] = columns;
    const auto error = [](const std::function<void()>& call) {
      return message_of(call, ErrorKind::kValue);
    };
    EXPECT_EQ(error([&] { fp8_rmsnorm_forward_workspace(shaped, f.format, f.out); }),
              "fp8_rmsnorm_forward_workspace: x must have " + message);
    EXPECT_EQ(error([&] { fp8_rmsnorm_backward_workspace(shaped); }),
              "fp8_rmsnorm_backward_workspace: x must have " + message);
    EXPECT_EQ(error([&] { fp8_quantize_workspace(shaped, f.format, f.out); }),
              "fp8_quantize_workspace: y must have " + message);
  };
  expect(6, 0, "1 to 65536 columns, got shape (6, 0)");
  expect(6, 65537, "1 to 65536 columns, got shape (6, 65537)");
  expect(std::int64_t{1} << 31, 64, "at most 2146435072 rows, got shape (2147483648, 64)");
}

TEST_P(Fp8RmsNormCheck, SmallScalesOfX) {
  expect_error([&](Forward& f) { f.x_scale = {}; }, "x_scale is required, got nothing");
  expect_error(
      [&](Forward& f) {
        f.x_scale = make(kBF16, {kM, 3});
      },
      "x_scale must have shape (M, N / G) with a G of 16, 32, 64 or 128 that "
      "divides N, for x of shape (6, 64), got (6, 3)");
  expect_error(
      [&](Forward& f) {
        f.x_scale = make(kBF16, {kM, 8});
      },
      "x_scale must have shape (M, N / G) with a G of 16, 32, 64 or 128 that "
      "divides N, for x of shape (6, 64), got (6, 8)");
  expect_error(
      [&](Forward& f) {
        f.x_scale = make(kBF16, {kM - 1, 4});
      },
      "x_scale must have shape (M, N / G) with a G of 16, 32, 64 or 128 that "
      "divides N, for x of shape (6, 64), got (5, 4)");
  expect_error(
      [&](Forward& f) {
        f.x = make(kE4M3, {kM, 100});
        f.x_scale = make(kBF16, {kM, 6});
      },
      "x_scale must have shape (M, N / G) with a G of 16, 32, 64 or 128 that "
      "divides N, for x of shape (6, 100), got (6, 6)");
  expect_error(
      [&](Forward& f) {
        f.x = make(kBF16, {kM, kN});
      },
      "x_scale must be left out for x of bfloat16, got a tensor");
  expect_error(
      [&](Forward& f) {
        f.x_scale = make(kF16, {kM, 4});
      },
      "x_scale must have dtype float32 or bfloat16, got float16", ErrorKind::kType);
}

TEST_P(Fp8RmsNormCheck, SmallDtypes) {
  expect_error(
      [&](Forward& f) {
        f.x = make(DType::kUInt8, {kM, kN});
      },
      "x must have dtype float32 or float16 or bfloat16 or float8_e4m3fn or "
      "float8_e5m2, got uint8",
      ErrorKind::kType);
  expect_error([&](Forward& f) { f.weight = make(DType::kFloat64, {kN}); },
               "weight must have dtype float32 or float16 or bfloat16, got float64",
               ErrorKind::kType);
  expect_error(
      [&](Forward& f) {
        f.residual = make(kE4M3, {kM, kN});
      },
      "residual must have dtype float32 or float16 or bfloat16, got "
      "float8_e4m3fn",
      ErrorKind::kType);
  expect_error(
      [&](Forward& f) {
        f.out.q = make(kBF16, {kM, kN});
      },
      "q must have dtype float8_e4m3fn or float8_e5m2, got bfloat16", ErrorKind::kType);
  expect_error(
      [&](Forward& f) {
        f.out.q_t = make(kE5M2, {kN, kM});
      },
      "q_t must have the dtype of q (float8_e4m3fn), got float8_e5m2", ErrorKind::kType);
  expect_error([&](Forward& f) { f.out.scale = make(kBF16, {}); },
               "scale must have dtype float32, got bfloat16", ErrorKind::kType);
  expect_error([&](Forward& f) { f.out.amax = make(kBF16, {}); },
               "amax must have dtype float32, got bfloat16", ErrorKind::kType);
  expect_error([&](Forward& f) { f.rstd = make(kBF16, {kM}); },
               "rstd must have dtype float32, got bfloat16", ErrorKind::kType);
  expect_error(
      [&](Forward& f) {
        f.normed = make(kF16, {kM, kN});
      },
      "normed must have dtype bfloat16, got float16", ErrorKind::kType);
  expect_error([&](Forward& f) { f.format.rng = make(DType::kInt32, {2}); },
               "rng must have dtype int64, got int32", ErrorKind::kType);
  expect_error([&](Forward& f) { f.format.rng = make(DType::kInt64, {3}); },
               "rng must have shape (2), got (3)");
}

TEST_P(Fp8RmsNormCheck, SmallDevices) {
  const Device other = device.type == DeviceType::kCPU ? Device{DeviceType::kCUDA, 0} : Device{};
  const auto expect = [&](const char* name, const std::function<Tensor&(Forward&)>& argument) {
    EXPECT_EQ(forward_error([&](Forward& f) { argument(f).device = other; }, ErrorKind::kType),
              concat("fp8_rmsnorm_forward: ", name, " must be on ", device_string(device), ", got ",
                     device_string(other)));
  };
  expect("x_scale", [](Forward& f) -> Tensor& { return f.x_scale; });
  expect("weight", [](Forward& f) -> Tensor& { return f.weight; });
  expect("residual", [](Forward& f) -> Tensor& { return f.residual; });
  expect("q", [](Forward& f) -> Tensor& { return f.out.q; });
  expect("q_t", [](Forward& f) -> Tensor& { return f.out.q_t; });
  expect("scale", [](Forward& f) -> Tensor& { return f.out.scale; });
  expect("amax", [](Forward& f) -> Tensor& { return f.out.amax; });
  expect("rstd", [](Forward& f) -> Tensor& { return f.rstd; });
  expect("normed", [](Forward& f) -> Tensor& { return f.normed; });
  expect("workspace", [](Forward& f) -> Tensor& { return f.workspace; });
}

TEST_P(Fp8RmsNormCheck, SmallStrides) {
  expect_error(
      [&](Forward& f) {
        f.x.strides = {1, kM};
      },
      "x must have stride 1 in its last dimension, got stride 6");
  expect_error([&](Forward& f) { f.x.strides[0] = -kN; },
               "x must have a row stride of at least 0, got -64");
  expect_error(
      [&](Forward& f) {
        f.x_scale.strides = {1, kM};
      },
      "x_scale must have stride 1 in its last dimension, got stride 6");
  expect_error(
      [&](Forward& f) {
        f.residual.strides = {1, kM};
      },
      "residual must have stride 1 in its last dimension, got stride 6");
  expect_error(
      [&](Forward& f) {
        f.out.q.strides = {1, kM};
      },
      "q must have stride 1 in its last dimension, got stride 6");
  expect_error(
      [&](Forward& f) {
        f.out.q_t.strides = {1, kN};
      },
      "q_t must have stride 1 in its last dimension, got stride 64");
  expect_error([&](Forward& f) { f.out.q.strides[0] = 0; },
               "q must not overlap itself (it is written to), got an expanded or "
               "overlapping view");
  expect_error([&](Forward& f) { f.residual.strides[0] = 32; },
               "residual must not overlap itself (it is written to), got an expanded or "
               "overlapping view");
  expect_error(
      [&](Forward& f) {
        f.weight = make(kF32, {2 * kN});
        f.weight.shape[0] = kN;
        f.weight.strides[0] = 2;
      },
      "weight must be contiguous, got strides (2) for shape (64)");
}

TEST_P(Fp8RmsNormCheck, SmallOverlaps) {
  expect_error([&](Forward& f) { f.out.q = f.x; },
               "q and x must not overlap in memory, got views that do");
  expect_error([&](Forward& f) { f.out.q_t.data = f.out.q.data; },
               "q_t and q must not overlap in memory, got views that do");
  expect_error(
      [&](Forward& f) {
        f.x = make(kBF16, {kM, kN});
        f.x_scale = {};
        f.residual = f.x;
      },
      "residual and x must not overlap in memory, got views that do");
  expect_error([&](Forward& f) { f.normed = f.residual; },
               "residual and normed must not overlap in memory, got views that do");
  expect_error([&](Forward& f) { f.out.amax = f.out.scale; },
               "amax and scale must not overlap in memory, got views that do");
  expect_error([&](Forward& f) { f.weight.data = f.workspace.data; },
               "workspace and weight must not overlap in memory, got views that do");
}

}  // namespace
}  // namespace mortar::testing
