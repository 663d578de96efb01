// SPDX-License-Identifier: Apache-2.0
// How the work of a batch is shared among threads: items, numbered through all groups, which
// threads draw from a counter. Who runs an item has no influence on its result.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "lora/cpu/groups.h"
#include "lora/problem.h"

namespace mortar::lora::cpu {

/// A stretch of one group: tokens sorted[start .. start + count), all of `adapter`. `row` numbers
/// its first token among the tokens of all groups.
struct Part {
  std::int64_t adapter = 0, start = 0, count = 0, row = 0;
};

/// Rows [first, last) of the numbering above.
struct RowRange {
  std::int64_t first = 0, last = 0;
};

/// Draws item numbers from `next` until none is left and calls run(part, item of the part).
/// items_of(part) is the number of items of a part.
template <class ItemsOf, class Run>
void drain(const GroupList& groups, RowRange range, std::atomic<std::int64_t>& next,
           const ItemsOf& items_of, const Run& run) {
  std::int64_t g = 0, row = 0;         // the next group, and its first row
  std::int64_t before = 0, count = 0;  // items of earlier parts, and of `part`
  Part part;
  while (true) {
    const std::int64_t item = next.fetch_add(1, std::memory_order_relaxed);
    while (item >= before + count) {
      before += count;
      count = 0;
      if (g == groups.size() || row >= range.last) return;
      const Group group = groups.get(g++);
      const std::int64_t skip = std::max<std::int64_t>(range.first - row, 0);
      part = {group.adapter, group.start + skip, std::min(group.count, range.last - row) - skip,
              row + skip};
      row += group.count;
      if (part.count > 0) count = items_of(part);
    }
    run(part, item - before);
  }
}

/// What the threads of one op have in common.
struct Batch {
  std::int64_t num_rows = 0;  ///< tokens of all groups
  int num_threads = 1;
};

/// Adds up the groups and chooses the number of threads: OMP_NUM_THREADS, less for small batches.
/// `width` is the number of elements of a row of A, of B, or of both.
Batch measure(const GroupList& groups, const WeightsView& weights, std::int64_t width);

}  // namespace mortar::lora::cpu
