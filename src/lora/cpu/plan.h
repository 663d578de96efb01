// SPDX-License-Identifier: Apache-2.0
// The planner on the host.
#pragma once

#include <cstdint>

#include "lora/problem.h"
#include "mortar/stream.h"

namespace mortar::lora::cpu {

/// Writes all words of a plan; see plan_layout.h. Unused entries are zero.
void plan(const IdsView& token_adapter, std::int64_t num_tokens, std::int64_t num_adapters,
          std::int32_t* plan, Stream stream);

void read_plan_header(const std::int32_t* plan, std::int32_t* header, Stream stream);

}  // namespace mortar::lora::cpu
