// SPDX-License-Identifier: Apache-2.0
// Which elements dropout keeps. Element i of a matrix (m * columns + c) draws 16 bits and is
// dropped if they are below the threshold 2^16 p. The upper eight are a byte of its own, of the 16
// in Philox block i / 16; the lower eight are the XOR of the bytes of its octet, i / 8, which is
// independent of any seven of them. So each element is dropped with probability p in steps of
// 2^-16, and no two have a covariance above 2^-18, at half the cost of 16 bits for each: the lower
// bits count in one draw of 256.
#pragma once

#include <cstdint>

#include "core/philox.h"

namespace mortar::lora::train {

inline constexpr std::uint32_t kDropAll = 1u << 16;
inline constexpr int kMaskGroup = 16;  ///< elements that share one Philox block
inline constexpr int kMaskRounds = 7;  ///< of Philox

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

/// The bytes of eight elements: those of elements 0 to 3 are bytes 0, 2, 1 and 3 of the first word.
/// So two neighbours lie 16 bits apart, as 16-bit elements do.
struct OctetDraw {
  std::uint32_t word[2];

  /// Elements whose byte is below are dropped: 0 to 256.
  MORTAR_HOST_DEVICE std::uint32_t limit(std::uint32_t threshold) const {
    std::uint32_t lower = word[0] ^ word[1];
    lower ^= lower >> 16;
    lower ^= lower >> 8;
    return (threshold + 0xffu - (lower & 0xffu)) >> 8;
  }
  /// Bits 15 and 31: elements 2 pair and 2 pair + 1 are kept.
  MORTAR_HOST_DEVICE std::uint32_t kept(int pair, std::uint32_t limit) const {
    const std::uint32_t bytes = word[pair / 2] >> (8 * (pair % 2)) & 0x00ff00ffu;
    return bytes + (0x8000u - limit) * 0x00010001u;
  }
};

/// Bit j is set if element 16 * group + j is kept.
MORTAR_HOST_DEVICE inline std::uint32_t keep_bits(std::uint64_t seed, std::uint64_t offset,
                                                  std::uint64_t group, std::uint32_t threshold) {
  if (threshold == 0) return 0xffffu;
  if (threshold >= kDropAll) return 0;
  const PhiloxWords random = philox_quad<kMaskRounds>(seed, offset, group);
  std::uint32_t bits = 0;
  for (int octet = 0; octet < 2; ++octet) {
    const OctetDraw draw{{random.word[2 * octet], random.word[2 * octet + 1]}};
    const std::uint32_t limit = draw.limit(threshold);
    for (int pair = 0; pair < 4; ++pair) {
      const std::uint32_t kept = draw.kept(pair, limit);
      bits |= ((kept >> 15 & 1u) | (kept >> 30 & 2u)) << (8 * octet + 2 * pair);
    }
  }
  return bits;
}

/// Whether one element is kept.
MORTAR_HOST_DEVICE inline bool keeps(std::uint64_t seed, std::uint64_t offset, std::uint64_t index,
                                     std::uint32_t threshold) {
  return (keep_bits(seed, offset, index / kMaskGroup, threshold) >> (index % kMaskGroup) & 1u) != 0;
}

}  // namespace mortar::lora::train
