// SPDX-License-Identifier: Apache-2.0
// The CPU's row kernels, once for every instruction set of this machine and once in plain code.
#include <cctype>
#include <string>
#include <vector>

#include "dynamic_conv_case.h"
#include "hwy/targets.h"

namespace mortar::testing {
namespace {

constexpr std::int64_t kPlain = 0;  ///< no instruction set: Highway falls back to its last target

std::vector<std::int64_t> targets() {
  std::vector<std::int64_t> list{kPlain};
  for (std::int64_t all = hwy::SupportedTargets(); all != 0; all &= all - 1) {
    list.push_back(all & -all);
  }
  return list;
}

class DynamicConvTarget : public ::testing::TestWithParam<std::int64_t> {
 protected:
  void SetUp() override { hwy::GetChosenTarget().Update(GetParam()); }
  void TearDown() override { hwy::GetChosenTarget().DeInit(); }

  static void expect_right(const Case& c, bool with_backward = true) {
    SCOPED_TRACE(concat(c));
    Trial run(c, Device{}, 5);
    run.forward();
    run.expect_forward_right();
    if (!with_backward) return;
    run.backward();
    run.expect_backward_right();
  }
};
std::string target_name(const ::testing::TestParamInfo<std::int64_t>& target) {
  if (target.param == kPlain) return "Plain";
  std::string name = hwy::TargetName(target.param);
  std::erase_if(name, [](unsigned char c) { return !std::isalnum(c); });
  return name + "_" + std::to_string(target.index);
}
INSTANTIATE_TEST_SUITE_P(Cpu, DynamicConvTarget, ::testing::ValuesIn(targets()), target_name);

TEST_P(DynamicConvTarget, EveryWidthAndDtype) {
  for (int width = 1; width <= kDynamicConvMaxWidth; ++width) {
    for (DType x : kFloats) {
      for (DType k : kFloats) {
        expect_right({.batch = 2,
                      .time = 9,
                      .channels = 83,
                      .width = width,
                      .x = x,
                      .k = k,
                      .silu = width % 2 == 0,
                      .state_length = width});
      }
    }
  }
}

TEST_P(DynamicConvTarget, SizesAroundTheVectors) {
  for (std::int64_t channels : {1, 3, 4, 5, 8, 15, 16, 17, 31, 32, 33}) {
    for (DType dtype : kFloats) {
      expect_right({.time = 6, .channels = channels, .x = dtype, .k = dtype, .silu = true});
      expect_right(
          {.time = 6, .channels = channels, .width = 3, .x = dtype, .k = dtype, .offset = 1});
    }
  }
}

// From 32 MB on y is stored past the caches; rows of odd length begin anywhere in a line.
TEST_P(DynamicConvTarget, LargerThanTheCaches) {
  for (std::int64_t channels : {1024, 1031}) {
    expect_right({.time = 1450, .channels = channels, .x = DType::kFloat32, .k = DType::kFloat32},
                 /*with_backward=*/false);
    expect_right({.time = 2900, .channels = channels, .width = 4}, /*with_backward=*/false);
  }
}

}  // namespace
}  // namespace mortar::testing
