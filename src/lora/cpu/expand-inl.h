// SPDX-License-Identifier: Apache-2.0
// y[t, n] (+)= sum_r h[t, r] B[n, r]: register tiles of kTileTokens tokens x kTileVecs vectors of
// columns. Every step over r loads kTileVecs vectors of packed B and broadcasts one h per token.
//
// y is read and written once, a tile of each row at a time; a last tile that is narrower goes
// through a buffer, with the same arithmetic.
#if defined(MORTAR_LORA_CPU_EXPAND_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MORTAR_LORA_CPU_EXPAND_INL_H_
#undef MORTAR_LORA_CPU_EXPAND_INL_H_
#else
#define MORTAR_LORA_CPU_EXPAND_INL_H_
#endif

#include <algorithm>
#include <cstring>

#include "core/simd-inl.h"
#include "lora/cpu/kernels.h"

HWY_BEFORE_NAMESPACE();
namespace mortar {
namespace HWY_NAMESPACE {
namespace lora_expand {

using lora::cpu::ExpandBlock;

// Accumulators + vectors of B + one broadcast must fit the registers: 24 + 4 + 1 of 32, or
// 8 + 2 + 2 of AVX2's 16.
inline constexpr bool kFewRegisters = HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_SCALAR;
inline constexpr int kTileTokens = kFewRegisters ? 4 : 6;
inline constexpr int kTileVecs = kFewRegisters ? 2 : 4;
inline constexpr std::int64_t kTileColumns = kTileVecs * kLanes;
static_assert(kTileColumns <= lora::cpu::kMaxColumnTile);

/// The `kPart`-th float32 of every 32-bit unit.
template <class B, int kPart>
HWY_INLINE FloatVec part(BitsVec unit) {
  const BitsTag u32;
  if constexpr (std::is_same_v<B, float>) {
    return hn::BitCast(FloatTag(), unit);
  } else if constexpr (std::is_same_v<B, BFloat16>) {
    return hn::BitCast(FloatTag(), kPart == 0 ? hn::ShiftLeft<16>(unit)
                                              : hn::And(unit, hn::Set(u32, 0xffff0000u)));
  } else {
    alignas(64) Float16 half[kLanes];
    store_u16(kPart == 0 ? hn::And(unit, hn::Set(u32, 0xffffu)) : hn::ShiftRight<16>(unit), half);
    return load_f32(half);
  }
}

template <class B, int kPart, int kTokens>
HWY_INLINE void multiply(const BitsVec (&unit)[kTileVecs], const float* h, std::int64_t h_stride,
                         FloatVec (&sum)[kTokens][kTileVecs]) {
  FloatVec b[kTileVecs];
  for (int v = 0; v < kTileVecs; ++v) b[v] = part<B, kPart>(unit[v]);
  for (int t = 0; t < kTokens; ++t) {
    const FloatVec hv = hn::Set(FloatTag(), h[t * h_stride]);
    for (int v = 0; v < kTileVecs; ++v) sum[t][v] = hn::MulAdd(hv, b[v], sum[t][v]);
  }
}

/// One row's tile of y.
template <class Y>
HWY_INLINE void update(const FloatVec (&sum)[kTileVecs], bool add, Y* y) {
  for (int v = 0; v < kTileVecs; ++v) {
    store_f32(add ? hn::Add(load_f32(y + v * kLanes), sum[v]) : sum[v], y + v * kLanes);
  }
}

template <class Y>
HWY_INLINE void update_part(const FloatVec (&sum)[kTileVecs], bool add, Y* y,
                            std::int64_t columns) {
  Y tile[kTileColumns] = {};
  std::memcpy(tile, y, columns * sizeof(Y));
  update(sum, add, tile);
  std::memcpy(y, tile, columns * sizeof(Y));
}

template <class B, class Y, int kTokens>
HWY_INLINE void tile(const ExpandBlock& block, std::int64_t token, std::int64_t column) {
  const BitsTag u32;
  FloatVec sum[kTokens][kTileVecs];
  for (int t = 0; t < kTokens; ++t) {
    for (int v = 0; v < kTileVecs; ++v) sum[t][v] = hn::Zero(FloatTag());
  }
  constexpr int kPerUnit = sizeof(float) / sizeof(B);
  const float* h = static_cast<const float*>(block.h) + token * block.h_stride;
  const std::uint32_t* b = block.b + column;
  for (std::int64_t u = 0; u < block.units; ++u, b += block.b_stride, h += kPerUnit) {
    BitsVec unit[kTileVecs];
    for (int v = 0; v < kTileVecs; ++v) unit[v] = hn::LoadU(u32, b + v * kLanes);
    multiply<B, 0, kTokens>(unit, h, block.h_stride, sum);
    if constexpr (kPerUnit == 2) multiply<B, 1, kTokens>(unit, h + 1, block.h_stride, sum);
  }
  const std::int64_t columns = block.num_columns - column;
  for (int t = 0; t < kTokens; ++t) {
    Y* y = static_cast<Y*>(block.y_rows[token + t]) + column;
    if (columns >= kTileColumns) {
      update(sum[t], block.add, y);
    } else {
      update_part(sum[t], block.add, y, columns);
    }
  }
}

template <class B, class Y, int kTokens>
HWY_INLINE void tile_row(const ExpandBlock& block, std::int64_t token) {
  for (std::int64_t n = 0; n < block.num_columns; n += kTileColumns) {
    tile<B, Y, kTokens>(block, token, n);
  }
}

template <class B, class Y>
void expand(const ExpandBlock& block) {
  std::int64_t t = 0;
  for (; t + kTileTokens <= block.num_tokens; t += kTileTokens) {
    tile_row<B, Y, kTileTokens>(block, t);
  }
  for (; t + 2 <= block.num_tokens; t += 2) tile_row<B, Y, 2>(block, t);
  for (; t < block.num_tokens; ++t) tile_row<B, Y, 1>(block, t);
}

}  // namespace lora_expand
}  // namespace HWY_NAMESPACE
}  // namespace mortar
HWY_AFTER_NAMESPACE();

#endif  // MORTAR_LORA_CPU_EXPAND_INL_H_
