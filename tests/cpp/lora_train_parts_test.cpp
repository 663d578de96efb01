// SPDX-License-Identifier: Apache-2.0
// Float32 weights beside bfloat16 on a GPU: the kernels for dense rows, which split weights, h and
// ds themselves and drop elements of whole tiles, leave the bits of those for any strides.
#include <vector>

#include "lora_train_case.h"

#if MORTAR_HAS_CUDA

namespace mortar::testing {
namespace {

class LoraTrainParts : public ::testing::TestWithParam<Device> {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(LoraTrainParts);  // on a machine without a GPU
INSTANTIATE_TEST_SUITE_P(Devices, LoraTrainParts, ::testing::ValuesIn(gpus()),
                         [](const auto& one) { return device_label(one.param); });

TEST_P(LoraTrainParts, StridesChangeNoBit) {
  constexpr DType kBF16 = DType::kBFloat16;
  struct Case {
    std::vector<int> ranks;
    std::vector<float> p = {};
    LoraDropoutOn on = LoraDropoutOn::kInput;
    std::vector<std::int64_t> widths = {528};
    int adapters = 1;
    bool transposed_weights = false;
  };
  constexpr auto kDelta = LoraDropoutOn::kDelta;
  for (const Case& own :
       {Case{{16}, {0.1f}}, Case{{8}, {0.5f}, kDelta}, Case{{24}, {0.05f}, kDelta},
        Case{{32}, {0.1f}}, Case{{5}, {0.1f}, LoraDropoutOn::kInput, {528}, 1, true},
        Case{{61}, {0.1f}}, Case{{64}, {1.0f}}, Case{{48}, {0.25f}, kDelta}, Case{{72}, {0.1f}},
        Case{{16, 9}, {0.1f}, LoraDropoutOn::kInput, {272, 144}},
        Case{{40, 24}, {}, kDelta, {272, 144}},
        Case{{16, 3, 32}, {0.1f, 0.0f, 0.3f}, LoraDropoutOn::kInput, {528}, 3}}) {
    TrainCase c;
    c.x = c.y = c.dx = kBF16;
    c.rows = 403;
    c.hidden = 1104;
    c.widths = own.widths;
    c.ranks = own.ranks;
    c.p = own.p;
    c.on = own.on;
    c.adapters = own.adapters;
    if (own.adapters > 1) c.by = RowsBy::kSegments;
    c.transposed_weights = own.transposed_weights;
    expect_strides_change_no_bit(
        c, GetParam(), concat("rank ", own.ranks[0], ", ", own.p.empty() ? 0.0f : own.p[0]));
  }
}

}  // namespace
}  // namespace mortar::testing
#endif
