// SPDX-License-Identifier: Apache-2.0
// Launch choices of the CUDA backend where others were measured to be slower, on the host alone:
// those of few tokens are in lora_choice_few_test.cpp.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "lora/launch_choice.h"
#include "lora/launch_plan.h"
#include "lora_choice_shapes.h"

namespace mortar::lora {
namespace {

/// Where tiles are full, CTAs take fewer columns.
TEST(LoraChoice, FullTilesTakeFewerColumns) {
  const auto cols = [](const LoraShape& s) { return choose(s, {}).expand.cols; };
  EXPECT_EQ(cols(shape(2879, 163, 16, 5120, {5120})), 1024);
  EXPECT_EQ(cols(shape(2605, 115, 16, 4096, {4096})), 1024);
  EXPECT_EQ(cols(shape(1477, 227, 16, 18944, {3584})), 1792);
}

/// Persistent CTAs of shrink where A comes in boxes and their units fill the chip.
TEST(LoraChoice, HighRanksOfManyTokensWalk) {
  const auto rows = [](LoraShape s, bool boxes = true) {
    s.boxes = boxes;
    const LaunchPlan plan = choose(s, {});
    EXPECT_LE(plan.workspace_bytes, most_workspace(s));
    return plan.shrink.kernel == ShrinkKernel::kWalk ? plan.shrink.rows : 0;
  };
  const LoraShape one = shape(7071, 1, 128, 5120, {1280, 1280, 1280});
  EXPECT_EQ(rows(one), 192);
  EXPECT_EQ(rows(one, false), 0);
  EXPECT_EQ(rows(shape(4096, 1, 256, 4096, {4096, 1024, 1024})), 192);
  EXPECT_EQ(rows(shape(3358, 16, 512, 3584, {4736, 4736})), 128);
  EXPECT_EQ(rows(shape(2298, 13, 512, 8192, {7168, 7168})), 128);
  EXPECT_EQ(rows(shape(3996, 7, 512, 2048, {1024})), 192);
  EXPECT_EQ(rows(shape(4177, 27, 512, 2048, {2048})), 128);
  EXPECT_EQ(rows(shape(6516, 8, 256, 1024, {3072, 3072})), 128);
  EXPECT_EQ(rows(shape(4083, 31, 512, 896, {2048, 1024, 1024})), 0);
  EXPECT_EQ(rows(shape(4145, 1, 128, 2048, {512, 128, 128})), 0);
  EXPECT_EQ(rows(shape(1404, 1, 256, 1024, {2048, 1024, 1024})), 0);
  EXPECT_EQ(rows(shape(2048, 4, 128, 4096, {4096, 1024, 1024})), 0);
}

/// Expand takes tiles of 64 from 27 tokens of an adapter on, of ragged ranks from 18 on.
TEST(LoraChoice, TilesOf64MayBeEmptierWhereRanksAreRagged) {
  const auto kernel = [](LoraShape s, bool ragged) {
    s.ragged = ragged;
    return choose(s, {}).expand.kernel;
  };
  const LoraShape gate = shape(1455, 57, 64, 1024, {3072, 3072});
  EXPECT_EQ(kernel(gate, true), ExpandKernel::kPrefill);
  EXPECT_EQ(kernel(gate, false), ExpandKernel::kDecode);
  EXPECT_EQ(kernel(shape(1454, 80, 64, 2048, {512, 128, 128}), true), ExpandKernel::kPrefill);
  EXPECT_EQ(kernel(shape(374, 23, 64, 4096, {4096, 1024, 1024}), true), ExpandKernel::kDecode);
  EXPECT_EQ(kernel(shape(2547, 73, 16, 2048, {2048}), false), ExpandKernel::kPrefill);
}

/// Chunks of K cost a kernel that adds their sums, unless expand can.
TEST(LoraChoice, ChunksCountWhoAddsThem) {
  const auto plan = [](const LoraShape& s) { return choose(s, {}); };
  EXPECT_EQ(plan(shape(409, 7, 32, 1280, {5120})).shrink.partials, Partials::kExpand);
  EXPECT_EQ(plan(shape(3348, 3, 16, 2048, {1024})).shrink.partials, Partials::kExpand);
  EXPECT_EQ(plan(shape(1911, 19, 32, 2048, {2048})).shrink.partials, Partials::kNone);
}

/// Tiles of 16 tokens where these read few weights, tiles of 64 where ranks are high.
TEST(LoraChoice, TilesFollowWhatTheyRead) {
  const auto decodes = [](const LoraShape& s, const Machine& m = {}) {
    return choose(s, m).shrink.kernel == ShrinkKernel::kDecode;
  };
  EXPECT_TRUE(decodes(shape(880, 7, 4, 3072, {1024})));
  EXPECT_TRUE(decodes(shape(492, 6, 8, 4096, {4096, 4096})));
  EXPECT_FALSE(decodes(shape(465, 1, 32, 8192, {2048})));
  EXPECT_FALSE(decodes(shape(512, 10, 16, 4096, {14336, 14336})));
  EXPECT_TRUE(decodes(shape(20, 1, 128, 28672, {8192})));
  EXPECT_FALSE(decodes(shape(30, 1, 128, 28672, {8192})));
  EXPECT_FALSE(decodes(shape(30, 1, 256, 28672, {8192})));
  EXPECT_TRUE(decodes(shape(40, 1, 512, 1024, {1024})));
  // Tiles of 64 of few tokens where they save many reads.
  EXPECT_FALSE(decodes(shape(33, 1, 128, 4096, {4096, 1024, 1024})));
  EXPECT_TRUE(decodes(shape(35, 2, 128, 5120, {13824, 13824})));
  EXPECT_FALSE(decodes(shape(53, 3, 256, 1024, {2048, 1024, 1024})));
  EXPECT_FALSE(decodes(shape(17, 1, 512, 28672, {8192})));
  EXPECT_TRUE(decodes(shape(25, 3, 512, 2048, {2048})));
  EXPECT_TRUE(decodes(shape(13, 1, 512, 3584, {3584})));
  EXPECT_FALSE(decodes(shape(220, 3, 16, 53248, {16384})));
  EXPECT_FALSE(decodes(shape(210, 8, 64, 5120, {5120, 5120, 5120})));
  EXPECT_TRUE(decodes(shape(174, 8, 32, 16384, {16384})));
  const auto expand = [](const LoraShape& s) { return choose(s, {}).expand.kernel; };
  EXPECT_EQ(expand(shape(93, 1, 64, 3584, {18944, 18944})), ExpandKernel::kPrefill);
  EXPECT_EQ(expand(shape(60, 1, 64, 3584, {18944, 18944})), ExpandKernel::kDecode);
  EXPECT_EQ(expand(shape(47, 1, 256, 3584, {4096})), ExpandKernel::kWide);
  EXPECT_EQ(expand(shape(19, 1, 512, 18944, {3584})), ExpandKernel::kDecode);
  LoraShape s = shape(200, 1, 64, 4096, {4096, 1024, 1024});
  s.one_type = false;
  s.float_weights = true;
  EXPECT_EQ(choose(s, {}).shrink.kernel, ShrinkKernel::kWgmma);
  EXPECT_EQ(choose(s, kMachines[1]).shrink.kernel, ShrinkKernel::kParts);
}

/// Ranks of 64 and 128 on wgmma in CTAs of as many rank rows, two an SM.
TEST(LoraChoice, RanksOfPowersOfTwoTakeNarrowCtas) {
  const auto takes = [](const LoraShape& s, Share share) {
    const ShrinkPlan c = choose(s, {}).shrink;
    const WgmmaShape& shape = kWgmmaShapes[c.shape];
    return c.kernel == ShrinkKernel::kWgmma && shape.rows == 64 && shape.share == share;
  };
  EXPECT_TRUE(takes(shape(4723, 56, 64, 2048, {2048}), Share::kHalf));
  EXPECT_TRUE(takes(shape(10921, 239, 64, 8192, {2048}), Share::kHalf));
  EXPECT_TRUE(takes(shape(205, 4, 128, 5120, {5120}), Share::kLeaf));
  EXPECT_TRUE(takes(shape(514, 1, 128, 3072, {1024}), Share::kHalf));
  EXPECT_TRUE(takes(shape(471, 1, 64, 28672, {8192}), Share::kLeaf));
  LoraShape ragged = shape(1454, 80, 64, 2048, {512, 128, 128});
  ragged.ragged = true;
  EXPECT_FALSE(takes(ragged, Share::kHalf));
  EXPECT_TRUE(takes(shape(913, 4, 256, 3584, {3584}), Share::kHalf));
  EXPECT_FALSE(takes(shape(7892, 2, 256, 2048, {2048}), Share::kHalf));
}

/// Above rank 128 CTAs sum all of K where SMs have more than one of them, on wgmma where that takes
/// clearly fewer clocks.
TEST(LoraChoice, HighRanksOfFewTokensWalkOverK) {
  const auto shrink = [](const LoraShape& s) { return choose(s, {}).shrink; };
  EXPECT_EQ(shrink(shape(23, 5, 512, 4096, {3584, 3584})).kernel, ShrinkKernel::kWgmma);
  EXPECT_EQ(shrink(shape(164, 15, 256, 2048, {1024})).kernel, ShrinkKernel::kWgmma);
  EXPECT_EQ(shrink(shape(66, 17, 256, 5120, {5120, 5120, 5120})).kernel, ShrinkKernel::kMma);
  EXPECT_EQ(shrink(shape(3, 98, 512, 18944, {3584})).kernel, ShrinkKernel::kStream);
}

/// B of float32 adapters of low ranks is split once for several tiles, where these are full.
TEST(LoraChoice, FloatWeightsAreKeptForSeveralTiles) {
  const auto expand = [](LoraShape s) {
    s.one_type = false;
    s.float_weights = true;
    return choose(s, {}).expand;
  };
  EXPECT_EQ(expand(shape(5236, 3, 64, 4096, {14336, 14336})), kept_expand(3));
  EXPECT_EQ(expand(shape(1743, 2, 64, 2048, {2048})), kept_expand(1));
  EXPECT_EQ(expand(shape(366, 3, 8, 5120, {13824, 13824})).shape, kWideKeptShape);
  EXPECT_EQ(expand(shape(1955, 42, 4, 3584, {4736, 4736})).kernel, ExpandKernel::kDirect);
  EXPECT_EQ(expand(shape(7071, 1, 128, 5120, {1280, 1280, 1280})).shape, kWideWalkPartsShape);
  EXPECT_EQ(expand(shape(1288, 1, 256, 16384, {16384, 1024, 1024})).shape, kWideWalkPartsShape);
  EXPECT_EQ(expand(shape(5976, 62, 256, 4096, {1024, 256, 256})).shape, kWideWalkPartsShape);
  EXPECT_EQ(expand(shape(866, 6, 256, 4096, {4096})).shape, kWidePairPartsShape);
  EXPECT_EQ(expand(shape(1814, 1, 512, 4096, {4096})).shape, kWidePairPartsShape);
  EXPECT_EQ(expand(shape(2656, 60, 128, 3584, {3584})).shape, kWidePartsShape);
}

/// Float32 adapters under long K leave partials of K chunks where CTAs are too few without, up to
/// what the workspace has room for, several chunks a CTA.
TEST(LoraChoice, FloatWeightsShareLongKOfFewTokens) {
  const auto share = [](LoraShape s) {
    s.one_type = false;
    s.float_weights = true;
    const ShrinkPlan c = choose(s, {}).shrink;
    EXPECT_EQ(c.kernel, ShrinkKernel::kWgmma);
    return std::pair(kWgmmaShapes[c.shape].share, c.leaves);
  };
  EXPECT_EQ(share(shape(411, 1, 256, 28672, {8192})), std::pair(Share::kLeaf, 7));
  EXPECT_EQ(share(shape(673, 1, 256, 16384, {16384})), std::pair(Share::kLeaf, 3));
  EXPECT_EQ(share(shape(1846, 2, 8, 18944, {3584})), std::pair(Share::kLeaf, 5));
  EXPECT_EQ(share(shape(1547, 1, 64, 4096, {4096, 1024, 1024})).first, Share::kHalf);
  EXPECT_EQ(share(shape(11599, 1, 64, 7168, {8192})).first, Share::kHalf);
}

/// Several tiles of an adapter take few CTAs, an SM each.
TEST(LoraChoice, CtasOfSeveralTilesFindAnSmEach) {
  const auto shrink = [](const LoraShape& s) { return choose(s, {}).shrink; };
  const std::vector<std::int64_t> qkv = {4096, 1024, 1024};
  for (const LoraShape& s :
       {shape(60, 1, 16, 4096, {14336, 1024, 1024}), shape(64, 1, 32, 4096, {14336, 14336})}) {
    const ShrinkPlan c = shrink(s);
    EXPECT_EQ(c.kernel, ShrinkKernel::kDecode);
    EXPECT_EQ(c.rows, s.num_slices == 3 ? 48 : 64);
    EXPECT_EQ(c.per_sm, 1);
    EXPECT_EQ(c.partials, Partials::kExpand);
  }
  const ShrinkPlan finished = shrink(shape(49, 1, 128, 2048, {1024}));
  EXPECT_EQ(finished.partials, Partials::kFinish);
  EXPECT_EQ(finished.rows, 32);
  EXPECT_EQ(finished.per_sm, 1);
  EXPECT_EQ(shrink(shape(60, 1, 128, 1024, {3072, 3072})).partials, Partials::kFinish);
  // No clusters make h of low ranks.
  EXPECT_EQ(shrink(shape(17, 1, 16, 53248, {16384})).partials, Partials::kFinish);
  EXPECT_EQ(shrink(shape(1, 5, 32, 53248, {16384})).partials, Partials::kExpand);
}

/// Rank rows that a CTA of shrink multiplies at once: of long K where all CTAs run at once, of
/// short K no more but where that makes them one round.
TEST(LoraChoice, CtasOfShrinkTakeTheRowsOfOneChain) {
  const auto rows = [](const LoraShape& s) { return choose(s, {}).shrink.rows; };
  EXPECT_EQ(rows(shape(6, 12, 64, 18944, {3584})), 64);
  EXPECT_EQ(rows(shape(1, 25, 64, 16384, {53248, 53248})), 64);
  EXPECT_EQ(rows(shape(24, 24, 64, 14336, {4096})), 32);
  EXPECT_EQ(rows(shape(1, 199, 128, 8192, {8192, 1024, 1024})), 64);
  EXPECT_EQ(rows(shape(6, 4, 128, 16384, {4096, 256, 256})), 64);
  EXPECT_EQ(rows(shape(77, 469, 64, 1024, {768, 768})), 64);
  EXPECT_EQ(rows(shape(32, 32, 64, 4096, {4096, 1024, 1024})), 96);
}

/// Of more adapters CTAs of expand are narrow enough to fill the chip.
TEST(LoraChoice, CtasOfManyAdaptersFillTheChip) {
  const auto expand = [](const LoraShape& s) { return choose(s, {}).expand; };
  const ExpandPlan dense = expand(shape(30, 215, 32, 2048, {8192, 8192}));
  EXPECT_EQ(dense.cols, 1024);
  EXPECT_EQ(dense.per_sm, kDenseExpandPerSm);
  EXPECT_EQ(expand(shape(32, 32, 16, 4096, {14336, 14336})).cols, 1792);
  EXPECT_EQ(expand(shape(32, 32, 16, 4096, {4096, 1024, 1024})).cols, 768);
  EXPECT_EQ(expand(shape(25, 178, 64, 2048, {2048})).cols, 128);
  EXPECT_EQ(expand(shape(64, 1, 64, 28672, {8192})).block_cols, 128);
  EXPECT_EQ(expand(shape(23, 4, 64, 18944, {3584})).cluster, kExpandCluster);
}

/// Of few adapters all CTAs of expand run at once, whole stages of columns each.
TEST(LoraChoice, CtasOfFewAdaptersAreOneRound) {
  const auto cols = [](const LoraShape& s) {
    const LaunchPlan plan = choose(s, {});
    return plan.expand.kernel == ExpandKernel::kDecode ? plan.expand.cols : 0;
  };
  EXPECT_EQ(cols(shape(126, 1, 16, 3584, {18944, 18944})), 1024);
  EXPECT_EQ(cols(shape(160, 1, 16, 13312, {16384})), 512);
  EXPECT_EQ(cols(shape(159, 2, 16, 16384, {16384})), 512);
  LoraShape by_8 = shape(47, 3, 4, 8192, {8192, 1024, 1024});
  by_8.b_by_8 = true;
  EXPECT_EQ(cols(by_8), 256);
  by_8 = shape(321, 1, 4, 14336, {4096});
  by_8.b_by_8 = true;
  EXPECT_EQ(cols(by_8), 0);
}

/// Two kernels for many tokens of low ranks, where CTAs of the decode expand all run at once.
TEST(LoraChoice, ExpandAddsChunksOfK) {
  const auto adds = [](const LoraShape& s, const Machine& m = {}) {
    const LaunchPlan plan = choose(s, m);
    return plan.shrink.tile_tokens == 64 && plan.shrink.partials == Partials::kExpand &&
           plan.expand.kernel == ExpandKernel::kDecode;
  };
  EXPECT_TRUE(adds(shape(1024, 8, 16, 4096, {4096, 1024, 1024})));
  EXPECT_TRUE(adds(shape(1024, 8, 16, 14336, {4096})));
  EXPECT_TRUE(adds(shape(409, 7, 32, 1280, {5120})));
  EXPECT_FALSE(adds(shape(1024, 8, 16, 4096, {14336, 14336})));
  EXPECT_FALSE(adds(shape(458, 2, 8, 8192, {8192, 1024, 1024})));
  EXPECT_FALSE(adds(shape(1024, 8, 64, 4096, {4096, 1024, 1024})));
  EXPECT_FALSE(adds(shape(1024, 8, 16, 4096, {4096, 1024, 1024}), kMachines[1]));
  EXPECT_EQ(choose(shape(1024, 8, 16, 4096, {4096, 1024, 1024}), {}).expand.cols, 1024);
  EXPECT_EQ(choose(shape(1024, 8, 16, 14336, {4096}), {}).shrink.rows, 16);
}

/// Where adapters have ranks of their own, most fill no CTA of as many rank rows as the largest
/// has: rank rows of all tiles of a CTA.
TEST(LoraChoice, RaggedRanksTakeSmallCtas) {
  const auto rows = [](LoraShape s, bool ragged) {
    s.ragged = ragged;
    const WgmmaShape& shape = kWgmmaShapes[choose(s, {}).shrink.shape];
    return shape.rows * shape.tiles;
  };
  for (const LoraShape& s : {shape(2975, 40, 64, 2048, {2048, 512, 512}),
                             shape(8000, 100, 64, 4096, {4096, 1024, 1024})}) {
    EXPECT_EQ(rows(s, false), 192);
    EXPECT_EQ(rows(s, true), 96);
  }
}

/// Rings no longer than K, and runs no longer than an adapter has tiles.
TEST(LoraChoice, CtasAreNoLargerThanTheirWork) {
  const LaunchPlan ring = choose(shape(900, 40, 128, 512, {2048}), {});
  EXPECT_EQ(ring.shrink.kernel, ShrinkKernel::kWgmma);
  EXPECT_EQ(kWgmmaShapes[ring.shrink.shape].stages, 6);
  const ShrinkPlan two = choose(shape(1638, 1, 64, 1024, {2048, 1024, 1024}), {}).shrink;
  EXPECT_EQ(kWgmmaShapes[two.shape].per_sm, 2);
  const auto run = [](const LoraShape& s) { return choose(s, {}).expand.log_run; };
  EXPECT_EQ(run(shape(541, 12, 128, 3584, {18944, 18944})), 1);
  EXPECT_EQ(run(shape(1126, 3, 64, 3072, {1024})), 0);
  EXPECT_EQ(run(shape(3385, 8, 16, 3584, {896, 128, 128})), 1);
  EXPECT_EQ(run(shape(681, 2, 128, 8192, {28672, 28672})), 2);
  LoraShape reused = shape(1313, 1, 128, 3584, {18944, 18944});
  reused.op = Op::kExpand;
  EXPECT_EQ(run(reused), 3);
  EXPECT_EQ(choose(shape(431, 12, 16, 4096, {14336, 14336}), {}).expand.kernel,
            ExpandKernel::kPrefill);
  EXPECT_EQ(choose(shape(776, 22, 4, 4096, {4096, 1024, 1024}), {}).expand.kernel,
            ExpandKernel::kDirect);
  const ExpandPlan blocks = choose(shape(32, 23, 128, 1024, {2048, 1024, 1024}), {}).expand;
  EXPECT_EQ(blocks.cols, 256);
  EXPECT_EQ(blocks.block_cols, 128);
  EXPECT_EQ(choose(shape(24, 1, 256, 4096, {3584, 3584}), {}).expand, wide_expand(0));
}

TEST(LoraChoice, WideExpandWalksOverManySteps) {
  const auto walks = [](const LoraShape& s, const Machine& m = {}) {
    const ExpandPlan expand = choose(s, m).expand;
    return expand == wide_expand(kWideWalkShape) || expand == wide_expand(kWideStagedShape);
  };
  EXPECT_TRUE(walks(shape(8860, 5, 256, 1280, {5120})));
  EXPECT_TRUE(walks(shape(7000, 1, 128, 4096, {4096})));
  EXPECT_FALSE(walks(shape(913, 4, 256, 3584, {3584})));
  EXPECT_FALSE(walks(shape(7000, 1, 64, 4096, {4096})));
  EXPECT_TRUE(walks(shape(7200, 1, 256, 3584, {18944, 18944})));
  EXPECT_TRUE(walks(shape(8192, 1, 128, 4096, {14336, 14336})));
  EXPECT_FALSE(walks(shape(1024, 8, 128, 4096, {14336, 14336})));
  EXPECT_FALSE(walks(shape(8860, 5, 256, 1280, {5120}), kMachines[1]));
  EXPECT_TRUE(walks(shape(162, 283, 256, 14336, {4096})));
  EXPECT_FALSE(walks(shape(58, 277, 256, 3072, {1024})));
  const auto expand = [](const LoraShape& s) { return choose(s, {}).expand; };
  EXPECT_EQ(expand(shape(2106, 1, 128, 5120, {5120})), wide_expand(kWideStagedShape));
  EXPECT_EQ(expand(shape(4096, 1, 256, 4096, {4096, 1024, 1024})), wide_expand(kWideStagedShape));
  EXPECT_EQ(expand(shape(7038, 79, 256, 3584, {4736, 4736})), wide_expand(kWideStagedShape));
  EXPECT_EQ(expand(shape(914, 110, 256, 2048, {8192, 8192})), wide_expand(kWideWalkShape));
  EXPECT_EQ(expand(shape(7200, 1, 512, 3584, {18944})), wide_expand(kWideWalkShape));
}

/// CTAs of the persistent expand share B, where the copy engine takes it, if many of its bytes are
/// read again.
TEST(LoraChoice, WideExpandSharesManyBytesOfB) {
  const auto cluster = [](LoraShape s) {
    s.b_boxes = true;
    return choose(s, {}).expand.cluster;
  };
  EXPECT_EQ(cluster(shape(3104, 1, 512, 8192, {28672, 28672})), 2);
  EXPECT_EQ(cluster(shape(9641, 15, 256, 1024, {3072, 3072})), 2);
  EXPECT_EQ(cluster(shape(10954, 105, 512, 1024, {4096})), 2);
  EXPECT_EQ(cluster(shape(1412, 8, 256, 4096, {4096})), 1);
  EXPECT_EQ(cluster(shape(283, 8, 256, 2048, {8192})), 1);
  EXPECT_EQ(choose(shape(3104, 1, 512, 8192, {28672, 28672}), {}).expand.cluster, 1);
}

/// Ranks 33 to 128 whose CTAs all run at once take a step each, or a tile or two on wgmma.
TEST(LoraChoice, FewStepsOfHighRanksAreOneRound) {
  const auto expand = [](const LoraShape& s) { return choose(s, {}).expand; };
  const ExpandPlan one_step = expand(shape(455, 3, 64, 3072, {1024}));
  EXPECT_EQ(one_step.kernel, ExpandKernel::kPrefill);
  EXPECT_EQ(one_step.log_run, 0);
  for (const auto& [s, tiles] : {std::pair{shape(200, 1, 128, 4096, {4096, 1024, 1024}), 1},
                                 {shape(126, 1, 128, 4096, {8192, 8192}), 1},
                                 {shape(71, 1, 128, 4096, {1024, 256, 256}), 1},
                                 {shape(300, 1, 96, 4096, {4096}), 1},
                                 {shape(63, 2, 128, 8192, {8192}), 1},
                                 {shape(538, 1, 64, 3584, {3584}), 1},
                                 {shape(191, 1, 64, 3584, {3584, 512, 512}), 1},
                                 {shape(476, 5, 64, 2048, {2048, 512, 512}), 1},
                                 {shape(896, 18, 128, 2048, {1024}), 1},
                                 {shape(800, 1, 128, 4096, {4096}), 2}}) {
    const ExpandPlan c = expand(s);
    EXPECT_EQ(c.kernel, ExpandKernel::kWide) << describe(choose(s, {}));
    EXPECT_EQ(kWideShapes[c.shape].tiles, tiles) << describe(choose(s, {}));
  }
  EXPECT_EQ(expand(shape(236, 3, 64, 3584, {3584})).kernel, ExpandKernel::kPrefill);
  EXPECT_EQ(expand(shape(219, 5, 64, 512, {2048})).kernel, ExpandKernel::kDecode);
  EXPECT_EQ(expand(shape(111, 2, 128, 2048, {512, 128, 128})).kernel, ExpandKernel::kDecode);
  EXPECT_EQ(expand(shape(800, 32, 128, 4096, {4096})).kernel, ExpandKernel::kDecode);
}

/// K chunks of many rank rows come several to a CTA where they would not all run at once, or where
/// partials of single ones do not fit the workspace.
TEST(LoraChoice, ChunksOfManyRowsShareCtas) {
  const auto leaves = [](const LoraShape& s) {
    const ShrinkPlan c = choose(s, {}).shrink;
    EXPECT_EQ(c.partials, Partials::kFinish) << describe(choose(s, {}));
    return c.leaves;
  };
  EXPECT_EQ(leaves(shape(76, 1, 256, 53248, {16384})), 4);
  EXPECT_EQ(leaves(shape(471, 1, 64, 28672, {8192})), 2);
  EXPECT_EQ(leaves(shape(663, 1, 64, 53248, {16384})), 5);
  EXPECT_EQ(leaves(shape(106, 1, 512, 53248, {16384})), 18);
  EXPECT_EQ(leaves(shape(1281, 9, 4, 13312, {16384})), 1);
}

/// One tile a CTA where all of these run at once, and of rows of y of any address.
TEST(LoraChoice, WideExpandFillsTheChip) {
  const auto expand = [](const LoraShape& s) { return choose(s, {}).expand; };
  EXPECT_EQ(expand(shape(249, 3, 256, 4096, {4096})), wide_expand(0));
  EXPECT_EQ(expand(shape(378, 1, 512, 4096, {8192})), wide_expand(1));
  EXPECT_EQ(expand(shape(604, 1, 512, 4096, {4096})), wide_expand(1));
  EXPECT_EQ(expand(shape(551, 3, 256, 896, {3584})), wide_expand(0));
  LoraShape any_y = shape(604, 1, 512, 4096, {4096});
  any_y.aligned_y = false;
  EXPECT_EQ(expand(any_y), wide_expand(0));
  EXPECT_EQ(expand(shape(54, 1, 256, 4096, {4096})), wide_expand(0));
}

}  // namespace
}  // namespace mortar::lora
