// SPDX-License-Identifier: Apache-2.0
// The quantisation alone: every value of float16, ties and their neighbours, stochastic rounding.
#include <cstring>

#include "fp8_rmsnorm_case.h"

namespace mortar::testing {
namespace {

constexpr Fp8Scaling kScalings[] = {Fp8Scaling::kTensor, Fp8Scaling::kRow, Fp8Scaling::kGroup};

class Fp8Quantize : public ::testing::TestWithParam<Device> {
 protected:
  /// A case whose scale is given and a power of two, so that y / scale is exact.
  NormTrial with_scale(NormCase c, float scale) {
    c.norm = false;
    c.given = true;
    NormTrial trial(c, GetParam(), 1);
    trial.scale.memory.for_each([&](std::int64_t i) { set_value(trial.scale.memory, i, scale); });
    trial.scale.memory.upload();
    if (c.scaling != Fp8Scaling::kTensor) {
      trial.scale_t.memory.for_each(
          [&](std::int64_t i) { set_value(trial.scale_t.memory, i, scale); });
      trial.scale_t.memory.upload();
    }
    return trial;
  }
};
INSTANTIATE_TEST_SUITE_P(Devices, Fp8Quantize, ::testing::ValuesIn(devices()), device_name);

TEST_P(Fp8Quantize, SmallEveryDtypeAndSwitch) {
  for (Fp8Scaling scaling : kScalings) {
    for (DType y : {kF32, kF16, kBF16}) {
      for (int flags = 0; flags < 32; ++flags) {
        NormCase c{
            .rows = 37, .columns = 83, .x = y, .norm = false, .scaling = scaling, .group = 32};
        c.pow2 = flags & 1;
        c.given = flags & 2;
        c.stochastic = flags & 4;
        c.q = flags & 8 ? kE5M2 : kE4M3;
        c.by_columns = flags & 16;
        c.make_q = flags % 3 != 0;
        c.make_q_t = flags % 3 != 1;
        expect_forward_right(c, GetParam(), static_cast<unsigned>(flags));
      }
    }
  }
}

TEST_P(Fp8Quantize, SmallSizesAndViews) {
  for (Fp8Scaling scaling : kScalings) {
    for (std::int64_t n : {1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129}) {
      expect_forward_right(
          {.rows = n, .columns = 130 - n, .x = kBF16, .norm = false, .scaling = scaling},
          GetParam());
      expect_forward_right({.rows = 21,
                            .columns = n,
                            .x = kF32,
                            .norm = false,
                            .scaling = scaling,
                            .group = 16,
                            .layout = {.lead = n % 5, .row_gap = n % 3}},
                           GetParam());
    }
  }
}

TEST_P(Fp8Quantize, SmallCompatDividesWhatComes) {
  for (DType y : {kF32, kBF16}) {
    for (DType q : {kE4M3, kE5M2}) {
      for (bool stochastic : {false, true}) {
        expect_forward_right({.rows = 50,
                              .columns = 70,
                              .x = y,
                              .norm = false,
                              .given = true,
                              .compat = true,
                              .stochastic = stochastic,
                              .q = q},
                             GetParam());
      }
    }
  }
}

// All 65,536 values of float16, NaN and infinities among them, by scales that reach overflow,
// subnormals and underflow: the bytes of the scalar conversion.
TEST_P(Fp8Quantize, SmallEveryFloat16) {
  for (DType q : {kE4M3, kE5M2}) {
    for (float scale : {1.0f, 0x1p-9f, 0x1p6f, 0x1p13f}) {
      NormTrial trial = with_scale({.rows = 256, .columns = 256, .x = kF16, .q = q}, scale);
      trial.make_inputs();
      for (std::size_t i = 0; i < 65536; ++i) {
        trial.x.data<std::uint16_t>()[i] = static_cast<std::uint16_t>(i);
      }
      trial.x.upload();
      trial.call_op();
      const Bytes got = bytes_of(trial.q);
      const Bytes expected =
          fp8_rmsnorm::reference::quantise(floats_of(values_of(trial.x)), scale, q, nullptr);
      for (std::size_t i = 0; i < 65536; ++i) ASSERT_EQ(got[i], expected[i]) << "float16 " << i;
      ASSERT_EQ(bytes_of(trial.q_t), fp8_rmsnorm::reference::transposed(256, expected));
    }
  }
}

// Around the middle of every two neighbours: the float32 below, the tie, the one above.
TEST_P(Fp8Quantize, SmallTiesOfEveryCode) {
  for (DType q : {kE4M3, kE5M2}) {
    NormTrial trial = with_scale({.rows = 6, .columns = 128, .x = kF32, .q = q}, 1.0f);
    std::fill(trial.x_values.begin(), trial.x_values.end(), 0.0);
    const int codes = q == kE4M3 ? 0x7e : 0x7b;
    for (int code = 0; code < codes; ++code) {
      const auto value = [&](int c) {
        const auto bits = static_cast<std::uint8_t>(c);
        return q == kE4M3 ? to_float(Float8E4M3{bits}) : to_float(Float8E5M2{bits});
      };
      const float tie = (value(code) + value(code + 1)) / 2;
      const float around[] = {std::nextafter(tie, 0.0f), tie, std::nextafter(tie, INFINITY)};
      for (int i = 0; i < 6; ++i) {
        const float v = i < 3 ? around[i] : -around[i - 3];
        trial.x_values[static_cast<std::size_t>(i * 128 + code)] = static_cast<double>(v);
      }
    }
    trial.run();
    ASSERT_EQ(bytes_of(trial.q),
              fp8_rmsnorm::reference::quantise(floats_of(values_of(trial.x)), 1.0f, q, nullptr));
  }
}

// With an exact quotient stochastic rounding is a function of the draw alone, so every byte is
// known; q and q_t draw alike under every scaling.
TEST_P(Fp8Quantize, SmallStochasticBytesFollowTheDraws) {
  for (Fp8Scaling scaling : kScalings) {
    for (DType q : {kE4M3, kE5M2}) {
      for (const auto& [x, columns] : {std::pair{kF32, 1},
                                       {kF32, 5},
                                       {kF32, 67},
                                       {kF32, 1030},
                                       {kF32, 132},
                                       {kBF16, 136},
                                       {kF16, 1032}}) {
        NormTrial trial = with_scale({.rows = 37,
                                      .columns = columns,
                                      .x = x,
                                      .scaling = scaling,
                                      .group = 16,
                                      .stochastic = true,
                                      .q = q},
                                     0x1p-7f);
        trial.seed = -3;  // all 64 bits count
        trial.offset = (std::int64_t{1} << 40) + 1;
        trial.run();
        const std::int64_t rng[] = {trial.seed, trial.offset};
        const Bytes expected =
            fp8_rmsnorm::reference::quantise(floats_of(values_of(trial.x)), 0x1p-7f, q, rng);
        ASSERT_EQ(bytes_of(trial.q), expected);
        ASSERT_EQ(bytes_of(trial.q_t), fp8_rmsnorm::reference::transposed(37, expected));
      }
    }
  }
}

// The mean over n draws of two neighbours lies within 6 standard errors, each at most half a step
// over the root of n: 3 steps / sqrt(n). Representable values stay; large ones saturate.
TEST_P(Fp8Quantize, SmallStochasticMeanIsTheValue) {
  const std::int64_t rows = 1024, columns = 1024;
  for (DType q : {kE4M3, kE5M2}) {
    for (double v : {0.3, -100.1, 1.5, 0.0, 0.00201, 3e-6, 1e6}) {
      NormTrial trial = with_scale({.rows = rows,
                                    .columns = columns,
                                    .x = kF32,
                                    .stochastic = true,
                                    .q = q,
                                    .make_q_t = false},
                                   1.0f);
      std::fill(trial.x_values.begin(), trial.x_values.end(), v);
      trial.run();
      const double given = static_cast<double>(static_cast<float>(v));
      const double wanted = std::clamp(given, -largest_of(q), largest_of(q));
      double sum = 0;
      for (double value : values_of(trial.q)) sum += value;
      const double n = static_cast<double>(rows * columns);
      const bool exact = v == 1.5 || v == 0.0 || v == 1e6;
      EXPECT_NEAR(sum / n, wanted, exact ? 0.0 : 3 * step_at(wanted, q) / std::sqrt(n)) << v;
    }
  }
}

// A NaN or an infinity among given scales touches nothing else; the infinity saturates.
TEST_P(Fp8Quantize, SmallBadValuesWithAGivenScale) {
  NormTrial trial = with_scale({.rows = 3, .columns = 64, .x = kBF16}, 0x1p-3f);
  trial.x_values[5] = std::nan("");
  trial.x_values[70] = -INFINITY;
  trial.run();
  const Array q = values_of(trial.q);
  for (std::size_t i = 0; i < q.size(); ++i) EXPECT_EQ(std::isnan(q[i]), i == 5) << i;
  EXPECT_EQ(q[70], -448.0);
  EXPECT_TRUE(std::isnan(get_value(trial.amax, 0)));
}

// The smallest positive scale there is still leaves zeros zero.
TEST_P(Fp8Quantize, SmallTinyGivenScale) {
  NormTrial trial = with_scale({.rows = 2, .columns = 64, .x = kF32}, 1e-40f);
  trial.x_values.assign(128, 0.0);
  trial.x_values[3] = 1.0;
  trial.run();
  const Array q = values_of(trial.q);
  for (std::size_t i = 0; i < q.size(); ++i) EXPECT_EQ(q[i], i == 3 ? 448.0 : 0.0) << i;
}

}  // namespace
}  // namespace mortar::testing
