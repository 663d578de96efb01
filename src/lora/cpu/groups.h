// SPDX-License-Identifier: Apache-2.0
// One view of the groups of a batch, whether they come from a plan or from segment tensors.
// Everything read from the tensors is clamped, so that stale or wrong entries never lead out of
// bounds.
#pragma once

#include <algorithm>
#include <cstdint>

#include "lora/plan_layout.h"
#include "lora/problem.h"

namespace mortar::lora::cpu {

/// Tokens sorted[start .. start + count) of one adapter; count is 0 for a group to be skipped.
struct Group {
  std::int64_t adapter = 0, start = 0, count = 0;
};

class GroupList {
 public:
  GroupList(const GroupsView& view, std::int64_t num_tokens, std::int64_t num_adapters)
      : view_(view), num_tokens_(num_tokens), num_adapters_(num_adapters) {
    if (view.plan == nullptr) {
      size_ = view.num_segments;
      sorted_ = view.sorted;
      num_sorted_ = view.num_sorted;
      return;
    }
    const PlanLayout layout = PlanLayout::make(num_tokens, num_adapters);
    size_ = std::clamp<std::int64_t>(view.plan[kPlanNumGroups], 0, layout.max_groups);
    entries_ = view.plan + layout.groups;
    sorted_ = view.plan + layout.sorted;
    num_sorted_ = num_tokens;
  }

  std::int64_t size() const { return size_; }

  Group get(std::int64_t i) const {
    Group g;
    if (entries_ != nullptr) {
      const std::int32_t* e = entries_ + kPlanEntryWords * i;
      g = {e[0], e[1], e[2]};
    } else {
      g = {view_.ids[i], view_.starts[i], view_.counts[i]};
    }
    const bool valid = g.adapter >= 0 && g.adapter < num_adapters_ && g.start >= 0 &&
                       g.start < num_sorted_ && g.count > 0;
    g.count = valid ? std::min(g.count, num_sorted_ - g.start) : 0;
    return g;
  }

  /// The token at a sorted position, or -1 if the entry names no row of the batch.
  std::int64_t token(std::int64_t position) const {
    const std::int64_t t = sorted_[position];
    return t >= 0 && t < num_tokens_ ? t : -1;
  }

 private:
  GroupsView view_;
  std::int64_t num_tokens_, num_adapters_;
  std::int64_t size_ = 0, num_sorted_ = 0;
  const std::int32_t* entries_ = nullptr;
  const std::int32_t* sorted_ = nullptr;
};

}  // namespace mortar::lora::cpu
