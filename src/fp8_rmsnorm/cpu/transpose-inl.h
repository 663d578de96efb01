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

HWY_BEFORE_NAMESPACE();
namespace mortar::fp8_rmsnorm::cpu {
namespace HWY_NAMESPACE {
using namespace mortar::HWY_NAMESPACE;

inline constexpr int kBlock = 16;

/// The 16 x 16 bytes at p become those at `to`, column by column.
HWY_INLINE void transpose_block(const std::uint8_t* p, std::int64_t pitch, std::uint8_t* to) {
#if HWY_TARGET == HWY_SCALAR
  for (int r = 0; r < kBlock; ++r) {
    for (int c = 0; c < kBlock; ++c) to[c * kBlock + r] = p[r * pitch + c];
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
  for (int c = 0; c < kBlock; ++c) hn::Store(a[c], d, to + c * kBlock);
#endif
}

inline void transpose(const std::uint8_t* from, std::int64_t pitch, std::int64_t rows,
                      std::int64_t columns, std::uint8_t* to, std::int64_t stride) {
  alignas(16) std::uint8_t block[kBlock * kBlock];
  for (std::int64_t c = 0; c < columns; c += kBlock) {
    const std::int64_t last = std::min<std::int64_t>(kBlock, columns - c);
    for (std::int64_t r = 0; r < rows; r += kBlock) {
      transpose_block(from + r * pitch + c, pitch, block);
      const auto bytes = static_cast<std::size_t>(std::min<std::int64_t>(kBlock, rows - r));
      for (std::int64_t i = 0; i < last; ++i) {
        std::memcpy(to + (c + i) * stride + r, block + i * kBlock, bytes);
      }
    }
  }
}

inline void draw(const std::int64_t* rng, std::uint64_t first, std::int64_t n,
                 std::uint32_t* draws) {
  const auto seed = static_cast<std::uint64_t>(rng[0]), offset = static_cast<std::uint64_t>(rng[1]);
  for (std::int64_t i = 0; i < n;) {
    const std::uint64_t index = first + static_cast<std::uint64_t>(i);
    const PhiloxWords words = philox_quad(seed, offset, index / 4);
    for (std::uint64_t w = index % 4; w < 4 && i < n; ++w) draws[i++] = words.word[w];
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace mortar::fp8_rmsnorm::cpu
HWY_AFTER_NAMESPACE();

#endif  // MORTAR_FP8_RMSNORM_TRANSPOSE_INL_H_
