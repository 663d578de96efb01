// SPDX-License-Identifier: Apache-2.0
// Contents of device tensors that the host cannot check, sizes of workspaces, and the traffic
// that benchmarks divide by.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "lora_expect.h"

namespace mortar::testing {
namespace {

constexpr DType kF32 = DType::kFloat32, kF16 = DType::kFloat16, kBF16 = DType::kBFloat16;

class LoraRobustness : public ::testing::TestWithParam<LoraTarget> {
 protected:
  Device device() const { return GetParam().device; }
  const UseTarget use_{GetParam()};
};

/// Only groups 0 and 3 are sound; the rest point outside of everything. Once with few tokens, once
/// with so many that the kernels for prefill run.
TEST_P(LoraRobustness, SmallWildSegmentsStayInBounds) {
  constexpr std::int32_t kBig = std::numeric_limits<std::int32_t>::max();
  constexpr std::int32_t kLow = std::numeric_limits<std::int32_t>::min();
  for (const auto& [dtype, tokens] : {std::pair(kF32, 6), {kBF16, 6}, {kBF16, 300}}) {
    LoraCase c;
    c.tokens = tokens;
    c.hidden = 64;
    c.x = c.w = c.y = dtype;
    LoraOperands op(c, device());
    GuardedTensor sorted =
        int_tensor(std::vector<std::int32_t>{0, kBig, -7, 2, 5, tokens, kLow}, device());
    GuardedTensor ids =
        int_tensor(std::vector<std::int32_t>{1, 0, 3, 2, kBig, kLow, 0, 0}, device());
    GuardedTensor starts =
        int_tensor(std::vector<std::int32_t>{0, -3, 0, 4, 0, 0, kBig, 5, kLow}, device());
    GuardedTensor counts =
        int_tensor(std::vector<std::int32_t>{4, 2, 4, 1, 4, 4, kBig, kBig}, device());
    const LoraGroups groups =
        LoraGroups::from_segments(sorted.view(), ids.view(), counts.view(), starts.view());
    op.map.assign(c.tokens, -1);
    op.map[0] = op.map[2] = 1;
    op.map[5] = 2;
    const LoraWeights host = op.host_weights();
    const auto h = lora::reference_shrink(op.x.host(), host, op.map, 1.0);
    const auto expected = lora::reference_expand(h, host, op.map, op.y.host(), 0, true);
    const GuardedTensor original = op.y;
    GuardedTensor hidden = make_hidden(op, kF32, 0);
    lora_shrink(op.x.view(), op.weights(), groups, hidden.view(), 1.0f, {},
                op.shrink_workspace().view(), Stream{});
    hidden.download();
    EXPECT_TRUE(hidden.guards_intact());
    lora_expand(hidden.view(), op.weights(), groups, op.y.view(), 0, true, Stream{});
    expect_outputs(op, expected, kF32, "wild segments");
    restore_y(op, original);
    GuardedTensor workspace = op.apply_workspace();
    lora_apply(op.x.view(), op.weights(), groups, op.y.view(), 0, 1.0f, true, workspace.view(),
               Stream{});
    workspace.download();
    EXPECT_TRUE(workspace.guards_intact());
    expect_outputs(op, expected, kF32, "wild segments, lora_apply");
  }
}

/// Ranks in a table that are negative or above max_rank, and pointers that are null or no multiple
/// of 16, leave a slice alone.
TEST_P(LoraRobustness, SmallWildTableEntriesLeaveSlicesAlone) {
  LoraCase c;
  c.tokens = 5;
  c.tokens = 7;
  c.adapters = 7;
  c.map = Map::kDistinct;
  LoraOperands op(c, device());
  const LoraWeights stacked = op.weights();
  GuardedTensor table(DType::kInt64, {7, 1, 4}, {}, device());
  auto* entries = table.data<LoraTableEntry>();
  for (int l = 0; l < 7; ++l) {
    entries[l] = {reinterpret_cast<std::uint64_t>(stacked.a[0].data),
                  reinterpret_cast<std::uint64_t>(stacked.b[0].data), 8, 1.0f, 0};
  }
  entries[0].rank = -1;
  entries[1].rank = 9;
  entries[2].a = 0;
  entries[3].b = 0;
  entries[4].rank = std::numeric_limits<std::int32_t>::min();
  entries[5].a += 8;
  entries[6].b += 4;
  table.upload();
  const LoraWeights weights = LoraWeights::from_table(table.view(), kF32, 8, c.hidden, c.widths);
  GuardedTensor workspace = op.apply_workspace();
  lora_apply(op.x.view(), weights, op.groups(), op.y.view(), 0, 1.0f, false, workspace.view(),
             Stream{});
  op.y.download();
  EXPECT_TRUE(op.y.all_unchanged());
}

/// Ranks of a stacked tensor's `ranks` below 0 or above its padded rank are clamped.
TEST_P(LoraRobustness, SmallWildRanksAreClamped) {
  LoraCase c;
  c.tokens = 6;
  c.adapters = 2;
  c.map = Map::kDistinct;
  LoraOperands op(c, device());
  LoraWeights weights = op.weights();
  GuardedTensor ranks = int_tensor(std::vector<std::int32_t>{-5, 1000}, device());
  weights.ranks = ranks.view();
  LoraWeights host = op.host_weights();
  host.ranks = ranks.host();
  const auto h = lora::reference_shrink(op.x.host(), host, op.map, 1.0);
  const auto expected = lora::reference_expand(h, host, op.map, op.y.host(), 0, true);
  GuardedTensor workspace = op.apply_workspace();
  lora_apply(op.x.view(), weights, op.groups(), op.y.view(), 0, 1.0f, true, workspace.view(),
             Stream{});
  expect_outputs(op, expected, kF32, "wild ranks");
}

/// h of 8,192 times a scale of 16 passes float16's largest value, the result does not: scales
/// multiply the finished sums. In any type the numbers are exact.
TEST_P(LoraRobustness, SmallScalesMultiplyFinishedSums) {
  const UseTarget use(GetParam());
  for (DType dtype : {kF16, kBF16, kF32}) {
    for (std::int64_t tokens : {1, 20, 300}) {
      for (int rank : {8, 64, 256}) {
        for (bool of_adapter : {false, true}) {
          const std::int64_t hidden = 512, width = 40;
          const auto filled = [&](std::vector<std::int64_t> shape, float value) {
            GuardedTensor t(dtype, std::move(shape), {}, device());
            t.for_each([&](std::int64_t at) { t.set(at, value); });
            t.upload();
            return t;
          };
          const GuardedTensor x = filled({tokens, hidden}, 16), a = filled({1, rank, hidden}, 1);
          const GuardedTensor b = filled({1, width, rank}, 0x1p-10f / static_cast<float>(rank));
          GuardedTensor y = filled({tokens, width}, 2);
          GuardedTensor scales(kF32, {1}, {}, device());
          scales.data<float>()[0] = of_adapter ? 16.0f : 1.0f;
          scales.upload();
          const Tensor a_view = a.view(), b_view = b.view();
          const LoraWeights weights =
              LoraWeights::stacked({&a_view, 1}, {&b_view, 1}, {}, scales.view());
          const GuardedTensor ids = int_tensor(std::vector<std::int32_t>(tokens, 0), device());
          const GuardedTensor plan(DType::kInt32, {lora_plan_size(tokens, 1)}, {}, device());
          lora_plan(ids.view(), 1, plan.view(), Stream{});
          const GuardedTensor workspace =
              byte_tensor(lora_apply_workspace(x.view(), weights), device());
          lora_apply(x.view(), weights, LoraGroups::from_plan(plan.view(), tokens, 1), y.view(), 0,
                     of_adapter ? 1.0f : 16.0f, true, workspace.view(), Stream{});
          y.download();
          y.for_each([&](std::int64_t at) {
            ASSERT_EQ(y.get(at), 130.0f) << dtype_name(dtype) << ", rank " << rank;
          });
        }
      }
    }
  }
}

/// At most twice h in float32, and 16 MB, or 24 MB of float32 weights under a bfloat16 x.
TEST_P(LoraRobustness, SmallWorkspaceStaysWithinItsLimit) {
  for (std::int64_t tokens : {1, 16, 300, 8192, 65536}) {
    for (std::int64_t hidden : {64, 4096, 14336}) {
      for (int rank : {8, 64, 512}) {
        for (int slices : {1, 3, 8}) {
          for (const auto& [x_dtype, dtype] :
               {std::pair(kF32, kF32), std::pair(kBF16, kBF16), std::pair(kBF16, kF32)}) {
            const std::int64_t adapters = 32, width = 4096, kMegabyte = 1 << 20;
            Tensor x(nullptr, x_dtype, {tokens, hidden}, device());
            std::vector<Tensor> a(slices,
                                  Tensor(nullptr, dtype, {adapters, rank, hidden}, device()));
            std::vector<Tensor> b(slices,
                                  Tensor(nullptr, dtype, {adapters, width, rank}, device()));
            const LoraWeights weights = LoraWeights::stacked(a, b);
            const std::int64_t limit =
                2 * tokens * slices * rank * 4 + (x_dtype == dtype ? 16 : 24) * kMegabyte;
            EXPECT_LE(lora_apply_workspace(x, weights), limit)
                << tokens << " tokens, K " << hidden << ", rank " << rank << ", " << slices
                << " slices of " << dtype_name(dtype);
            EXPECT_LE(lora_shrink_workspace(x, weights), limit);
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Targets, LoraRobustness, ::testing::ValuesIn(lora_targets()),
                         [](const auto& target) { return target.param.name; });

/// Three tokens of rank 8, none of rank 64, two without this slice: bytes by hand.
TEST(LoraTrafficTest, SmallCountsOnlyAdaptersInUse) {
  const std::int64_t widths[] = {100, 50}, tokens[] = {3, 0, 2};
  const int ranks[] = {8, 16, 64, 64, 0, 4};
  const LoraTraffic add = lora_traffic(1000, widths, ranks, tokens, kBF16, kF32, true);
  EXPECT_EQ(add.weight_bytes, 4 * (8 * 1100 + 16 * 1050 + 4 * 1050));
  EXPECT_EQ(add.x_bytes, 2 * 5 * 1000);
  EXPECT_EQ(add.y_bytes, 2 * 2 * (3 * 150 + 2 * 50));
  EXPECT_EQ(add.flops, 2 * (3 * (8 * 1100 + 16 * 1050) + 2 * 4 * 1050));
  EXPECT_EQ(add.bytes(), add.weight_bytes + add.x_bytes + add.y_bytes);
  const LoraTraffic overwrite = lora_traffic(1000, widths, ranks, tokens, kBF16, kF32, false);
  EXPECT_EQ(overwrite.y_bytes * 2, add.y_bytes);
}

}  // namespace
}  // namespace mortar::testing
