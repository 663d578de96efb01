// SPDX-License-Identifier: Apache-2.0
#include "lora/train/cpu/row_chunks.h"

#include "lora/cpu/groups.h"
#include "lora/train/cpu/config.h"
#include "lora/train/dropout.h"

namespace mortar::lora::train::cpu {
namespace {

/// Whether dropout leaves nothing of an adapter's delta.
bool drops_all(const Problem& p, std::int64_t adapter) {
  const auto& probabilities = p.given->dropout.p;
  return !probabilities.empty() && drop_threshold(probabilities[adapter]) >= kDropAll;
}

}  // namespace

void RowChunks::cut(const Problem& p, std::int64_t adapter, std::int64_t start,
                    std::int64_t count) {
  const bool is_base = drops_all(p, adapter);
  for (std::int64_t at = 0; at < count; at += kStepRows) {
    const std::int64_t first = start + at, rows = std::min(kStepRows, count - at);
    if (is_base) {
      base_.push_back({sorted_, first, rows});
    } else {
      chunks_.push_back({adapter, first, rows});
    }
  }
}

RowChunks::RowChunks(const Problem& p) {
  if (p.rows.plan != nullptr) {
    const PlanLayout layout = PlanLayout::make(p.num_rows, p.num_adapters);
    GroupsView view;
    view.plan = p.rows.plan;
    view.sorted = p.rows.plan + layout.sorted;
    const lora::cpu::GroupList groups(view, p.num_rows, p.num_adapters);
    sorted_ = view.sorted;
    std::int64_t active = 0;
    for (std::int64_t g = 0; g < groups.size(); ++g) {
      const lora::cpu::Group group = groups.get(g);
      cut(p, group.adapter, group.start, group.count);
      active += group.count;
    }
    for (; active < p.num_rows; active += kStepRows) {
      base_.push_back({sorted_, active, std::min(kStepRows, p.num_rows - active)});
    }
    return;
  }
  if (p.rows.offsets == nullptr) {
    cut(p, 0, 0, p.num_rows);
    return;
  }
  for (std::int64_t l = 0; l < p.num_adapters; ++l) {
    cut(p, l, p.rows.offsets[l], p.rows.offsets[l + 1] - p.rows.offsets[l]);
  }
}

std::int64_t most_chunks(const Problem& p) {
  return ceil_div(p.num_rows, kStepRows) +
         (p.num_adapters > 1 ? std::min(p.num_adapters, p.num_rows) : 0);
}

}  // namespace mortar::lora::train::cpu
