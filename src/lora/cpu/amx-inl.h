// SPDX-License-Identifier: Apache-2.0
// Shrink and expand of bfloat16 on a matrix-tile unit (AMX): tiles of 16 rows x 64 bytes, and
// C[16, 16] += A[16, 32] B[32, 16] with B in pairs of rows, as the packed units of kernels.h are.
//
// A token is a row of C, in shrink of one tile of tokens a column, and that depends on its own row
// of A, or column of B, alone: tiles that are not full compute what nobody reads, and a token's
// bits do not depend on its neighbours. K goes by in steps of 32 from zero, in order, whatever the
// batch; tiles that rest in memory between chunks of K do so in float32 as they are.
//
// `Tiles` is the unit itself, or a stand-in for it in tests:
//   configure(units)       tiles 0-5 full; 6 of `units` * 4 bytes a row, 7 of `units` rows
//   release(), zero<c>(), load<t>(p, stride_bytes), store<t>(p, stride_bytes), dot<c, a, b>()
//   update(const float* sums, num_columns, scale, base, y): a row of y, up to 64 columns, in
//   float32 or bfloat16
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "core/float16.h"
#include "lora/cpu/kernels.h"

namespace mortar::lora::cpu {

inline constexpr std::int64_t kTileRows = 16;   ///< rows of a tile, and columns of C
inline constexpr std::int64_t kTileBytes = 64;  ///< of a row
inline constexpr std::int64_t kTileStep = 32;   ///< elements of K, or of the rank, per product
inline constexpr std::int64_t kAmxChunk = 512;  ///< elements of K for which A is packed at a time
inline constexpr std::int64_t kPanelBytes = kPackColumns * 4;

template <class Tiles>
class AmxShrink {
 public:
  /// Packs rows of A; set once, before the first call.
  static inline PackKernel pack = nullptr;

  static void run(const ShrinkBlock& block) {
    if (block.num_tokens <= kTileRows) return few_tokens(block);
    alignas(64) float sums[kMaxShrinkTokens][kMaxShrinkRanks];
    alignas(64) std::uint32_t packed[kAmxChunk / 2 * kPackColumns];
    Tiles::configure(kTileRows);
    std::int64_t begin = 0;
    do {
      const std::int64_t end = std::min(block.hidden, begin + kAmxChunk);
      pack_chunk(block, begin, end, packed);
      for (std::int64_t t = 0; t < block.num_tokens; t += kTileRows) {
        const std::int64_t rank_tiles = (block.num_ranks + kTileRows - 1) / kTileRows;
        switch (rank_tiles) {
          case 1:
            tokens<1>(block, t, begin, end, packed, sums[t]);
            break;
          case 2:
            tokens<2>(block, t, begin, end, packed, sums[t]);
            break;
          case 3:
            tokens<3>(block, t, begin, end, packed, sums[t]);
            break;
          case 4:
            tokens<4>(block, t, begin, end, packed, sums[t]);
            break;
        }
      }
      begin = end;
    } while (begin < block.hidden);
    Tiles::release();
    for (std::int64_t t = 0; t < block.num_tokens; ++t) {
      std::copy_n(sums[t], block.num_ranks, block.out + t * block.out_stride);
    }
  }

 private:
  /// Units [end of K, next whole step) are zero.
  static void pack_chunk(const ShrinkBlock& block, std::int64_t begin, std::int64_t end,
                         std::uint32_t* packed) {
    const std::int64_t units = (end - begin + 1) / 2, written = (units + 3) / 4 * 4;
    const std::int64_t whole = (units + kTileRows - 1) / kTileRows * kTileRows;
    std::fill(packed + written * kPackColumns, packed + whole * kPackColumns, 0u);
    if (end == begin) return;
    PackBlock rows;
    rows.rows = static_cast<const BFloat16*>(block.a) + begin;
    rows.row_bytes = (end - begin) * sizeof(BFloat16);
    rows.stride_bytes = block.a_row_stride * sizeof(BFloat16);
    rows.num_rows = block.num_ranks;
    rows.out = packed;
    rows.panel_stride = 0;  // at most one panel
    pack(rows);
  }

  template <int kRankTiles>
  static void tokens(const ShrinkBlock& block, std::int64_t t, std::int64_t begin, std::int64_t end,
                     const std::uint32_t* packed, float* sums) {
    begin == 0 ? zero<kRankTiles>() : load_sums<kRankTiles>(sums);
    const auto* x = reinterpret_cast<const BFloat16* const*>(block.x_rows) + t;
    const std::int64_t count = std::min(kTileRows, block.num_tokens - t);
    const std::int64_t stride = even_stride(x, count);
    std::int64_t k = begin;
    for (; k + kTileStep <= end; k += kTileStep, packed += kTileRows * kPackColumns) {
      if (stride != 0) {
        Tiles::template load<4>(x[0] + k, stride);
      } else {
        load_rows(x, count, k, kTileStep);
      }
      multiply<kRankTiles>(packed);
    }
    if (k < end) {
      load_rows(x, count, k, end - k);
      multiply<kRankTiles>(packed);
    }
    store_sums<kRankTiles>(sums);
  }

  /// Bytes between the rows of a full tile if that is one number, else 0.
  static std::int64_t even_stride(const BFloat16* const* x, std::int64_t count) {
    if (count < kTileRows) return 0;
    const std::int64_t stride = x[1] - x[0];
    for (std::int64_t i = 2; i < kTileRows; ++i) {
      if (x[i] - x[i - 1] != stride) return 0;
    }
    return stride * static_cast<std::int64_t>(sizeof(BFloat16));
  }

  /// Rows that lie anywhere, and steps that are not whole, by way of a zeroed copy.
  static void load_rows(const BFloat16* const* x, std::int64_t count, std::int64_t k,
                        std::int64_t elements) {
    alignas(64) BFloat16 copy[kTileRows][kTileStep] = {};
    for (std::int64_t i = 0; i < count; ++i) {
      std::memcpy(copy[i], x[i] + k, elements * sizeof(BFloat16));
    }
    Tiles::template load<4>(copy, kTileBytes);
  }

  template <int kRankTiles>
  static void zero() {
    Tiles::template zero<0>();
    if constexpr (kRankTiles > 1) Tiles::template zero<1>();
    if constexpr (kRankTiles > 2) Tiles::template zero<2>();
    if constexpr (kRankTiles > 3) Tiles::template zero<3>();
  }
  template <int kRankTiles>
  static void load_sums(const float* sums) {
    constexpr std::int64_t kStride = kMaxShrinkRanks * sizeof(float);
    Tiles::template load<0>(sums, kStride);
    if constexpr (kRankTiles > 1) Tiles::template load<1>(sums + kTileRows, kStride);
    if constexpr (kRankTiles > 2) Tiles::template load<2>(sums + 2 * kTileRows, kStride);
    if constexpr (kRankTiles > 3) Tiles::template load<3>(sums + 3 * kTileRows, kStride);
  }
  template <int kRankTiles>
  static void store_sums(float* sums) {
    constexpr std::int64_t kStride = kMaxShrinkRanks * sizeof(float);
    Tiles::template store<0>(sums, kStride);
    if constexpr (kRankTiles > 1) Tiles::template store<1>(sums + kTileRows, kStride);
    if constexpr (kRankTiles > 2) Tiles::template store<2>(sums + 2 * kTileRows, kStride);
    if constexpr (kRankTiles > 3) Tiles::template store<3>(sums + 3 * kTileRows, kStride);
  }
  /// One tile of tokens: their x is packed, as it is less than A, whose rows are loaded where they
  /// lie. Tiles of sums are turned over, [rank][token]; each sum has the same products in the same
  /// order.
  static void few_tokens(const ShrinkBlock& block) {
    alignas(64) std::uint32_t packed[kAmxChunk / 2 * kTileRows] = {};
    Tiles::configure(kTileRows);
    zero<4>();
    for (std::int64_t begin = 0; begin < block.hidden; begin += kAmxChunk) {
      const std::int64_t end = std::min(block.hidden, begin + kAmxChunk);
      pack_tokens(block, begin, end, packed);
      const std::uint32_t* units = packed;
      for (std::int64_t k = begin; k < end; k += kTileStep, units += kTileRows * kTileRows) {
        Tiles::template load<5>(units, kTileBytes);
        const std::int64_t elements = std::min(kTileStep, end - k);
        add_ranks<0>(block, k, elements);
        if (block.num_ranks > kTileRows) add_ranks<1>(block, k, elements);
        if (block.num_ranks > 2 * kTileRows) add_ranks<2>(block, k, elements);
        if (block.num_ranks > 3 * kTileRows) add_ranks<3>(block, k, elements);
      }
    }
    alignas(64) float sums[kMaxShrinkRanks][kTileRows];
    Tiles::template store<0>(sums[0], kTileBytes);
    Tiles::template store<1>(sums[kTileRows], kTileBytes);
    Tiles::template store<2>(sums[2 * kTileRows], kTileBytes);
    Tiles::template store<3>(sums[3 * kTileRows], kTileBytes);
    Tiles::release();
    for (std::int64_t t = 0; t < block.num_tokens; ++t) {
      for (std::int64_t r = 0; r < block.num_ranks; ++r) {
        block.out[t * block.out_stride + r] = sums[r][t];
      }
    }
  }

  /// Pairs of elements of the tokens: unit u of token t at 16 u + t, zero from `end` on.
  static void pack_tokens(const ShrinkBlock& block, std::int64_t begin, std::int64_t end,
                          std::uint32_t* packed) {
    const std::int64_t elements = end - begin, pairs = elements / 2;
    const std::int64_t whole = (elements + kTileStep - 1) / kTileStep * kTileRows;
    const auto* const* x = reinterpret_cast<const BFloat16* const*>(block.x_rows);
    for (std::int64_t u = 0; u < pairs; ++u, packed += kTileRows) {
      for (std::int64_t t = 0; t < block.num_tokens; ++t) {
        std::memcpy(packed + t, x[t] + begin + 2 * u, 4);
      }
    }
    std::fill_n(packed, (whole - pairs) * kTileRows, 0u);
    if (elements % 2 == 0) return;
    for (std::int64_t t = 0; t < block.num_tokens; ++t) {
      std::memcpy(packed + t, x[t] + end - 1, 2);
    }
  }

  /// Adds the products of up to 16 rows of A from row 16 kTile on and of the tokens in tile 5.
  template <int kTile>
  static void add_ranks(const ShrinkBlock& block, std::int64_t k, std::int64_t elements) {
    constexpr int kRows = kTile % 2 == 0 ? 4 : 6;
    const std::int64_t count = std::min(kTileRows, block.num_ranks - kTile * kTileRows);
    const auto* a =
        static_cast<const BFloat16*>(block.a) + kTile * kTileRows * block.a_row_stride + k;
    if (count == kTileRows && elements == kTileStep) {
      Tiles::template load<kRows>(a, block.a_row_stride * std::int64_t{sizeof(BFloat16)});
    } else {
      alignas(64) BFloat16 copy[kTileRows][kTileStep] = {};
      for (std::int64_t r = 0; r < count; ++r) {
        std::memcpy(copy[r], a + r * block.a_row_stride, elements * sizeof(BFloat16));
      }
      Tiles::template load<kRows>(copy, kTileBytes);
    }
    Tiles::template dot<kTile, kRows, 5>();
  }

  template <int kTile>
  static void multiply_one(const std::uint32_t* packed) {
    Tiles::template load<5>(packed + kTile * kTileRows, kPanelBytes);
    Tiles::template dot<kTile, 4, 5>();
  }
  template <int kRankTiles>
  static void multiply(const std::uint32_t* packed) {
    multiply_one<0>(packed);
    if constexpr (kRankTiles > 1) multiply_one<1>(packed);
    if constexpr (kRankTiles > 2) multiply_one<2>(packed);
    if constexpr (kRankTiles > 3) multiply_one<3>(packed);
  }
};

/// h must have room for whole tiles of tokens: rows up to the next multiple of 16 are loaded.
template <class Tiles, class Y>
struct AmxExpand {
  static void run(const ExpandBlock& block) {
    const std::int64_t rest = block.units % kTileRows;
    Tiles::configure(rest == 0 ? kTileRows : rest);
    for (std::int64_t t = 0; t < block.num_tokens; t += kTileRows) {
      for (std::int64_t n = 0; n < block.num_columns; n += kPackColumns) panel(block, t, n, rest);
    }
    Tiles::release();
  }

 private:
  static void panel(const ExpandBlock& block, std::int64_t t, std::int64_t n, std::int64_t rest) {
    alignas(64) float sums[kTileRows][kPackColumns];
    const auto* h = static_cast<const std::uint32_t*>(block.h) + t * block.h_stride;
    const std::int64_t h_bytes = block.h_stride * 4;
    const std::uint32_t* b = block.b + n / kPackColumns * block.panel_stride;
    Tiles::template zero<0>();
    Tiles::template zero<1>();
    Tiles::template zero<2>();
    Tiles::template zero<3>();
    std::int64_t u = 0;
    for (; u + kTileRows <= block.units; u += kTileRows, b += kTileRows * kPackColumns) {
      Tiles::template load<4>(h + u, h_bytes);
      multiply<0, 4, 5>(b);
      multiply<1, 4, 5>(b);
      multiply<2, 4, 5>(b);
      multiply<3, 4, 5>(b);
    }
    if (rest != 0) {
      Tiles::template load<6>(h + u, h_bytes);
      multiply<0, 6, 7>(b);
      multiply<1, 6, 7>(b);
      multiply<2, 6, 7>(b);
      multiply<3, 6, 7>(b);
    }
    Tiles::template store<0>(sums[0], kPanelBytes);
    Tiles::template store<1>(sums[0] + kTileRows, kPanelBytes);
    Tiles::template store<2>(sums[0] + 2 * kTileRows, kPanelBytes);
    Tiles::template store<3>(sums[0] + 3 * kTileRows, kPanelBytes);
    const std::int64_t columns = std::min(kPackColumns, block.num_columns - n);
    for (std::int64_t i = 0; i < std::min(kTileRows, block.num_tokens - t); ++i) {
      const auto* base =
          block.base_rows == nullptr ? nullptr : static_cast<const Y*>(block.base_rows[t + i]) + n;
      Tiles::update(sums[i], columns, block.scale, base, static_cast<Y*>(block.y_rows[t + i]) + n);
    }
  }

  template <int kTile, int kA, int kB>
  static void multiply(const std::uint32_t* b) {
    Tiles::template load<kB>(b + kTile * kTileRows, kPanelBytes);
    Tiles::template dot<kTile, kA, kB>();
  }
};

}  // namespace mortar::lora::cpu
