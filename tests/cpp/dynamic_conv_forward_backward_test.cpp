// SPDX-License-Identifier: Apache-2.0
// Forward and backward against the float64 reference, on every device of the machine.
#include <algorithm>
#include <cmath>

#include "dynamic_conv_case.h"

namespace mortar::testing {
namespace {

class DynamicConv : public ::testing::TestWithParam<Device> {
 protected:
  static void expect_right(const Case& c, unsigned seed = 1) {
    SCOPED_TRACE(concat(c));
    Trial run(c, GetParam(), seed);
    run.forward();
    run.expect_forward_right();
    run.backward();
    run.expect_backward_right();
  }
};
INSTANTIATE_TEST_SUITE_P(Devices, DynamicConv, ::testing::ValuesIn(devices()), device_name);

TEST_P(DynamicConv, SmallEveryWidthAndDtype) {
  for (int width = 1; width <= kDynamicConvMaxWidth; ++width) {
    for (DType dtype : kFloats) {
      expect_right(
          {.batch = 2, .time = 37, .channels = 48, .width = width, .x = dtype, .k = dtype});
    }
  }
}

TEST_P(DynamicConv, SmallSiluEveryWidth) {
  for (int width = 1; width <= kDynamicConvMaxWidth; ++width) {
    expect_right({.batch = 1, .time = 21, .channels = 40, .width = width, .silu = true});
  }
}

TEST_P(DynamicConv, SmallMixedDtypes) {
  for (DType x : kFloats) {
    for (DType k : kFloats) {
      expect_right({.batch = 2, .time = 19, .channels = 24, .x = x, .k = k, .silu = true});
      expect_right(
          {.batch = 1, .time = 9, .channels = 16, .width = 3, .x = x, .k = k, .state_length = 2});
    }
  }
}

TEST_P(DynamicConv, SmallOddSizesAndMisalignedViews) {
  for (std::int64_t channels : {1, 2, 3, 7, 8, 31, 33, 65}) {
    for (std::int64_t offset : {0, 1, 2, 4}) {
      expect_right({.batch = 2, .time = 11, .channels = channels, .offset = offset});
      expect_right({.batch = 1, .time = 6, .channels = channels, .width = 8, .offset = offset});
    }
  }
}

TEST_P(DynamicConv, SmallSlicedViews) {
  for (std::int64_t padding : {1, 2, 8}) {
    expect_right({.batch = 2, .time = 13, .channels = 32, .channel_padding = padding});
    expect_right({.batch = 3, .time = 13, .channels = 32, .width = 2, .time_padding = padding});
    expect_right({.batch = 2,
                  .time = 5,
                  .channels = 16,
                  .width = 3,
                  .state_length = 3,
                  .state_by_time = true,
                  .channel_padding = padding,
                  .time_padding = padding});
  }
}

TEST_P(DynamicConv, SmallTimesAroundTheWidth) {
  for (int width : {1, 2, 3, 4, 8}) {
    for (std::int64_t time : {0, 1, 2, 3, 4, 5, 7, 8, 9}) {
      for (int length : {width, width - 1}) {
        for (bool has_initial : {false, true}) {
          expect_right({.batch = 2,
                        .time = time,
                        .channels = 16,
                        .width = width,
                        .state_length = length,
                        .has_initial = has_initial});
        }
      }
    }
  }
}

TEST_P(DynamicConv, SmallEmptyBatchOrChannels) {
  expect_right({.batch = 0, .time = 5, .channels = 8, .state_length = 4});
  expect_right({.batch = 2, .time = 5, .channels = 0, .state_length = 4});
  expect_right({.batch = 1, .time = 0, .channels = 8, .cu_seqlens = {0}});
}

TEST_P(DynamicConv, SmallPackedSequences) {
  const std::vector<std::vector<std::int64_t>> packs = {
      {0, 20}, {0, 0, 20}, {0, 20, 20}, {0, 7, 7, 7, 20}, {0, 1, 2, 3, 20}, {0, 0, 0, 16, 20, 20}};
  for (const auto& pack : packs) {
    for (bool wide : {false, true}) {
      for (int width : {1, 2, 4, 8}) {
        expect_right(
            {.time = 20, .channels = 16, .width = width, .cu_seqlens = pack, .wide = wide});
        for (int length : {width - 1, width}) {
          expect_right({.time = 20,
                        .channels = 16,
                        .width = width,
                        .silu = wide,
                        .cu_seqlens = pack,
                        .wide = wide,
                        .state_length = length,
                        .has_initial = width != 2,
                        .state_by_time = !wide});
        }
      }
    }
  }
}

TEST_P(DynamicConv, SmallEmptySequencesOnly) {
  expect_right({.time = 0, .channels = 16, .cu_seqlens = {0, 0, 0}, .state_length = 4});
  expect_right({.time = 0, .channels = 16, .cu_seqlens = {0, 0}, .state_length = 3});
}

TEST_P(DynamicConv, SequencesOfOneStep) {
  std::vector<std::int64_t> starts;
  for (int i = 0; i <= 300; ++i) starts.push_back(i);
  expect_right({.time = 300, .channels = 32, .cu_seqlens = starts, .state_length = 4});
  expect_right({.time = 300, .channels = 32, .width = 3, .cu_seqlens = starts, .state_length = 2});
}

TEST_P(DynamicConv, ThousandSequences) {
  for (int width : {3, 4}) {
    expect_right({.time = 3000,
                  .channels = 32,
                  .width = width,
                  .silu = true,
                  .cu_seqlens = random_starts(1000, 3000, 5),
                  .state_length = width});
    expect_right({.time = 3000,
                  .channels = 40,
                  .width = width,
                  .cu_seqlens = random_starts(1000, 3000, 6),
                  .wide = true});
  }
}

// Boundaries at, just before and just after every place where a chunk of time may end.
TEST_P(DynamicConv, BoundariesAroundChunkEnds) {
  for (int shift : {-1, 0, 1, 2}) {
    std::vector<std::int64_t> starts = {0};
    for (int t = 16; t < 520; t += 16) starts.push_back(t + shift);
    starts.push_back(520);
    for (int width : {2, 4, 8}) {
      expect_right({.time = 520,
                    .channels = 16,
                    .width = width,
                    .cu_seqlens = starts,
                    .state_length = width});
    }
  }
}

TEST_P(DynamicConv, LongTimesAndManyChannels) {
  expect_right({.batch = 1, .time = 1031, .channels = 72, .silu = true, .state_length = 3});
  expect_right({.batch = 2, .time = 70, .channels = 2050, .state_length = 4});
  expect_right({.batch = 1,
                .time = 40,
                .channels = 1025,
                .width = 5,
                .x = DType::kFloat32,
                .k = DType::kFloat32});
  expect_right({.batch = 3,
                .time = 130,
                .channels = 320,
                .width = 8,
                .x = DType::kFloat16,
                .k = DType::kFloat16});
}

TEST_P(DynamicConv, RepeatsBitwise) {
  const Case c = {.time = 400,
                  .channels = 96,
                  .silu = true,
                  .cu_seqlens = random_starts(40, 400, 3),
                  .state_length = 4};
  Trial first(c, GetParam(), 7);
  first.forward();
  first.backward();
  for (int repeat = 0; repeat < 3; ++repeat) {
    Trial again(c, GetParam(), 7);
    again.forward();
    again.backward();
    EXPECT_EQ(first.y->bits(), again.y->bits());
    EXPECT_EQ(first.dx->bits(), again.dx->bits());
    EXPECT_EQ(first.dk->bits(), again.dk->bits());
    EXPECT_EQ(first.dinitial->bits(), again.dinitial->bits());
  }
}

/// Elements [first, first + count) of a bit pattern.
std::vector<std::uint64_t> slice(const std::vector<std::uint64_t>& bits, std::int64_t first,
                                 std::int64_t count) {
  return {bits.begin() + first, bits.begin() + first + count};
}

// A sequence's bits depend neither on its place in a pack nor on its neighbours: each sequence of a
// pack is run again alone, as a dense batch of one.
TEST_P(DynamicConv, PackedEqualsAloneBitwise) {
  const std::int64_t channels = 32;
  const int width = 4;
  const Case pack = {.time = 310,
                     .channels = channels,
                     .width = width,
                     .silu = true,
                     .cu_seqlens = random_starts(12, 310, 9),
                     .state_length = width};
  Trial packed(pack, GetParam(), 11);
  packed.forward();
  packed.backward();
  for (std::size_t n = 0; n + 1 < pack.cu_seqlens.size(); ++n) {
    const std::int64_t first = pack.cu_seqlens[n], last = pack.cu_seqlens[n + 1];
    const std::int64_t count = last - first;
    Trial alone(
        {.time = count, .channels = channels, .width = width, .silu = true, .state_length = width},
        GetParam(), 0);
    const auto copy = [&](Array& to, const Array& from, std::int64_t per_row, std::int64_t row) {
      std::copy_n(from.begin() + row * per_row, to.size(), to.begin());
    };
    copy(alone.x, packed.x, channels, first);
    copy(alone.k, packed.k, channels * width, first);
    copy(alone.dy, packed.dy, channels, first);
    copy(alone.initial, packed.initial, channels * width, static_cast<std::int64_t>(n));
    copy(alone.dfinal, packed.dfinal, channels * width, static_cast<std::int64_t>(n));
    alone.forward();
    alone.backward();
    const auto row = static_cast<std::int64_t>(n);
    EXPECT_EQ(alone.y->bits(), slice(packed.y->bits(), first * channels, count * channels));
    EXPECT_EQ(alone.dx->bits(), slice(packed.dx->bits(), first * channels, count * channels));
    EXPECT_EQ(alone.dk->bits(),
              slice(packed.dk->bits(), first * channels * width, count * channels * width));
    EXPECT_EQ(alone.dinitial->bits(),
              slice(packed.dinitial->bits(), row * channels * width, channels * width));
    EXPECT_EQ(alone.final_state->bits(),
              slice(packed.final_state->bits(), row * channels * width, channels * width));
  }
}

TEST_P(DynamicConv, PermutedBatchBitwise) {
  const Case c = {.batch = 5, .time = 45, .channels = 64, .silu = true, .state_length = 3};
  Trial run(c, GetParam(), 13), turned(c, GetParam(), 13);
  const auto rotate_rows = [&](Array& a) {
    std::rotate(a.begin(), a.begin() + static_cast<std::ptrdiff_t>(a.size()) / 5, a.end());
  };
  for (Array* a : {&turned.x, &turned.k, &turned.dy, &turned.initial, &turned.dfinal}) {
    rotate_rows(*a);
  }
  for (Trial* r : {&run, &turned}) {
    r->forward();
    r->backward();
  }
  const auto expect_rotated = [](const Operand& before, const Operand& after) {
    auto bits = before.bits();
    std::rotate(bits.begin(), bits.begin() + static_cast<std::ptrdiff_t>(bits.size()) / 5,
                bits.end());
    EXPECT_EQ(bits, after.bits());
  };
  expect_rotated(*run.y, *turned.y);
  expect_rotated(*run.dx, *turned.dx);
  expect_rotated(*run.dk, *turned.dk);
  expect_rotated(*run.dinitial, *turned.dinitial);
}

// A bad input reaches the W outputs that see it and no other; a bad gradient the W inputs that its
// output saw, and a boundary stops both.
TEST_P(DynamicConv, SmallBadValuesStayWhereTheyBelong) {
  const std::int64_t channels = 16;
  for (double bad : {std::nan(""), static_cast<double>(INFINITY)}) {
    for (int width : {2, 3, 4, 8}) {
      const Case c = {.time = 60,
                      .channels = channels,
                      .width = width,
                      .cu_seqlens = {0, 22, 60},
                      .state_length = width};
      Trial run(c, GetParam(), 17);
      const std::int64_t t_bad = 20, d_bad = 5;
      run.x[static_cast<std::size_t>(t_bad * channels + d_bad)] = bad;
      run.dy[static_cast<std::size_t>((t_bad + 3) * channels + d_bad)] = bad;
      run.forward();
      run.backward();
      const Array y = run.y->values(), dx = run.dx->values();
      for (std::int64_t t = 0; t < c.time; ++t) {
        for (std::int64_t d = 0; d < channels; ++d) {
          const auto i = static_cast<std::size_t>(t * channels + d);
          const bool in_y =
              d == d_bad && t >= t_bad && t < std::min<std::int64_t>(t_bad + width, 22);
          const std::int64_t g = t_bad + 3;
          const bool in_dx = d == d_bad && t <= g && t > g - width && t >= 22;
          EXPECT_EQ(std::isfinite(y[i]), !in_y) << "y at " << t << ", " << d << " of " << c;
          EXPECT_EQ(std::isfinite(dx[i]), !in_dx) << "dx at " << t << ", " << d << " of " << c;
        }
      }
      const Array final_state = run.final_state->values();
      for (std::size_t i = final_state.size() / 2; i < final_state.size(); ++i) {
        EXPECT_TRUE(std::isfinite(final_state[i])) << "final state of the second sequence";
      }
    }
  }
}

// SiLU of values whose exponential overflows is 0 or the value itself, and its gradient 0 or 1.
TEST_P(DynamicConv, SmallSiluOfLargeValues) {
  for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    Trial run({.time = 8, .channels = 16, .width = 1, .x = dtype, .k = dtype, .silu = true},
              GetParam(), 19);
    for (std::size_t i = 0; i < run.x.size(); ++i) {
      run.x[i] = i % 2 == 0 ? 1e4 : -1e4;
      run.x[i] = static_cast<double>(round_to(static_cast<float>(run.x[i]), dtype));
      run.k[i] = 1;
      run.dy[i] = 1;
    }
    run.forward();
    run.backward();
    const Array y = run.y->values(), dx = run.dx->values();
    for (std::size_t i = 0; i < y.size(); ++i) {
      EXPECT_EQ(y[i], i % 2 == 0 ? run.x[i] : 0.0);
      EXPECT_EQ(dx[i], i % 2 == 0 ? 1.0 : 0.0);
    }
  }
}

}  // namespace
}  // namespace mortar::testing
