// SPDX-License-Identifier: Apache-2.0
// Views with a negative size, or with elements and no memory: one sentence in every family.
#include <functional>
#include <tuple>
#include <vector>

#include "lora_bad_call.h"
#include "mortar/dynamic_conv.h"
#include "mortar/fp8_rmsnorm.h"
#include "mortar/lora_train.h"

namespace mortar::testing {
namespace {

Tensor null(Tensor t) {
  t.data = nullptr;
  return t;
}

std::vector<BadCall> lora_calls() {
  return {
      {"XRows",
       [](Call& c) {
         c.x.shape[0] = c.y.shape[0] = -4;
         c.use_segments();
         c.groups = LoraGroups::from_segments(c.sorted_tokens, c.ids, c.counts, c.starts);
         c.apply();
       },
       kValue,
       {"lora_apply: x must have sizes of 0 or more", "got shape (-4, 16)"}},
      {"XRowsOfQuery",
       [](Call& c) {
         c.x.shape[0] = -4;
         lora_shrink_workspace(c.x, c.weights);
       },
       kValue,
       {"lora_shrink_workspace: x must have sizes of 0 or more", "got shape (-4, 16)"}},
      {"YRows",
       [](Call& c) {
         c.y.shape[0] = c.h.shape[1] = -1;
         c.expand();
       },
       kValue,
       {"lora_expand: y must have sizes of 0 or more", "got shape (-1, 32)"}},
      {"WidthOfB",
       [](Call& c) {
         c.weights.b[1].shape[1] = -20;
         c.stacked();
       },
       kValue,
       {"lora_weights: b[1] must have sizes of 0 or more", "got shape (3, -20, 8)"}},
      {"XNull",
       [](Call& c) {
         c.x = null(c.x);
         c.apply();
       },
       kValue,
       {"lora_apply: x must have an address for its elements", "got null for shape (4, 16)"}},
      {"YNull",
       [](Call& c) {
         c.y = null(c.y);
         c.expand();
       },
       kValue,
       {"lora_expand: y must have an address for its elements", "got null for shape (4, 32)"}},
      {"HNull",
       [](Call& c) {
         c.h = null(c.h);
         c.shrink();
       },
       kValue,
       {"lora_shrink: h must have an address for its elements", "got null for shape (2, 4, 8)"}},
      {"WorkspaceNull",
       [](Call& c) {
         c.workspace = null(c.workspace);
         c.apply();
       },
       kValue,
       {"lora_apply: workspace must have an address for its elements", "got null"}},
      {"PlanNull",
       [](Call& c) {
         c.groups.plan = null(c.groups.plan);
         c.apply();
       },
       kValue,
       {"lora_apply: plan must have an address for its elements", "got null"}},
      {"PlanToMakeNull",
       [](Call& c) {
         c.plan = null(c.plan);
         c.make_plan();
       },
       kValue,
       {"lora_plan: plan must have an address for its elements", "got null"}},
      {"IdsNull",
       [](Call& c) {
         c.token_adapter = null(c.token_adapter);
         c.make_plan();
       },
       kValue,
       {"lora_plan: token_adapter must have an address for its elements", "got null"}},
      {"WeightNull",
       [](Call& c) {
         c.weights.b[1] = null(c.weights.b[1]);
         c.apply();
       },
       kValue,
       {"lora_apply: b[1] must have an address for its elements", "got null"}},
      {"TableNull",
       [](Call& c) {
         c.table = null(c.table);
         c.from_table();
         c.apply();
       },
       kValue,
       {"lora_apply: table must have an address for its elements", "got null"}},
  };
}

class ViewError : public ::testing::TestWithParam<std::tuple<Device, BadCall>> {};

TEST_P(ViewError, SmallNamesTheMistakeAndWritesNothing) {
  expect_error(std::get<0>(GetParam()), std::get<1>(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(Lora, ViewError,
                         ::testing::Combine(::testing::ValuesIn(devices()),
                                            ::testing::ValuesIn(lora_calls())),
                         bad_call_name);

std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kValue) << e.what();
    return e.what();
  }
  ADD_FAILURE() << "no error was thrown";
  return {};
}

class ViewErrorOf : public ::testing::TestWithParam<Device> {
 protected:
  /// A view of up to kMostBytes that no other view shares, and that is read nowhere.
  Tensor view(DType dtype, std::initializer_list<std::int64_t> shape) {
    return {memory_.view().ptr<char>() + kMostBytes * num_views_++, dtype, shape, GetParam()};
  }

  static constexpr std::int64_t kMostBytes = 4096, kMostViews = 32;

 private:
  GuardedTensor memory_ = byte_tensor(kMostBytes * kMostViews, GetParam());
  std::int64_t num_views_ = 0;
};
INSTANTIATE_TEST_SUITE_P(Devices, ViewErrorOf, ::testing::ValuesIn(devices()),
                         [](const auto& device) { return device_label(device.param); });

TEST_P(ViewErrorOf, SmallDynamicConv) {
  const auto forward = [&](const Tensor& x, const Tensor& k, const Tensor& y) {
    return message_of([&] { dynamic_conv_forward(x, k, {}, {}, y, {}, false, {}); });
  };
  const Tensor x = view(kF32, {1, 6, 8}), k = view(kF32, {1, 6, 8, 4}), y = view(kF32, {1, 6, 8});
  EXPECT_EQ(forward(view(kF32, {1, -6, 8}), view(kF32, {1, -6, 8, 4}), view(kF32, {1, -6, 8})),
            "dynamic_conv_forward: x must have sizes of 0 or more, got shape (1, -6, 8)");
  EXPECT_EQ(forward(null(x), k, y),
            "dynamic_conv_forward: x must have an address for its elements, got null for shape "
            "(1, 6, 8)");
  EXPECT_EQ(forward(x, k, null(y)),
            "dynamic_conv_forward: y must have an address for its elements, got null for shape "
            "(1, 6, 8)");
}

TEST_P(ViewErrorOf, SmallFp8RmsNorm) {
  const auto quantize = [&](const Tensor& y, const Fp8Quantized& out) {
    return message_of([&] { fp8_quantize(y, {}, out, view(DType::kUInt8, {kMostBytes}), {}); });
  };
  const Tensor y = view(kF32, {6, 16}), q = view(DType::kFloat8E4M3, {6, 16});
  Fp8Quantized out;
  out.scale = view(kF32, {});
  out.q = view(DType::kFloat8E4M3, {-6, 16});
  EXPECT_EQ(quantize(view(kF32, {-6, 16}), out),
            "fp8_quantize: y must have sizes of 0 or more, got shape (-6, 16)");
  out.q = null(q);
  EXPECT_EQ(quantize(y, out),
            "fp8_quantize: q must have an address for its elements, got null for shape (6, 16)");
  out.q = q;
  out.scale = null(out.scale);
  EXPECT_EQ(quantize(y, out),
            "fp8_quantize: scale must have an address for its elements, got null for shape ()");
}

TEST_P(ViewErrorOf, SmallLoraTraining) {
  const auto forward = [&](std::int64_t rows, const Tensor& x, const Tensor& a) {
    const LoraTrainPair pair{.a = a, .b = view(kF32, {8, 4})};
    const Tensor y = view(kF32, {rows, 8});
    LoraTrainProblem problem;
    problem.num_slices = 1;
    problem.widths[0] = 8;
    problem.weight_dtype = kF32;
    problem.pairs = {&pair, 1};
    LoraTrainForward call;
    call.x = x;
    call.y = {&y, 1};
    const Tensor workspace = view(DType::kUInt8, {kMostBytes});
    return message_of([&] { lora_train_forward(problem, call, workspace, {}); });
  };
  const Tensor x = view(kF32, {6, 16}), a = view(kF32, {4, 16});
  EXPECT_EQ(forward(-6, view(kF32, {-6, 16}), a),
            "lora_train_forward: x must have sizes of 0 or more, got shape (-6, 16)");
  EXPECT_EQ(forward(6, null(x), a),
            "lora_train_forward: x must have an address for its elements, got null for shape "
            "(6, 16)");
  EXPECT_EQ(forward(6, x, null(a)),
            "lora_train_forward: a must have an address for its elements, got null for shape "
            "(4, 16)");
}

}  // namespace
}  // namespace mortar::testing
