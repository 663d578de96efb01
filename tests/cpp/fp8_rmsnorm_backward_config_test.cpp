// SPDX-License-Identifier: Apache-2.0
// Launch choices of FP8 RMSNorm's backward on CUDA, on the host alone: every row and column has its
// thread, shared memory suffices, and dw's tree is a matter of sizes.
#include "fp8_rmsnorm/backward_config.h"

#include <gtest/gtest.h>

#include <random>

#include "fp8_rmsnorm_config_case.h"

namespace mortar::fp8_rmsnorm {
namespace {

constexpr GpuShape kGpus[] = {
    {132, 227 << 10, true}, {108, 163 << 10, false}, {84, 99 << 10, false}, {1, 99 << 10, false}};

TEST(Fp8RmsNormBackwardConfig, CoversAllAndFits) {
  std::mt19937 rng(2);
  for (int i = 0; i < 20'000; ++i) {
    BackwardShape s;
    s.rows = random_size(rng, 4e6);
    s.hidden = std::max<std::int64_t>(1, random_size(rng, 65537));
    s.x_bytes = 1 << rng() % 3;
    s.dy_bytes = 2 << rng() % 2;
    s.residual_grad = rng() % 2 != 0;
    const GpuShape& gpu = kGpus[rng() % std::size(kGpus)];
    const BackwardPlan plan = choose(s, gpu);
    SCOPED_TRACE(printed(plan));
    EXPECT_GE(std::int64_t{plan.strips} * plan.strip(), s.hidden);
    EXPECT_GE(plan.chunks, 1);
    EXPECT_LT((plan.chunks - 1) * plan.row_groups, s.rows) << "a CTA without rows";
    EXPECT_LE(plan.row_threads * plan.row_groups, plan.threads);
    EXPECT_LE(plan.chunks * plan.strips, 132);
    EXPECT_LE(plan.strips, BackwardPlan::kMostStrips);
    EXPECT_LE(plan.threads, BackwardPlan::kMostThreads);
    EXPECT_GE(plan.stages, 1);
    // What the query said, without knowing dy and residual_grad, is enough.
    BackwardShape asked = s;
    asked.dy_bytes = 4;
    asked.residual_grad = false;
    EXPECT_EQ(choose(asked, gpu).workspace_bytes, plan.workspace_bytes);
    EXPECT_TRUE(plan.strips == 1 || plan.cluster ||
                plan.dots_at + 4 * plan.strips * s.rows <= plan.workspace_bytes);
    EXPECT_LE(plan.smem, gpu.max_smem - BackwardPlan::kStaticSmem);
    EXPECT_TRUE(plan.row_threads <= 32 || plan.row_threads % 32 == 0);
  }
}

// On any GPU, whatever its shared memory: the same chunks, row groups, and threads of a row.
TEST(Fp8RmsNormBackwardConfig, TheTreeOfDwIsAMatterOfSizes) {
  for (const std::int64_t rows : {1, 127, 132, 133, 1000, 8192, 1'000'000}) {
    for (const std::int64_t hidden : {16, 1040, 4096, 8208, 12288, 16384, 65536}) {
      for (const int x_bytes : {1, 2, 4}) {
        for (const int dy_bytes : {2, 4}) {
          BackwardShape s{rows, hidden, x_bytes, dy_bytes, false};
          const BackwardPlan a = choose(s, kGpus[0]);
          s.residual_grad = true;
          for (const GpuShape& gpu : kGpus) {
            const BackwardPlan b = choose(s, gpu);
            EXPECT_EQ(a.chunks, b.chunks);
            EXPECT_EQ(a.row_groups, b.row_groups);
            EXPECT_EQ(a.row_threads, b.row_threads);
            EXPECT_EQ(a.strips, b.strips);
          }
        }
      }
    }
  }
}

TEST(Fp8RmsNormBackwardConfig, RowsOfOneStepAreOneChunkWithoutAWorkspace) {
  for (const auto& [rows, hidden] : {std::pair{1, 256}, {32, 256}, {2, 4096}, {1, 8192}}) {
    const BackwardPlan plan = choose(BackwardShape{rows, hidden, 1, 2, false}, kGpus[0]);
    EXPECT_EQ(plan.chunks, 1);
    EXPECT_EQ(plan.row_groups, rows);
    EXPECT_EQ(plan.workspace_bytes, 0);
    EXPECT_GT(choose(BackwardShape{rows + 32, hidden, 1, 2, false}, kGpus[0]).chunks, 1);
  }
}

TEST(Fp8RmsNormBackwardConfig, NoRowsHaveNoChunks) {
  EXPECT_EQ(choose(BackwardShape{0, 64, 1, 2, false}, kGpus[0]).chunks, 0);
}

}  // namespace
}  // namespace mortar::fp8_rmsnorm
