// SPDX-License-Identifier: Apache-2.0
// What only a GPU shows of FP8 RMSNorm's forward: every shape of its kernels, forced by plans;
// graph replay; and two streams at once.
#if MORTAR_HAS_CUDA
#include <cuda_runtime_api.h>

#include <limits>

#include "fp8_rmsnorm_plans.h"

namespace mortar::testing {
namespace {

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Fp8RmsNormCuda);  // on a machine without a GPU
INSTANTIATE_TEST_SUITE_P(Devices, Fp8RmsNormCuda, ::testing::ValuesIn(gpus()), device_name);

TEST_P(Fp8RmsNormCuda, LaunchChoicesChangeNoBit) {
  for (Fp8Scaling scaling : kScalings) {
    for (const auto& [x, columns] : {std::pair{kE4M3, 1040}, {kE5M2, 256}, {kBF16, 1000}}) {
      NormCase c{.rows = 140, .columns = columns, .x = x, .scaling = scaling, .group = 64};
      expect_same_bits(c);
      c.make_q = false;
      expect_same_bits(c);
    }
  }
}

// A thread uses eight slots of a row, seven, whose last ones are whole or not, six or five.
TEST_P(Fp8RmsNormCuda, AllSlotsOfAThreadChangeNoBit) {
  for (Fp8Scaling scaling : kScalings) {
    for (const auto& [x, columns] : {std::pair{kE4M3, 1024},
                                     {kE5M2, 896},
                                     {kE4M3, 832},
                                     {kE4M3, 768},
                                     {kE5M2, 640},
                                     {kBF16, 512},
                                     {kF16, 448},
                                     {kBF16, 384},
                                     {kF16, 320}}) {
      NormCase c{.rows = 16, .columns = columns, .x = x, .scaling = scaling, .group = 64};
      expect_same_bits(c);
      c.compat = scaling == Fp8Scaling::kTensor;
      c.make_q_t = c.compat;
      expect_same_bits(c);
    }
  }
}

// Weights of Inf make NaN of zeros and Inf of the rest, in columns of some tiles alone; zeros also
// fill a row and a column.
TEST_P(Fp8RmsNormCuda, InfiniteWeightsChangeNoBit) {
  for (Fp8Scaling scaling : kScalings) {
    for (const auto& [x, columns] : {std::pair{kE4M3, 512}, {kBF16, 400}}) {
      const NormCase c{.rows = 140, .columns = columns, .x = x, .scaling = scaling, .group = 64};
      change_inputs = [&c](NormTrial& trial) {
        constexpr double kInfinity = std::numeric_limits<double>::infinity();
        trial.weight_values[37] = kInfinity;
        trial.weight_values[290] = -kInfinity;
        const auto at = [&](std::int64_t m, std::int64_t n) -> double& {
          return trial.x_values[static_cast<std::size_t>(m * c.columns + n)];
        };
        for (std::int64_t m = 0; m < c.rows; m += 3) at(m, 37) = at(m, 38) = 0;
        for (std::int64_t m = 0; m < c.rows; ++m) at(m, 290) = 0;
        for (std::int64_t n = 0; n < c.columns; ++n) at(131, n) = 0;
        // No zero among a column's rows: its maximum is infinite, and not a NaN.
        trial.weight_values[100] = kInfinity;
        for (std::int64_t m = 0; m < c.rows; ++m) at(m, 100) = 1;
      };
      expect_same_bits(c);
    }
  }
}

TEST_P(Fp8RmsNormCuda, SmallOneKernelChangesNoBit) {
  expect_one_kernel_changes_no_bit({.rows = 80, .columns = 272});
}

// Rows of several CTAs, the last of which has fewer; columns that are no multiple of a tile; scales
// of x that are not whole copies; long rows, of which the first columns stay in shared memory.
TEST_P(Fp8RmsNormCuda, OneKernelChangesNoBit) {
  for (const auto& [rows, columns] : {std::pair{16, 16}, {144, 1040}, {272, 640}, {208, 8192}}) {
    const NormCase c{.rows = rows, .columns = columns, .x = kE5M2, .weight = kBF16};
    NormCase scales = c, q = c, q_t = c, given = c, layout = c;
    expect_one_kernel_changes_no_bit(c);
    scales.x_scale = kF32;
    scales.q = kE5M2;
    if (columns % 128 == 0) scales.x_group = 128;
    expect_one_kernel_changes_no_bit(scales);
    q.make_q_t = false;
    expect_one_kernel_changes_no_bit(q);
    q_t.make_q = false;
    expect_one_kernel_changes_no_bit(q_t);
    layout.layout = {.row_gap = 16};
    expect_one_kernel_changes_no_bit(layout);
    given.given = true;
    if (columns == 1040) expect_one_kernel_changes_no_bit(given);
  }
}

// What one CTA does at once, to the bits of any other plan: one row and several, by one thread and
// by all; aligned and not; every switch.
TEST_P(Fp8RmsNormCuda, SmallOneCtaChangesNoBit) {
  for (const auto& [x, rows, columns] : {std::tuple{kE4M3, 1, 256},
                                         {kE5M2, 5, 80},
                                         {kE4M3, 37, 16},
                                         {kBF16, 1, 1000},
                                         {kBF16, 3, 264},
                                         {kF16, 7, 77},
                                         {kF32, 2, 132},
                                         {kF32, 9, 3}}) {
    NormCase c{.rows = rows, .columns = columns, .x = x, .x_scale = kF32, .weight = kBF16};
    ASSERT_TRUE(choose(shape_of(c), gpu_).small_plan.possible);
    for (bool compat : {false, true}) {
      for (bool stochastic : {false, true}) {
        c.compat = compat;
        c.stochastic = stochastic;
        expect_same_bits(c);
        NormCase other = c;
        other.make_normed = true;
        other.make_q_t = other.make_amax = false;
        other.weight_offset = 1.0f;
        other.layout = {.lead = 3, .row_gap = 5};
        expect_same_bits(other);
        other.residual = true;
        other.residual_dtype = rows % 2 != 0 ? kBF16 : kF32;
        other.q = kE5M2;
        expect_same_bits(other);
        NormCase quantize = c;
        quantize.norm = quantize.compat = false;
        quantize.make_q = false;
        quantize.pow2 = stochastic;
        if (!compat && dtype_size(x) > 1) expect_same_bits(quantize);
      }
    }
  }
}

TEST_P(Fp8RmsNormCuda, LaunchChoicesOfOnePassChangeNoBit) {
  for (Fp8Scaling scaling : kScalings) {
    for (bool given : {false, true}) {
      for (DType x : {kE4M3, kF16, kF32}) {
        expect_same_bits({.rows = 37,
                          .columns = 528,
                          .x = x,
                          .weight = kBF16,
                          .scaling = scaling,
                          .group = 128,
                          .given = given,
                          .make_q_t = false});
      }
    }
  }
}

// Rows of over 64 KB, which the kernel for any kind reads in two spans or four, each a branch of
// the tree over pieces.
TEST_P(Fp8RmsNormCuda, LaunchChoicesOfVeryLongRowsChangeNoBit) {
  for (const auto& [x, columns] : {std::pair{kF32, 18432},
                                   {kF32, 40004},
                                   {kF32, 65536},
                                   {kBF16, 32776},
                                   {kF16, 65536},
                                   {kF32, 16389}}) {
    expect_same_bits({.rows = 5, .columns = columns, .x = x, .weight = kBF16});
  }
}

TEST_P(Fp8RmsNormCuda, LaunchChoicesOfOtherFormsChangeNoBit) {
  for (DType x : {kE4M3, kBF16}) {
    const NormCase c{.rows = 133, .columns = 1040, .x = x, .x_scale = kF32};
    NormCase compat = c, residual = c, quantize = c, given = c;
    compat.compat = true;
    expect_same_bits(compat);
    for (DType dtype : {kBF16, kF16, kF32}) {
      residual.residual = true;
      residual.residual_dtype = dtype;
      expect_same_bits(residual);
    }
    given.given = true;
    expect_same_bits(given);
    if (x != kBF16) continue;
    quantize.norm = false;
    for (bool with_scale : {false, true}) {
      quantize.given = with_scale;
      for (Fp8Scaling scaling : kScalings) {
        quantize.scaling = scaling;
        expect_same_bits(quantize);
      }
    }
  }
}

// Rows that are added to as they come, by one warp and by several, with one row of a CTA in shared
// memory and with more.
TEST_P(Fp8RmsNormCuda, LaunchChoicesOfTheResidualChangeNoBit) {
  for (DType x : {kBF16, kF16}) {
    for (Fp8Scaling scaling : kScalings) {
      for (std::int64_t columns : {264, 4104}) {
        NormCase c{.rows = columns < 4104 ? 133 : 40,
                   .columns = columns,
                   .x = x,
                   .residual = true,
                   .residual_dtype = x,
                   .scaling = scaling,
                   .group = 128};
        expect_same_bits(c);
        c.make_q_t = false;
        c.given = scaling == Fp8Scaling::kTensor;
        expect_same_bits(c);
      }
    }
  }
}

// Rows that begin anywhere in a block of draws, and whose q_t is aligned or not.
TEST_P(Fp8RmsNormCuda, LaunchChoicesOfStochasticRoundingChangeNoBit) {
  for (Fp8Scaling scaling : kScalings) {
    for (DType q : {kE4M3, kE5M2}) {
      expect_same_bits({.rows = 140,
                        .columns = 1040,
                        .scaling = scaling,
                        .group = 64,
                        .stochastic = true,
                        .q = q});
      expect_same_bits({.rows = 144,
                        .columns = 1000,
                        .x = kBF16,
                        .scaling = scaling,
                        .stochastic = true,
                        .q = q});
    }
  }
  expect_same_bits({.rows = 131, .columns = 264, .x = kF16, .norm = false, .stochastic = true});
}

// q_t's rows begin at every address modulo 32 and end at any; tiles are whole or not.
TEST_P(Fp8RmsNormCuda, LaunchChoicesOfUnalignedColumnsChangeNoBit) {
  for (std::int64_t rows : {1, 2, 3, 5, 8, 95, 97, 129, 131, 136, 257}) {
    for (const auto& [x, columns] : {std::pair{kE4M3, 272}, {kBF16, 136}, {kF32, 132}}) {
      expect_same_bits({.rows = rows, .columns = columns, .x = x});
    }
  }
}

// The same where they begin at sectors or at half of one.
TEST_P(Fp8RmsNormCuda, LaunchChoicesOfAlignedColumnsChangeNoBit) {
  for (const auto& [x, columns] : {std::pair{kE4M3, 272}, {kBF16, 136}, {kF32, 132}}) {
    for (std::int64_t rows : {16, 112, 240, 272, 288}) {
      expect_same_bits({.rows = rows, .columns = columns, .x = x});
    }
  }
  // Strides that the number of rows does not tell of.
  expect_same_bits({.rows = 272, .columns = 136, .x = kBF16, .layout = {.row_gap = 8}});
  expect_same_bits({.rows = 272, .columns = 272, .x = kE4M3, .layout = {.row_gap = 16}});
  expect_same_bits({.rows = 257, .columns = 132, .x = kF32, .layout = {.row_gap = 4}});
}

// No tile reaches beyond the matrix.
TEST_P(Fp8RmsNormCuda, LaunchChoicesOfWholeTilesChangeNoBit) {
  for (const auto& [x, q] :
       {std::pair{kE4M3, kE5M2}, {kE5M2, kE4M3}, {kBF16, kE4M3}, {kF16, kE5M2}}) {
    const NormCase c{.rows = 256, .columns = 384, .x = x, .weight = kBF16, .q = q};
    ASSERT_TRUE(choose_passes(shape_of(c), gpu_).tile_plan.whole);
    NormCase compat = c, scales = c, quantize = c;
    expect_same_bits(c);
    compat.compat = true;
    compat.weight = kF32;
    expect_same_bits(compat);
    scales.x_scale = kF32;
    scales.given = true;
    scales.layout = {.row_gap = 16};
    expect_same_bits(scales);
    quantize.norm = false;
    if (x == kBF16) expect_same_bits(quantize);
  }
}

// One captured call, replayed after x has changed, does what a fresh call with the new x does.
TEST_P(Fp8RmsNormCuda, GraphReplayWithOtherContent) {
  for (Fp8Scaling scaling : kScalings) {
    const NormCase c{.rows = 300, .columns = 1040, .scaling = scaling, .group = 64};
    NormTrial captured(c, GetParam(), 31);
    captured.make_inputs();
    const ForwardPlan plan = choose(shape_of(c), gpu_);
    GuardedTensor workspace = byte_tensor(plan.workspace_bytes, GetParam());
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    ASSERT_EQ(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    fp8_rmsnorm_forward(captured.x.view(), captured.x_scale.view(), captured.weight.view(),
                        captured.eps, c.weight_offset, {}, captured.format(), captured.quantized(),
                        captured.rstd.view(), {}, workspace.view(), {stream_});
    ASSERT_EQ(cudaStreamEndCapture(stream_, &graph), cudaSuccess);
    ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
    for (unsigned seed : {32u, 33u, 34u}) {
      NormTrial fresh(c, GetParam(), seed);
      fresh.run();
      for (const auto& [to, from] : {std::pair{&captured.x, &fresh.x},
                                     {&captured.x_scale, &fresh.x_scale},
                                     {&captured.weight, &fresh.weight}}) {
        to->for_each([&](std::int64_t i) { set_value(*to, i, get_value(*from, i)); });
        to->upload();
      }
      ASSERT_EQ(cudaGraphLaunch(executable, stream_), cudaSuccess);
      ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
      EXPECT_TRUE(outputs_of(captured) == outputs_of(fresh)) << concat(c);
    }
    EXPECT_EQ(cudaGraphExecDestroy(executable), cudaSuccess);
    EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  }
}

// Calls on two streams, each with its own workspace, do not disturb each other.
TEST_P(Fp8RmsNormCuda, TwoStreamsAtOnce) {
  cudaStream_t other = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), cudaSuccess);
  const NormCase cases[] = {{.rows = 700, .columns = 2048},
                            {.rows = 513, .columns = 4096, .x = kBF16, .weight = kBF16}};
  std::vector<std::vector<Bytes>> expected;
  std::vector<std::unique_ptr<NormTrial>> trials;
  std::vector<GuardedTensor> workspaces;
  for (const NormCase& c : cases) {
    NormTrial alone(c, GetParam(), 41);
    alone.run();
    alone.expect_right();
    expected.push_back(outputs_of(alone));
    trials.push_back(std::make_unique<NormTrial>(c, GetParam(), 41));
    trials.back()->make_inputs();
    workspaces.push_back(byte_tensor(choose(shape_of(c), gpu_).workspace_bytes, GetParam()));
  }
  for (int repeat = 0; repeat < 20; ++repeat) {
    for (std::size_t i = 0; i < trials.size(); ++i) {
      NormTrial& t = *trials[i];
      fp8_rmsnorm_forward(t.x.view(), t.is_float8() ? t.x_scale.view() : Tensor(), t.weight.view(),
                          t.eps, 0.0f, {}, t.format(), t.quantized(), t.rstd.view(), {},
                          workspaces[i].view(), {i == 0 ? stream_ : other});
    }
  }
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  for (std::size_t i = 0; i < trials.size(); ++i) {
    EXPECT_TRUE(outputs_of(*trials[i]) == expected[i]) << concat(cases[i]);
  }
  EXPECT_EQ(cudaStreamDestroy(other), cudaSuccess);
}

}  // namespace
}  // namespace mortar::testing
#endif
