// SPDX-License-Identifier: Apache-2.0
// Which kernels the sums over rows of a backward take, by sizes.
#include <gtest/gtest.h>

#include <cstdint>
#include <utility>

#include "lora/train/cuda/grad_sum.h"
#include "lora/train/cuda/input_parts.h"
#include "lora/train/cuda/panel.h"
#include "lora/train/cuda/part_plan.h"
#include "lora/train/cuda/stored_sums.h"

namespace mortar::testing {
namespace {

using namespace lora::train;
using namespace lora::train::cuda;

/// The sums of dy and of x, which has 4,096 columns.
std::pair<PanelProblem, PanelProblem> sums_of(std::int64_t rows, std::int64_t width, int rank) {
  PanelProblem dy;
  dy.rows = rows;
  dy.matrices = 1;
  dy.width = rank;
  dy.products = true;
  PanelProblem x = dy;
  dy.columns[0] = width;
  x.columns[0] = 4096;
  return {dy, x};
}

TEST(LoraTrainSumsPlan, DyOfUpTo32RanksComesOnceWhereItsChunksCostLess) {
  const auto once = [](std::int64_t rows, std::int64_t width, int rank) {
    const auto [dy, x] = sums_of(rows, width, rank);
    return choose_backward(dy, x, true, 227 * 1024).one_pass;
  };
  EXPECT_TRUE(once(12345, 2560, 24));
  EXPECT_TRUE(once(2048, 13824, 32));
  EXPECT_TRUE(once(4096, 4096, 32));
  EXPECT_FALSE(once(4096, 1024, 32));
  EXPECT_FALSE(once(20000, 1024, 32));  // 63 chunks
  EXPECT_FALSE(once(8192, 14336, 40));  // no kernel makes ds of so many
  EXPECT_TRUE(once(4096, 4096, 16));
  EXPECT_FALSE(once(4096, 1024, 16));
}

TEST(LoraTrainSumsPlan, SumsOfDyBesideDsFillHalfOfTheDevice) {
  const auto chunks = [](std::int64_t rows, std::int64_t width, int rank, bool beside) {
    auto [dy, x] = sums_of(rows, width, rank);
    dy.beside_ds = beside;
    const BackwardPlan plan = choose_backward(dy, x, true, 227 * 1024);
    EXPECT_FALSE(plan.one_pass);
    return ceil_div<std::int64_t>(rows, plan.dy.chunk.rows);
  };
  EXPECT_EQ(chunks(8192, 14336, 64, true), 3);  // 168 tiles on 34 clusters
  EXPECT_EQ(chunks(8192, 14336, 64, false), 1);
  EXPECT_EQ(chunks(4096, 4096, 64, true), 2);
  EXPECT_EQ(chunks(4096, 5120, 64, true), 3);
  EXPECT_EQ(chunks(8192, 4096, 128, true), 2);
  EXPECT_EQ(chunks(4096, 14336, 128, true), 1);
}

// Of float32 weights, a rank of which has three columns.
TEST(LoraTrainSumsPlan, DsOfPartsLeavesHalfOfTheSmsToDbWhereBothFillTheirs) {
  const auto shares = [](std::int64_t rows, std::int64_t width, int rank) {
    return shares_dy(rows, width, 3 * rank, kLeaves, 3);
  };
  EXPECT_TRUE(shares(8192, 14336, 16));
  EXPECT_TRUE(shares(8192, 4096, 8));
  EXPECT_TRUE(shares(4096, 14336, 16));
  EXPECT_FALSE(shares(6000, 11008, 16));  // 48 thread blocks of whole rows
  EXPECT_FALSE(shares(16384, 8192, 16));  // one for each SM
  EXPECT_FALSE(shares(512, 4096, 16));
  EXPECT_FALSE(shares(4096, 4096, 32));  // more than a tile of 64 columns
  const ProductCut whole = cut_part_shrink_beside(8192, 14336, 48, kLeaves, 132);
  EXPECT_EQ(whole.parts, 1);
  EXPECT_FALSE(whole.split);
  const ProductCut clusters = cut_part_shrink_beside(4096, 14336, 48, kLeaves, 132);
  EXPECT_EQ(clusters.parts, 2);
  EXPECT_TRUE(clusters.split);
}

TEST(LoraTrainSumsPlan, DxComesWithSumsOfPartsWherePanelsFillTheDevice) {
  const auto chunks = [](std::int64_t rows, std::int64_t hidden, int rank,
                         std::int64_t adapters = 0) {
    PanelProblem x;
    x.rows = rows;
    x.matrices = 1;
    x.columns[0] = hidden;
    x.copies = 3;
    x.width = 3 * rank;
    x.products = true;
    x.adapters = adapters;
    return chunks_with_dx_in_parts(x);
  };
  EXPECT_EQ(chunks(4096, 4096, 16), 4);
  EXPECT_EQ(chunks(4096, 5120, 8), 3);
  EXPECT_EQ(chunks(1024, 4096, 32), 4);
  EXPECT_EQ(chunks(512, 4096, 16), 0);    // chunks would be short
  EXPECT_EQ(chunks(8192, 14336, 16), 0);  // 112 thread blocks
  EXPECT_EQ(chunks(4096, 4096, 40), 0);   // more than its kernel takes
  EXPECT_EQ(chunks(4096, 4096, 16, 2), 0);
}

TEST(LoraTrainSumsPlan, WholeSumsStartBesideDsWhereDyIsWide) {
  const auto beside = [](std::int64_t hidden, std::int64_t width) {
    PanelProblem dy, x;
    dy.matrices = x.matrices = 1;
    dy.columns[0] = width;
    x.columns[0] = hidden;
    return starts_beside_ds(dy, x);
  };
  EXPECT_TRUE(beside(4096, 14336));
  EXPECT_FALSE(beside(4096, 4096));
  EXPECT_FALSE(beside(14336, 4096));
}

TEST(LoraTrainSumsPlan, FewElementsAreSummedByThreadBlocksThatHaveAllRows) {
  const auto whole = [](std::int64_t rows, std::int64_t hidden, std::int64_t width, int rank,
                        std::int64_t adapters = 0) {
    PanelProblem dy, x;
    dy.rows = x.rows = rows;
    dy.matrices = x.matrices = 1;
    dy.columns[0] = width;
    x.columns[0] = hidden;
    dy.width = x.width = rank;
    dy.adapters = x.adapters = adapters;
    return sums_whole(dy, x);
  };
  EXPECT_TRUE(whole(512, 4096, 4096, 16));
  EXPECT_TRUE(whole(256, 4096, 4096, 64));
  EXPECT_TRUE(whole(1024, 4096, 14336, 32));
  EXPECT_FALSE(whole(1536, 4096, 4096, 32));
  EXPECT_FALSE(whole(512, 4096, 4096, 64));
  EXPECT_TRUE(whole(2048, 4096, 4096, 16));
  EXPECT_TRUE(whole(2048, 64, 64, 16));
  EXPECT_FALSE(whole(2048, 2048, 8192, 16));
  EXPECT_FALSE(whole(2048, 1024, 4096, 32));
  EXPECT_FALSE(whole(3072, 2048, 2048, 8));
  EXPECT_FALSE(whole(512, 4096, 14336, 64));
  EXPECT_FALSE(whole(1024, 7168, 2048, 64));
  EXPECT_FALSE(whole(512, 4096, 4096, 128));
  EXPECT_FALSE(whole(512, 4096, 4096, 16, 2));
  EXPECT_FALSE(whole(0, 4096, 4096, 16));
}

// dA and dB without partial sums, if their tiles fill the SMs: of up to two chunks of rows in tiles
// of 128 columns, of any in tiles of 256, which store what is added to nothing.
TEST(LoraTrainSumsPlan, ProductsStoreSumsInTilesThatFillTheSms) {
  const auto stored = [](std::int64_t rows, std::int64_t columns, int width, int chunks, bool of_a,
                         int sms = 132, bool adds = false) {
    return stored_columns({rows, columns, width, ceil_div<std::int64_t>(rows, chunks), of_a, adds},
                          sms);
  };
  EXPECT_EQ(stored(2048, 4096, 512, 2, true), 128);
  EXPECT_EQ(stored(2048, 4096, 512, 1, false), 128);
  EXPECT_EQ(stored(4096, 8192, 256, 2, true), 128);
  EXPECT_EQ(stored(2048, 8192, 128, 1, false), 128);
  EXPECT_EQ(stored(8192, 4096, 256, 2, false), 0);
  EXPECT_EQ(stored(8192, 4096, 512, 2, true), 0);
  EXPECT_EQ(stored(8192, 4096, 512, 3, true), 0);
  EXPECT_EQ(stored(2048, 8192, 128, 1, true), 0);
  EXPECT_EQ(stored(2048, 8192, 64, 1, false), 0);
  // Of one wave of 256 columns, or beside ds, on half of the SMs.
  EXPECT_EQ(stored(3000, 8192, 512, 1, true), 256);
  EXPECT_EQ(stored(3000, 8192, 512, 1, true, 132, true), 128);
  EXPECT_EQ(stored(4096, 4096, 512, 1, false, 68), 256);
  EXPECT_EQ(stored(8192, 8192, 512, 4, true), 256);
  // What waits in memory has no room in the workspace of two chunks.
  EXPECT_FALSE(stores_wide({8192, 264, 264, 4096, true}));
  EXPECT_TRUE(stores_wide({8192, 264, 264, 8192, true}));
}

// dB waits for dx where both gradients' tiles fill the SMs together, and neither does alone.
TEST(LoraTrainSumsPlan, SumsAreStoredTogetherAfterDx) {
  const auto together = [](std::int64_t rows, std::int64_t hidden, std::int64_t width, int rank,
                           int chunks) {
    const std::int64_t chunk = ceil_div<std::int64_t>(rows, chunks);
    return stores_together({rows, width, rank, chunk, false}, {rows, hidden, rank, chunk, true},
                           132);
  };
  EXPECT_TRUE(together(8192, 4096, 4096, 512, 2));
  EXPECT_FALSE(together(8192, 4096, 4096, 384, 2));   // of which a quarter of the tiles is empty
  EXPECT_FALSE(together(8192, 4096, 4096, 256, 4));   // half of the SMs
  EXPECT_FALSE(together(16384, 2048, 2048, 512, 4));  // the same
  EXPECT_FALSE(together(8192, 8192, 8192, 512, 1));   // each fills them
  EXPECT_FALSE(together(8192, 4096, 4096, 128, 2));
}

// Gradients that threads of few registers store, four neighbours at a time.
TEST(LoraTrainSumsPlan, VectorsAreOfDenseAlignedRows) {
  alignas(16) static float memory[64];
  const auto adds = [](int offset, std::int64_t row_stride, std::int64_t col_stride, DType dtype,
                       std::int64_t length) {
    char* const data = reinterpret_cast<char*>(memory) + offset * dtype_size(dtype);
    return adds_vectors(Matrix{data, row_stride, col_stride, dtype}, length);
  };
  EXPECT_TRUE(adds(0, 16, 1, DType::kBFloat16, 16));
  EXPECT_TRUE(adds(4, 20, 1, DType::kBFloat16, 20));
  EXPECT_TRUE(adds(4, 16, 1, DType::kFloat32, 16));
  EXPECT_FALSE(adds(2, 16, 1, DType::kBFloat16, 16));
  EXPECT_FALSE(adds(0, 18, 1, DType::kBFloat16, 16));
  EXPECT_FALSE(adds(0, 16, 1, DType::kBFloat16, 6));
  EXPECT_FALSE(adds(0, 1, 16, DType::kBFloat16, 16));
  EXPECT_TRUE(adds_vectors(Matrix{}, 6));  // none
}

}  // namespace
}  // namespace mortar::testing
