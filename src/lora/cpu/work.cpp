// SPDX-License-Identifier: Apache-2.0
#include "lora/cpu/work.h"

#include <omp.h>

#include <algorithm>

#include "lora/cpu/config.h"

namespace mortar::lora::cpu {

Batch measure(const GroupList& groups, const WeightsView& weights, std::int64_t width) {
  Batch batch;
  std::int64_t rank_tokens = 0;
  for (std::int64_t g = 0; g < groups.size(); ++g) {
    const Group group = groups.get(g);
    if (group.count == 0) continue;
    batch.num_rows += group.count;
    std::int64_t ranks = 0;
    for (int s = 0; s < weights.num_slices; ++s) ranks += weights.get(group.adapter, s).rank;
    rank_tokens += ranks * (group.count + kWeightTokens);
  }
  const std::int64_t wanted = rank_tokens * width / kWorkPerThread;
  batch.num_threads = static_cast<int>(std::clamp<std::int64_t>(wanted, 1, omp_get_max_threads()));
  return batch;
}

}  // namespace mortar::lora::cpu
