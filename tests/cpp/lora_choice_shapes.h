// SPDX-License-Identifier: Apache-2.0
// Problems and devices for the tests of LoRA's launch choices.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "lora/launch_plan.h"

namespace mortar::lora {

inline LoraShape shape(std::int64_t tokens, std::int64_t adapters, int rank, std::int64_t hidden,
                       const std::vector<std::int64_t>& widths) {
  LoraShape s;
  s.num_tokens = tokens;
  s.num_adapters = adapters;
  s.hidden = hidden;
  std::copy(widths.begin(), widths.end(), s.widths.begin());
  s.num_slices = static_cast<int>(widths.size());
  s.max_rank = s.h_columns = rank;
  return s;
}

/// An H200, an A100, an L40S, and a device of one SM with little shared memory.
inline const Machine kMachines[] = {
    {}, {108, 80, 166'912, 167'936}, {142, 89, 101'376, 102'400}, {1, 80, 101'376, 102'400}};

}  // namespace mortar::lora
