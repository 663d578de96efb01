// SPDX-License-Identifier: Apache-2.0
// Groups tokens by adapter on the host: a stable counting sort, O(M + L), one thread. The words
// are those that the CUDA planner writes, except in the scratch region.
#include "lora/cpu/plan.h"

#include <algorithm>
#include <cstring>

#include "lora/plan_layout.h"

namespace mortar::lora::cpu {
namespace {

struct EntryWriter {
  std::int32_t* out;
  std::int32_t num = 0;
  void add(std::int32_t adapter, std::int32_t start, std::int32_t count, std::int32_t ordinal = 0) {
    std::int32_t* e = out + kPlanEntryWords * static_cast<std::int64_t>(num++);
    e[0] = adapter;
    e[1] = start;
    e[2] = count;
    e[3] = ordinal;
  }
};

/// The tiles of one group: entries, and the places of their tokens, -1 where a tile is not full.
void add_tiles(EntryWriter& tiles, std::int32_t* tokens, std::int32_t tile,
               const std::int32_t* sorted, std::int32_t adapter, std::int32_t start,
               std::int32_t count) {
  for (std::int32_t done = 0; done < count; done += tile) {
    const std::int32_t part = std::min(tile, count - done);
    std::copy_n(sorted + start + done, part, tokens + std::int64_t{tile} * tiles.num);
    tiles.add(adapter, start + done, part, done / tile);
  }
}

}  // namespace

void plan(const IdsView& token_adapter, std::int64_t num_tokens, std::int64_t num_adapters,
          std::int32_t* plan, Stream) {
  const PlanLayout layout = PlanLayout::make(num_tokens, num_adapters);
  const auto l = static_cast<std::int32_t>(num_adapters);
  const auto m = static_cast<std::int32_t>(num_tokens);
  std::memset(plan, 0, layout.size * sizeof(std::int32_t));

  // Bin l is that of base tokens, which come last.
  std::int32_t* next = plan + layout.scratch;
  std::int32_t out_of_range = 0, first_out_of_range = -1;
  for (std::int32_t t = 0; t < m; ++t) {
    const std::int32_t id = token_adapter.get(t);
    const bool in_range = id >= 0 && id < l;
    if (!in_range && id != -1 && out_of_range++ == 0) first_out_of_range = t;
    ++next[in_range ? id : l];
  }

  std::int32_t start = 0, num_active = 0;
  for (std::int32_t id = 0; id <= l; ++id) {
    const std::int32_t count = next[id];
    next[id] = start;
    start += count;
    if (id < l) num_active = start;
  }
  std::int32_t* sorted = plan + layout.sorted;
  for (std::int32_t t = 0; t < m; ++t) {
    const std::int32_t id = token_adapter.get(t);
    sorted[next[id >= 0 && id < l ? id : l]++] = t;
  }

  EntryWriter groups{plan + layout.groups}, tiles16{plan + layout.tiles16};
  EntryWriter tiles64{plan + layout.tiles64};
  std::int32_t* tokens16 = plan + layout.tokens16;
  std::int32_t* tokens64 = plan + layout.tokens64;
  std::fill(tokens16, plan + layout.scratch, -1);
  for (std::int32_t id = 0, first = 0; id < l; first = next[id++]) {  // next: one past the group
    const std::int32_t count = next[id] - first;
    if (count == 0) continue;
    groups.add(id, first, count);
    add_tiles(tiles16, tokens16, 16, sorted, id, first, count);
    add_tiles(tiles64, tokens64, 64, sorted, id, first, count);
  }
  plan[kPlanNumTokens] = m;
  plan[kPlanNumAdapters] = l;
  plan[kPlanNumTiles16] = tiles16.num;
  plan[kPlanNumTiles64] = tiles64.num;
  plan[kPlanNumGroups] = groups.num;
  plan[kPlanNumActive] = num_active;
  plan[kPlanNumOutOfRange] = out_of_range;
  plan[kPlanFirstOutOfRange] = first_out_of_range;
}

void read_plan_header(const std::int32_t* plan, std::int32_t* header, Stream) {
  std::memcpy(header, plan, kPlanHeaderWords * sizeof(std::int32_t));
}

}  // namespace mortar::lora::cpu
