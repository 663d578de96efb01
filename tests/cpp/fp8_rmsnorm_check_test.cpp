// SPDX-License-Identifier: Apache-2.0
// Mistakes of the caller: one clear sentence, and nothing written.
#include <functional>

#include "fp8_rmsnorm_operands.h"
#include "mortar/error.h"

namespace mortar::testing {
namespace {

constexpr std::int64_t kM = 6, kN = 64;

class Fp8RmsNormCheck : public ::testing::TestWithParam<Device> {
 protected:
  const Device device = GetParam();
  GuardedTensor x{kE4M3, {kM, kN}, {}, device}, x_scale{kBF16, {kM, kN / 16}, {}, device};
  GuardedTensor weight{kF32, {kN}, {}, device}, residual{kBF16, {kM, kN}, {}, device};
  GuardedTensor q{kE4M3, {kM, kN}, {}, device}, q_t{kE4M3, {kN, kM}, {}, device};
  GuardedTensor scale{kF32, {}, {}, device}, amax{kF32, {}, {}, device};
  GuardedTensor row_scale{kF32, {kM}, {}, device}, column_scale{kF32, {kN}, {}, device};
  GuardedTensor rstd{kF32, {kM}, {}, device}, normed{kBF16, {kM, kN}, {}, device};
  GuardedTensor dy{kBF16, {kM, kN}, {}, device}, dx{kBF16, {kM, kN}, {}, device};
  GuardedTensor dw{kF32, {kN}, {}, device};
  GuardedTensor workspace = byte_tensor(1 << 16, device);

  /// The arguments of a call, right until a test spoils one.
  struct Forward {
    Tensor x, x_scale, weight, residual, rstd, normed, workspace;
    float eps = 1e-5f, weight_offset = 0;
    Fp8Format format;
    Fp8Quantized out;
  };
  Forward good() {
    Forward f;
    f.x = x.view();
    f.x_scale = x_scale.view();
    f.weight = weight.view();
    f.residual = residual.view();
    f.rstd = rstd.view();
    f.normed = normed.view();
    f.workspace = workspace.view();
    f.out = {.q = q.view(),
             .scale = scale.view(),
             .q_t = q_t.view(),
             .scale_t = {},
             .amax = amax.view()};
    return f;
  }

  void TearDown() override {
    for (GuardedTensor* t : {&residual, &q, &q_t, &scale, &amax, &row_scale, &column_scale, &rstd,
                             &normed, &dy, &dx, &dw, &workspace}) {
      t->download();
      EXPECT_TRUE(t->all_unchanged());
    }
  }

  static std::string message_of(const std::function<void()>& call, ErrorKind kind) {
    try {
      call();
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), kind) << e.what();
      return e.what();
    }
    ADD_FAILURE() << "no error was thrown";
    return {};
  }
  std::string forward_error(const std::function<void(Forward&)>& spoil,
                            ErrorKind kind = ErrorKind::kValue) {
    Forward f = good();
    spoil(f);
    return message_of(
        [&] {
          fp8_rmsnorm_forward(f.x, f.x_scale, f.weight, f.eps, f.weight_offset, f.residual,
                              f.format, f.out, f.rstd, f.normed, f.workspace, {});
        },
        kind);
  }
  void expect_error(const std::function<void(Forward&)>& spoil, const std::string& message,
                    ErrorKind kind = ErrorKind::kValue) {
    EXPECT_EQ(forward_error(spoil, kind), "fp8_rmsnorm_forward: " + message);
  }
  std::string quantize_error(const Tensor& y, const Fp8Format& format, const Fp8Quantized& out,
                             ErrorKind kind = ErrorKind::kValue) {
    return message_of([&] { fp8_quantize(y, format, out, workspace.view(), {}); }, kind);
  }
  Tensor make(DType dtype, std::initializer_list<std::int64_t> shape) {
    made_.emplace_back(dtype, std::vector<std::int64_t>(shape), Layout{}, device);
    return made_.back().view();
  }

 private:
  std::vector<GuardedTensor> made_;
};
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

TEST_P(Fp8RmsNormCheck, SmallFormats) {
  expect_error(
      [&](Forward& f) {
        f.out.q = {};
        f.out.q_t = {};
      },
      "q or q_t is required, got neither");
  expect_error([&](Forward& f) { f.out.scale = {}; }, "scale is required, got nothing");
  expect_error([&](Forward& f) { f.out.scale = make(kF32, {kM}); },
               "scale must have shape (), got (6)");
  expect_error([&](Forward& f) { f.out.scale_t = column_scale.view(); },
               "scale_t must be left out where nothing is scaled by it, got a tensor");
  expect_error([&](Forward& f) { f.format.scaling = static_cast<Fp8Scaling>(3); },
               "scaling must be tensor, row or group, got 3");
  expect_error([&](Forward& f) { f.format.numerics = static_cast<Fp8Numerics>(2); },
               "numerics must be fast or compat, got 2");
  expect_error(
      [&](Forward& f) {
        f.format.numerics = Fp8Numerics::kCompat;
        f.format.scaling = Fp8Scaling::kRow;
      },
      "scaling must be tensor with numerics compat, got row");
  expect_error(
      [&](Forward& f) {
        f.format.numerics = Fp8Numerics::kCompat;
        f.format.pow2_scale = true;
      },
      "pow2_scale must be false with numerics compat, got true");
  const auto by_row = [&](Forward& f) {
    f.format.scaling = Fp8Scaling::kRow;
    f.out.scale = row_scale.view();
    f.out.scale_t = column_scale.view();
    f.out.amax = {};
  };
  expect_error(
      [&](Forward& f) {
        by_row(f);
        f.out.scale = scale.view();
      },
      "scale must have shape (6), got ()");
  expect_error(
      [&](Forward& f) {
        by_row(f);
        f.out.scale_t = row_scale.view();
      },
      "scale_t must have shape (64), got (6)");
  expect_error(
      [&](Forward& f) {
        by_row(f);
        f.out.amax = amax.view();
      },
      "amax must be left out with scaling row, got a tensor");
  expect_error(
      [&](Forward& f) {
        by_row(f);
        f.out.q = {};
      },
      "scale must be left out where nothing is scaled by it, got a tensor");
  const auto by_group = [&](Forward& f) {
    f.format.scaling = Fp8Scaling::kGroup;
    f.format.group = 32;
    f.out = {.q = q.view(), .scale = make(kF32, {kM, 2}), .q_t = {}, .scale_t = {}, .amax = {}};
  };
  expect_error(
      [&](Forward& f) {
        by_group(f);
        f.format.group = 48;
      },
      "group must be 16, 32, 64 or 128, got 48");
  expect_error(
      [&](Forward& f) {
        by_group(f);
        f.format.group = 64;
      },
      "scale must have shape (6, 1), got (6, 2)");
  expect_error(
      [&](Forward& f) {
        by_group(f);
        f.out.q_t = q_t.view();
      },
      "scale_t is required, got nothing");
}

TEST_P(Fp8RmsNormCheck, SmallNumbers) {
  expect_error([&](Forward& f) { f.eps = 0; }, "eps must be positive and finite, got 0");
  expect_error([&](Forward& f) { f.eps = -1; }, "eps must be positive and finite, got -1");
  expect_error([&](Forward& f) { f.eps = NAN; }, "eps must be positive and finite, got nan");
  expect_error([&](Forward& f) { f.weight_offset = INFINITY; },
               "weight_offset must be finite, got inf");
}

// Values of given scales are looked at where that costs no wait.
TEST(Fp8RmsNormGivenScale, SmallMustBePositiveAndFinite) {
  GuardedTensor y(kF32, {4, 64}), q(kE4M3, {4, 64}), scale(kF32, {4, 2}, {.row_gap = 1});
  GuardedTensor workspace = byte_tensor(1 << 12, Device{});
  Fp8Format format;
  format.scaling = Fp8Scaling::kGroup;
  format.group = 32;
  format.given_scale = true;
  for (float bad : {0.0f, -2.0f, NAN, INFINITY}) {
    scale.for_each([&](std::int64_t i) { set_value(scale, i, 0.5); });
    scale.set(3 * 3 + 1, bad);
    scale.upload();
    try {
      fp8_quantize(y.view(), format,
                   {.q = q.view(), .scale = scale.view(), .q_t = {}, .scale_t = {}, .amax = {}},
                   workspace.view(), {});
      ADD_FAILURE() << "no error for " << bad;
    } catch (const Error& e) {
      EXPECT_EQ(e.what(), concat("fp8_quantize: scale must be positive and finite where it is "
                                 "given, got ",
                                 bad));
    }
    q.download();
    EXPECT_TRUE(q.all_unchanged());
  }
}

TEST_P(Fp8RmsNormCheck, SmallWorkspaces) {
  EXPECT_EQ(forward_error([](Forward& f) {
              f.workspace.shape[0] = 8;
            }).find("fp8_rmsnorm_forward: workspace must have at least "),
            0u);
  expect_error([&](Forward& f) { f.workspace = {}; }, "workspace is required, got nothing");
  expect_error([&](Forward& f) { f.workspace = make(kF32, {1 << 12}); },
               "workspace must have dtype uint8, got float32", ErrorKind::kType);
  EXPECT_EQ(forward_error([](Forward& f) {
              f.workspace.data = f.workspace.ptr<char>() + 4;
              f.workspace.shape[0] -= 4;
            }).find("fp8_rmsnorm_forward: workspace must be aligned to 16 bytes, got address"),
            0u);
}

TEST_P(Fp8RmsNormCheck, SmallQuantize) {
  const Fp8Quantized out{
      .q = q.view(), .scale = scale.view(), .q_t = {}, .scale_t = {}, .amax = {}};
  EXPECT_EQ(quantize_error(x.view(), {}, out, ErrorKind::kType),
            "fp8_quantize: y must have dtype float32 or float16 or bfloat16, got float8_e4m3fn");
  EXPECT_EQ(quantize_error(make(kF32, {kM, kN + 1}), {}, out),
            "fp8_quantize: q must have shape (6, 65), got (6, 64)");
  EXPECT_EQ(quantize_error(dy.view(), {}, {}), "fp8_quantize: q or q_t is required, got neither");
}

TEST_P(Fp8RmsNormCheck, SmallBackward) {
  struct Backward {
    Tensor dy, x, x_scale, weight, rstd, residual_grad, dx, dw, workspace;
  };
  const auto error = [&](const std::function<void(Backward&)>& spoil,
                         ErrorKind kind = ErrorKind::kValue) {
    Backward b{dy.view(), x.view(),  x_scale.view(), weight.view(),   rstd.view(),
               {},        dx.view(), dw.view(),      workspace.view()};
    spoil(b);
    return message_of(
        [&] {
          fp8_rmsnorm_backward(b.dy, b.x, b.x_scale, b.weight, 0, b.rstd, b.residual_grad, b.dx,
                               b.dw, false, b.workspace, {});
        },
        kind);
  };
  EXPECT_EQ(error([&](Backward& b) {
              b.dy = make(kBF16, {kM, 63});
            }),
            "fp8_rmsnorm_backward: dy must have shape (6, 64), got (6, 63)");
  EXPECT_EQ(error([&](Backward& b) { b.dy = x.view(); }, ErrorKind::kType),
            "fp8_rmsnorm_backward: dy must have dtype float32 or float16 or bfloat16, got "
            "float8_e4m3fn");
  EXPECT_EQ(error(
                [&](Backward& b) {
                  b.dx = make(kF32, {kM, kN});
                },
                ErrorKind::kType),
            "fp8_rmsnorm_backward: dx must have the dtype of dy (bfloat16), got float32");
  EXPECT_EQ(
      error(
          [&](Backward& b) {
            b.residual_grad = make(kF32, {kM, kN});
          },
          ErrorKind::kType),
      "fp8_rmsnorm_backward: residual_grad must have the dtype of dy (bfloat16), got float32");
  EXPECT_EQ(error([&](Backward& b) { b.rstd = {}; }),
            "fp8_rmsnorm_backward: rstd is required, got nothing");
  EXPECT_EQ(error([&](Backward& b) { b.dw = make(kF32, {kN + 1}); }),
            "fp8_rmsnorm_backward: dw must have shape (64), got (65)");
  EXPECT_EQ(error([&](Backward& b) { b.dw = b.weight; }),
            "fp8_rmsnorm_backward: dw and weight must not overlap in memory, got views that do");
  EXPECT_EQ(error([&](Backward& b) {  // dy itself is allowed, a view shifted by an element is not
              b.dx = b.dy;
              b.dx.data = b.dy.ptr<char>() + 2;
            }),
            "fp8_rmsnorm_backward: dx and dy must not overlap in memory, got views that do");
  EXPECT_EQ(error([&](Backward& b) { b.x_scale = {}; }),
            "fp8_rmsnorm_backward: x_scale is required, got nothing");
}

TEST(Fp8RmsNormTraffic, SmallCountsEachOperandOnce) {
  const auto t = fp8_rmsnorm_traffic(8192, 4096, 1, 16, 2, 2, 2);
  const std::int64_t elements = std::int64_t{8192} * 4096;
  EXPECT_EQ(t.forward, 3 * elements + 2 * elements / 16);
  EXPECT_EQ(t.backward, 5 * elements + 2 * elements / 16);
  EXPECT_EQ(fp8_rmsnorm_traffic(10, 100, 2, 0, 0, 1, 4).forward, 3000);
}

}  // namespace
}  // namespace mortar::testing
