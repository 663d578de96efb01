// SPDX-License-Identifier: Apache-2.0
// Formats, numbers and workspaces that do not fit, and the arguments of the other two ops.
#include "fp8_rmsnorm_bad_call.h"

namespace mortar::testing {
namespace {

INSTANTIATE_TEST_SUITE_P(Devices, Fp8RmsNormCheck, ::testing::ValuesIn(devices()), device_name);

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

// Of as many elements as the plans of whole bands of rows are for.
TEST_P(Fp8RmsNormCheck, SmallQueriesCheckTheFormat) {
  Tensor many = normed.view();
  many.shape = {1 << 13, 1 << 12};
  const Fp8Quantized out = {.q = {}, .scale = {}, .q_t = q_t.view(), .scale_t = {}, .amax = {}};
  for (const std::int64_t group : {std::int64_t{0}, std::int64_t{48}, std::int64_t{1} << 32}) {
    Fp8Format format;
    format.scaling = Fp8Scaling::kGroup;
    format.group = group;
    const std::string message = ": group must be 16, 32, 64 or 128, got " + std::to_string(group);
    EXPECT_EQ(
        message_of([&] { fp8_rmsnorm_forward_workspace(many, format, out); }, ErrorKind::kValue),
        "fp8_rmsnorm_forward_workspace" + message);
    EXPECT_EQ(message_of([&] { fp8_quantize_workspace(many, format, out); }, ErrorKind::kValue),
              "fp8_quantize_workspace" + message);
  }
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
  // By rows: few elements with one scale need no workspace on a GPU.
  const auto by_rows = [&](const std::function<void(Forward&)>& spoil) {
    return [&, spoil](Forward& f) {
      f.format.scaling = Fp8Scaling::kRow;
      f.out.scale = row_scale.view();
      f.out.scale_t = column_scale.view();
      f.out.amax = {};
      spoil(f);
    };
  };
  EXPECT_EQ(forward_error(by_rows([](Forward& f) {
              f.workspace.shape[0] = 8;
            })).find("fp8_rmsnorm_forward: workspace must have at least "),
            0u);
  expect_error(by_rows([](Forward& f) { f.workspace = {}; }), "workspace is required, got nothing");
  expect_error(by_rows([&](Forward& f) { f.workspace = make(kF32, {1 << 12}); }),
               "workspace must have dtype uint8, got float32", ErrorKind::kType);
  EXPECT_EQ(forward_error(by_rows([](Forward& f) {
              f.workspace.data = f.workspace.ptr<char>() + 4;
              f.workspace.shape[0] -= 4;
            })).find("fp8_rmsnorm_forward: workspace must be aligned to 16 bytes, got address"),
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
