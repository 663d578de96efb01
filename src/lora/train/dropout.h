// SPDX-License-Identifier: Apache-2.0
// Which elements dropout keeps. Element i of a matrix (m * columns + c) draws 16 bits: half i % 8
// of the Philox words of counter i / 8, low halves first; it is dropped if they are below the
// threshold 2^16 p.
#pragma once

#include <cstdint>

#include "core/philox.h"

namespace mortar::lora::train {

inline constexpr std::uint32_t kDropAll = 1u << 16;
inline constexpr int kMaskGroup = 8;  ///< elements that share one Philox call

/// p rounded to a multiple of 2^-16.
inline std::uint32_t drop_threshold(float p) {
  return static_cast<std::uint32_t>(static_cast<double>(p) * kDropAll + 0.5);
}

/// What kept elements are multiplied by; 0 where none is kept.
inline float keep_scale(std::uint32_t threshold) {
  return threshold >= kDropAll
             ? 0.0f
             : static_cast<float>(static_cast<double>(kDropAll) / (kDropAll - threshold));
}

/// Bit j is set if element 8 * group + j is kept.
MORTAR_HOST_DEVICE inline std::uint32_t keep_bits(std::uint64_t seed, std::uint64_t offset,
                                                  std::uint64_t group, std::uint32_t threshold) {
  if (threshold == 0) return 0xffu;
  if (threshold >= kDropAll) return 0;
  const PhiloxWords random = philox_quad(seed, offset, group);
  std::uint32_t bits = 0;
  for (int j = 0; j < kMaskGroup; ++j) {
    const std::uint32_t draw = random.word[j / 2] >> (16 * (j % 2)) & 0xffffu;
    bits |= (draw >= threshold ? 1u : 0u) << j;
  }
  return bits;
}

/// Whether one element is kept.
MORTAR_HOST_DEVICE inline bool keeps(std::uint64_t seed, std::uint64_t offset, std::uint64_t index,
                                     std::uint32_t threshold) {
  return (keep_bits(seed, offset, index / kMaskGroup, threshold) >> (index % kMaskGroup) & 1u) != 0;
}

}  // namespace mortar::lora::train
