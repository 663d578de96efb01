// SPDX-License-Identifier: Apache-2.0
// How the CUDA backend cuts a convolution: a pure function of sizes and of the number of SMs.
#include "dynamic_conv/config.h"

#include <gtest/gtest.h>

#include <array>
#include <random>

namespace mortar::testing {
namespace {

using dynamic_conv::CudaConfig;
using dynamic_conv::Loads;

constexpr int kSms = 132;
/// Those of W = 4 in 16 bits.
constexpr Loads kForward{8, 0, 8, 600, 0}, kBackward{4, 12, 128, 400, 3};

TEST(DynamicConvConfig, EverySizeHasAChunkThatItsKernelTakes) {
  std::mt19937_64 rng(3);
  for (int i = 0; i < 20'000; ++i) {
    const auto draw = [&](int bits) {
      return static_cast<std::int64_t>(rng() >> (64 - rng() % bits - 1));
    };
    const std::int64_t batch = draw(12), time = draw(20), groups = draw(16);
    for (const Loads& loads : {kForward, kBackward}) {
      const CudaConfig c = CudaConfig::make(batch, time, groups, kSms, loads);
      SCOPED_TRACE(::testing::Message() << batch << " x " << time << " x " << groups << ": "
                                        << c.steps << " steps, " << c.threads << " threads");
      EXPECT_EQ(c.threads % 32, 0);
      EXPECT_GE(c.threads, 32);
      EXPECT_LE(c.threads, 128);
      EXPECT_GE(c.steps, 1);
      EXPECT_LE(c.steps, loads.most_steps);
      const bool whole_groups = c.steps % loads.group_steps == 0;
      EXPECT_TRUE(whole_groups || c.steps < loads.group_steps ||
                  c.steps + loads.halo <= loads.at_once);
    }
  }
}

TEST(DynamicConvConfig, FewTokensAreReadAtOnceAndManyInLongChunks) {
  const auto steps = [](std::int64_t batch, std::int64_t time, std::int64_t channels) {
    return CudaConfig::make(batch, time, channels / 2, kSms, kBackward).steps;
  };
  for (const auto& [batch, time, channels] :
       {std::array{1, 16, 3072}, {1, 33, 3072}, {3, 77, 1000}, {16, 9, 4096}, {1, 128, 2048}}) {
    EXPECT_LE(steps(batch, time, channels) + kBackward.halo, kBackward.at_once);
  }
  EXPECT_GT(steps(1, 1000, 1536) + kBackward.halo, kBackward.at_once);
  EXPECT_EQ(steps(8, 4096, 3072), kBackward.most_steps);
  // A forward has no halo: with few tokens it takes a part of a group.
  EXPECT_LT(CudaConfig::make(1, 33, 1536, kSms, kForward).steps, kForward.group_steps);
  EXPECT_EQ(CudaConfig::make(8, 4096, 1536, kSms, kForward).steps, kForward.most_steps);
}

TEST(DynamicConvConfig, LanesWithoutAGroupAreFewUnlessCtasWouldBeTiny) {
  const auto threads = [](std::int64_t groups) {
    return CudaConfig::make(8, 4096, groups, kSms, kBackward).threads;
  };
  EXPECT_EQ(threads(14), 32);
  EXPECT_EQ(threads(40), 64);
  EXPECT_EQ(threads(134), 96);   // 192 lanes for 256
  EXPECT_EQ(threads(540), 128);  // 576 would save a tenth
  EXPECT_EQ(threads(8478), 128);
}

}  // namespace
}  // namespace mortar::testing
