// SPDX-License-Identifier: Apache-2.0
// The passes of the CUDA backend, as the host sees them.
#pragma once

#include <cstdint>

#include "lora/config.h"
#include "lora/cuda/params.cuh"
#include "mortar/stream.h"

namespace mortar::lora::cuda {

void plan(const std::int32_t* token_adapter, std::int64_t num_tokens, std::int64_t num_adapters,
          std::int32_t* plan, Stream stream);
void read_plan_header(const std::int32_t* plan, std::int32_t* header, Stream stream);

/// Partial or whole h = x A^T on tensor cores: x and A of one 16-bit type.
void shrink_mma(const ShrinkParams& p, const ShrinkConfig& c, Stream stream);
/// The same for every pair of dtypes, on ordinary float32 units.
void shrink_simt(const ShrinkParams& p, const ShrinkConfig& c, Stream stream);
/// Adds the slabs of `from` in order, scales, and writes to.h.
void shrink_finish(const ShrinkParams& to, const HView& from, Stream stream);
/// y (+)= h B^T on tensor cores: B and y of one 16-bit type.
void expand_mma(const ExpandParams& p, const ExpandConfig& c, Stream stream);
void expand_simt(const ExpandParams& p, const ExpandConfig& c, Stream stream);

/// Grid of an expand kernel: column blocks, then groups of tiles.
dim3 expand_grid(const ExpandParams& p);

}  // namespace mortar::lora::cuda
