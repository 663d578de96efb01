// SPDX-License-Identifier: Apache-2.0
// The forward of FP8 RMSNorm under every launch plan that fits a case, on a GPU.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <functional>
#include <sstream>
#include <vector>

#include "fp8_rmsnorm/checks.h"
#include "fp8_rmsnorm/cuda/kernels.cuh"
#include "fp8_rmsnorm_case.h"

namespace mortar::testing {

using fp8_rmsnorm::BandPlan;
using fp8_rmsnorm::ForwardPlan;
using fp8_rmsnorm::ForwardShape;
using fp8_rmsnorm::HeldRowsPlan;
using fp8_rmsnorm::RowBlockPlan;

inline constexpr Fp8Scaling kScalings[] = {Fp8Scaling::kTensor, Fp8Scaling::kRow,
                                           Fp8Scaling::kGroup};

/// Runs plans of one's own, and compares their bits.
class Fp8RmsNormCuda : public ::testing::TestWithParam<Device> {
 protected:
  void SetUp() override { ASSERT_EQ(cudaStreamCreate(&stream_), cudaSuccess); }
  void TearDown() override { ASSERT_EQ(cudaStreamDestroy(stream_), cudaSuccess); }

  static ForwardShape shape_of(const NormCase& c) {
    return {.rows = c.rows,
            .hidden = c.columns,
            .x_bytes = static_cast<int>(dtype_size(c.x)),
            .x_group = dtype_size(c.x) == 1 ? c.x_group : 0,
            .x_scale_bytes = dtype_size(c.x) == 1 ? static_cast<int>(dtype_size(c.x_scale)) : 0,
            .norm = c.norm,
            .adds = c.residual && c.residual_dtype == c.x && dtype_size(c.x) == 2,
            .scaling = c.scaling,
            .group = static_cast<int>(c.group),
            .given_scale = c.given,
            .stochastic = c.stochastic,
            .q = c.make_q,
            .q_t = c.make_q_t};
  }

  /// The outputs under a plan, which are right (unless inputs were changed).
  std::vector<Bytes> run(const NormCase& c, const ForwardPlan& plan) {
    std::ostringstream printed;
    printed << plan;
    SCOPED_TRACE(printed.str());
    NormTrial trial(c, GetParam(), 21);
    if (change_inputs) change_inputs(trial);
    trial.make_inputs();
    GuardedTensor workspace = byte_tensor(plan.workspace_bytes, GetParam());
    const ArgCheck arg("test");
    const Tensor none;
    if (c.norm) {
      auto problem = fp8_rmsnorm::check_forward(
          arg, trial.x.view(), trial.is_float8() ? trial.x_scale.view() : none, trial.weight.view(),
          trial.eps, c.weight_offset, c.residual ? trial.residual.view() : none, trial.format(),
          trial.quantized(), c.make_rstd ? trial.rstd.view() : none,
          c.make_normed ? trial.normed.view() : none);
      problem.workspace = workspace.view().ptr<std::byte>();
      fp8_rmsnorm::cuda::forward(problem, &plan, {stream_});
    } else {
      auto problem =
          fp8_rmsnorm::check_quantize(arg, trial.x.view(), trial.format(), trial.quantized());
      problem.workspace = workspace.view().ptr<std::byte>();
      fp8_rmsnorm::cuda::quantize(problem, &plan, {stream_});
    }
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    const std::vector<Bytes> bytes = outputs_of(trial);
    workspace.download();
    EXPECT_TRUE(workspace.guards_intact());
    if (!change_inputs) trial.expect_right();
    return bytes;
  }

  /// Every plan that fits the case, and what it is called.
  void for_each_plan(const NormCase& c,
                     const std::function<void(const ForwardPlan&, const char*)>& use) {
    const ForwardShape s = shape_of(c);
    ForwardPlan chosen = choose_passes(s, gpu_);
    use(chosen, "passes");
    for_each_fused_plan(s, use);
    chosen.fused_plan.possible = chosen.band_plan.possible = false;
    ForwardPlan plan = chosen;
    for (int cluster = BandPlan::kLeastCluster; cluster <= BandPlan::kMostCluster; cluster *= 2) {
      plan.band_plan = band_plan(s, gpu_, cluster);
      if (!plan.rows || !plan.band_plan.possible) continue;
      lay_out(plan, s, gpu_);
      use(plan, "bands");
    }
    plan = chosen;
    for (int strips : {1, RowBlockPlan::kStrips}) {
      plan.block_plan = row_block_plan(s, gpu_, strips);
      if (!plan.rows || !plan.block_plan.possible || !row_blocks_take(s, strips)) continue;
      lay_out(plan, s, gpu_);
      use(plan, strips == 1 ? "blocks of rows" : "strips of rows");
      plan.block_plan.grid = strips;  // one CTA, or one of each strip, takes all rows
      use(plan, "blocks of rows by one CTA");
    }
    plan = chosen;
    plan.tile_plan.whole = false;
    if (chosen.tile_plan.whole) use(plan, "tiles of which any may reach beyond the matrix");
    plan.block_plan.possible = false;
    use(plan, "rows, and maxima of columns apart");
    plan.held_plan.possible = false;
    use(plan, "rows of any kind");
    plan.tile_plan.any = true;
    use(plan, "all of any kind");
    for (int threads = least_held_threads(s); threads <= HeldRowsPlan::kThreads; threads *= 2) {
      plan = chosen;
      plan.block_plan.possible = false;
      plan.held_plan = held_rows_plan(s, gpu_, threads);
      if (!plan.held_plan.possible) continue;
      lay_out(plan, s, gpu_);
      use(plan, "threads of a row");
      plan.held_plan.grid = 1;  // a CTA goes over all rows, and another over all tiles
      plan.tile_plan.grid = 1;
      plan.held_plan.late_rows = 2;  // all others are marked for eviction
      plan.held_plan.alone = false;
      use(plan, "one CTA");
      plan.held_plan.grid = std::min(3, held_rows_plan(s, gpu_, threads).grid);
      plan.tile_plan.grid = static_cast<int>(std::min<std::int64_t>(5, plan.tile_plan.tiles));
      use(plan, "a few CTAs");
    }
  }

  /// Every plan of one kernel that fits.
  void for_each_fused_plan(const ForwardShape& s,
                           const std::function<void(const ForwardPlan&, const char*)>& use) {
    for (int rows : {16, 32, 48, 64, 128, 192}) {
      ForwardPlan plan = choose_passes(s, gpu_);
      plan.fused_plan = fused_plan(s, gpu_, rows);
      plan.fused_plan.held.late_rows = 5;
      if (s.stochastic || !plan.tiles_make_q || !plan.fused_plan.possible) continue;
      lay_out(plan, s, gpu_);
      use(plan, "one kernel");
    }
  }

  /// Forms that rows and tiles in one kernel have, in a case whose rows are a multiple of 16.
  void expect_one_kernel_changes_no_bit(NormCase c) {
    for (bool compat : {false, true}) {
      c.compat = compat;
      SCOPED_TRACE(concat(c));
      ForwardPlan apart = choose_passes(shape_of(c), gpu_);
      apart.fused_plan.possible = false;
      const std::vector<Bytes> expected = run(c, apart);
      int plans = 0;
      for_each_fused_plan(shape_of(c), [&](const ForwardPlan& plan, const char*) {
        std::ostringstream printed;
        printed << plan;
        EXPECT_TRUE(run(c, plan) == expected) << printed.str();
        ++plans;
      });
      EXPECT_GT(plans, 0);
    }
  }

  void expect_same_bits(const NormCase& c) {
    SCOPED_TRACE(concat(c));
    const std::vector<Bytes> expected = run(c, choose(shape_of(c), gpu_));
    for_each_plan(c, [&](const ForwardPlan& plan, const char* name) {
      EXPECT_TRUE(run(c, plan) == expected) << name;
    });
  }

  std::function<void(NormTrial&)> change_inputs;
  const fp8_rmsnorm::GpuShape gpu_ = fp8_rmsnorm::cuda::this_gpu();
  cudaStream_t stream_ = nullptr;
};

}  // namespace mortar::testing
