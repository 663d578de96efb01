// SPDX-License-Identifier: Apache-2.0
// Where everything lies in a plan: int32 words whose places depend on (M, L) alone, so that host
// and device agree without reading anything back.
//
//   header | sorted tokens [M] | groups [G][4] | tiles of 16 tokens [T16][4] | tiles of 64 [T64][4]
//   | tokens of the tiles of 16 [T16][16] | of the tiles of 64 [T64][64] | scratch of the planner
//
// A group is {adapter, start, count, 0}: tokens sorted[start .. start + count). A tile is the same
// with its ordinal among its adapter's tiles as fourth word, so that a kernel may take several at a
// time. Base tokens follow the active ones in `sorted`, in their own order. A tile never mixes
// adapters.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/int_math.h"

namespace mortar::lora {

/// Words of the header. num_tokens and num_adapters let a kernel refuse a plan made for another
/// batch size instead of reading past it.
enum PlanWord : int {
  kPlanNumTokens,
  kPlanNumAdapters,
  kPlanNumTiles16,
  kPlanNumTiles64,
  kPlanNumGroups,
  kPlanNumActive,
  kPlanNumOutOfRange,
  kPlanFirstOutOfRange,
  kPlanHeaderWords,
};

inline constexpr int kPlanEntryWords = 4;        ///< {adapter, start, count, ordinal or 0}
inline constexpr int kPlanTokensPerChunk = 256;  ///< least tokens a planner CTA handles
inline constexpr int kPlanMaxChunks = 128;

struct PlanLayout {
  std::int64_t max_groups, max_tiles16, max_tiles64;
  std::int64_t num_chunks;
  std::int64_t sorted, groups, tiles16, tiles64, tokens16, tokens64, scratch;  ///< word offsets
  std::int64_t size;                                                           ///< words in all

  MORTAR_HOST_DEVICE static constexpr PlanLayout make(std::int64_t num_tokens,
                                                      std::int64_t num_adapters) {
    PlanLayout p{};
    p.max_groups = num_tokens < num_adapters ? num_tokens : num_adapters;
    p.max_tiles16 = ceil_div<std::int64_t>(num_tokens, 16) + p.max_groups;
    p.max_tiles64 = ceil_div<std::int64_t>(num_tokens, 64) + p.max_groups;
    p.num_chunks = ceil_div<std::int64_t>(num_tokens, kPlanTokensPerChunk);
    if (p.num_chunks > kPlanMaxChunks) p.num_chunks = kPlanMaxChunks;
    if (p.num_chunks < 1) p.num_chunks = 1;
    p.sorted = round_up<std::int64_t>(kPlanHeaderWords, 4);
    p.groups = p.sorted + round_up<std::int64_t>(num_tokens, 4);
    p.tiles16 = p.groups + kPlanEntryWords * p.max_groups;
    p.tiles64 = p.tiles16 + kPlanEntryWords * p.max_tiles16;
    p.tokens16 = p.tiles64 + kPlanEntryWords * p.max_tiles64;
    p.tokens64 = p.tokens16 + 16 * p.max_tiles16;
    p.scratch = p.tokens64 + 64 * p.max_tiles64;
    // One histogram per chunk and one of all, with a bin for base tokens; out-of-range counts.
    p.size = p.scratch + (p.num_chunks + 1) * (num_adapters + 1) + 2 * p.num_chunks;
    return p;
  }
};

}  // namespace mortar::lora
