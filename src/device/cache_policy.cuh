// SPDX-License-Identifier: Apache-2.0
// Policies of L2 for copies: what is read once goes first, what is read again stays. PTX ISA,
// "createpolicy".
#pragma once

#include <cstdint>

namespace mortar::device {

/// As createpolicy.fractional.L2::evict_first makes it for all lines: what is read or written goes
/// before anything else.
inline constexpr std::uint64_t kEvictFirst = 0x12f0000000000000;
/// The same of evict_normal: what was used least recently goes first.
inline constexpr std::uint64_t kEvictNormal = 0x1000000000000000;

}  // namespace mortar::device
