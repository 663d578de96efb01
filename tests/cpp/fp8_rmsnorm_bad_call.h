// SPDX-License-Identifier: Apache-2.0
// Calls of FP8 RMSNorm that are right until a test spoils one argument. Whatever is refused, every
// tensor is as it was.
#pragma once

#include <functional>

#include "fp8_rmsnorm_operands.h"
#include "mortar/error.h"

namespace mortar::testing {

inline constexpr std::int64_t kM = 6, kN = 64;

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

}  // namespace mortar::testing
