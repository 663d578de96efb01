// SPDX-License-Identifier: Apache-2.0
// Launch choices of the CUDA backend for few tokens where others were measured to be slower, on the
// host alone.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "lora/launch_choice.h"
#include "lora/launch_plan.h"
#include "lora_choice_shapes.h"

namespace mortar::lora {
namespace {

/// lora_apply is one kernel for few tiles of ranks up to 64 whose clusters all run at once.
TEST(LoraChoice, OneKernelIsChosenWhereItIsFaster) {
  const std::vector<std::int64_t> o = {4096}, qkv = {4096, 1024, 1024}, gate_up = {14336, 14336};
  const auto cols = [](const LoraShape& s, const Machine& m = {}) {
    const LaunchPlan plan = choose(s, m);
    return plan.one_kernel() ? plan.expand.cols : 0;
  };
  for (const auto& [tokens, adapters, most] : {std::tuple{1, 1, 256},
                                               {4, 4, 512},
                                               {8, 8, 512},
                                               {16, 1, 256},
                                               {64, 1, 512},
                                               {64, 16, 512},
                                               {32, 32, 512}}) {
    EXPECT_EQ(cols(shape(tokens, adapters, 16, 4096, o)), most) << tokens << " " << adapters;
  }
  EXPECT_EQ(cols(shape(1, 1, 16, 4096, qkv)), 256);
  EXPECT_EQ(cols(shape(64, 1, 32, 4096, qkv)), 512);
  EXPECT_EQ(cols(shape(146, 1, 64, 4096, o)), 512);
  EXPECT_EQ(cols(shape(23, 1, 64, 3584, {4736, 4736})), 512);
  EXPECT_EQ(cols(shape(1, 1, 16, 4096, gate_up)), 512);
  EXPECT_EQ(cols(shape(30, 5, 4, 768, {1024})), 128);
  // A cluster for each tile and slice is no more than there must be.
  EXPECT_EQ(cols(shape(8, 8, 16, 4096, qkv)), 512);
  EXPECT_EQ(cols(shape(40, 369, 8, 4096, o)), 512);
  EXPECT_EQ(cols(shape(13, 7, 4, 18944, {3584})), 512);
  EXPECT_EQ(cols(shape(8, 8, 16, 14336, o)), 512);
  EXPECT_EQ(cols(shape(46, 24, 16, 8192, {2048})), 256);
  // As many CTAs as the chip holds, where a model's decode step has no such batch.
  EXPECT_EQ(cols(shape(146, 1, 32, 4096, {1024, 256, 256})), 128);
  EXPECT_EQ(cols(shape(415, 13, 64, 4096, o)), 0);
  EXPECT_EQ(cols(shape(422, 2, 16, 2048, {1024})), 128);
  EXPECT_EQ(cols(shape(223, 1, 32, 8192, {2048})), 256);
  for (const LoraShape& s :
       {shape(32, 32, 16, 4096, qkv), shape(146, 1, 32, 4096, qkv), shape(32, 32, 64, 4096, qkv),
        shape(5, 1, 64, 7168, o), shape(64, 1, 16, 4096, gate_up), shape(14, 14, 16, 14336, o),
        shape(1, 1, 128, 4096, o), shape(88, 12, 4, 4096, qkv), shape(152, 6, 4, 14336, o),
        shape(256, 64, 16, 4096, o)}) {
    EXPECT_EQ(cols(s), 0) << describe(choose(s, {}));
  }
  EXPECT_EQ(cols(shape(1, 1, 16, 4096, o), kMachines[1]), 0);
  LoraShape s = shape(1, 1, 16, 4096, o);
  s.aligned_y = false;
  EXPECT_EQ(cols(s), 0);
  s.aligned_y = true;
  s.op = Op::kShrink;
  EXPECT_EQ(cols(s), 0);
}

/// The decode shrink takes fewer stages where more of its CTAs have to run at once.
TEST(LoraChoice, StagesOfTheDecodeShrinkFollowItsCtas) {
  const auto stages = [](const LoraShape& s) { return choose(s, {}).shrink.stages; };
  EXPECT_EQ(stages(shape(256, 64, 16, 4096, {4096, 1024, 1024})), kFewDecodeStages);
  EXPECT_EQ(stages(shape(32, 32, 16, 4096, {4096, 1024, 1024})), kDecodeStages);
  EXPECT_EQ(stages(shape(256, 64, 64, 4096, {4096, 1024, 1024})), kFewDecodeStages);
  EXPECT_EQ(stages(shape(67, 61, 32, 2048, {512, 128, 128})), kDecodeStages);
  EXPECT_EQ(stages(shape(256, 64, 16, 14336, {4096})), kDecodeStages);
  const std::string text = describe(choose(shape(256, 64, 16, 4096, {4096, 1024, 1024}), {}));
  EXPECT_NE(text.find("48 rank rows, 2 stages"), std::string::npos) << text;
}

/// Its CTAs take several K chunks of low ranks where those of both kernels would be too many, and x
/// of half a tile at a time where there are rounds of them.
TEST(LoraChoice, LowRanksShareCtasOfTheDecodeShrink) {
  const auto plan = [](const LoraShape& s) { return choose(s, {}).shrink; };
  const auto taken = [&](const LoraShape& s) {
    return std::pair(plan(s).leaves, plan(s).x_tokens);
  };
  EXPECT_EQ(taken(shape(22, 251, 4, 8192, {8192, 1024, 1024})), std::pair(2, 16));
  EXPECT_EQ(taken(shape(67, 358, 4, 8192, {2048})), std::pair(4, 8));
  EXPECT_EQ(taken(shape(10, 109, 4, 16384, {16384})), std::pair(1, 16));
  EXPECT_EQ(taken(shape(15, 485, 4, 53248, {16384})), std::pair(2, 8));
  EXPECT_EQ(taken(shape(36, 1, 16, 18944, {3584})), std::pair(2, 16));
  EXPECT_EQ(taken(shape(1, 1, 4, 53248, {16384})), std::pair(4, 16));
  EXPECT_EQ(plan(shape(1, 1, 4, 53248, {16384})).rows, 4);
  EXPECT_EQ(taken(shape(32, 1, 16, 14336, {4096})), std::pair(1, 16));
  EXPECT_EQ(taken(shape(33, 9, 4, 28672, {8192})), std::pair(1, 16));
  EXPECT_EQ(taken(shape(22, 251, 64, 8192, {8192})), std::pair(1, 16));
  EXPECT_EQ(taken(shape(40, 40, 4, 4096, {4096})), std::pair(1, 16));
  EXPECT_EQ(taken(shape(79, 28, 4, 18944, {3584})), std::pair(2, 16));
  EXPECT_EQ(taken(shape(111, 334, 8, 8192, {8192})), std::pair(2, 8));
}

/// It runs in fewer registers where its CTAs and expand's would not find room for all of them.
TEST(LoraChoice, RegistersOfTheDecodeShrinkFollowTheCtasOfBothKernels) {
  const auto per_sm = [](const LoraShape& s) { return choose(s, {}).shrink.per_sm; };
  EXPECT_EQ(per_sm(shape(59, 104, 8, 4096, {16384})), kDenseShrinkPerSm);
  EXPECT_EQ(per_sm(shape(44, 325, 8, 3072, {1024})), 0);
  EXPECT_EQ(per_sm(shape(31, 467, 16, 2048, {512, 128, 128})), 0);
  EXPECT_EQ(per_sm(shape(59, 104, 8, 8192, {16384})), 0);
}

/// Four CTAs of the decode expand share an SM where each has long to stream.
TEST(LoraChoice, ManyColumnsOfHigherRanksShareAnSm) {
  const auto expand = [](const LoraShape& s, const Machine& m = {}) {
    const ExpandPlan c = choose(s, m).expand;
    EXPECT_EQ(c.kernel, ExpandKernel::kDecode);
    EXPECT_EQ(c.stages, c.per_sm == kDenseExpandPerSm && s.max_rank > 32 ? kDenseExpandStages
                                                                         : kDecodeExpandStages);
    return c;
  };
  const ExpandPlan ragged = expand(shape(242, 222, 64, 3584, {3584, 512, 512}));
  EXPECT_EQ(ragged.per_sm, kDenseExpandPerSm);
  EXPECT_EQ(ragged.cols, 1792 / 2);
  EXPECT_EQ(expand(shape(45, 71, 64, 768, {1024})).per_sm, kDenseExpandPerSm);
  EXPECT_EQ(expand(shape(6, 1, 64, 16384, {53248, 53248})).per_sm, 0);
  EXPECT_EQ(expand(shape(512, 256, 16, 4096, {14336, 14336})).per_sm, kDenseExpandPerSm);
  const LoraShape high = shape(150, 83, 128, 5120, {5120});
  EXPECT_EQ(expand(high).per_sm, kDenseExpandPerSm);
  EXPECT_EQ(expand(high).block_cols, 128);
  Machine small;
  small.arch = 86;
  small.max_smem = 99 << 10;
  small.sm_smem = 100 << 10;
  EXPECT_EQ(expand(high, small).block_cols, 64);
}

/// Groups of columns share an MMA step where there are many columns, and few tokens of an adapter.
TEST(LoraChoice, GroupsOfColumnsShareAStep) {
  const auto groups = [](const LoraShape& s, const Machine& m = {}) {
    const ExpandPlan expand = choose(s, m).expand;
    return expand.kernel == ExpandKernel::kDirect ? expand.groups : 0;
  };
  EXPECT_EQ(groups(shape(230, 135, 4, 5120, {13824, 13824})), 4);
  EXPECT_EQ(groups(shape(230, 135, 4, 5120, {13824, 13824}), kMachines[1]), 1);
  EXPECT_EQ(groups(shape(240, 81, 4, 3584, {3584, 512, 512})), 1);
  LoraShape one = shape(1, 5, 4, 13824, {5120});  // by 8 bytes
  one.b_by_8 = true;
  EXPECT_EQ(groups(one), 4);
  EXPECT_EQ(groups(shape(267, 112, 4, 4096, {14336, 14336})), 4);
  EXPECT_EQ(groups(shape(1308, 110, 4, 1024, {3072, 3072})), 1);
  EXPECT_EQ(groups(shape(125, 151, 8, 4096, {14336, 14336})), 1);
}

/// The device cuts columns of expand where there may be far fewer tiles than the host assumes.
TEST(LoraChoice, ManyAdaptersLeaveTheCutOfColumnsToTheDevice) {
  const auto round = [](const LoraShape& s) { return choose(s, {}).expand.round; };
  EXPECT_EQ(round(shape(192, 125, 16, 4096, {16384})), 514);
  EXPECT_EQ(round(shape(407, 132, 32, 4736, {3584})), 514);
  EXPECT_EQ(round(shape(107, 413, 16, 4736, {3584})), 0);
  EXPECT_EQ(round(shape(200, 3, 16, 14336, {4096})), 0);
  EXPECT_EQ(round(shape(83, 306, 128, 4096, {4096})), 0);
  LoraShape s = shape(192, 125, 16, 4096, {16384});
  s.segments = true;
  EXPECT_EQ(round(s), 0);
}

/// Ragged ranks: columns of which all CTAs make one round, and no few more than that; up to four
/// tiles as many; half as many rank rows where there is one slice.
TEST(LoraChoice, CtasOfRaggedRanksMakeOneRound) {
  const auto plan = [](LoraShape s, bool ragged) {
    s.ragged = ragged;
    return choose(s, {});
  };
  const auto cols = [&](const LoraShape& s) { return plan(s, true).expand.cols; };
  EXPECT_EQ(cols(shape(38, 323, 64, 896, {3584})), 384);
  EXPECT_EQ(cols(shape(37, 410, 64, 3584, {3584})), 256);
  EXPECT_EQ(cols(shape(11, 8, 64, 16384, {53248, 53248})), 1664);
  EXPECT_EQ(cols(shape(242, 222, 64, 3584, {3584, 512, 512})), 1792 / 2);
  EXPECT_EQ(cols(shape(46, 11, 64, 16384, {16384})), 384);
  EXPECT_EQ(cols(shape(172, 11, 64, 2048, {8192, 8192})), 512);
  const LoraShape four = shape(4, 7, 64, 16384, {53248, 53248});
  EXPECT_EQ(plan(four, true).expand.per_sm, kDenseExpandPerSm);
  EXPECT_EQ(plan(four, false).expand.per_sm, 0);
  EXPECT_EQ(plan(shape(1, 178, 64, 16384, {53248, 53248}), true).expand.per_sm, 0);
  const LoraShape narrow = shape(108, 20, 64, 3584, {3584});
  EXPECT_EQ(plan(narrow, true).shrink.rows, 32);
  EXPECT_EQ(plan(narrow, false).shrink.rows, 64);
  EXPECT_EQ(plan(shape(135, 432, 64, 2048, {2048}), true).shrink.rows, 64);
  EXPECT_EQ(plan(shape(218, 9, 64, 4096, {4096}), true).shrink.rows, 64);
  EXPECT_EQ(plan(shape(77, 469, 64, 1024, {768, 768}), true).shrink.rows, 64);
  const LoraShape more = shape(740, 84, 64, 1024, {2048, 1024, 1024});
  EXPECT_EQ(plan(more, true).shrink.rows, 64);
  EXPECT_EQ(plan(more, false).shrink.rows, 192);
}

/// Persistent warps of shrink take tiles that may be and are not, of few tokens each.
TEST(LoraChoice, ManyTilesOfShrinkHavePersistentWarps) {
  const auto streams = [](const LoraShape& s, const Machine& m = {}) {
    return choose(s, m).shrink.kernel == ShrinkKernel::kStream;
  };
  LoraShape s = shape(296, 434, 64, 5120, {1280, 1280, 1280});
  s.ragged = true;
  EXPECT_TRUE(streams(s));
  EXPECT_FALSE(streams(s, kMachines[1]));
  EXPECT_TRUE(streams(shape(557, 374, 8, 14336, {4096})));
  EXPECT_FALSE(streams(shape(8, 8, 16, 4096, {4096, 1024, 1024})));
  EXPECT_FALSE(streams(shape(1024, 64, 32, 14336, {4096})));
  LoraShape heavy = shape(920, 298, 64, 13824, {5120});  // partials of the largest rank
  EXPECT_FALSE(streams(heavy));
  heavy.ragged = true;
  EXPECT_TRUE(streams(heavy));
  s.segments = true;
  EXPECT_FALSE(streams(s));
  // Several CTAs an SM, where tiles or rank rows may be fewer than the host has to assume.
  LoraShape ragged = shape(36, 261, 64, 8192, {8192});
  EXPECT_FALSE(streams(ragged));
  ragged.ragged = true;
  EXPECT_TRUE(streams(ragged));
  EXPECT_EQ(choose(ragged, {}).shrink.per_sm, 3);
  EXPECT_TRUE(streams(shape(34, 164, 16, 16384, {16384})));
  EXPECT_FALSE(streams(shape(32, 32, 16, 14336, {4096})));
  EXPECT_FALSE(streams(shape(22, 60, 16, 16384, {16384, 1024, 1024})));
  LoraShape slices = shape(142, 40, 64, 5120, {5120, 5120, 5120});
  EXPECT_FALSE(streams(slices));
  slices.ragged = true;
  EXPECT_TRUE(streams(slices));
  // Two tiles for each thread that lists them, at most.
  LoraShape tiles = shape(184, 373, 64, 4736, {3584});
  tiles.ragged = true;
  EXPECT_EQ(choose(tiles, {}).shrink.per_sm, 2);
  // One CTA an SM in front of a long expand.
  EXPECT_TRUE(streams(shape(51, 18, 16, 16384, {53248, 53248})));
  EXPECT_EQ(choose(shape(51, 18, 16, 16384, {53248, 53248}), {}).shrink.per_sm, 1);
  EXPECT_EQ(choose(shape(21, 13, 64, 53248, {16384}), {}).shrink.per_sm, 1);
}

/// CTAs of expand run in fewer registers where that lets all of them start beside those of shrink.
TEST(LoraChoice, ShortCtasOfExpandFindRoomBesideShrink) {
  const auto dense = [](const LoraShape& s) {
    return choose(s, {}).expand.per_sm == kDenseExpandPerSm;
  };
  EXPECT_TRUE(dense(shape(30, 15, 16, 3584, {3584, 512, 512})));
  EXPECT_TRUE(dense(shape(8, 163, 64, 3584, {4736, 4736})));
  EXPECT_TRUE(dense(shape(26, 36, 8, 2048, {2048, 512, 512})));
  EXPECT_FALSE(dense(shape(44, 325, 8, 3072, {1024})));
  EXPECT_FALSE(dense(shape(126, 1, 16, 3584, {18944, 18944})));
}

/// So do short ones that are a little more than a round of three CTAs an SM.
TEST(LoraChoice, MoreThanARoundOfExpandRunsInFewerRegisters) {
  const auto per_sm = [](const LoraShape& s) { return choose(s, {}).expand.per_sm; };
  EXPECT_EQ(per_sm(shape(110, 109, 16, 3584, {3584, 512, 512})), kDenseExpandPerSm);
  EXPECT_EQ(per_sm(shape(110, 144, 32, 4736, {3584})), kDenseExpandPerSm);
  EXPECT_EQ(per_sm(shape(64, 80, 16, 18944, {3584})), 0);
  EXPECT_EQ(per_sm(shape(86, 81, 16, 5120, {13824, 13824})), 0);
}

/// Persistent CTAs expand low ranks of tiles that are mostly not full, behind a shrink that sums
/// all of K, unless that would wait for its steps.
TEST(LoraChoice, LowRanksOfManyAdaptersHavePersistentCtas) {
  const auto plan = [](LoraShape s, bool runs = true) {
    s.b_runs = runs;
    const LaunchPlan chosen = choose(s, {});
    EXPECT_NE(chosen.shrink.partials, Partials::kExpand);
    return chosen;
  };
  const auto bulk = [](const LaunchPlan& p) { return p.expand.kernel == ExpandKernel::kBulk; };
  const LoraShape low = shape(10871, 317, 4, 1024, {3072, 3072});
  EXPECT_TRUE(bulk(plan(low)));
  EXPECT_EQ(plan(low).shrink.shape, kNarrowMma);
  EXPECT_FALSE(bulk(plan(low, false)));
  EXPECT_TRUE(bulk(plan(shape(1209, 441, 16, 2048, {2048}))));
  EXPECT_FALSE(bulk(plan(shape(14536, 20, 8, 2048, {2048, 2048}))));
  const LaunchPlan finished = plan(shape(846, 71, 4, 5120, {5120, 5120, 5120}));
  EXPECT_TRUE(bulk(finished));
  EXPECT_EQ(finished.shrink.kernel, ShrinkKernel::kDecode);
  EXPECT_EQ(finished.shrink.partials, Partials::kFinish);
  LoraShape few = shape(488, 484, 4, 4096, {4096});
  few.b_runs = true;
  EXPECT_EQ(choose(few, {}).expand.kernel, ExpandKernel::kDirect);
  EXPECT_EQ(choose(few, {}).expand.cols, 2048);  // not 3,072 and 1,024
  EXPECT_FALSE(bulk(plan(shape(4624, 160, 16, 1024, {512, 256, 256}))));
  EXPECT_EQ(plan(shape(5841, 403, 16, 1024, {512, 256, 256})).shrink.shape, 0);
}

/// So do they behind a shrink on wgmma, of tiles of 64 that are mostly not full and of much y;
/// where that would take K chunks of such tiles, tiles of 16 do, if they do not read A too often.
TEST(LoraChoice, PersistentCtasExpandWhatTilesOf64HaveShrunk) {
  const auto plan = [](LoraShape s) {
    s.b_runs = true;
    return choose(s, {});
  };
  const auto shrink = [&](const LoraShape& s) {
    const LaunchPlan p = plan(s);
    EXPECT_EQ(p.expand.kernel, ExpandKernel::kBulk);
    EXPECT_NE(p.shrink.partials, Partials::kExpand);
    return p.shrink.kernel;
  };
  EXPECT_EQ(shrink(shape(11676, 193, 8, 1024, {2048, 1024, 1024})), ShrinkKernel::kWgmma);
  EXPECT_EQ(shrink(shape(9445, 322, 8, 5120, {1280, 1280, 1280})), ShrinkKernel::kWgmma);
  EXPECT_EQ(shrink(shape(1053, 18, 16, 7168, {8192})), ShrinkKernel::kWgmma);
  EXPECT_EQ(shrink(shape(1257, 32, 4, 16384, {16384})), ShrinkKernel::kDecode);
  EXPECT_EQ(shrink(shape(948, 21, 4, 18944, {3584})), ShrinkKernel::kDecode);
  EXPECT_EQ(shrink(shape(521, 106, 16, 8192, {7168, 7168})), ShrinkKernel::kStream);
  EXPECT_EQ(shrink(shape(705, 30, 16, 8192, {8192, 1024, 1024})), ShrinkKernel::kWgmma);
  EXPECT_EQ(shrink(shape(964, 68, 16, 5120, {13824, 13824})), ShrinkKernel::kDecode);
  for (const LoraShape& s :
       {shape(2389, 3, 16, 5120, {1280, 1280, 1280}), shape(4884, 51, 4, 1024, {512, 256, 256}),
        shape(818, 50, 16, 5120, {5120})}) {
    EXPECT_NE(plan(s).expand.kernel, ExpandKernel::kBulk);
  }
}

/// Chunks of K on wgmma for few tokens of several slices, read by expand in tiles of 16.
TEST(LoraChoice, FewTokensOfSeveralSlicesTakeChunksOnWgmma) {
  const auto chunks = [](const LoraShape& s, const Machine& m = {}) {
    const ShrinkPlan c = choose(s, m).shrink;
    return c.kernel == ShrinkKernel::kWgmma && kWgmmaShapes[c.shape].share == Share::kLeaf;
  };
  EXPECT_TRUE(chunks(shape(122, 1, 64, 16384, {16384, 1024, 1024})));
  EXPECT_FALSE(chunks(shape(122, 8, 64, 16384, {16384, 1024, 1024})));
  EXPECT_FALSE(chunks(shape(141, 1, 32, 14336, {4096})));
  EXPECT_FALSE(chunks(shape(122, 1, 64, 16384, {16384, 1024, 1024}), kMachines[1]));
}

/// Few tokens of float32 adapters: tiles of 16 wherever their kernels start sooner, rank rows for
/// as many CTAs as run at once, chunks of K together where those are more, B straight into
/// fragments for low ranks, wgmma for high ones, and else fewer columns of those.
TEST(LoraChoice, FloatWeightsOfFewTokensFillTheChip) {
  const auto plan = [](LoraShape s) {
    s.one_type = false;
    s.float_weights = true;
    return choose(s, {});
  };
  EXPECT_EQ(plan(shape(1262, 26, 16, 3072, {1024})).expand.tile_tokens, 16);
  EXPECT_EQ(plan(shape(1934, 67, 32, 5120, {1280, 1280, 1280})).expand.tile_tokens, 64);
  EXPECT_EQ(plan(shape(839, 24, 16, 53248, {16384})).shrink.tile_tokens, 64);
  EXPECT_EQ(plan(shape(79, 7, 64, 8192, {8192})).shrink.rows, 32);
  EXPECT_EQ(plan(shape(60, 74, 4, 4096, {4096, 1024, 1024})).shrink.leaves, 2);
  EXPECT_EQ(plan(shape(57, 81, 64, 4096, {4096})).shrink.leaves, 1);
  EXPECT_EQ(plan(shape(720, 288, 4, 18944, {3584})).shrink.leaves, 4);
  EXPECT_EQ(plan(shape(29, 172, 4, 3584, {18944, 18944})).expand.kernel, ExpandKernel::kDirect);
  EXPECT_EQ(plan(shape(28, 1, 512, 1024, {2048, 1024, 1024})).expand.shape, kWidePairPartsShape);
  EXPECT_EQ(plan(shape(59, 1, 512, 5120, {13824, 13824})).expand.shape, kWidePartsShape);
  EXPECT_EQ(plan(shape(111, 139, 256, 896, {3584})).expand.cols, 128);
  EXPECT_EQ(plan(shape(720, 125, 64, 1024, {2048, 1024, 1024})).expand.cols, 512);
}

/// More rank rows where CTAs of fewer found no SM each beside expand's.
TEST(LoraChoice, CtasOfShrinkHaveAnSmEach) {
  const auto expect = [](const LoraShape& s, int rows, int per_sm) {
    const ShrinkPlan c = choose(s, {}).shrink;
    EXPECT_EQ(c.kernel, ShrinkKernel::kDecode);
    EXPECT_EQ(c.rows, rows) << describe(choose(s, {}));
    EXPECT_EQ(c.per_sm, per_sm) << describe(choose(s, {}));
  };
  expect(shape(5, 1, 128, 5120, {1280, 1280, 1280}), 64, 1);
  expect(shape(11, 1, 256, 2048, {512, 128, 128}), 64, 1);
  expect(shape(15, 1, 128, 3584, {4096}), 16, 1);
}

/// Rank 128 of some tokens of an adapter on wgmma, where tiles of 16 would be rounds of CTAs.
TEST(LoraChoice, ManyRankRowsOfSomeTokensOnWgmma) {
  const auto kernel = [](const LoraShape& s) { return choose(s, {}).shrink.kernel; };
  EXPECT_EQ(kernel(shape(72, 5, 128, 16384, {16384, 1024, 1024})), ShrinkKernel::kWgmma);
  EXPECT_NE(kernel(shape(9, 33, 128, 4096, {3584, 3584})), ShrinkKernel::kWgmma);
  EXPECT_NE(kernel(shape(4, 24, 128, 16384, {16384, 1024, 1024})), ShrinkKernel::kWgmma);
}

/// Where the copy engine takes h and B, a step a CTA of up to three rounds, in boxes unless most
/// SMs have two CTAs of few tokens; of two tiles an SM each where that asks less of L2.
TEST(LoraChoice, WideStepsOfBoxes) {
  const auto expect = [](LoraShape s, int which) {
    s.boxes = s.b_boxes = true;
    ExpandPlan want = wide_expand(which);
    want.boxes = true;
    EXPECT_EQ(choose(s, {}).expand, want) << describe(choose(s, {}));
  };
  expect(shape(50, 1, 512, 3584, {896, 128, 128}), 0);
  expect(shape(514, 1, 128, 3072, {1024}), 0);
  expect(shape(315, 2, 512, 3584, {3584, 512, 512}), 0);
  expect(shape(76, 1, 256, 53248, {16384}), 0);
  expect(shape(628, 1, 512, 1024, {2048, 1024, 1024}), 1);
  expect(shape(260, 1, 512, 8192, {8192}), 1);
  expect(shape(398, 1, 512, 1024, {2048, 1024, 1024}), kWideAloneShape);
  expect(shape(367, 1, 512, 5120, {5120, 5120, 5120}), kWideAloneShape);
  expect(shape(79, 1, 256, 3584, {18944, 18944}), kWideAloneShape);
  EXPECT_EQ(choose(shape(398, 1, 512, 1024, {2048, 1024, 1024}), {}).expand, wide_expand(0));
}

}  // namespace
}  // namespace mortar::lora
