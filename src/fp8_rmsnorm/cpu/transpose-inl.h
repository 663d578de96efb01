// SPDX-License-Identifier: Apache-2.0
// Bytes turned over in blocks of 16 x 16, and Philox draws for a run of elements. Included once per
// target.
#if defined(MORTAR_FP8_RMSNORM_TRANSPOSE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MORTAR_FP8_RMSNORM_TRANSPOSE_INL_H_
#undef MORTAR_FP8_RMSNORM_TRANSPOSE_INL_H_
#else
#define MORTAR_FP8_RMSNORM_TRANSPOSE_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "core/philox.h"
#include "core/simd-inl.h"
#include "fp8_rmsnorm/cpu/row_kernels.h"

HWY_BEFORE_NAMESPACE();
namespace mortar::fp8_rmsnorm::cpu {
namespace HWY_NAMESPACE {
using namespace mortar::HWY_NAMESPACE;

inline constexpr int kBlock = 16;

/// The 16 x 16 bytes at p become columns at `to`, `stride` bytes apart.
HWY_INLINE void transpose_block(const std::uint8_t* p, std::int64_t pitch, std::uint8_t* to,
                                std::int64_t stride) {
#if HWY_TARGET == HWY_SCALAR
  for (int r = 0; r < kBlock; ++r) {
    for (int c = 0; c < kBlock; ++c) to[c * stride + r] = p[r * pitch + c];
  }
#else
  const hn::Full128<std::uint8_t> d;
  using V = hn::Vec<decltype(d)>;
  V a[kBlock], b[kBlock];
  for (int r = 0; r < kBlock; ++r) a[r] = hn::LoadU(d, p + r * pitch);
  // Rows i and i + 8 are interleaved, four times: a perfect shuffle of 256 bytes each.
  const auto shuffle = [&](const V(&from)[kBlock], V(&onto)[kBlock]) HWY_ATTR {
    for (int i = 0; i < kBlock / 2; ++i) {
      onto[2 * i] = hn::InterleaveLower(d, from[i], from[i + kBlock / 2]);
      onto[2 * i + 1] = hn::InterleaveUpper(d, from[i], from[i + kBlock / 2]);
    }
  };
  shuffle(a, b);
  shuffle(b, a);
  shuffle(a, b);
  shuffle(b, a);
  for (int c = 0; c < kBlock; ++c) hn::StoreU(a[c], d, to + c * stride);
#endif
}

inline void transpose(const std::uint8_t* from, std::int64_t pitch, std::int64_t rows,
                      std::int64_t columns, std::uint8_t* to, std::int64_t stride) {
  std::uint8_t block[kBlock * kBlock];
  for (std::int64_t c = 0; c < columns; c += kBlock) {
    const std::int64_t wide = std::min<std::int64_t>(kBlock, columns - c);
    // The lines of the next columns, which no processor would guess, come while these are turned.
    for (std::int64_t i = c + kBlock; i < std::min(c + 2 * kBlock, columns); ++i) {
      for (std::int64_t r = 0; r < rows; r += 64) __builtin_prefetch(to + i * stride + r, 1, 3);
    }
    for (std::int64_t r = 0; r < rows; r += kBlock) {
      const std::int64_t high = std::min<std::int64_t>(kBlock, rows - r);
      const std::uint8_t* p = from + r * pitch + c;
      std::uint8_t* at = to + c * stride + r;
      if (wide == kBlock && high == kBlock) {
        transpose_block(p, pitch, at, stride);
        continue;
      }
      transpose_block(p, pitch, block, kBlock);
      for (std::int64_t i = 0; i < wide; ++i) {
        std::memcpy(at + i * stride, block + i * kBlock, static_cast<std::size_t>(high));
      }
    }
  }
}

/// words[4 i + w] = word w of block first + i, for i below `blocks` rounded up to a vector.
inline void draw_blocks(const std::int64_t* rng, std::uint64_t first, std::int64_t blocks,
                        std::uint32_t* words) {
  const auto seed = static_cast<std::uint64_t>(rng[0]), offset = static_cast<std::uint64_t>(rng[1]);
#if HWY_TARGET == HWY_SCALAR
  for (std::int64_t i = 0; i < blocks; ++i) {
    const PhiloxWords block = philox_quad(seed, offset, first + static_cast<std::uint64_t>(i));
    std::memcpy(words + 4 * i, block.word, sizeof(block.word));
  }
#else
  // One block for each lane of 64 bits. A word is its lower half; the upper one is not read.
  const hn::ScalableTag<std::uint64_t> u64;
  const hn::Repartition<std::uint32_t, decltype(u64)> u32;
  using V = hn::Vec<decltype(u64)>;
  const auto multiply = [&](V a, std::uint32_t b)
                            HWY_ATTR { return hn::MulEven(hn::BitCast(u32, a), hn::Set(u32, b)); };
  for (std::int64_t i = 0; i < blocks; i += static_cast<std::int64_t>(hn::Lanes(u64))) {
    V c0 = hn::Iota(u64, first + static_cast<std::uint64_t>(i)), c1 = hn::ShiftRight<32>(c0);
    V c2 = hn::Set(u64, offset), c3 = hn::ShiftRight<32>(c2);
    std::uint32_t key0 = static_cast<std::uint32_t>(seed);
    std::uint32_t key1 = static_cast<std::uint32_t>(seed >> 32);
    for (int round = 0; round < kPhiloxRounds; ++round) {
      const V p0 = multiply(c0, kPhiloxMultiplier0), p2 = multiply(c2, kPhiloxMultiplier2);
      c0 = hn::Xor(hn::Xor(hn::ShiftRight<32>(p2), c1), hn::Set(u64, key0));
      c2 = hn::Xor(hn::Xor(hn::ShiftRight<32>(p0), c3), hn::Set(u64, key1));
      c1 = p2;
      c3 = p0;
      key0 += kPhiloxKeyStep0;
      key1 += kPhiloxKeyStep1;
    }
    const V low = hn::Set(u64, 0xffffffffu);
    hn::StoreInterleaved2(hn::Or(hn::And(c0, low), hn::ShiftLeft<32>(c1)),
                          hn::Or(hn::And(c2, low), hn::ShiftLeft<32>(c3)), u64,
                          reinterpret_cast<std::uint64_t*>(words + 4 * i));
  }
#endif
}

/// draws[i] = draw i of the words: four of each.
inline void turn_words(const std::uint32_t* words, std::int64_t n, std::uint32_t* draws) {
#if HWY_TARGET == HWY_SCALAR
  for (std::int64_t i = 0; i < n; ++i) {
    draws[i] = turned_draw(words[i / kDrawsOfWord], static_cast<int>(i % kDrawsOfWord));
  }
#else
  // Byte b of a word's draw i is its byte b - i.
  alignas(16) static constexpr std::uint8_t kFrom[16] = {0, 1, 2, 3, 3, 0, 1, 2,
                                                         2, 3, 0, 1, 1, 2, 3, 0};
  const hn::Full128<std::uint32_t> u32;
  const auto from = hn::BitCast(u32, hn::Load(hn::Full128<std::uint8_t>(), kFrom));
  for (std::int64_t i = 0; i < n; i += kDrawsOfWord) {
    const auto word = hn::Set(u32, words[i / kDrawsOfWord]);
    hn::StoreU(hn::TableLookupBytes(word, from), u32, draws + i);
  }
#endif
}

inline void draw(const std::int64_t* rng, std::uint64_t first, std::int64_t n,
                 std::uint32_t* draws) {
  constexpr std::int64_t kMostBlocks = kRun / kDrawsOfBlock + 1;
  const auto skipped = static_cast<std::int64_t>(first % kDrawsOfBlock);
  alignas(64) std::uint32_t words[4 * round_up<std::int64_t>(kMostBlocks, 16)];
  draw_blocks(rng, first / kDrawsOfBlock, ceil_div<std::int64_t>(skipped + n, kDrawsOfBlock),
              words);
  if (skipped % kDrawsOfWord == 0) return turn_words(words + skipped / kDrawsOfWord, n, draws);
  alignas(64) std::uint32_t all[kRun + kPadding];
  turn_words(words, skipped + n, all);
  std::memcpy(draws, all + skipped, static_cast<std::size_t>(n) * sizeof(std::uint32_t));
}

}  // namespace HWY_NAMESPACE
}  // namespace mortar::fp8_rmsnorm::cpu
HWY_AFTER_NAMESPACE();

#endif  // MORTAR_FP8_RMSNORM_TRANSPOSE_INL_H_
