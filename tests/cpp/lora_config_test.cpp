// SPDX-License-Identifier: Apache-2.0
// Launch choices of the CUDA backend: bounds that a grid must keep, on the host alone.
#include "lora/config.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "lora/cuda/params.cuh"
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

LoraShape shape(std::int64_t tokens, std::int64_t adapters, int rank, std::int64_t hidden,
                std::vector<std::int64_t> widths) {
  LoraShape s{tokens, hidden, adapters, 0, 0, static_cast<int>(widths.size()), rank, true};
  for (const std::int64_t width : widths) {
    s.sum_widths += width;
    s.max_width = std::max(s.max_width, width);
  }
  return s;
}

TEST(LoraConfig, TilesSuitTheTokensOfAnAdapter) {
  const std::vector<std::int64_t> qkv = {4096, 1024, 1024}, down = {4096};
  EXPECT_EQ(tile_tokens(shape(32, 1, 512, 4096, qkv)), 16);
  EXPECT_EQ(tile_tokens(shape(256, 64, 128, 4096, qkv)), 16);
  EXPECT_EQ(tile_tokens(shape(200, 1, 128, 4096, qkv)), 64);  // weights read 13 times otherwise
  EXPECT_EQ(tile_tokens(shape(512, 256, 64, 4096, qkv)), 16);
  EXPECT_EQ(tile_tokens(shape(512, 16, 16, 4096, qkv)), 64);
  EXPECT_EQ(tile_tokens(shape(1024, 64, 64, 4096, qkv)), 16);
  EXPECT_EQ(tile_tokens(shape(1024, 64, 64, 14336, down)), 64);  // its slabs do not fit
  EXPECT_EQ(tile_tokens(shape(65536, 4096, 16, 4096, qkv)), 64);
  LoraShape parts = shape(512, 21, 16, 4096, qkv);
  EXPECT_EQ(tile_tokens(parts), 16);
  parts.one_type = false;
  EXPECT_EQ(tile_tokens(parts), 64);
}

TEST(LoraConfig, FullTilesOfHighRankHaveTheirSlabsAddedOnce) {
  const std::vector<std::int64_t> qkv = {4096, 1024, 1024};
  EXPECT_TRUE(choose_shrink(shape(16, 1, 64, 4096, qkv)).finish);
  EXPECT_FALSE(choose_shrink(shape(16, 1, 32, 4096, qkv)).finish);
  EXPECT_FALSE(choose_shrink(shape(16, 16, 64, 4096, qkv)).finish);  // tiles of a token each
}

/// CTAs per SM that give_room sets, shrink's first.
std::pair<int, int> room(const LoraShape& s) {
  ShrinkConfig shrink = choose_shrink(s);
  ExpandConfig expand = choose_expand(s);
  give_room(s, shrink, expand);
  return {shrink.per_sm, expand.per_sm};
}

TEST(LoraConfig, OnlyBatchesThatFitTheChipAtOnceHaveRoom) {
  const std::vector<std::int64_t> qkv = {4096, 1024, 1024}, gate_up = {14336, 14336}, down = {4096};
  EXPECT_EQ(room(shape(32, 1, 16, 4096, qkv)), std::pair(1, 0));
  EXPECT_EQ(room(shape(32, 1, 16, 4096, gate_up)), std::pair(1, 0));
  EXPECT_EQ(room(shape(32, 1, 16, 14336, down)), std::pair(1, 1));
  EXPECT_EQ(room(shape(1, 1, 16, 4096, qkv)), std::pair(1, 1));
  EXPECT_EQ(room(shape(4, 4, 16, 4096, qkv)), std::pair(0, 0));
  EXPECT_EQ(room(shape(32, 32, 16, 4096, qkv)), std::pair(0, 0));
  EXPECT_EQ(room(shape(1024, 8, 16, 4096, qkv)), std::pair(0, 0));
  // Above rank 128 a kernel of its own adds the slabs.
  EXPECT_EQ(room(shape(1, 1, 256, 4096, down)), std::pair(0, 0));
}

#if MORTAR_HAS_CUDA
TEST(LoraConfig, KernelsForOneTypeOf16BitsRefuseAnyOther) {  // before a launch: no GPU is needed
  for (const DType dtype : {DType::kInt32, DType::kFloat32, DType::kFloat8E4M3}) {
    cuda::ShrinkParams shrink;
    cuda::ExpandParams expand;
    shrink.x.dtype = expand.y.dtype = dtype;
    EXPECT_THROW(cuda::shrink_mma(shrink, {}, {}), Error) << dtype_name(dtype);
    EXPECT_THROW(cuda::expand_decode(expand, {}), Error) << dtype_name(dtype);
    EXPECT_THROW(cuda::expand_prefill(expand, {}), Error) << dtype_name(dtype);
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
