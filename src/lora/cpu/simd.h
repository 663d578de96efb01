// SPDX-License-Identifier: Apache-2.0
// Where the tables of functions come from.
#pragma once

#include <memory>
#include <vector>

#include "lora/cpu/kernels.h"

namespace mortar::lora::cpu {

/// The tables that Highway compiled and this machine can run, best first; the last is plain C++.
std::vector<const Kernels*> highway_kernels();

/// Dot products of bfloat16 pairs (vdpbf16ps); null on a machine or compiler without them. The
/// other entries are those of `base`.
std::unique_ptr<Kernels> avx512_bf16_kernels(const Kernels& base);

/// Matrix tiles of bfloat16 (AMX) on top of a table that has pairs; null on a machine, kernel or
/// compiler without them.
std::unique_ptr<Kernels> amx_kernels(const Kernels& base);

}  // namespace mortar::lora::cpu
