// SPDX-License-Identifier: Apache-2.0
// The forward against the exact result: every dtype and switch, and sizes around all tiles.
#include "fp8_rmsnorm_case.h"

namespace mortar::testing {
namespace {

constexpr Fp8Scaling kScalings[] = {Fp8Scaling::kTensor, Fp8Scaling::kRow, Fp8Scaling::kGroup};

class Fp8RmsNorm : public ::testing::TestWithParam<Device> {
 protected:
  void expect_right(const NormCase& c, unsigned seed = 1) {
    expect_forward_right(c, GetParam(), seed);
  }
};
INSTANTIATE_TEST_SUITE_P(Devices, Fp8RmsNorm, ::testing::ValuesIn(devices()), device_name);

TEST_P(Fp8RmsNorm, SmallEveryDtype) {
  for (Fp8Scaling scaling : kScalings) {
    for (DType q : {kE4M3, kE5M2}) {
      for (DType x : {kE4M3, kE5M2, kF32, kF16, kBF16}) {
        expect_right({.rows = 7, .columns = 96, .x = x, .scaling = scaling, .group = 32, .q = q});
      }
      for (DType s : {kF32, kBF16}) {
        expect_right({.x_scale = s, .scaling = scaling, .group = 16, .q = q});
      }
      for (DType w : {kF32, kF16, kBF16}) expect_right({.weight = w, .scaling = scaling, .q = q});
    }
  }
}

TEST_P(Fp8RmsNorm, SmallEverySwitch) {
  for (Fp8Scaling scaling : kScalings) {
    for (int flags = 0; flags < 64; ++flags) {
      NormCase c{.rows = 19, .columns = 160, .scaling = scaling, .group = 64};
      c.pow2 = flags & 1;
      c.given = flags & 2;
      c.stochastic = flags & 4;
      c.residual = flags & 8;
      c.make_normed = flags & 16;
      c.by_columns = flags & 32;
      c.make_q = flags % 3 != 0;
      c.make_q_t = flags % 3 != 1;
      c.make_rstd = flags % 5 != 0;
      c.make_amax = flags % 7 != 0;
      c.weight_offset = flags % 2 ? 1.0f : 0.0f;
      expect_right(c, static_cast<unsigned>(flags));
    }
  }
}

TEST_P(Fp8RmsNorm, SmallEveryGroup) {
  for (int x_group : {16, 32, 64, 128}) {
    for (std::int64_t group : {16, 32, 64, 128}) {
      for (bool turned : {false, true}) {
        expect_right({.rows = 131,
                      .columns = 256 + 128,
                      .x_group = x_group,
                      .scaling = Fp8Scaling::kGroup,
                      .group = group,
                      .by_columns = turned});
      }
    }
  }
}

// Columns of 16-bit and float32 x need not divide by anything; those of 8-bit x by their group.
TEST_P(Fp8RmsNorm, SmallTailsOfColumns) {
  for (std::int64_t columns : {1,  2,  3,   7,   8,   9,   15,  16,  17,   31,   32,   33,  63,
                               64, 65, 127, 128, 129, 255, 256, 257, 1023, 1024, 1025, 1031}) {
    for (Fp8Scaling scaling : kScalings) {
      expect_right({.rows = 5, .columns = columns, .x = kBF16, .scaling = scaling, .group = 16});
      expect_right({.rows = 3,
                    .columns = columns,
                    .x = kF32,
                    .residual = true,
                    .scaling = scaling,
                    .make_normed = true});
    }
  }
  for (std::int64_t groups : {1, 2, 3, 5, 63, 64, 65}) {
    for (Fp8Scaling scaling : kScalings) {
      expect_right({.rows = 4, .columns = 16 * groups, .scaling = scaling, .group = 32});
    }
  }
}

TEST_P(Fp8RmsNorm, SmallTailsOfRows) {
  for (std::int64_t rows :
       {1, 2, 3, 4, 5, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 255, 257}) {
    for (Fp8Scaling scaling : kScalings) {
      expect_right({.rows = rows, .columns = 48, .scaling = scaling, .group = 16});
      expect_right({.rows = rows, .columns = 37, .x = kBF16, .scaling = scaling});
    }
  }
}

// Slices of larger tensors at any address.
TEST_P(Fp8RmsNorm, SmallStridedAndMisalignedViews) {
  for (std::int64_t lead : {0, 1, 2, 4, 7, 8, 16}) {
    for (std::int64_t gap : {0, 1, 3, 8, 16}) {
      for (Fp8Scaling scaling : kScalings) {
        const Layout layout{.lead = lead, .row_gap = gap};
        expect_right(
            {.rows = 18, .columns = 80, .scaling = scaling, .group = 32, .layout = layout});
        expect_right({.rows = 18,
                      .columns = 77,
                      .x = kBF16,
                      .residual = true,
                      .scaling = scaling,
                      .group = 32,
                      .make_normed = true,
                      .layout = layout});
      }
    }
  }
}

TEST_P(Fp8RmsNorm, LargerSizes) {
  for (Fp8Scaling scaling : kScalings) {
    expect_right({.rows = 200, .columns = 4096, .scaling = scaling});
    expect_right({.rows = 1000, .columns = 1040, .scaling = scaling, .q = kE5M2});
    expect_right({.rows = 3001, .columns = 128, .scaling = scaling, .group = 64});
    expect_right({.rows = 66, .columns = 8192 + 16, .residual = true, .scaling = scaling});
    expect_right({.rows = 3, .columns = 65536, .scaling = scaling});
    expect_right({.rows = 17, .columns = 65535, .x = kBF16, .scaling = scaling, .group = 16});
  }
}

TEST_P(Fp8RmsNorm, SmallCompatIsCoatsChainToTheByte) {
  for (DType q : {kE4M3, kE5M2}) {
    for (DType x : {kE4M3, kE5M2, kBF16, kF32}) {
      for (DType w : {kF32, kBF16}) {
        expect_right({.rows = 33,
                      .columns = 208,
                      .x = x,
                      .weight = w,
                      .compat = true,
                      .q = q,
                      .make_normed = true});
        expect_right({.rows = 33,
                      .columns = 208,
                      .x = x,
                      .weight = w,
                      .given = true,
                      .compat = true,
                      .q = q,
                      .make_q = false});
        expect_right({.rows = 20,
                      .columns = 64,
                      .x = x,
                      .weight = w,
                      .residual = true,
                      .weight_offset = 1.0f,
                      .compat = true,
                      .stochastic = true,
                      .q = q});
      }
    }
  }
}

TEST_P(Fp8RmsNorm, CompatOfLargerSizes) {
  expect_right({.rows = 257, .columns = 4096, .compat = true});
  expect_right({.rows = 1000, .columns = 1024 + 16, .x_scale = kF32, .compat = true, .q = kE5M2});
  expect_right({.rows = 7, .columns = 65536, .weight = kBF16, .compat = true, .make_q_t = false});
}

// Every code of both formats times its scale, read exactly: added to a residual of zeros.
TEST_P(Fp8RmsNorm, SmallEveryCodeIsReadExactly) {
  for (DType x : {kE4M3, kE5M2}) {
    NormTrial trial({.rows = 4, .columns = 256, .x = x, .residual = true, .residual_dtype = kF32},
                    GetParam(), 3);
    // set_value rounds to nearest, so every code comes from its own value; those of NaN stay out.
    for (std::size_t i = 0; i < trial.x_values.size(); ++i) {
      const auto code = static_cast<std::uint8_t>(i);
      const double v =
          static_cast<double>(x == kE4M3 ? to_float(Float8E4M3{code}) : to_float(Float8E5M2{code}));
      trial.x_values[i] = std::isfinite(v) ? v : 0.0;
      trial.residual_values[i] = 0;
    }
    trial.run();
    const Array z = values_of(trial.x), s = values_of(trial.x_scale);
    const Array sum = values_of(trial.residual);
    for (std::size_t i = 0; i < z.size(); ++i) {
      EXPECT_EQ(sum[i], static_cast<double>(static_cast<float>(z[i] * s[i / 16])));
    }
    trial.expect_right();
  }
}

// All zeros give zeros, and a scale with which one can divide.
TEST_P(Fp8RmsNorm, SmallZeros) {
  for (Fp8Scaling scaling : kScalings) {
    for (bool pow2 : {false, true}) {
      for (bool compat : {false, true}) {
        if (compat && (pow2 || scaling != Fp8Scaling::kTensor)) continue;
        NormTrial trial({.rows = 20,
                         .columns = 64,
                         .scaling = scaling,
                         .group = 32,
                         .pow2 = pow2,
                         .compat = compat},
                        GetParam(), 5);
        std::fill(trial.x_values.begin(), trial.x_values.end(), 0.0);
        trial.run();
        trial.expect_right();
        for (double v : values_of(trial.q)) EXPECT_EQ(v, 0.0);
        for (double v : values_of(trial.q_t)) EXPECT_EQ(v, 0.0);
        trial.scale.memory.for_each([&](std::int64_t i) {
          const double s = get_value(trial.scale.memory, i);
          EXPECT_TRUE(s > 0 && std::isfinite(1 / static_cast<float>(s))) << s;
        });
      }
    }
  }
}

// One row of zeros among others; values far from 1, and a row whose sum of squares is subnormal.
TEST_P(Fp8RmsNorm, SmallUnevenRows) {
  for (Fp8Scaling scaling : kScalings) {
    NormTrial trial({.rows = 5, .columns = 128, .x = kF32, .scaling = scaling, .group = 32},
                    GetParam(), 7);
    const double factors[] = {0, 1e-20, 1e-4, 1e4, 1e12};
    for (std::size_t i = 0; i < trial.x_values.size(); ++i) trial.x_values[i] *= factors[i / 128];
    trial.run();
    trial.expect_right();
  }
}

/// Which values of a matrix are NaN.
std::vector<bool> nans(const Array& values) {
  std::vector<bool> out;
  for (double v : values) out.push_back(std::isnan(v));
  return out;
}

// A NaN in row 2, column 33: one scale for all makes all NaN; else its row, and of the transpose
// what shares a scale with that row.
TEST_P(Fp8RmsNorm, SmallNaNIsNeverQuantisedAway) {
  for (double bad : {std::nan(""), -std::nan("")}) {
    for (Fp8Scaling scaling : kScalings) {
      for (bool compat : {false, true}) {
        if (compat && scaling != Fp8Scaling::kTensor) continue;
        const std::int64_t rows = 40, columns = 64;
        NormTrial trial({.rows = rows,
                         .columns = columns,
                         .x = kBF16,
                         .scaling = scaling,
                         .group = 16,
                         .compat = compat},
                        GetParam(), 9);
        trial.x_values[static_cast<std::size_t>(2 * columns + 33)] = bad;
        trial.run();
        trial.expect_guards();
        const std::vector<bool> q = nans(values_of(trial.q)), q_t = nans(values_of(trial.q_t));
        for (std::int64_t m = 0; m < rows; ++m) {
          const bool in_q = scaling == Fp8Scaling::kTensor || m == 2;
          const bool in_q_t = scaling != Fp8Scaling::kGroup || m < 16;
          for (std::int64_t n = 0; n < columns; ++n) {
            EXPECT_EQ(q[static_cast<std::size_t>(m * columns + n)], in_q) << m << ", " << n;
            EXPECT_EQ(q_t[static_cast<std::size_t>(n * rows + m)], in_q_t) << m << ", " << n;
          }
        }
        if (scaling == Fp8Scaling::kTensor) {
          EXPECT_TRUE(std::isnan(trial.scale.at(0, 0)) && std::isnan(get_value(trial.amax, 0)));
        }
      }
    }
  }
}

// An infinity makes its row's rstd 0 and itself NaN: never a number that looks right.
TEST_P(Fp8RmsNorm, SmallInfinity) {
  NormTrial trial(
      {.rows = 3, .columns = 64, .x = kBF16, .scaling = Fp8Scaling::kRow, .make_q_t = false},
      GetParam(), 11);
  trial.x_values[70] = INFINITY;
  trial.run();
  const Array q = values_of(trial.q);
  for (std::size_t i = 0; i < q.size(); ++i) EXPECT_EQ(std::isnan(q[i]), i / 64 == 1) << i;
}

// A scale that is given may be too small: values saturate, and amax tells the history.
TEST_P(Fp8RmsNorm, SmallGivenScalesSaturate) {
  for (DType dtype : {kE4M3, kE5M2}) {
    NormTrial trial({.rows = 9, .columns = 64, .given = true, .q = dtype}, GetParam(), 13);
    trial.scale.memory.data<float>()[0] = 1e-6f;
    trial.scale.memory.upload();
    trial.run();
    trial.expect_right();
    const double largest = largest_of(dtype);
    const Array q = values_of(trial.q);
    EXPECT_TRUE(std::any_of(q.begin(), q.end(), [&](double v) { return v == largest; }));
    EXPECT_TRUE(std::any_of(q.begin(), q.end(), [&](double v) { return v == -largest; }));
  }
}

TEST_P(Fp8RmsNorm, SmallEmpty) {
  for (Fp8Scaling scaling : kScalings) {
    for (bool given : {false, true}) {
      NormTrial trial({.rows = 0, .columns = 64, .scaling = scaling, .given = given}, GetParam(),
                      1);
      trial.run();
      trial.expect_guards();
      if (scaling == Fp8Scaling::kRow && !given) {
        for (std::int64_t n = 0; n < 64; ++n) {
          EXPECT_EQ(trial.scale_t.at(n, 0), static_cast<double>(1e-10f / 448.0f));
        }
      }
      if (scaling != Fp8Scaling::kTensor) continue;
      EXPECT_EQ(get_value(trial.amax, 0), 0.0);
      if (!given) {
        EXPECT_EQ(trial.scale.at(0, 0), static_cast<double>(1e-10f / 448.0f));
      }
    }
  }
}

TEST_P(Fp8RmsNorm, SmallRepeatsAreTheSameBits) {
  for (Fp8Scaling scaling : kScalings) {
    const NormCase c{.rows = 150,
                     .columns = 1040,
                     .residual = true,
                     .scaling = scaling,
                     .stochastic = true,
                     .make_normed = true};
    std::vector<Bytes> first;
    for (int repeat = 0; repeat < 5; ++repeat) {
      NormTrial trial(c, GetParam(), 15);
      trial.run();
      std::vector<Bytes> bytes;
      for (GuardedTensor* t : trial.outputs()) bytes.push_back(bytes_of(*t));
      if (repeat == 0) first = bytes;
      EXPECT_TRUE(bytes == first) << "repeat " << repeat;
    }
  }
}

}  // namespace
}  // namespace mortar::testing
