// SPDX-License-Identifier: Apache-2.0
// lora_plan: a stable grouping with its tile lists, the report, and reuse of a plan's buffer.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "guarded_tensor.h"
#include "lora/plan_layout.h"
#include "mortar/lora.h"

namespace mortar::testing {
namespace {

using lora::PlanLayout;

class LoraPlan : public ::testing::TestWithParam<Device> {
 protected:
  /// A map on the device, planned into a poisoned buffer.
  struct Planned {
    std::vector<std::int32_t> map;
    std::int32_t adapters;
    GuardedTensor plan;
  };

  Planned make(const std::vector<std::int32_t>& map, std::int32_t adapters) const {
    const auto tokens = static_cast<std::int64_t>(map.size());
    Planned p{map, adapters, {}};
    p.plan = GuardedTensor(DType::kInt32, {lora_plan_size(tokens, adapters)}, {}, GetParam());
    GuardedTensor ids = int_tensor(map, GetParam());
    lora_plan(ids.view(), adapters, p.plan.view(), Stream{});
    p.plan.download();
    return p;
  }

  static bool active(std::int32_t id, std::int32_t adapters) { return id >= 0 && id < adapters; }

  void expect_right(const Planned& p) const {
    const auto tokens = static_cast<std::int32_t>(p.map.size());
    const PlanLayout layout = PlanLayout::make(tokens, p.adapters);
    const auto* words = p.plan.data<std::int32_t>();
    ASSERT_TRUE(p.plan.guards_intact());
    std::vector<std::int32_t> order(tokens);
    for (std::int32_t t = 0; t < tokens; ++t) order[t] = t;
    const auto key = [&](std::int32_t t) {
      return active(p.map[t], p.adapters) ? p.map[t] : p.adapters;
    };
    std::stable_sort(order.begin(), order.end(),
                     [&](std::int32_t a, std::int32_t b) { return key(a) < key(b); });
    ASSERT_TRUE(std::equal(order.begin(), order.end(), words + layout.sorted));

    std::vector<std::int32_t> groups, tiles16, tiles64;
    std::int32_t start = 0;
    while (start < tokens && key(order[start]) < p.adapters) {
      std::int32_t end = start;
      while (end < tokens && key(order[end]) == key(order[start])) ++end;
      groups.insert(groups.end(), {key(order[start]), start, end - start, 0});
      for (const auto& [list, size] : {std::pair{&tiles16, 16}, std::pair{&tiles64, 64}}) {
        for (std::int32_t at = start; at < end; at += size) {
          list->insert(list->end(),
                       {key(order[start]), at, std::min(size, end - at), (at - start) / size});
        }
      }
      start = end;
    }
    expect_entries(words + layout.groups, groups, "groups");
    expect_entries(words + layout.tiles16, tiles16, "tiles of 16");
    expect_entries(words + layout.tiles64, tiles64, "tiles of 64");
    expect_tokens(words + layout.tokens16, tiles16, order, 16, layout.max_tiles16);
    expect_tokens(words + layout.tokens64, tiles64, order, 64, layout.max_tiles64);
    EXPECT_EQ(words[lora::kPlanNumTokens], tokens);
    EXPECT_EQ(words[lora::kPlanNumAdapters], p.adapters);
    EXPECT_EQ(words[lora::kPlanNumGroups] * 4, static_cast<std::int32_t>(groups.size()));
    EXPECT_EQ(words[lora::kPlanNumTiles16] * 4, static_cast<std::int32_t>(tiles16.size()));
    EXPECT_EQ(words[lora::kPlanNumTiles64] * 4, static_cast<std::int32_t>(tiles64.size()));
    expect_report(p, start);
  }

  static void expect_entries(const std::int32_t* got, const std::vector<std::int32_t>& want,
                             const char* what) {
    EXPECT_TRUE(std::equal(want.begin(), want.end(), got)) << what;
  }

  /// The tokens of every tile, -1 where it is not full and in all tiles that are not used.
  static void expect_tokens(const std::int32_t* got, const std::vector<std::int32_t>& tiles,
                            const std::vector<std::int32_t>& order, std::int64_t tile,
                            std::int64_t max_tiles) {
    std::vector<std::int32_t> want(tile * max_tiles, -1);
    for (std::size_t i = 0; i < tiles.size(); i += 4) {
      std::copy_n(order.begin() + tiles[i + 1], tiles[i + 2], want.begin() + i / 4 * tile);
    }
    EXPECT_TRUE(std::equal(want.begin(), want.end(), got)) << "tokens of tiles of " << tile;
  }

  static void expect_report(const Planned& p, std::int32_t num_active) {
    const LoraPlanReport report = lora_plan_report(p.plan.view(), Stream{});
    std::int64_t bad = 0, first_bad = -1;
    for (std::size_t t = 0; t < p.map.size(); ++t) {
      if (p.map[t] == -1 || active(p.map[t], p.adapters)) continue;
      if (bad++ == 0) first_bad = static_cast<std::int64_t>(t);
    }
    EXPECT_EQ(report.num_tokens, static_cast<std::int64_t>(p.map.size()));
    EXPECT_EQ(report.num_adapters, p.adapters);
    EXPECT_EQ(report.num_active, num_active);
    EXPECT_EQ(report.num_out_of_range, bad);
    EXPECT_EQ(report.first_out_of_range, first_bad);
  }

  static std::vector<std::int32_t> random_map(std::int64_t tokens, std::int32_t low,
                                              std::int32_t high, unsigned seed) {
    std::mt19937 rng(seed);
    std::uniform_int_distribution<std::int32_t> id(low, high);
    std::vector<std::int32_t> map(tokens);
    for (std::int32_t& v : map) v = id(rng);
    return map;
  }
};

TEST_P(LoraPlan, SmallMapsOfManySizes) {
  for (std::int64_t tokens : {0, 1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 255, 256, 257, 1000}) {
    for (std::int32_t adapters : {1, 2, 3, 8, 33}) {
      SCOPED_TRACE(std::to_string(tokens) + " tokens, " + std::to_string(adapters) + " adapters");
      expect_right(make(random_map(tokens, -1, adapters - 1, 5), adapters));
    }
  }
}

TEST_P(LoraPlan, SmallAllBaseAndAllOneAdapter) {
  expect_right(make(std::vector<std::int32_t>(300, -1), 4));
  expect_right(make(std::vector<std::int32_t>(300, 3), 4));
  expect_right(make(std::vector<std::int32_t>(300, 0), 1));
}

TEST_P(LoraPlan, SmallIdsOutOfRangeCountAsBaseTokens) {
  expect_right(make(random_map(500, -4, 9, 6), 5));
  expect_right(make({std::numeric_limits<std::int32_t>::max(), 0,
                     std::numeric_limits<std::int32_t>::min(), -1, 1, 2},
                    2));
}

TEST_P(LoraPlan, SortedAndReversedMaps) {
  std::vector<std::int32_t> map = random_map(3000, -1, 63, 7);
  std::sort(map.begin(), map.end());
  expect_right(make(map, 64));
  std::reverse(map.begin(), map.end());
  expect_right(make(map, 64));
}

TEST_P(LoraPlan, LargestSizes) {
  expect_right(make(random_map(kLoraMaxTokens, -1, kLoraMaxAdapters - 1, 8), kLoraMaxAdapters));
  expect_right(make(random_map(8192, -1, kLoraMaxAdapters - 1, 9), kLoraMaxAdapters));
  for (std::int64_t tokens : {1, 255, 256, 257}) {
    expect_right(make(random_map(tokens, -1, kLoraMaxAdapters - 1, 9), kLoraMaxAdapters));
  }
  expect_right(make(random_map(100000, -1, 2, 10), 3));
}

/// The sizes at which another kernel, another cluster or another round of a warp begins.
TEST_P(LoraPlan, SizesAroundEveryPath) {
  for (std::int64_t tokens :
       {512, 513, 1025, 2048, 2049, 4096, 4097, 8192, 12289, 16384, 16385, 32769, 262145}) {
    for (std::int32_t adapters : {1, 7, 8, 65, 4095}) {
      SCOPED_TRACE(std::to_string(tokens) + " tokens, " + std::to_string(adapters) + " adapters");
      expect_right(make(random_map(tokens, -2, adapters, 18), adapters));
      expect_right(make(std::vector<std::int32_t>(tokens, adapters - 1), adapters));
    }
  }
}

TEST_P(LoraPlan, SmallBufferIsReusedForAnotherMap) {
  Planned p = make(random_map(200, -1, 7, 11), 8);
  for (unsigned seed = 12; seed < 16; ++seed) {
    p.map = random_map(200, -1, seed % 2 == 0 ? 7 : 0, seed);
    GuardedTensor ids = int_tensor(p.map, GetParam());
    lora_plan(ids.view(), 8, p.plan.view(), Stream{});
    p.plan.download();
    expect_right(p);
  }
}

/// int64 ids give the plan of the same ids in int32; what does not fit 32 bits is out of range.
TEST_P(LoraPlan, SmallWideIds) {
  constexpr std::int64_t kHigh = std::int64_t{1} << 32;
  for (std::int64_t tokens : {1, 5, 256, 257, 3000, 16385}) {
    for (std::int32_t adapters : {1, 5, 300}) {
      SCOPED_TRACE(std::to_string(tokens) + " tokens, " + std::to_string(adapters) + " adapters");
      Planned p = make(random_map(tokens, -3, adapters, 19), adapters);
      GuardedTensor ids(DType::kInt64, {tokens}, {}, GetParam());
      for (std::int64_t t = 0; t < tokens; ++t) {
        const std::int64_t id = p.map[t];
        // Low halves that would be an adapter's, and the base token's.
        ids.data<std::int64_t>()[t] = id < -1 ? (t % 2 == 0 ? kHigh : kHigh * 7 - 1) : id;
      }
      ids.upload();
      lora_plan(ids.view(), adapters, p.plan.view(), Stream{});
      p.plan.download();
      expect_right(p);
    }
  }
}

TEST_P(LoraPlan, RepeatsItselfBitwise) {
  const std::vector<std::int32_t> map = random_map(5000, -2, 40, 17);
  const Planned first = make(map, 40);
  const PlanLayout layout = PlanLayout::make(5000, 40);
  const auto groups = first.plan.data<std::int32_t>()[lora::kPlanNumGroups];
  for (int i = 0; i < 20; ++i) {
    const Planned again = make(map, 40);
    EXPECT_TRUE(std::equal(first.plan.data<std::int32_t>(),
                           first.plan.data<std::int32_t>() + layout.groups + 4 * groups,
                           again.plan.data<std::int32_t>()));
  }
}

std::string device_case_name(const ::testing::TestParamInfo<Device>& info) {
  return device_label(info.param);
}
INSTANTIATE_TEST_SUITE_P(Devices, LoraPlan, ::testing::ValuesIn(devices()), device_case_name);

}  // namespace
}  // namespace mortar::testing
