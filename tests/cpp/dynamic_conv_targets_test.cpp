// SPDX-License-Identifier: Apache-2.0
// The CPU's row kernels, once for every instruction set of this machine and once in plain code.
#include "dynamic_conv_case.h"
#include "simd_targets.h"

namespace mortar::testing {
namespace {

class DynamicConvTarget : public SimdTarget {
 protected:
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
INSTANTIATE_TEST_SUITE_P(Cpu, DynamicConvTarget, ::testing::ValuesIn(simd_targets()),
                         simd_target_name);

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
