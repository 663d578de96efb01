// SPDX-License-Identifier: Apache-2.0
// Tests that run once for every instruction set of this machine that Highway compiles for, and once
// in plain code.
#pragma once

#include <gtest/gtest.h>

#include <cctype>
#include <cstdint>
#include <string>
#include <vector>

#include "hwy/targets.h"

namespace mortar::testing {

/// No instruction set: Highway falls back to its last target.
inline constexpr std::int64_t kPlain = 0;

inline std::vector<std::int64_t> simd_targets() {
  std::vector<std::int64_t> list{kPlain};
  for (std::int64_t all = hwy::SupportedTargets(); all != 0; all &= all - 1) {
    list.push_back(all & -all);
  }
  return list;
}

inline std::string simd_target_name(const ::testing::TestParamInfo<std::int64_t>& target) {
  if (target.param == kPlain) return "Plain";
  std::string name = hwy::TargetName(target.param);
  std::erase_if(name, [](unsigned char c) { return !std::isalnum(c); });
  return name + "_" + std::to_string(target.index);
}

/// Code that Highway dispatches runs on the parameter's instruction set.
class SimdTarget : public ::testing::TestWithParam<std::int64_t> {
 protected:
  void SetUp() override { hwy::GetChosenTarget().Update(GetParam()); }
  void TearDown() override { hwy::GetChosenTarget().DeInit(); }
};

}  // namespace mortar::testing
