// SPDX-License-Identifier: Apache-2.0
// Launch choices of the CUDA backend: bounds that a grid must keep, on the host alone.
#include "lora/launch_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "lora/cuda/params.cuh"
#include "lora/launch_choice.h"
#include "lora_choice_shapes.h"
#include "mortar/error.h"
#if MORTAR_HAS_CUDA
#include <vector_types.h>

#include "lora/cuda/backend.cuh"
#endif

namespace mortar::lora {
namespace {

std::int64_t tiles_of(const std::vector<std::int64_t>& counts, int tile) {
  std::int64_t tiles = 0;
  for (const std::int64_t count : counts) tiles += ceil_div<std::int64_t>(count, tile);
  return tiles;
}

TEST(LoraConfig, NoMapMakesMoreTilesThanTheBound) {
  std::mt19937 random(1);
  for (int i = 0; i < 20'000; ++i) {
    const int tile = random() % 2 == 0 ? 16 : 64;
    const auto tokens = static_cast<std::int64_t>(random() % 600);
    const auto adapters = static_cast<std::int64_t>(1 + random() % 40);
    std::vector<std::int64_t> counts(adapters);
    // A few adapters have most of the tokens, and some tokens have none.
    for (std::int64_t t = 0; t < tokens; ++t) {
      const auto to = std::min(random() % (adapters + 1), random() % (adapters + 1));
      if (static_cast<std::int64_t>(to) < adapters) ++counts[to];
    }
    EXPECT_LE(tiles_of(counts, tile), max_tiles(tokens, adapters, tile))
        << tokens << " tokens, " << adapters << " adapters, tiles of " << tile;
  }
}

TEST(LoraConfig, SomeMapMakesAsManyTilesAsTheBound) {
  for (const int tile : {16, 64}) {
    for (std::int64_t tokens = 1; tokens < 300; ++tokens) {
      for (const std::int64_t adapters : {1, 2, 5, 16, 300}) {
        // One token for every adapter, and the rest for the first.
        const std::int64_t groups = std::min(tokens, adapters);
        std::vector<std::int64_t> counts(groups, 1);
        counts[0] += tokens - groups;
        EXPECT_EQ(tiles_of(counts, tile), max_tiles(tokens, adapters, tile));
      }
    }
  }
}

TEST(LoraConfig, TileRowsFitAGrid) {
  const auto expect_fits = [](std::int64_t tokens, std::int64_t adapters, int tile) {
    const auto tiles = static_cast<int>(max_tiles(tokens, adapters, tile));
    const TileRowGrid grid = tile_row_grid(tiles, tile);
    EXPECT_EQ(std::int64_t{grid.y} * grid.z, std::int64_t{tiles} * (tile / 16));
    EXPECT_LE(grid.y, 65535u) << tokens << " tokens, " << adapters << " adapters";
    EXPECT_EQ(grid.z > 1, std::int64_t{tiles} * (tile / 16) > 65535);
  };
  for (const std::int64_t adapters : {1, 2, 500, 4096}) {
    for (const std::int64_t tokens :
         {1, 64, 65, 700'000, 790'527, 790'528, 1'048'512, 1'048'513, 1'048'576}) {
      expect_fits(tokens, adapters, 64);
    }
    for (const std::int64_t tokens : {1, 17, 16 * 1024}) expect_fits(tokens, adapters, 16);
  }
}

template <int kTiles>
void expect_runs(int log_tile) {
  const std::int64_t run = std::int64_t{kTiles} << log_tile;
  for (const int count :
       {0,   1,   15,  16,  17,  63,  64,  65,   127,     128,
        129, 191, 192, 193, 384, 385, 512, 1000, 1 << 20, std::numeric_limits<int>::max()}) {
    EXPECT_EQ(cuda::runs_of_tokens<kTiles>(count, log_tile), ceil_div<std::int64_t>(count, run))
        << count << " tokens in runs of " << run;
  }
}

TEST(LoraConfig, RunsOfTilesHoldAllTokens) {
  expect_runs<1>(4);
  expect_runs<1>(6);
  expect_runs<2>(6);
  expect_runs<3>(6);
}

LoraShape random_shape(std::mt19937& random) {
  const auto log_uniform = [&](double most) {
    return static_cast<std::int64_t>(
        std::exp(std::uniform_real_distribution<double>(0, std::log(most + 0.9))(random)));
  };
  std::vector<std::int64_t> widths(1 + random() % 3);
  for (std::int64_t& width : widths) width = 8 * log_uniform(4000);
  LoraShape s = shape(log_uniform(1 << 20), log_uniform(4096), static_cast<int>(log_uniform(512)),
                      8 * log_uniform(8000), widths);
  s.op = static_cast<Op>(random() % 3);
  s.one_type = random() % 4 != 0;
  s.float_weights = !s.one_type && random() % 4 != 0;
  s.float_h = s.op == Op::kExpand && random() % 2 == 0;
  s.aligned_h = s.op == Op::kExpand && (s.float_h || s.one_type) && random() % 4 != 0;
  s.aligned_x = random() % 4 != 0;
  s.aligned_y = random() % 4 != 0;
  s.ragged = random() % 4 == 0;
  if (random() % 8 == 0) {  // a rank of whole boxes
    s.max_rank = s.h_columns = kWalkBoxRows * static_cast<int>(1 + random() % 8);
  }
  s.boxes = s.op == Op::kApply && !s.ragged && s.max_rank % kWalkBoxRows == 0;
  s.b_boxes = s.boxes && s.one_type;
  s.b_runs = s.op == Op::kApply && s.max_rank % 4 == 0;
  return s;
}

TEST(LoraConfig, PlansKeepToTheirLimits) {
  std::mt19937 random(7);
  for (int i = 0; i < 20'000; ++i) {
    const LoraShape s = random_shape(random);
    const LaunchPlan plan = choose(s, kMachines[i % 4]);
    SCOPED_TRACE(describe(plan));
    EXPECT_EQ(plan.shape, s);
    EXPECT_EQ(plan, choose(s, kMachines[i % 4]));
    EXPECT_EQ(plan.workspace_bytes, workspace_of(plan));
    if (s.op != Op::kExpand) {
      EXPECT_LE(plan.workspace_bytes, most_workspace(s));
    }
    const ShrinkPlan& shrink = plan.shrink;
    const ExpandPlan& expand = plan.expand;
    const bool wgmma_shape = shrink.kernel == ShrinkKernel::kWgmma && s.op != Op::kExpand;
    const bool wide = expand.kernel == ExpandKernel::kWide && s.op != Op::kShrink;
    if (wgmma_shape) {
      EXPECT_EQ(kWgmmaShapes[shrink.shape].float_weights, s.float_weights);
    }
    if (wide) {
      EXPECT_EQ(kWideShapes[expand.shape].float_weights, s.float_weights);
      EXPECT_TRUE(s.op == Op::kApply || s.aligned_h);
      EXPECT_TRUE(!rounds_h(s) || expand.shape == kWideRoundedShape);
    }
    EXPECT_EQ(s.op != Op::kExpand && !s.one_type && !wgmma_shape,
              shrink.kernel == ShrinkKernel::kParts);
    const bool direct = expand.kernel == ExpandKernel::kDirect;
    EXPECT_EQ(s.op != Op::kShrink && !s.one_type && !wide && !direct,
              expand.kernel == ExpandKernel::kParts);
    EXPECT_TRUE(!direct || s.max_rank <= kDirectMaxRank);
    // Two parts of a value are lora_apply's, three everyone's.
    EXPECT_TRUE(s.one_type || s.op == Op::kApply || (!wgmma_shape && !wide && !direct));
    if ((!s.aligned_x || !s.float_weights) && !s.one_type && s.op != Op::kExpand) {
      EXPECT_EQ(shrink.kernel, ShrinkKernel::kParts);
    }
    if ((!s.aligned_y || !s.float_weights) && !s.one_type && s.op != Op::kShrink) {
      EXPECT_EQ(expand.kernel, ExpandKernel::kParts);
    }
    if (!s.aligned_x && s.one_type) {
      EXPECT_EQ(shrink.kernel, ShrinkKernel::kMma);
    }
    if (kMachines[i % 4].arch != 90) {
      EXPECT_NE(shrink.kernel, ShrinkKernel::kWgmma);
      EXPECT_NE(shrink.kernel, ShrinkKernel::kWalk);
      EXPECT_NE(expand.kernel, ExpandKernel::kWide);
    }
    if (s.op != Op::kExpand && shrink.kernel == ShrinkKernel::kStream) {
      EXPECT_TRUE(runs_stream(s, kMachines[i % 4]));
      EXPECT_TRUE(shrink.split());
    }
    if (s.op != Op::kShrink && expand.kernel == ExpandKernel::kBulk) {
      EXPECT_TRUE(runs_bulk(s, kMachines[i % 4]));
      EXPECT_NE(shrink.partials, Partials::kExpand);
    }
    if (plan.one_kernel()) {
      EXPECT_TRUE(runs_one(s, kMachines[i % 4], expand.cols));
      EXPECT_EQ(plan.workspace_bytes, 0);
    }
    if (s.op != Op::kApply || kMachines[i % 4].arch != 90 || !s.aligned_y ||
        s.max_rank > kOneMaxRank) {
      EXPECT_FALSE(plan.one_kernel());
    }
    if (s.op != Op::kApply) {
      EXPECT_NE(shrink.partials, Partials::kExpand);
    }
    if (shrink.partials == Partials::kExpand) {
      EXPECT_EQ(expand.tile_tokens, 16);
    }
    if (wide) {
      EXPECT_TRUE(expand.cluster == 1 || (s.b_boxes && kWideShapes[expand.shape].walks));
      EXPECT_TRUE(!expand.boxes || (s.b_boxes && !kWideShapes[expand.shape].walks));
    } else if (expand.cluster > 1) {
      EXPECT_TRUE(shares_h(s, kMachines[i % 4], shrink, expand));
      EXPECT_EQ(expand.cluster, kExpandCluster);
    }
    if (shrink.split()) {
      EXPECT_TRUE(wgmma_shape ? wgmma_partials_fit(s, shrink.leaves) : partials_fit(s));
    }
    if (s.op != Op::kExpand && shrink.kernel == ShrinkKernel::kDecode && shrink.split()) {
      const int rows = std::min(shrink.rows, s.rank_rows());
      EXPECT_LE(decode_smem(s.hidden, rows, shrink.stages, shrink.leaves, shrink.x_tokens) +
                    kDecodeStaticSmem,
                kMachines[i % 4].max_smem);
    }
    if (s.op != Op::kExpand && shrink.kernel == ShrinkKernel::kDecode && !shrink.split()) {
      EXPECT_EQ(s.op, Op::kShrink);
      EXPECT_EQ(kMachines[i % 4].arch, 90);
      EXPECT_LE(decode_cluster_smem(s.hidden, shrink.rows) + kDecodeStaticSmem,
                kMachines[i % 4].max_smem);
    }
  }
}

/// Few tokens of ranks 65 to 128, whose blocks of B are half of the shared memory of some devices.
TEST(LoraConfig, RingsOfTheDecodeExpandFitTheDevice) {
  std::mt19937 random(3);
  for (int i = 0; i < 20'000; ++i) {
    const auto below = [&](int most) { return static_cast<std::int64_t>(random() % most); };
    const std::vector<std::int64_t> widths(1 + below(3), 8 + 8 * below(1000));
    const LoraShape s =
        shape(1 + below(60), 1 + below(60), static_cast<int>(65 + below(64)), 1024, widths);
    for (const Machine& m : kMachines) {
      const ExpandPlan c = choose(s, m).expand;
      if (c.kernel != ExpandKernel::kDecode) continue;
      ASSERT_TRUE(decode_ring_fits(s, m, c.cols, c.block_cols, c.stages)) << describe(choose(s, m));
      ASSERT_EQ(c.cols % c.block_cols, 0) << describe(choose(s, m));
    }
  }
}

TEST(LoraConfig, CandidatesFitTheirProblem) {
  std::mt19937 random(11);
  for (int i = 0; i < 2000; ++i) {
    const LoraShape s = random_shape(random);
    const std::vector<LaunchPlan> all = candidates(s, kMachines[i % 4]);
    EXPECT_EQ(all.front(), choose(s, kMachines[i % 4]));
    for (const LaunchPlan& plan : all) {
      EXPECT_EQ(plan.shape, s);
      EXPECT_EQ(plan.workspace_bytes, workspace_of(plan));
      if (s.op != Op::kExpand) {
        EXPECT_LE(plan.workspace_bytes, most_workspace(s));
      }
    }
  }
}

/// Columns of a CTA are counted in 32 bits, tiles of 16 tokens are at most the rows of a grid.
TEST(LoraConfig, SmallNoCountOverflows) {
  for (const std::int64_t width : {std::int64_t{1} << 31, (std::int64_t{1} << 33) + 8}) {
    for (const std::int64_t tokens : {1, 40, 1 << 20}) {
      for (const int rank : {8, 16, 64, 512}) {
        for (const Machine& m : kMachines) {
          for (const LaunchPlan& plan : candidates(shape(tokens, 4096, rank, 64, {width}), m)) {
            ASSERT_GT(plan.expand.cols, 0) << describe(plan);
            ASSERT_LE(plan.expand.cols, 1 << 26) << describe(plan);
            ASSERT_LE(max_tiles(tokens, 4096, plan.expand.tile_tokens), 65535) << describe(plan);
          }
        }
      }
    }
  }
}

/// Every row of a table of shapes is the best for some problem.
TEST(LoraConfig, EveryShapeIsChosenSomewhere) {
  std::mt19937 random(13);
  std::set<int> wgmma, mma, wide, walk;
  for (int i = 0; i < 240'000; ++i) {
    const LaunchPlan plan = choose(random_shape(random), kMachines[i % 4]);
    if (plan.one_kernel()) continue;
    if (plan.shape.op != Op::kExpand && plan.shrink.kernel == ShrinkKernel::kWgmma) {
      wgmma.insert(plan.shrink.shape);
    }
    if (plan.shape.op != Op::kExpand && plan.shrink.kernel == ShrinkKernel::kMma) {
      mma.insert(plan.shrink.shape);
    }
    if (plan.shape.op != Op::kExpand && plan.shrink.kernel == ShrinkKernel::kWalk) {
      walk.insert(plan.shrink.shape);
    }
    if (plan.shape.op != Op::kShrink && plan.expand.kernel == ExpandKernel::kWide) {
      wide.insert(plan.expand.shape);
    }
  }
  EXPECT_EQ(wgmma.size(), std::size(kWgmmaShapes)) << ::testing::PrintToString(wgmma);
  EXPECT_EQ(mma.size(), std::size(kMmaShapes)) << ::testing::PrintToString(mma);
  EXPECT_EQ(wide.size(), std::size(kWideShapes)) << ::testing::PrintToString(wide);
  EXPECT_EQ(walk.size(), std::size(kWalkShapes)) << ::testing::PrintToString(walk);
}

/// CTAs of the decode expand neither leave most of the chip idle where half of the tiles are there,
/// nor make a second round for a few.
// vLLM's shrink alone knows no columns, which its choice of partials asks for.
TEST(LoraConfig, ShrinkNeedsNoColumns) {
  for (std::int64_t tokens : {1, 8, 64, 256, 1024}) {
    for (int rank : {8, 64, 128, 512}) {
      LoraShape s;
      s.op = Op::kShrink;
      s.num_tokens = tokens;
      s.hidden = 4096;
      s.num_adapters = 8;
      s.num_slices = 3;
      s.max_rank = s.h_columns = rank;
      const LaunchPlan plan = choose(s, Machine());
      EXPECT_EQ(plan.shape, s);
    }
  }
}

/// Slices may have no columns, alone or beside others.
TEST(LoraConfig, SlicesMayHaveNoColumns) {
  for (const std::vector<std::int64_t>& widths :
       {std::vector<std::int64_t>{0}, {0, 0, 0}, {0, 1024}, {1024, 0}}) {
    for (const std::int64_t tokens : {1, 8, 64, 256, 1024, 20'000}) {
      for (const int rank : {4, 8, 16, 32, 64, 128, 512}) {
        for (const Machine& m : kMachines) {
          LoraShape s = shape(tokens, 8, rank, 4096, widths);
          EXPECT_EQ(choose(s, m).shape, s);
          s.op = Op::kExpand;
          EXPECT_EQ(choose(s, m).shape, s);
        }
      }
    }
  }
}

/// No CTA of the one kernel holds so much of K, whose bytes do not fit an int.
TEST(LoraConfig, VeryLongKIsNotOneKernel) {
  for (const std::int64_t turns : {30'000, 60'000, 100'000, 1'000'000}) {
    for (const int rank : {16, 64}) {
      const LoraShape s = shape(1, 1, rank, turns * kOneCluster * kDecodeK, {64});
      EXPECT_FALSE(runs_one(s, {}, 32)) << s.hidden;
      EXPECT_FALSE(choose(s, {}).one_kernel()) << s.hidden;
    }
  }
}

TEST(LoraConfig, APlanSaysWhichKernelsRun) {
  EXPECT_EQ(describe(choose(shape(8192, 16, 64, 4096, {4096, 1024, 1024}), {})).find("lora_apply"),
            0u);
  const std::string decode = describe(choose(shape(1, 1, 16, 14336, {4096}), {}));
  EXPECT_NE(decode.find("1 tokens, 1 adapters, K 14336, N 4096, rank 16"), std::string::npos);
  EXPECT_NE(decode.find("shrink: decode"), std::string::npos) << decode;
  EXPECT_NE(decode.find("expand: decode"), std::string::npos) << decode;
  EXPECT_NE(decode.find("workspace"), std::string::npos) << decode;
  const std::string one = describe(choose(shape(1, 1, 16, 4096, {4096}), {}));
  EXPECT_NE(one.find("one kernel: tiles of 16 tokens, clusters of 8 CTAs"), std::string::npos)
      << one;
  EXPECT_NE(one.find("workspace 0 bytes"), std::string::npos) << one;
}

TEST(LoraConfig, NoTokensTakeNoKernels) {
  alignas(16) float memory[64] = {};
  std::vector<Device> devices = {{}};
#if MORTAR_HAS_CUDA
  devices.push_back({DeviceType::kCUDA, 0});  // of which nothing is asked
#endif
  for (const Device& device : devices) {
    const Tensor a(memory, DType::kBFloat16, {1, 8, 16}, device);
    const Tensor b(memory, DType::kBFloat16, {1, 16, 8}, device);
    const Tensor x(memory, DType::kBFloat16, {0, 16}, device);
    EXPECT_EQ(lora_launch_plan(x, LoraWeights::stacked({{a}}, {{b}}), x, 0),
              "lora_apply of 0 tokens: no kernels");
  }
}

#if MORTAR_HAS_CUDA
TEST(LoraConfig, KernelsForOneTypeOf16BitsRefuseAnyOther) {  // before a launch: no GPU is needed
  for (const DType dtype : {DType::kInt32, DType::kFloat32, DType::kFloat8E4M3}) {
    cuda::ShrinkParams shrink;
    cuda::ExpandParams expand;
    shrink.x.dtype = expand.y.dtype = dtype;
    EXPECT_THROW(cuda::shrink_mma(shrink, {}, {}), Error) << dtype_name(dtype);
    EXPECT_THROW(cuda::expand_decode(expand, {}), Error) << dtype_name(dtype);
    EXPECT_THROW(cuda::apply_decode({expand, {}}, {}), Error) << dtype_name(dtype);
    EXPECT_THROW(cuda::expand_prefill(expand, {}), Error) << dtype_name(dtype);
    EXPECT_THROW(cuda::expand_wide(expand, {}, {}), Error) << dtype_name(dtype);
  }
}

TEST(LoraConfig, KernelsOfMixedTypesRefuseWhatIsNoFloat) {
  for (const DType dtype : {DType::kInt32, DType::kFloat8E4M3}) {
    cuda::ShrinkParams shrink;
    cuda::ExpandParams expand;
    shrink.x.dtype = expand.y.dtype = dtype;
    EXPECT_THROW(cuda::shrink_parts(shrink, {}, {}), Error) << dtype_name(dtype);
    EXPECT_THROW(cuda::expand_parts(expand, {}), Error) << dtype_name(dtype);
  }
}
#endif

}  // namespace
}  // namespace mortar::lora
