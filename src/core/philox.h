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

/// Block `index` of a stream: the counter is (index, offset), two words each, and the key is the
/// seed.
template <int kRounds = kPhiloxRounds>
MORTAR_HOST_DEVICE inline PhiloxWords philox_quad(std::uint64_t seed, std::uint64_t offset,
                                                  std::uint64_t index) {
  return philox4x32<kRounds>(
      {{static_cast<std::uint32_t>(index), static_cast<std::uint32_t>(index >> 32),
        static_cast<std::uint32_t>(offset), static_cast<std::uint32_t>(offset >> 32)}},
      static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32));
}

/// Elements that share a block of draws, and those that share a word of it.
inline constexpr int kDrawsOfBlock = 16, kDrawsOfWord = 4;

/// Draw i of a word: its bits turned to the left by i bytes. Each is as random as the word, and two
/// of them are independent of each other unless the highest eight bits of one do not decide.
MORTAR_HOST_DEVICE inline std::uint32_t turned_draw(std::uint32_t word, int i) {
  const int bits = 8 * (i % kDrawsOfWord);
  return bits == 0 ? word : word << bits | word >> (32 - bits);
}

/// The draw of element `index`: 16 elements share a block, four of them a word.
MORTAR_HOST_DEVICE inline std::uint32_t philox_draw(std::uint64_t seed, std::uint64_t offset,
                                                    std::uint64_t index) {
  const PhiloxWords block = philox_quad(seed, offset, index / kDrawsOfBlock);
  const std::uint64_t in_block = index % kDrawsOfBlock;
  return turned_draw(block.word[in_block / kDrawsOfWord], static_cast<int>(in_block));
}

}  // namespace mortar
