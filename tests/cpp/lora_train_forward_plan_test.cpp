// SPDX-License-Identifier: Apache-2.0
// Plans of h and y in one launch on CUDA: what the host chooses.
#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <tuple>
#include <utility>

#include "lora/train/cuda/forward_plan.h"

namespace mortar::testing {
namespace {

using namespace lora::train::cuda;

constexpr Machine kH200{132, true, true};

TEST(LoraTrainForwardPlan, ClustersThatRunAtOnceMakeYToo) {
  const auto tile = [](std::int64_t rows, std::int64_t columns, std::int64_t out, int width) {
    const ForwardPlan plan = choose_forward(rows, columns, out, width, kH200.sms);
    return std::pair(plan.parts, plan.parts > 0 ? plan.rows : 0);
  };
  using Tile = std::pair<int, int>;
  EXPECT_EQ(tile(4096, 4096, 4096, 16), Tile(2, 64));
  EXPECT_EQ(tile(4096, 4096, 4096, 64), Tile(2, 64));
  EXPECT_EQ(tile(4096, 8192, 1024, 32), Tile(2, 64));
  EXPECT_EQ(tile(4096, 4096, 8192, 32), Tile(2, 64));
  EXPECT_EQ(tile(4225, 4096, 4096, 32), Tile(2, 72));
  EXPECT_EQ(tile(3000, 5120, 5120, 32), Tile(4, 104));
  EXPECT_EQ(tile(2500, 5120, 5120, 16), Tile(4, 88));
  EXPECT_EQ(tile(2048, 4096, 4096, 64), Tile(4, 72));
  EXPECT_EQ(tile(1024, 4096, 4096, 32), Tile(8, 72));
  EXPECT_EQ(tile(512, 4096, 4096, 16), Tile(8, 40));
  EXPECT_EQ(tile(1024, 7168, 2048, 64), Tile(8, 72));
  EXPECT_EQ(tile(256, 4096, 4096, 16), Tile(8, 24));
  EXPECT_EQ(tile(768, 3584, 18944, 32), Tile(8, 56));
  EXPECT_EQ(tile(64, 14336, 14336, 16), Tile(0, 0));
  EXPECT_EQ(tile(512, 4096, 14336, 8), Tile(0, 0));
  EXPECT_EQ(tile(3000, 4096, 4096, 8), Tile(4, 104));
  EXPECT_EQ(tile(2048, 5120, 13824, 32), Tile(4, 72));
  EXPECT_EQ(tile(4096, 1024, 28672, 16), Tile(0, 0));
  EXPECT_EQ(tile(8192, 4096, 4096, 64), Tile(2, 128));
  EXPECT_EQ(tile(8500, 4096, 4096, 64), Tile(0, 0));
  // Of more ranks up to 128 rows.
  EXPECT_EQ(tile(8192, 4096, 4096, 128), Tile(2, 128));
  EXPECT_EQ(tile(6000, 3584, 3584, 96), Tile(2, 96));
  EXPECT_EQ(tile(3000, 8192, 2048, 128), Tile(4, 112));
  EXPECT_EQ(tile(2048, 4096, 4096, 128), Tile(4, 80));
  EXPECT_EQ(tile(16384, 4096, 4096, 128), Tile(0, 0));
  EXPECT_EQ(tile(8192, 4096, 4096, 136), Tile(0, 0));
  // Float32 weights.
  const auto parts = [](std::int64_t rows, std::int64_t columns, std::int64_t out, int width) {
    return choose_forward(rows, columns, out, width, kH200.sms, true).parts;
  };
  EXPECT_EQ(parts(4096, 4096, 4096, 16), 2);
  EXPECT_EQ(parts(512, 4096, 4096, 8), 8);
  EXPECT_EQ(parts(2048, 4096, 4096, 16), 4);
  EXPECT_EQ(parts(8192, 4096, 4096, 16), 2);
  EXPECT_EQ(parts(8500, 4096, 4096, 16), 0);
  EXPECT_EQ(parts(4096, 4096, 4096, 24), 0);
  std::mt19937_64 rng(11);
  for (int i = 0; i < 3000; ++i) {
    const std::int64_t rows = 1 + rng() % 20000, columns = 1 + rng() % 20000;
    const int width = 8 * static_cast<int>(1 + rng() % 16);
    const bool wide = width > lora::cuda::kForwardRanks;
    const ForwardPlan plan = choose_forward(rows, columns, 1 + rng() % 20000, width, kH200.sms);
    if (plan.parts == 0) continue;
    EXPECT_GE(plan.parts * plan.leaves * plan.leaf, columns);
    EXPECT_GE(plan.parts, 2);
    EXPECT_LE(plan.leaves,
              wide ? lora::cuda::kMostWideForwardLeaves : lora::cuda::kMostForwardLeaves);
    EXPECT_EQ(plan.leaf, leaf_columns(columns, plan.parts * plan.leaves));
    EXPECT_LE(plan.rows, lora::cuda::kTallForwardRows);
    EXPECT_TRUE(plan.rows > 0 && plan.rows % (wide ? 16 : 8) == 0);
  }
}

// Of several adapters, whose last tiles are not full, as many clusters as run at once.
TEST(LoraTrainForwardPlan, SegmentsShareTheClusters) {
  const auto segments = [](std::int64_t rows, std::int64_t columns, std::int64_t out,
                           int adapters) {
    const ForwardPlan plan = choose_segment_forward(rows, columns, out, 32, kH200.sms, adapters);
    return std::tuple(plan.parts, plan.parts > 0 ? plan.rows : 0, plan.clusters);
  };
  using Segments = std::tuple<int, int, int>;
  EXPECT_EQ(segments(4096, 4096, 4096, 1), Segments(2, 64, 0));  // with dropout
  EXPECT_EQ(segments(4096, 4096, 4096, 8), Segments(2, 64, 66));
  EXPECT_EQ(segments(3000, 5120, 5120, 8), Segments(2, 56, 66));
  EXPECT_EQ(segments(512, 4096, 4096, 2), Segments(8, 40, 15));
  EXPECT_EQ(segments(512, 4096, 4096, 8), Segments(8, 48, 15));
  EXPECT_EQ(segments(16, 4096, 4096, 8), Segments(0, 0, 0));
  EXPECT_EQ(segments(4225, 4096, 4096, 8), Segments(0, 0, 0));
}

}  // namespace
}  // namespace mortar::testing
