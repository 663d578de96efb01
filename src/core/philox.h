// SPDX-License-Identifier: Apache-2.0
// Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): random words
// as a pure function of a key and a counter, so that a draw depends on nothing but its index.
#pragma once

#include <cstdint>

#include "core/int_math.h"

namespace mortar {

/// Rounds, the multipliers of words 0 and 2, and what the two words of the key grow by per round.
inline constexpr int kPhiloxRounds = 10;
inline constexpr std::uint32_t kPhiloxMultiplier0 = 0xD2511F53u, kPhiloxMultiplier2 = 0xCD9E8D57u;
inline constexpr std::uint32_t kPhiloxKeyStep0 = 0x9E3779B9u, kPhiloxKeyStep1 = 0xBB67AE85u;

/// Four random words.
struct PhiloxWords {
  std::uint32_t word[4];
};

/// The block of a 128-bit counter and a 64-bit key, least significant words first. From seven
/// rounds on it passes all statistical tests that its authors ran; ten are their margin.
template <int kRounds = kPhiloxRounds>
MORTAR_HOST_DEVICE inline PhiloxWords philox4x32(PhiloxWords counter, std::uint32_t key0,
                                                 std::uint32_t key1) {
  PhiloxWords c = counter;
  for (int round = 0; round < kRounds; ++round) {
    const std::uint64_t p0 = std::uint64_t{kPhiloxMultiplier0} * c.word[0];
    const std::uint64_t p2 = std::uint64_t{kPhiloxMultiplier2} * c.word[2];
    c = {{static_cast<std::uint32_t>(p2 >> 32) ^ c.word[1] ^ key0, static_cast<std::uint32_t>(p2),
          static_cast<std::uint32_t>(p0 >> 32) ^ c.word[3] ^ key1, static_cast<std::uint32_t>(p0)}};
    key0 += kPhiloxKeyStep0;
    key1 += kPhiloxKeyStep1;
  }
  return c;
}

/// Draws of elements 4 * quad to 4 * quad + 3 of a tensor. The counter is (quad, offset), two words
/// each, and the key is the seed.
template <int kRounds = kPhiloxRounds>
MORTAR_HOST_DEVICE inline PhiloxWords philox_quad(std::uint64_t seed, std::uint64_t offset,
                                                  std::uint64_t quad) {
  return philox4x32<kRounds>(
      {{static_cast<std::uint32_t>(quad), static_cast<std::uint32_t>(quad >> 32),
        static_cast<std::uint32_t>(offset), static_cast<std::uint32_t>(offset >> 32)}},
      static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32));
}

/// The draw of element `index` alone.
MORTAR_HOST_DEVICE inline std::uint32_t philox_draw(std::uint64_t seed, std::uint64_t offset,
                                                    std::uint64_t index) {
  return philox_quad(seed, offset, index / 4).word[index % 4];
}

}  // namespace mortar
