// SPDX-License-Identifier: Apache-2.0
// Dropout's draws, a Philox block of 16 elements in every lane: the bits of lora/train/dropout.h.
#include "lora/train/cpu/drop.h"

// A group is one vector of 16 elements or several: of a size that is known.
#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_SSE4 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "lora/train/cpu/drop.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace mortar::lora::train::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET != HWY_SCALAR
using Tag = hn::ScalableTag<std::uint32_t>;
using Vec = hn::Vec<Tag>;
constexpr std::int64_t kGroups = hn::MaxLanes(Tag());  ///< drawn at a time

/// Both halves of 64-bit products.
HWY_INLINE void multiply(Vec a, std::uint32_t by, Vec& low, Vec& high) {
  const Tag u32;
  const hn::RepartitionToWide<Tag> u64;
  const Vec b = hn::Set(u32, by);
  const auto even = hn::MulEven(a, b);
  const auto odd = hn::MulEven(hn::BitCast(u32, hn::ShiftRight<32>(hn::BitCast(u64, a))), b);
  low = hn::OddEven(hn::BitCast(u32, hn::ShiftLeft<32>(odd)), hn::BitCast(u32, even));
  high = hn::OddEven(hn::BitCast(u32, odd), hn::BitCast(u32, hn::ShiftRight<32>(even)));
}

/// keep_bits of kGroups groups, whose numbers have the same upper 32 bits.
HWY_INLINE Vec draw(const Draws& d, std::uint64_t group) {
  const Tag u32;
  Vec c0 = hn::Iota(u32, static_cast<std::uint32_t>(group));
  Vec c1 = hn::Set(u32, static_cast<std::uint32_t>(group >> 32));
  Vec c2 = hn::Set(u32, static_cast<std::uint32_t>(d.offset));
  Vec c3 = hn::Set(u32, static_cast<std::uint32_t>(d.offset >> 32));
  auto key0 = static_cast<std::uint32_t>(d.seed), key1 = static_cast<std::uint32_t>(d.seed >> 32);
  for (int round = 0; round < kMaskRounds; ++round) {
    Vec low0, high0, low2, high2;
    multiply(c0, kPhiloxMultiplier0, low0, high0);
    multiply(c2, kPhiloxMultiplier2, low2, high2);
    c0 = hn::Xor(hn::Xor(high2, c1), hn::Set(u32, key0));
    c1 = low2;
    c2 = hn::Xor(hn::Xor(high0, c3), hn::Set(u32, key1));
    c3 = low0;
    key0 += kPhiloxKeyStep0;
    key1 += kPhiloxKeyStep1;
  }
  const auto octet = [&](Vec word0, Vec word1) {
    Vec lower = hn::Xor(word0, word1);
    lower = hn::Xor(lower, hn::ShiftRight<16>(lower));
    lower = hn::And(hn::Xor(lower, hn::ShiftRight<8>(lower)), hn::Set(u32, 0xffu));
    const Vec limit = hn::ShiftRight<8>(hn::Sub(hn::Set(u32, d.threshold + 0xffu), lower));
    const Vec room = hn::Sub(hn::Set(u32, 0x8000u), limit);
    const Vec both = hn::Or(room, hn::ShiftLeft<16>(room));
    const Vec bytes = hn::Set(u32, 0x00ff00ffu), even = hn::Set(u32, 1u), odd = hn::Set(u32, 2u);
    Vec bits = hn::Zero(u32);
    const auto put = [&](Vec pair, int shift) {
      const Vec kept = hn::Add(hn::And(pair, bytes), both);
      const Vec two =
          hn::Or(hn::And(hn::ShiftRight<15>(kept), even), hn::And(hn::ShiftRight<30>(kept), odd));
      bits = hn::Or(bits, hn::ShiftLeftSame(two, shift));
    };
    put(word0, 0);
    put(hn::ShiftRight<8>(word0), 2);
    put(word1, 4);
    put(hn::ShiftRight<8>(word1), 6);
    return bits;
  };
  return hn::Or(octet(c0, c1), hn::ShiftLeft<8>(octet(c2, c3)));
}

/// Keeps those of a group's elements whose bits are set.
template <class T>
HWY_INLINE void clear(std::uint32_t bits, T* values) {
  const hn::CappedTag<T, kMaskGroup> tag;
  constexpr int kLanes = static_cast<int>(hn::MaxLanes(tag));
  for (int e = 0; e < kMaskGroup; e += kLanes) {
    const std::uint32_t part = bits >> e;
    const std::uint8_t bytes[8] = {static_cast<std::uint8_t>(part),
                                   static_cast<std::uint8_t>(part >> 8)};
    const auto kept = hn::LoadMaskBits(tag, bytes);
    hn::StoreU(hn::IfThenElseZero(kept, hn::LoadU(tag, values + e)), tag, values + e);
  }
}
#endif

template <class T>
HWY_INLINE void drop(const Draws& d, std::uint64_t group, std::int64_t groups, T* values) {
  std::int64_t i = 0;
#if HWY_TARGET != HWY_SCALAR
  while (i < groups) {
    const std::uint64_t first = group + static_cast<std::uint64_t>(i);
    const std::uint32_t last = static_cast<std::uint32_t>(first) + (kGroups - 1);
    if (last < kGroups - 1) break;  // the lower 32 bits wrap around
    HWY_ALIGN std::uint32_t bits[kGroups];
    hn::Store(draw(d, first), Tag(), bits);
    for (std::int64_t g = 0; g < kGroups && i < groups; ++g, ++i) {
      clear(bits[g], values + i * kMaskGroup);
    }
  }
#endif
  for (; i < groups; ++i) {
    const std::uint32_t bits =
        keep_bits(d.seed, d.offset, group + static_cast<std::uint64_t>(i), d.threshold);
    for (int e = 0; e < kMaskGroup; ++e) {
      if ((bits >> e & 1u) == 0) values[i * kMaskGroup + e] = 0;
    }
  }
}

void drop_words(const Draws& d, std::uint64_t group, std::int64_t groups, std::uint32_t* values) {
  drop(d, group, groups, values);
}
void drop_halves(const Draws& d, std::uint64_t group, std::int64_t groups, std::uint16_t* values) {
  drop(d, group, groups, values);
}

}  // namespace HWY_NAMESPACE
}  // namespace mortar::lora::train::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace mortar::lora::train::cpu {

HWY_EXPORT(drop_words);
HWY_EXPORT(drop_halves);

void drop_groups(const Draws& draws, std::uint64_t group, std::int64_t groups,
                 std::uint32_t* values) {
  HWY_DYNAMIC_DISPATCH(drop_words)(draws, group, groups, values);
}
void drop_groups(const Draws& draws, std::uint64_t group, std::int64_t groups,
                 std::uint16_t* values) {
  HWY_DYNAMIC_DISPATCH(drop_halves)(draws, group, groups, values);
}

}  // namespace mortar::lora::train::cpu
#endif  // HWY_ONCE
