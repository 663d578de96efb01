// SPDX-License-Identifier: Apache-2.0
// The time of the streaming shrink by a model: a pure function of sizes and of the number of SMs.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/int_math.h"

namespace mortar::lora::train::cuda {

inline constexpr int kTileRows = 128;     ///< of shrink and expand: weights are read once per tile
inline constexpr int kBlockColumns = 64;  ///< 16-bit elements of a row of 128 bytes, swizzled

/// Clusters of so many thread blocks that fit a device at once. Those of 4 and more leave SMs idle:
/// on an H200 30 of 4 and 15 of 8 fit at one block an SM.
constexpr std::int64_t clusters_at_once(int parts, int per_sm, int sms) {
  return std::int64_t{per_sm} * ((parts <= 2 ? sms : sms - sms / 11) / parts);
}

/// Microseconds of a launch of the streaming shrink: clusters of `parts` thread blocks, `per_sm` of
/// which share an SM, come in waves; a wave takes its start and its steps of 64 columns, each as
/// long as its rows take from a DRAM that all blocks of the wave share, or as its instructions and
/// their latency, of which blocks that share an SM take longer. Dropout adds its draws, which more
/// warps than multiply share in small tiles of 16 ranks. Fitted to 2,100 plans of 84 sizes (M of
/// 512 to 16,384, K of 1,024 to 18,944, ranks 8 to 128, some with dropout): what it chooses takes
/// 1.015 times as long as the best plan on average, and 1.1 times at most.
struct ShrinkTime {
  static constexpr double kStartUs = 2.74, kPartUs = 0.241, kDramBytesPerUs = 3.6e6;
  static constexpr double kShared = 0.2556;  ///< what each further block of an SM adds to a step
  int ranks, rows;
  bool masked;

  constexpr double step_us() const {
    const double draws = (0.0689 + 0.002872 * rows) * (ranks == 16 && rows < kTileRows ? 0.824 : 1);
    return 0.1253 + 0.000457 * ranks + 0.001495 * rows + 2.725e-5 * ranks * rows +
           (masked ? draws : 0);
  }
  constexpr double wave_us(std::int64_t clusters, int parts, int per_sm, std::int64_t steps,
                           int sms) const {
    if (clusters == 0) return 0;
    const std::int64_t blocks = clusters * parts;
    const std::int64_t of_sm = std::min<std::int64_t>(per_sm, ceil_div<std::int64_t>(blocks, sms));
    const double own = step_us() * (1 + kShared * static_cast<double>(of_sm - 1));
    const double bytes = 2.0 * kBlockColumns * rows * static_cast<double>(blocks);
    return kStartUs + static_cast<double>(steps) * std::max(own, bytes / kDramBytesPerUs);
  }
  constexpr double us(std::int64_t clusters, int parts, int per_sm, std::int64_t steps,
                      int sms) const {
    const std::int64_t at_once = std::max<std::int64_t>(clusters_at_once(parts, per_sm, sms), 1);
    return static_cast<double>(clusters / at_once) * wave_us(at_once, parts, per_sm, steps, sms) +
           wave_us(clusters % at_once, parts, per_sm, steps, sms) + kPartUs * parts;
  }
};
/// What the model of products takes too long for, beside that of the streaming shrink.
inline constexpr double kProductAheadUs = 1.074;
/// The same of products that clusters may share the depth of. On an H100 h of 512 x 4096 and 64
/// ranks takes 7.5 us by the product, by its model 11.6; ds of 1024 x 2048 9.0 by the stream, by
/// its own 5.8.
inline constexpr double kSplitAheadUs = 6;

}  // namespace mortar::lora::train::cuda
