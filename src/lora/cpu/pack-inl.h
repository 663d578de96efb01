// SPDX-License-Identifier: Apache-2.0
// Packs rows of B into words [units][columns], so that the lanes of a vector are columns of y.
//
// Four words of `kLanes` rows make four vectors by a 4 x 4 transpose inside each 128-bit block:
// block b of vector i holds row 4 b + i, so that after the transpose lane n is row n. Edges go
// through a zeroed copy: no byte past a row's end is read.
#if defined(MORTAR_LORA_CPU_PACK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MORTAR_LORA_CPU_PACK_INL_H_
#undef MORTAR_LORA_CPU_PACK_INL_H_
#else
#define MORTAR_LORA_CPU_PACK_INL_H_
#endif

#include <algorithm>
#include <cstring>

#include "core/simd-inl.h"
#include "lora/cpu/kernels.h"

HWY_BEFORE_NAMESPACE();
namespace mortar {
namespace HWY_NAMESPACE {
namespace lora_pack {

using lora::cpu::PackBlock;

inline constexpr std::int64_t kUnits = 4;  ///< words of a row in one step
inline constexpr std::int64_t kBytes = 4 * kUnits;

#if HWY_TARGET != HWY_SCALAR
/// Block b of the vector is the first 16 bytes of row 4 b.
template <class D>
HWY_INLINE hn::Vec<D> load_blocks(D d, const std::uint8_t* rows, std::int64_t stride) {
  if constexpr (hn::MaxLanes(D()) == 4) {
    return hn::BitCast(d, hn::LoadU(hn::Repartition<std::uint8_t, D>(), rows));
  } else {
    const hn::Half<D> half;
    constexpr std::int64_t kHalfRows = hn::MaxLanes(half);
    return hn::Combine(d, load_blocks(half, rows + kHalfRows * stride, stride),
                       load_blocks(half, rows, stride));
  }
}
#endif

/// Transposes kUnits words of kLanes rows.
inline void transpose(const std::uint8_t* rows, std::int64_t stride, std::uint32_t* out,
                      std::int64_t out_stride) {
#if HWY_TARGET == HWY_SCALAR
  for (std::int64_t u = 0; u < kUnits; ++u) {
    for (std::int64_t n = 0; n < kLanes; ++n) {
      std::memcpy(out + u * out_stride + n, rows + n * stride + 4 * u, 4);
    }
  }
#else
  const BitsTag u32;
  const hn::RepartitionToWide<BitsTag> u64;
  const BitsVec r0 = load_blocks(u32, rows, stride), r1 = load_blocks(u32, rows + stride, stride);
  const BitsVec r2 = load_blocks(u32, rows + 2 * stride, stride);
  const BitsVec r3 = load_blocks(u32, rows + 3 * stride, stride);
  const auto low01 = hn::BitCast(u64, hn::InterleaveLower(u32, r0, r1));
  const auto low23 = hn::BitCast(u64, hn::InterleaveLower(u32, r2, r3));
  const auto high01 = hn::BitCast(u64, hn::InterleaveUpper(u32, r0, r1));
  const auto high23 = hn::BitCast(u64, hn::InterleaveUpper(u32, r2, r3));
  hn::Store(hn::BitCast(u32, hn::InterleaveLower(u64, low01, low23)), u32, out);
  hn::Store(hn::BitCast(u32, hn::InterleaveUpper(u64, low01, low23)), u32, out + out_stride);
  hn::Store(hn::BitCast(u32, hn::InterleaveLower(u64, high01, high23)), u32, out + 2 * out_stride);
  hn::Store(hn::BitCast(u32, hn::InterleaveUpper(u64, high01, high23)), u32, out + 3 * out_stride);
#endif
}

/// Bytes of B fetched ahead of use: what memory delivers in one latency.
inline constexpr std::int64_t kAheadBytes = 4096;

/// Fetches kLanes rows, the gaps between them too unless they are wide; no fault past the end.
inline void prefetch_rows(const std::uint8_t* rows, std::int64_t stride, std::int64_t row_bytes) {
  const bool dense = stride < row_bytes + 64;
  const std::int64_t pieces = dense ? 1 : kLanes, bytes = dense ? kLanes * stride : row_bytes;
  for (std::int64_t i = 0; i < pieces; ++i) {
    for (std::int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(rows + i * stride + at);
  }
}

inline void pack(const PackBlock& block) {
  using lora::cpu::kPackColumns;
  const auto* rows = static_cast<const std::uint8_t*>(block.rows);
  const std::int64_t columns = (block.num_rows + kPackColumns - 1) / kPackColumns * kPackColumns;
  const std::int64_t ahead = std::max<std::int64_t>(kLanes, kAheadBytes / block.row_bytes);
  for (std::int64_t n = 0; n < columns; n += kLanes) {
    const std::int64_t num_rows = std::clamp<std::int64_t>(block.num_rows - n, 0, kLanes);
    if (n + ahead < block.num_rows + block.rows_after) {
      prefetch_rows(rows + (n + ahead) * block.stride_bytes, block.stride_bytes, block.row_bytes);
    }
    std::uint32_t* out = block.out + n / kPackColumns * block.panel_stride + n % kPackColumns;
    for (std::int64_t byte = 0; byte < block.row_bytes;
         byte += kBytes, out += kUnits * kPackColumns) {
      const std::uint8_t* from = rows + n * block.stride_bytes + byte;
      const std::int64_t bytes = std::min(kBytes, block.row_bytes - byte);
      if (num_rows == kLanes && bytes == kBytes) {
        transpose(from, block.stride_bytes, out, kPackColumns);
        continue;
      }
      std::uint8_t edge[kLanes * kBytes] = {};
      for (std::int64_t i = 0; i < num_rows; ++i) {
        std::memcpy(edge + i * kBytes, from + i * block.stride_bytes, bytes);
      }
      transpose(edge, kBytes, out, kPackColumns);
    }
  }
}

}  // namespace lora_pack
}  // namespace HWY_NAMESPACE
}  // namespace mortar
HWY_AFTER_NAMESPACE();

#endif  // MORTAR_LORA_CPU_PACK_INL_H_
