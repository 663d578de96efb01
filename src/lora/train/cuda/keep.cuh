// SPDX-License-Identifier: Apache-2.0
// Draws of dropout and their masks in few instructions, where these bind: the draws of
// core/philox.h, and the masks of OctetDraw from four bytes of a draw at a time.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/philox.h"
#include "lora/train/dropout.h"

namespace mortar::lora::train::cuda {

/// philox_quad() with products that are one instruction: of those of 64 bits the compiler keeps an
/// addition to the upper half.
__device__ __forceinline__ PhiloxWords draw_block(std::uint64_t seed, std::uint64_t offset,
                                                  std::uint64_t index) {
  const auto product = [](std::uint32_t a, std::uint32_t b, std::uint32_t* upper) {
    std::uint32_t lower;
    asm("{\n.reg .b64 both;\nmul.wide.u32 both, %2, %3;\nmov.b64 {%0, %1}, both;\n}\n"
        : "=r"(lower), "=r"(*upper)
        : "r"(a), "r"(b));
    return lower;
  };
  auto key0 = static_cast<std::uint32_t>(seed), key1 = static_cast<std::uint32_t>(seed >> 32);
  PhiloxWords c{{static_cast<std::uint32_t>(index), static_cast<std::uint32_t>(index >> 32),
                 static_cast<std::uint32_t>(offset), static_cast<std::uint32_t>(offset >> 32)}};
#pragma unroll
  for (int round = 0; round < kMaskRounds; ++round) {
    std::uint32_t upper0, upper2;
    const std::uint32_t lower0 = product(kPhiloxMultiplier0, c.word[0], &upper0);
    const std::uint32_t lower2 = product(kPhiloxMultiplier2, c.word[2], &upper2);
    c = {{upper2 ^ c.word[1] ^ key0, lower2, upper0 ^ c.word[3] ^ key1, lower0}};
    key0 += kPhiloxKeyStep0;
    key1 += kPhiloxKeyStep1;
  }
  return c;
}

/// What a threshold below kDropAll says of draws. Elements are kept whose byte is not below a
/// limit, of two that differ by one (OctetDraw::limit): the sum of a byte's lower seven bits and
/// `add` has bit 7 if these reach the limit, without its upper half. That half counts in the lower
/// limits if either bit 7 is there, in the upper ones if both are.
struct Keep {
  std::uint32_t lower;   ///< bits of the threshold, as the highest
  std::uint32_t add[2];  ///< in each byte; the second of elements whose lower bits are below
  std::uint32_t either;

  __device__ __forceinline__ explicit Keep(std::uint32_t threshold) {
    const std::uint32_t upper = threshold >> 8, most = upper < 0x80 ? 0x80 : 0x100;
    lower = threshold << 24;
    add[0] = (most - upper) * 0x01010101u;
    add[1] = (most - upper - 1) * 0x01010101u;
    either = upper < 0x80 ? 0xffffffffu : 0;
  }
  /// Bits 7, 15, 23 and 31 of words: the element of that byte is kept.
  __device__ __forceinline__ uint2 bits(const OctetDraw& draw) const {
    std::uint32_t all = draw.word[0] ^ draw.word[1];  // the lower bits are all bytes' XOR
    all ^= all << 16;
    all ^= all << 8;
    const std::uint32_t own = all < lower ? add[1] : add[0];
    const auto of = [&](std::uint32_t word) {
      const std::uint32_t sum = (word & 0x7f7f7f7fu) + own;
      return (sum & word) | ((sum | word) & either);
    };
    return make_uint2(of(draw.word[0]), of(draw.word[1]));
  }
};

/// Eight 16-bit masks of Keep::bits(), zeros for dropped elements.
__device__ __forceinline__ uint4 mask_words(const uint2& bits) {
  const auto signs = [](std::uint32_t word, auto which) {  // of two bytes, in all bits of 16 each
    std::uint32_t mask;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(mask) : "r"(word), "n"(decltype(which)::value));
    return mask;
  };
  constexpr std::integral_constant<int, 0xaa88> kFirst;
  constexpr std::integral_constant<int, 0xbb99> kSecond;
  return make_uint4(signs(bits.x, kFirst), signs(bits.x, kSecond), signs(bits.y, kFirst),
                    signs(bits.y, kSecond));
}

}  // namespace mortar::lora::train::cuda
