// SPDX-License-Identifier: Apache-2.0
// The CPU's row kernels, once for every instruction set of this machine and once in plain code.
#include "fp8_rmsnorm_case.h"
#include "fp8_rmsnorm_grad_case.h"
#include "simd_targets.h"

namespace mortar::testing {
namespace {

using Fp8RmsNormTarget = SimdTarget;
INSTANTIATE_TEST_SUITE_P(Cpu, Fp8RmsNormTarget, ::testing::ValuesIn(simd_targets()),
                         simd_target_name);

TEST_P(Fp8RmsNormTarget, EveryDtypeAndScaling) {
  for (auto scaling : {Fp8Scaling::kTensor, Fp8Scaling::kRow, Fp8Scaling::kGroup}) {
    for (DType x : {kE4M3, kE5M2, kF32, kF16, kBF16}) {
      for (DType q : {kE4M3, kE5M2}) {
        for (bool stochastic : {false, true}) {
          expect_forward_right({.rows = 21,
                                .columns = 1040 + 32,
                                .x = x,
                                .x_group = 16,
                                .residual = stochastic,
                                .scaling = scaling,
                                .group = 16,
                                .stochastic = stochastic,
                                .q = q,
                                .make_normed = true},
                               Device{});
        }
      }
    }
  }
}

TEST_P(Fp8RmsNormTarget, CompatToTheByte) {
  for (DType x : {kE4M3, kE5M2, kBF16}) {
    expect_forward_right({.rows = 21, .columns = 1040, .x = x, .compat = true}, Device{});
  }
}

TEST_P(Fp8RmsNormTarget, TailsOfColumns) {
  for (std::int64_t columns = 1; columns <= 67; ++columns) {
    expect_forward_right({.rows = 17,
                          .columns = columns,
                          .x = kBF16,
                          .weight = kF16,
                          .residual = true,
                          .residual_dtype = kF16,
                          .scaling = Fp8Scaling::kGroup,
                          .group = 16},
                         Device{});
  }
}

TEST_P(Fp8RmsNormTarget, BackwardOfEveryDtype) {
  for (DType dy : {kF32, kF16, kBF16}) {
    for (DType x : {kE4M3, kE5M2, kF32, kF16, kBF16}) {
      for (std::int64_t columns : {16, 1040}) {
        GradTrial trial({.rows = 21, .columns = columns, .x = x, .dy = dy, .residual_grad = true},
                        Device{}, 1);
        trial.run();
        trial.expect_right();
      }
    }
  }
}

TEST_P(Fp8RmsNormTarget, BackwardWithTailsOfColumns) {
  for (std::int64_t columns = 1; columns <= 67; ++columns) {
    for (bool adds : {false, true}) {
      GradTrial trial({.rows = 17, .columns = columns, .x = kBF16, .residual_grad = adds}, Device{},
                      1);
      trial.run();
      trial.expect_right();
    }
  }
}

// Conversions take the same steps on every instruction set: one set of bytes.
TEST_P(Fp8RmsNormTarget, EveryFloat16HasTheBytesOfTheScalarConversion) {
  for (DType q : {kE4M3, kE5M2}) {
    for (bool stochastic : {false, true}) {
      NormTrial trial({.rows = 256,
                       .columns = 256,
                       .x = kF16,
                       .norm = false,
                       .given = true,
                       .stochastic = stochastic,
                       .q = q},
                      Device{}, 1);
      trial.scale.memory.data<float>()[0] = 0x1p-2f;
      trial.scale.memory.upload();
      trial.make_inputs();
      for (std::size_t i = 0; i < 65536; ++i) {
        trial.x.data<std::uint16_t>()[i] = static_cast<std::uint16_t>(i);
      }
      trial.x.upload();
      trial.call_op();
      const std::int64_t rng[] = {trial.seed, trial.offset};
      const Bytes expected = fp8_rmsnorm::reference::quantise(
          floats_of(values_of(trial.x)), 0x1p-2f, q, stochastic ? rng : nullptr);
      EXPECT_EQ(bytes_of(trial.q), expected);
      EXPECT_EQ(bytes_of(trial.q_t), fp8_rmsnorm::reference::transposed(256, expected));
    }
  }
}

}  // namespace
}  // namespace mortar::testing
