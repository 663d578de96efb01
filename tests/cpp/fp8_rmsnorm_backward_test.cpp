// SPDX-License-Identifier: Apache-2.0
// The backward against float64, over every dtype, switch and size.
#include <omp.h>

#include "fp8_rmsnorm_grad_case.h"

namespace mortar::testing {
namespace {

class Fp8RmsNormBackward : public ::testing::TestWithParam<Device> {
 protected:
  void expect_right(const GradCase& c, unsigned random = 1) {
    GradTrial trial(c, GetParam(), random);
    trial.run();
    trial.expect_right();
  }
};
INSTANTIATE_TEST_SUITE_P(Devices, Fp8RmsNormBackward, ::testing::ValuesIn(devices()), device_name);

TEST_P(Fp8RmsNormBackward, SmallEveryDtype) {
  for (DType dy : {kF32, kF16, kBF16}) {
    for (DType x : {kE4M3, kE5M2, kF32, kF16, kBF16}) {
      expect_right({.rows = 20, .columns = 96, .x = x, .dy = dy, .residual_grad = true});
    }
    for (DType w : {kF32, kF16, kBF16}) {
      for (DType dw : {kF32, kF16, kBF16}) {
        expect_right({.x_scale = kF32, .weight = w, .dy = dy, .dw = dw, .accumulate = true});
      }
    }
  }
}

TEST_P(Fp8RmsNormBackward, SmallEverySwitch) {
  for (int flags = 0; flags < 16; ++flags) {
    for (auto dx : {GradCase::kApart, GradCase::kOnDy, GradCase::kOnResidual}) {
      GradCase c{.rows = 35, .columns = 160, .x_group = 32};
      c.residual_grad = flags & 1 || dx == GradCase::kOnResidual;
      c.accumulate = flags & 2;
      c.make_dx = flags & 4;
      c.make_dw = flags & 8;
      c.weight_offset = flags % 2 ? 1.0f : 0.0f;
      c.dx = dx;
      expect_right(c, static_cast<unsigned>(flags));
    }
  }
}

TEST_P(Fp8RmsNormBackward, SmallSizesAndViews) {
  for (std::int64_t columns : {1, 2, 7, 15, 16, 17, 33, 63, 65, 127, 129, 1023, 1024, 1025}) {
    expect_right({.rows = 3, .columns = columns, .x = kBF16, .residual_grad = true});
    expect_right({.rows = 18, .columns = columns, .x = kF32, .dy = kF32});
  }
  for (std::int64_t rows : {1, 2, 15, 16, 17, 31, 33, 64, 65, 127, 129, 255, 257, 1023, 1025}) {
    expect_right({.rows = rows, .columns = 48});
  }
  for (int group : {16, 32, 64, 128}) expect_right({.columns = 384, .x_group = group});
  for (std::int64_t lead : {0, 1, 2, 3, 4, 8}) {
    for (std::int64_t gap : {0, 1, 3, 8}) {
      const Layout layout{.lead = lead, .row_gap = gap};
      expect_right({.rows = 18, .columns = 80, .residual_grad = true, .layout = layout});
      expect_right({.rows = 18, .columns = 77, .x = kBF16, .dy = kF32, .layout = layout});
    }
  }
}

TEST_P(Fp8RmsNormBackward, LargerSizes) {
  expect_right({.rows = 200, .columns = 4096, .residual_grad = true});
  expect_right({.rows = 4099, .columns = 128});
  expect_right({.rows = 140, .columns = 14336});
  expect_right({.rows = 3, .columns = 65536});
  expect_right({.rows = 35, .columns = 65535, .x = kBF16});
}

TEST_P(Fp8RmsNormBackward, SmallEmpty) {
  for (bool accumulate : {false, true}) {
    GradTrial trial({.rows = 0, .accumulate = accumulate}, GetParam(), 3);
    trial.run();
    const Array dw = values_of(trial.dw);
    for (std::size_t i = 0; i < dw.size(); ++i) {
      EXPECT_EQ(dw[i],
                accumulate ? static_cast<double>(static_cast<float>(trial.dw_values[i])) : 0);
    }
  }
}

// A NaN in dy spoils its row of dx and its column of dw, and nothing else.
TEST_P(Fp8RmsNormBackward, SmallNaNStaysInItsRowAndColumn) {
  const std::int64_t rows = 40, columns = 64;
  GradTrial trial({.rows = rows, .columns = columns}, GetParam(), 5);
  trial.dy_values[static_cast<std::size_t>(7 * columns + 9)] = std::nan("");
  trial.run();
  const Array dx = values_of(trial.dx), dw = values_of(trial.dw);
  for (std::int64_t m = 0; m < rows; ++m) {
    for (std::int64_t n = 0; n < columns; ++n) {
      EXPECT_EQ(std::isnan(dx[static_cast<std::size_t>(m * columns + n)]), m == 7) << m << "," << n;
    }
  }
  for (std::int64_t n = 0; n < columns; ++n) {
    EXPECT_EQ(std::isnan(dw[static_cast<std::size_t>(n)]), n == 9) << n;
  }
}

TEST_P(Fp8RmsNormBackward, RepeatsAreTheSameBits) {
  Bytes dx, dw;
  for (int repeat = 0; repeat < 5; ++repeat) {
    GradTrial trial({.rows = 700, .columns = 1040}, GetParam(), 7);
    trial.run();
    if (repeat == 0) {
      dx = bytes_of(trial.dx);
      dw = bytes_of(trial.dw);
    }
    EXPECT_TRUE(bytes_of(trial.dx) == dx && bytes_of(trial.dw) == dw) << "repeat " << repeat;
  }
}

// Bits do not depend on the number of threads, nor on how many rows each of them has.
TEST(Fp8RmsNormThreads, SmallBitsAreTheSameForAnyNumber) {
  const int usual = omp_get_max_threads();
  Bytes dx, dw;
  for (int threads : {1, 2, 3, 7}) {
    omp_set_num_threads(threads);
    GradTrial trial({.rows = 333, .columns = 528}, Device{}, 9);
    trial.run();
    if (threads == 1) {
      dx = bytes_of(trial.dx);
      dw = bytes_of(trial.dw);
    }
    EXPECT_TRUE(bytes_of(trial.dx) == dx && bytes_of(trial.dw) == dw) << threads << " threads";
  }
  omp_set_num_threads(usual);
}

}  // namespace
}  // namespace mortar::testing
