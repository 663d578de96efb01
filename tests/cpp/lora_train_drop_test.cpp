// SPDX-License-Identifier: Apache-2.0
// The CPU's draws, on every instruction set of this machine, are those of lora/train/dropout.h.
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "lora/train/cpu/drop.h"
#include "simd_targets.h"

namespace mortar::testing {
namespace {

using lora::train::keep_bits;
using lora::train::kMaskGroup;
using lora::train::cpu::Draws;

using LoraTrainDrop = SimdTarget;
INSTANTIATE_TEST_SUITE_P(Cpu, LoraTrainDrop, ::testing::ValuesIn(simd_targets()), simd_target_name);

template <class T>
void expect_draws(const Draws& draws, std::uint64_t group, std::int64_t groups) {
  constexpr T kGuard = 0x5a5a;
  std::vector<T> values(static_cast<std::size_t>(groups * kMaskGroup + 1), kGuard);
  lora::train::cpu::drop_groups(draws, group, groups, values.data());
  for (std::int64_t i = 0; i < groups * kMaskGroup; ++i) {
    const std::uint64_t at = group + static_cast<std::uint64_t>(i / kMaskGroup);
    const std::uint32_t bits = keep_bits(draws.seed, draws.offset, at, draws.threshold);
    const bool kept = (bits >> (i % kMaskGroup) & 1u) != 0;
    ASSERT_EQ(values[static_cast<std::size_t>(i)], kept ? kGuard : T{0})
        << "element " << i << " of " << groups << " groups from " << group << ", threshold "
        << draws.threshold;
  }
  ASSERT_EQ(values.back(), kGuard);
}

TEST_P(LoraTrainDrop, AreThoseOfOneElementAtATime) {
  // The counter's upper word changes in the middle of the last.
  for (const std::uint64_t group : {0ull, 1ull, 123456789ull, (3ull << 32) - 5}) {
    for (const std::int64_t groups : {1, 3, 4, 15, 16, 17, 40}) {
      for (const std::uint32_t threshold : {1u, 255u, 256u, 6554u, 32768u, 65535u}) {
        const Draws draws{0x123456789abcdef0ull + threshold, 0xfedcba9876543210ull, threshold};
        expect_draws<std::uint32_t>(draws, group, groups);
        expect_draws<std::uint16_t>(draws, group, groups);
      }
    }
  }
}

}  // namespace
}  // namespace mortar::testing
