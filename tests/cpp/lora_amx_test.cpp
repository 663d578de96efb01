// SPDX-License-Identifier: Apache-2.0
// The loops of the AMX level on a stand-in for the tile unit that checks every tile's shape, so
// that they are tested on machines without one. Where there is one, the level itself is among the
// targets of all LoRA tests.
#include "lora/cpu/amx-inl.h"

#include <gtest/gtest.h>

#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "lora_expect.h"
#include "lora_train_case.h"

namespace mortar::testing {
namespace {

using lora::cpu::AmxExpand;
using lora::cpu::AmxShrink;
using lora::cpu::Kernels;

struct Tile {
  std::int64_t rows = 0, bytes = 0;
  std::uint8_t data[16][64] = {};
};

/// Tiles as the manual describes them, one product at a time.
struct TileModel {
  static inline thread_local Tile tiles[8];
  static inline thread_local bool ready = false;

  static void configure(std::int64_t units) {
    for (Tile& tile : tiles) tile = {16, 64, {}};
    tiles[6].bytes = 4 * units;
    tiles[7].rows = units;
    ready = true;
  }
  static void release() { ready = false; }
  static void require(bool condition, const char* what) {
    if (!condition) throw std::logic_error(what);
  }
  template <int kTile>
  static void zero() {
    require(ready, "zero without a configuration");
    std::memset(tiles[kTile].data, 0, sizeof(tiles[kTile].data));
  }
  template <int kTile>
  static void load(const void* p, std::int64_t stride) {
    require(ready, "load without a configuration");
    Tile& tile = tiles[kTile];
    std::memset(tile.data, 0, sizeof(tile.data));
    for (std::int64_t r = 0; r < tile.rows; ++r) {
      std::memcpy(tile.data[r], static_cast<const char*>(p) + r * stride, tile.bytes);
    }
  }
  template <int kTile>
  static void store(void* p, std::int64_t stride) {
    require(ready, "store without a configuration");
    const Tile& tile = tiles[kTile];
    for (std::int64_t r = 0; r < tile.rows; ++r) {
      std::memcpy(static_cast<char*>(p) + r * stride, tile.data[r], tile.bytes);
    }
  }
  static float bf16_at(const Tile& tile, std::int64_t row, std::int64_t index) {
    BFloat16 v;
    std::memcpy(&v, &tile.data[row][2 * index], sizeof(v));
    return to_float(v);
  }
  template <int kC, int kA, int kB>
  static void dot() {
    Tile& c = tiles[kC];
    const Tile &a = tiles[kA], &b = tiles[kB];
    require(ready && a.bytes == 4 * b.rows && c.rows == a.rows && c.bytes == b.bytes,
            "tiles of shapes that do not fit");
    for (std::int64_t m = 0; m < c.rows; ++m) {
      for (std::int64_t u = 0; u < b.rows; ++u) {
        for (std::int64_t n = 0; n < c.bytes / 4; ++n) {
          float sum;
          std::memcpy(&sum, &c.data[m][4 * n], sizeof(sum));
          for (int i : {0, 1}) sum += bf16_at(a, m, 2 * u + i) * bf16_at(b, u, 2 * n + i);
          std::memcpy(&c.data[m][4 * n], &sum, sizeof(sum));
        }
      }
    }
  }
  template <class Y>
  static void update(const float* sums, std::int64_t columns, float scale, const Y* base, Y* y) {
    for (std::int64_t n = 0; n < columns; ++n) {
      y[n] = from_float<Y>(std::fma(sums[n], scale, base != nullptr ? to_float(base[n]) : -0.0f));
    }
  }
};

/// The ops run on the stand-in for its lifetime.
class UseTileModel {
 public:
  UseTileModel() : table_(*lora::cpu::supported_kernels().back()) {
    AmxShrink<TileModel>::pack = table_.pack;
    table_.shrink[1][1] = AmxShrink<TileModel>::run;
    table_.expand_pairs[0] = AmxExpand<TileModel, float>::run;
    table_.expand_pairs[1] = AmxExpand<TileModel, BFloat16>::run;
    lora::cpu::use_kernels(&table_);
  }
  ~UseTileModel() { lora::cpu::use_kernels(nullptr); }

 private:
  Kernels table_;
};

class LoraAmxModel : public ::testing::TestWithParam<LoraCase> {
 private:
  UseTileModel model_;
};

std::vector<LoraCase> amx_cases() {
  std::vector<LoraCase> cases;
  LoraCase c;
  c.x = c.w = c.y = DType::kBFloat16;
  const auto add = [&](const std::string& what, std::int64_t value) {
    c.name = "Small" + what + std::to_string(value);
    cases.push_back(c);
  };
  for (std::int64_t hidden : {0, 1, 31, 32, 33, 511, 512, 513, 1100}) {
    c.hidden = hidden;
    add("Hidden", hidden);
  }
  c.hidden = 96;
  for (int rank : {1, 8, 15, 16, 17, 31, 32, 33, 48, 64, 65, 130, 512}) {
    c.ranks = {rank};
    add("Rank", rank);
  }
  c.ranks = {16, 5, 40};
  for (std::int64_t tokens : {1, 15, 16, 17, 33, 47, 48, 49, 100}) {
    c.tokens = tokens;
    c.map = tokens % 2 == 0 ? Map::kOneAdapter : Map::kRandom;
    add("Tokens", tokens);
  }
  for (std::int64_t width : {1, 16, 63, 64, 65, 200}) {
    c.widths = {width, 24};
    c.strided = !c.strided;
    c.add = !c.add;
    add("Width", width);
  }
  return cases;
}

TEST_P(LoraAmxModel, ApplyMatchesOracle) {
  LoraOperands op(GetParam(), Device{});
  expect_apply_matches(op);
}

TEST_P(LoraAmxModel, TwoOpsMatchOracle) {
  LoraOperands op(GetParam(), Device{}, 2);
  expect_two_ops_match(op, DType::kBFloat16, true);
}

/// Tiles whose rows are ranks, columns that no kernel can write in place.
TEST(LoraAmxModelTraining, MatchesOracle) {
  const UseTileModel model;
  TrainCase c;
  c.rows = 139;
  c.widths = {70, 3};
  c.ranks = {5, 40};
  c.x = c.w = c.y = c.grad = c.dx = DType::kBFloat16;
  for (const bool transposed : {false, true}) {
    c.transposed = transposed;
    c.name = transposed ? "transposed" : "dense";
    TrainStep step(c, Device{});
    expect_matches(step);
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, LoraAmxModel, ::testing::ValuesIn(amx_cases()),
                         [](const auto& shape) { return shape.param.name; });

}  // namespace
}  // namespace mortar::testing
