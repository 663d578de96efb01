// SPDX-License-Identifier: Apache-2.0
// Launch choices of FP8 RMSNorm's forward on CUDA, on the host alone: every row and column has its
// thread, and shared memory suffices.
#include "fp8_rmsnorm/config.h"

#include <gtest/gtest.h>

#include <random>
#include <tuple>

#include "fp8_rmsnorm_config_case.h"

namespace mortar::fp8_rmsnorm {
namespace {

constexpr GpuShape kGpus[] = {{132, 227 << 10}, {108, 163 << 10}, {84, 99 << 10}, {1, 99 << 10}};

TEST(Fp8RmsNormConfig, RowsAreHeldAndFit) {
  std::mt19937 rng(1);
  for (int i = 0; i < 20'000; ++i) {
    ForwardShape s;
    s.rows = random_size(rng, 4e6);
    s.hidden = std::max<std::int64_t>(1, random_size(rng, 65537));
    s.x_bytes = 1 << rng() % 3;
    s.norm = rng() % 4 != 0;
    s.scaling = static_cast<Fp8Scaling>(rng() % 3);
    s.group = 16 << rng() % 4;
    s.given_scale = rng() % 2 != 0;
    s.stochastic = rng() % 2 != 0;
    s.q_t = rng() % 2 != 0;
    const GpuShape& gpu = kGpus[rng() % std::size(kGpus)];
    const ForwardPlan plan = choose_passes(s, gpu);
    const RowsPlan& rows = plan.row_plan;
    SCOPED_TRACE(printed(plan));
    const std::int64_t piece = 16 / s.x_bytes, pieces = ceil_div(s.hidden, piece);
    EXPECT_EQ(rows.threads % rows.row_threads, 0);
    EXPECT_EQ(rows.row_threads & (rows.row_threads - 1), 0);
    EXPECT_LE(rows.threads, RowsPlan::kMostThreads);
    EXPECT_LE(rows.slots * rows.held_rows, kHeldPieces);
    EXPECT_GE(rows.grid, 1);
    EXPECT_LE(rows.smem, gpu.max_smem - 4352 - 1024);
    if (const HeldRowsPlan& held = plan.held_plan; held.possible) {
      EXPECT_EQ(held.row_threads & (held.row_threads - 1), 0);
      EXPECT_LE(held.row_threads, HeldRowsPlan::kThreads);
      EXPECT_GE(held.row_threads, least_held_threads(s));
      EXPECT_LE(held.slots, kHeldPieces);
      EXPECT_GE(std::int64_t{held.row_threads} * held.slots, pieces);
      // The eighth slot may be of zeros.
      EXPECT_LE(std::int64_t{held.row_threads} * (held.slots - 1), pieces);
      if (held.slots < kHeldPieces) {
        EXPECT_LT(std::int64_t{held.row_threads} * (held.slots - 1), pieces);
      }
      EXPECT_LE(held.smem, gpu.max_smem - HeldRowsPlan::kStaticSmem);
      EXPECT_GE(held.grid, 1);
      EXPECT_LE(plan.maxima_at + 4 * held.grid, plan.workspace_bytes);
    } else {
      // Not even one row of the CTA's most threads fits beside the weights.
      const std::int64_t most = kHeldPieces * HeldRowsPlan::kThreads;
      EXPECT_TRUE(pieces > most ||
                  (held_weight_quads(static_cast<int>(piece)) + 2) * 16 * pieces >
                      gpu.max_smem - HeldRowsPlan::kStaticSmem - 16 * 8 * HeldRowsPlan::kThreads);
    }
    if (const FusedPlan& fused = plan.fused_plan; fused.possible) {
      EXPECT_LE(fused.smem, gpu.max_smem - FusedPlan::kStaticSmem);
      EXPECT_LE(fused.grid, gpu.num_sms);
      EXPECT_GE(std::int64_t{fused.grid} * fused.rows, s.rows);
      EXPECT_LT(std::int64_t{fused.grid - 1} * fused.rows, s.rows);
      EXPECT_EQ(fused.rows % fused.tile_rows, 0);
      EXPECT_LE(fused.held.kept_bytes, s.hidden * s.x_bytes);
      EXPECT_LE(plan.maxima_at + 4 * fused.grid, plan.workspace_bytes);
    }
    // A group of one scale lies within the threads of a row, or is all of it.
    EXPECT_TRUE(rows.row_threads >= std::min<std::int64_t>(128 / piece, pieces));
    // A row is held whole unless the most threads cannot.
    EXPECT_TRUE(std::int64_t{rows.row_threads} * rows.slots >= pieces ||
                rows.row_threads >= RowsPlan::kThreads);
    EXPECT_LE(plan.tile_plan.grid, std::max<std::int64_t>(plan.tile_plan.tiles, 1));
    EXPECT_LE(plan.maxima_at + 4 * std::max(rows.grid, plan.tile_plan.grid), plan.workspace_bytes);
    EXPECT_TRUE(rows.shared_weights || plan.weights_at + 4 * s.hidden <= plan.workspace_bytes);
  }
}

// Every piece of a row has its thread and every block of rows its CTAs; what strips leave fits the
// workspace.
TEST(Fp8RmsNormConfig, RowBlocksAreWholeAndFit) {
  std::mt19937 rng(7);
  int chosen[2] = {};
  for (int i = 0; i < 20'000; ++i) {
    ForwardShape s;
    s.rows = random_size(rng, 1e6);
    s.hidden = std::max<std::int64_t>(1, random_size(rng, 65537));
    s.x_bytes = 1 << rng() % 3;
    s.scaling = static_cast<Fp8Scaling>(rng() % 3);
    s.given_scale = rng() % 2 != 0;
    s.q_t = rng() % 4 != 0;
    s.q = !s.q_t || rng() % 2 != 0;
    const GpuShape& gpu = kGpus[rng() % std::size(kGpus)];
    const ForwardPlan plan = choose_passes(s, gpu);
    const RowBlockPlan& blocks = plan.block_plan;
    if (!blocks.possible) continue;
    SCOPED_TRACE(printed(plan));
    ++chosen[blocks.strips == 1 ? 0 : 1];
    EXPECT_TRUE(row_blocks_take(s, blocks.strips));
    EXPECT_EQ(blocks.strips == 1, plan.columns);
    const std::int64_t pieces = ceil_div<std::int64_t>(s.hidden, 16 / s.x_bytes);
    EXPECT_GE(std::int64_t{blocks.threads} * s.x_bytes * blocks.strips, pieces);
    EXPECT_EQ(blocks.threads % RowBlockPlan::kRun, 0);
    EXPECT_LE(blocks.threads, RowBlockPlan::most_threads(gpu.clusters));
    EXPECT_EQ(blocks.smem, 2 * 16 * RowBlockPlan::kPieces * blocks.threads);
    EXPECT_LE(blocks.smem, gpu.max_smem - RowBlockPlan::kStaticSmem);
    EXPECT_EQ(blocks.grid % blocks.strips, 0);
    EXPECT_LE(blocks.grid / blocks.strips,
              ceil_div<std::int64_t>(s.rows, RowBlockPlan::rows(s.x_bytes)));
    EXPECT_LE(plan.partials_at + 4 * blocks.partials(s.rows), plan.workspace_bytes);
    EXPECT_LE(plan.maxima_at + 4 * blocks.finish_grid, plan.workspace_bytes);
  }
  EXPECT_GT(chosen[0], 100);
  EXPECT_GT(chosen[1], 100);
}

// A CTA of tiles comes early beside one of rows only where it fits there and has two or three of
// them to make; one kernel does both only where L2 holds what its shared memory does not.
TEST(Fp8RmsNormConfig, RowsBesideTilesAndInOneKernel) {
  const GpuShape& gpu = kGpus[0];
  const auto plan_of = [&](std::int64_t rows, std::int64_t hidden, int x_bytes = 1) {
    ForwardShape s;
    s.rows = rows;
    s.hidden = hidden;
    s.x_bytes = x_bytes;
    s.x_group = x_bytes == 1 ? 16 : 0;
    s.x_scale_bytes = x_bytes == 1 ? 2 : 0;
    s.q_t = true;
    return choose_passes(s, gpu);
  };
  for (const auto& [rows, hidden, beside] : {std::tuple{2048, 4096, false},
                                             {4096, 2304, true},
                                             {4097, 4096, true},
                                             {16384, 4096, false},
                                             {4096, 12288, false}}) {
    const ForwardPlan plan = plan_of(rows, hidden);
    SCOPED_TRACE(printed(plan));
    EXPECT_EQ(plan.held_plan.alone, !beside);
    EXPECT_LE(plan.held_plan.smem, gpu.max_smem - HeldRowsPlan::kStaticSmem);
    const bool all_late = plan.held_plan.late_rows >= rows;
    EXPECT_EQ(all_late, std::int64_t{rows} * hidden <= HeldRowsPlan::read_again(gpu));
  }
  EXPECT_TRUE(plan_of(4096, 2304, 2).held_plan.alone);
  EXPECT_TRUE(plan_of(8192, 4096).fused_plan.possible);
  EXPECT_FALSE(plan_of(16384, 4096).fused_plan.possible);
  EXPECT_FALSE(plan_of(131072, 256).fused_plan.possible);
}

// Tiles lie over all rows; each has the bytes of its columns' sectors that begin in it, or before
// the next one's first, wherever these begin.
TEST(Fp8RmsNormConfig, TilesCoverAllRows) {
  for (std::int64_t rows : {1, 15, 16, 96, 97, 112, 113, 127, 128, 129, 1000, 1008, 4096, 4097}) {
    for (Fp8Scaling scaling : {Fp8Scaling::kTensor, Fp8Scaling::kRow, Fp8Scaling::kGroup}) {
      ForwardShape s;
      s.rows = rows;
      s.hidden = 300;
      s.scaling = scaling;
      s.q_t = true;
      const TilesPlan plan = choose_tiles(s, kGpus[0]);
      const bool overlap = rows % 32 != 0 && scaling != Fp8Scaling::kGroup;
      EXPECT_EQ(plan.step, !overlap ? 128 : rows % 16 == 0 ? 112 : 96);
      EXPECT_EQ(plan.tiles % 3, 0);
      EXPECT_GE(plan.tiles / 3 * plan.step, rows);
      EXPECT_LT((plan.tiles / 3 - 1) * plan.step, rows);
      EXPECT_FALSE(plan.whole);  // the last ones reach beyond the columns
      s.hidden = 384;
      EXPECT_EQ(choose_tiles(s, kGpus[0]).whole, rows % 128 == 0 && scaling == Fp8Scaling::kTensor);
    }
  }
}

// Every tile of columns has its CTA of a cluster, and what they keep fits.
TEST(Fp8RmsNormConfig, BandsAreWholeAndFit) {
  std::mt19937 rng(5);
  int chosen = 0;
  for (int i = 0; i < 20'000; ++i) {
    ForwardShape s;
    s.rows = std::int64_t{1} << rng() % 21;
    s.hidden = std::max<std::int64_t>(1, random_size(rng, 20'000));
    s.x_bytes = 1 << rng() % 3;
    s.scaling = static_cast<Fp8Scaling>(rng() % 3);
    s.group = 16 << rng() % 4;
    s.given_scale = rng() % 2 != 0;
    s.q_t = rng() % 8 != 0;
    const GpuShape& gpu = kGpus[rng() % std::size(kGpus)];
    const BandPlan plan = choose_bands(s, gpu);
    if (!plan.possible) continue;
    ++chosen;
    EXPECT_TRUE(gpu.clusters && s.q_t && s.x_bytes <= 2 && s.scaling != Fp8Scaling::kRow);
    EXPECT_LE(plan.smem, gpu.max_smem - BandPlan::kStaticSmem);
    EXPECT_EQ(1 << plan.log2_cluster, plan.cluster);
    EXPECT_GE(plan.cluster, BandPlan::kLeastCluster);
    EXPECT_LE(plan.cluster, BandPlan::kMostCluster);
    const std::int64_t bands = plan.grid / plan.cluster;
    EXPECT_EQ(bands, ceil_div<std::int64_t>(s.rows, BandPlan::kRows));
    EXPECT_GE(std::int64_t{plan.tiles} * plan.cluster * BandPlan::kColumns, s.hidden);
    EXPECT_LE(4 * plan.grid, choose_passes(s, gpu).workspace_bytes);
  }
  EXPECT_GT(chosen, 100);
}

TEST(Fp8RmsNormConfig, OneCtaTakesWhatItsThreadsHold) {
  std::mt19937 rng(3);
  int taken = 0;
  for (int i = 0; i < 20'000; ++i) {
    ForwardShape s;
    s.rows = random_size(rng, 600);
    s.hidden = std::max<std::int64_t>(1, random_size(rng, 9000));
    s.x_bytes = 1 << rng() % 3;
    s.scaling = static_cast<Fp8Scaling>(rng() % 3);
    s.given_scale = rng() % 2 != 0;
    const ForwardPlan plan = choose(s, kGpus[rng() % std::size(kGpus)]);
    const SmallPlan& small = plan.small_plan;
    if (!small.possible) continue;
    ++taken;
    SCOPED_TRACE(printed(plan));
    EXPECT_TRUE(s.scaling == Fp8Scaling::kTensor && !s.given_scale && s.rows > 0);
    EXPECT_GE(std::int64_t{small.row_threads} * 16 / s.x_bytes, s.hidden);
    EXPECT_GE(small.threads, s.rows * small.row_threads);
    EXPECT_LE(small.threads, SmallPlan::kMostThreads);
    EXPECT_EQ(small.threads % 32, 0);
    EXPECT_EQ(plan.workspace_bytes, 0);
  }
  EXPECT_GT(taken, 100);
}

TEST(Fp8RmsNormConfig, NoRowsStillWriteAScale) {
  ForwardShape s;
  s.hidden = 64;
  s.q_t = true;
  EXPECT_EQ(choose(s, kGpus[0]).tile_plan.grid, 1);
  EXPECT_EQ(choose(s, kGpus[0]).row_plan.grid, 0);
}

}  // namespace
}  // namespace mortar::fp8_rmsnorm
