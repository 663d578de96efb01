// SPDX-License-Identifier: Apache-2.0
// Launch choices of LoRA's CUDA backend: where the decode expand cuts its columns on the device.
#include <cstdint>

#include "lora/launch_choice.h"

namespace mortar::lora {

/// Where adapters have as many tokens each there are nearly as many tiles as there may be; by
/// Zipf's law half as many, and CTAs of columns cut for all would be few and long. (us on an H200,
/// cut by the device and by the host: 192 tokens of 125 adapters, rank 16, 4,096 to 16,384, 20.0
/// and 23.3; 141 of 80, ranks up to 64, 8,192 to 8,192, 26.9 and 28.3; fewer CTAs, of 1.04 rounds,
/// 407 of 132, rank 32, 4,736 to 3,584, 28.2 and 32.2. To know the tiles first takes some 0.3 us,
/// and short CTAs have no use for it: 269 of 67, rank 16, 13,824 to 5,120, 20.5 and 18.8. CTAs
/// that run at once are best left alone up to nearly all places of the chip: 384 in 396 places
/// took 33.3, and 43.2 when they were fewer and longer, 256 of 64, rank 16, 4,096 to 2 x 14,336.)
int expand_round(const LoraShape& s, const Machine& m, const ExpandPlan& c) {
  constexpr int kMostRank = 64, kMostRounds = 3;
  constexpr std::int64_t kLongBytes = 64 << 10;  // of B and y of a CTA
  constexpr double kFull = 0.975;
  if (m.arch < 90 || c.kernel != ExpandKernel::kDecode || c.cluster > 1 || c.tile_tokens != 16 ||
      c.per_sm == 1 || s.segments || knows_tiles(s) || h_width(s) > kMostRank) {
    return 0;
  }
  const std::int64_t tiles = max_tiles(s.num_tokens, s.num_adapters, 16);
  const std::int64_t ranks = s.ragged ? s.max_rank / 2 : s.max_rank;  // the ragged ones' mean
  const std::int64_t bytes = c.cols * (2 * ranks + 4 * ceil_div(s.num_tokens, tiles));
  const auto ctas = static_cast<double>(decode_expand_per_sm(s, m, c) * m.sms);
  const auto round = static_cast<int>(kFull * ctas);
  const bool suits = bytes >= kLongBytes && tiles * column_blocks(s, c.cols) <= kMostRounds * round;
  return suits ? round : 0;
}

}  // namespace mortar::lora
