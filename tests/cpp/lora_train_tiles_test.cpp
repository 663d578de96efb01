// SPDX-License-Identifier: Apache-2.0
// No tile of the products of LoRA training's wide ranks changes a bit, on a GPU.
#include <tuple>

#if MORTAR_HAS_CUDA
#include "lora/train/cuda/expand_choice.h"
#include "lora_train_backward.h"
#include "lora_train_forward.h"

namespace mortar::testing {
namespace {

using namespace lora::train::cuda;

class LoraTrainTiles : public ::testing::TestWithParam<Device> {};

// Of many ranks a tile of y waits in registers until the next one of its cluster is multiplied.
TEST_P(LoraTrainTiles, NoTileThatWaitsChangesABit) {
  constexpr int kRank = 456;
  TrainCase c;
  c.rows = 1810;
  c.hidden = 64;
  c.widths = {2184};
  c.ranks = {kRank};
  c.x = c.w = c.y = DType::kBFloat16;
  ASSERT_TRUE(defers_tile(kRank));
  TrainStep first(c, GetParam()), other(c, GetParam());
  const ExpandPlan narrow = product_expand(c.widths[0], {128, 1});
  run_planned(&first, {nullptr, &narrow});
  const ExpandPlan wide = product_expand(c.widths[0], {256, 1});
  run_planned(&other, {nullptr, &wide});
  expect_same_forward(first, other, describe(wide));
}

// Products leave partial sums of dA and dB or store them, in tiles of either width, whose sums wait
// in memory from chunk to chunk, and side by side.
TEST_P(LoraTrainTiles, NoTileOfStoredSumsChangesABit) {
  constexpr DType kBF16 = DType::kBFloat16, kF16 = DType::kFloat16;
  for (const auto& [rank, dtype, chunk_rows] :
       {std::tuple{512, kBF16, 128}, {136, kF16, 128}, {256, kBF16, 192}, {264, kF16, 384}}) {
    TrainCase c;
    c.x = c.w = c.y = c.grad = c.dx = dtype;
    c.rows = 330;
    c.hidden = 504;
    c.widths = {520};
    c.ranks = {rank};
    BackwardPlan plan;
    plan.products = true;
    plan.dy = plan.x = {kChainPanels, chunk_rows};
    plan.stores = StoredBy::kPartials;
    TrainStep first(c, GetParam());
    first.run_forward();
    run_backward(first, plan);
    for (const StoredBy by : {StoredBy::kTiles, StoredBy::kWideTiles, StoredBy::kTogether}) {
      plan.stores = by;
      TrainStep other(c, first.device);
      copy_inputs(first, &other);
      other.run_forward();
      run_backward(other, plan);
      expect_same_results(first, other, concat(rank, " by ", static_cast<int>(by)));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Gpus, LoraTrainTiles, ::testing::ValuesIn(gpus()),
                         [](const auto& one) { return device_label(one.param); });
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(LoraTrainTiles);

}  // namespace
}  // namespace mortar::testing
#endif
