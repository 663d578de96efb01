// SPDX-License-Identifier: Apache-2.0
// Dropout of whole groups of elements, those that share a Philox block.
#pragma once

#include <cstdint>

#include "lora/train/dropout.h"

namespace mortar::lora::train::cpu {

/// What a call's draws follow from.
struct Draws {
  std::uint64_t seed = 0, offset = 0;
  std::uint32_t threshold = 0;  ///< 1 to kDropAll - 1
};

/// Writes zeros to what is dropped of groups [group, group + groups), whose elements are `values`
/// of 4 or 2 bytes.
void drop_groups(const Draws& draws, std::uint64_t group, std::int64_t groups,
                 std::uint32_t* values);
void drop_groups(const Draws& draws, std::uint64_t group, std::int64_t groups,
                 std::uint16_t* values);

}  // namespace mortar::lora::train::cpu
