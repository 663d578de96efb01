// SPDX-License-Identifier: Apache-2.0
// What must not change a bit of a training step: repetition, threads, strides, whether outputs are
// given anew or in place. And what dropout draws.
#include <gtest/gtest.h>
#include <omp.h>

#include <cmath>
#include <utility>
#include <vector>

#include "lora/cpu/kernels.h"
#include "lora/train/dropout.h"
#include "lora_train_case.h"

namespace mortar::testing {
namespace {

constexpr DType kBF16 = DType::kBFloat16;

class LoraTrainInvariance : public ::testing::TestWithParam<Device> {};

TrainCase dropped_slices(DType dtype) {
  TrainCase c;
  c.rows = 300;
  c.hidden = 136;
  c.widths = {64, 24};
  c.ranks = {8, 16};
  c.x = c.w = c.y = c.grad = c.dx = dtype;
  c.p = {0.2f};
  c.base = BaseIs::kApart;
  return c;
}

void run(TrainStep* step) {
  step->run_forward();
  step->run_backward();
}

TEST_P(LoraTrainInvariance, RepetitionChangesNoBit) {
  for (const DType dtype : {DType::kFloat32, kBF16}) {
    TrainStep first(dropped_slices(dtype), GetParam());
    run(&first);
    for (int i = 0; i < 3; ++i) {
      TrainStep again(dropped_slices(dtype), GetParam());
      run(&again);
      expect_same_results(first, again, "again");
    }
  }
}

TEST_P(LoraTrainInvariance, StridesAndGivenOutputsChangeNoBit) {
  for (const DType dtype : {DType::kFloat32, kBF16}) {
    const TrainCase plain = dropped_slices(dtype);
    TrainStep first(plain, GetParam());
    run(&first);
    TrainCase transposed = plain, misaligned = plain, in_place = plain;
    transposed.transposed = true;
    misaligned.layout = {1, 3};
    in_place.base = BaseIs::kInPlace;
    const std::pair<const char*, TrainCase> others[] = {
        {"transposed", transposed}, {"misaligned", misaligned}, {"in place", in_place}};
    for (const auto& [what, c] : others) {
      TrainStep other(c, GetParam());
      copy_inputs(first, &other);
      run(&other);
      expect_same_results(first, other, what);
    }
  }
}

/// Sums over many ranks, which two instruction sets would add in other orders, and a base that is
/// subnormal where nothing is added to it.
TEST(LoraTrainOnCpu, StridesChangeNoBitOfAnyLevel) {
  TrainCase dense;
  dense.rows = 300;
  dense.hidden = dense.widths[0] = 520;
  dense.ranks = {200};
  dense.x = dense.w = dense.y = dense.grad = dense.dx = kBF16;
  dense.base = BaseIs::kApart;
  TrainCase transposed = dense;
  transposed.transposed = true;
  for (const lora::cpu::Kernels* level : lora::cpu::supported_kernels()) {
    lora::cpu::use_kernels(level);
    TrainStep first(dense, Device{});
    const Tensor x = first.x.host(), base = first.base[0].host();
    for (int i = 0; i < 520; ++i) {
      store_float(x.data, kBF16, 5 * x.strides[0] + i, 0.0f);
      store_float(base.data, kBF16, 5 * base.strides[0] + i, 3e-40f);
    }
    first.x.memory().upload();
    first.base[0].memory().upload();
    TrainStep other(transposed, Device{});
    copy_inputs(first, &other);
    run(&first);
    run(&other);
    expect_same_results(first, other, level->level);
  }
  lora::cpu::use_kernels(nullptr);
}

TEST(LoraTrainOnCpu, ThreadsChangeNoBit) {
  const int threads = omp_get_max_threads();
  TrainCase c = dropped_slices(DType::kFloat32);
  c.rows = 1500;
  omp_set_num_threads(1);
  TrainStep one(c, Device{});
  run(&one);
  for (const int n : {2, 3, 8}) {
    omp_set_num_threads(n);
    TrainStep several(c, Device{});
    run(&several);
    expect_same_results(one, several, "threads");
  }
  omp_set_num_threads(threads);
}

/// 71 chunks of rows, more than pass at a time on up to 35 threads; adapters begin within a chunk.
TEST(LoraTrainOnCpu, RowsOfSeveralGroupsMatchOracleOnAnyThreads) {
  const int threads = omp_get_max_threads();
  TrainCase c;
  c.rows = 9000;
  c.hidden = 300;
  c.widths = {200, 60};
  c.ranks = {3, 5};
  c.adapters = 3;
  for (const RowsBy by : {RowsBy::kOne, RowsBy::kSegments, RowsBy::kPlan}) {
    c.by = by;
    c.adapters = by == RowsBy::kOne ? 1 : 3;
    c.empty_segment = by == RowsBy::kSegments;
    omp_set_num_threads(1);
    TrainStep one(c, Device{});
    expect_matches(one);
    omp_set_num_threads(4);
    TrainStep several(c, Device{});
    run(&several);
    expect_same_results(one, several, "threads");
  }
  omp_set_num_threads(threads);
}

/// NaN and Inf reach their own row and what sums over it, and nothing else.
TEST_P(LoraTrainInvariance, NanStaysInItsRow) {
  TrainCase c = dropped_slices(DType::kFloat32);
  c.p = {};
  TrainStep step(c, GetParam());
  const Tensor x = step.x.host();
  store_float(x.data, x.dtype, 7 * x.strides[0] + 3, std::nanf(""));
  step.x.memory().upload();
  run(&step);
  const Tensor y = step.y[0].host(), dx = step.dx.host();
  for (std::int64_t m = 0; m < c.rows; ++m) {
    EXPECT_EQ(std::isnan(load_float(y.data, y.dtype, m * y.strides[0])), m == 7) << m;
    EXPECT_FALSE(std::isnan(load_float(dx.data, dx.dtype, m * dx.strides[0] + 3))) << m;
  }
  const Tensor da = step.da[0].host();
  for (std::int64_t k = 0; k < c.hidden; ++k) {
    EXPECT_EQ(std::isnan(load_float(da.data, da.dtype, k)), k == 3) << k;
  }
}

TEST(LoraTrainDropout, DropsTheShareAskedForIndependently) {
  using namespace lora::train;
  constexpr int kElements = 1 << 18;
  for (const float p : {0.001f, 0.05f, 0.1f, 0.5f, 0.9f}) {
    const std::uint32_t threshold = drop_threshold(p);
    int dropped = 0, both = 0, other_offset = 0, other_seed = 0;
    for (int i = 0; i < kElements; ++i) {
      const bool own = !keeps(1, 2, i, threshold);
      dropped += own;
      both += own && !keeps(1, 2, i + 1, threshold);
      other_offset += own && !keeps(1, 3, i, threshold);
      other_seed += own && !keeps(2, 2, i, threshold);
    }
    // Five standard deviations of a binomial count.
    const auto expect = [&](int count, double share) {
      EXPECT_NEAR(count, share * kElements, 5 * std::sqrt(share * (1 - share) * kElements)) << p;
    };
    expect(dropped, p);
    expect(both, p * p);
    expect(other_offset, p * p);
    expect(other_seed, p * p);
  }
}

TEST(LoraTrainDropout, KeepsAllOrNoneWithoutADraw) {
  using namespace lora::train;
  EXPECT_EQ(drop_threshold(0.0f), 0u);
  EXPECT_EQ(drop_threshold(1.0f), kDropAll);
  EXPECT_EQ(keep_scale(0), 1.0f);
  EXPECT_EQ(keep_scale(kDropAll), 0.0f);
  EXPECT_EQ(keep_scale(kDropAll / 2), 2.0f);
  for (int i = 0; i < 100; ++i) {
    EXPECT_TRUE(keeps(1, 2, i, 0));
    EXPECT_FALSE(keeps(1, 2, i, kDropAll));
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, LoraTrainInvariance, ::testing::ValuesIn(devices()),
                         [](const auto& one) { return device_label(one.param); });

}  // namespace
}  // namespace mortar::testing
