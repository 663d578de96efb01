// SPDX-License-Identifier: Apache-2.0
// Vectors of float32 from and to float32, bfloat16 and float16 memory, one channel a lane. Included
// once per target.
#if defined(MORTAR_DYNAMIC_CONV_LANES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MORTAR_DYNAMIC_CONV_LANES_INL_H_
#undef MORTAR_DYNAMIC_CONV_LANES_INL_H_
#else
#define MORTAR_DYNAMIC_CONV_LANES_INL_H_
#endif

#include <cstdint>
#include <type_traits>

#include "core/float16.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace mortar::dynamic_conv::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::ScalableTag<float>;
using DU32 = hn::Rebind<std::uint32_t, DF>;
using DU16 = hn::Rebind<std::uint16_t, DF>;
using VF = hn::Vec<DF>;
using VU16 = hn::Vec<DU16>;
inline constexpr std::size_t kMaxLanes = hn::MaxLanes(DF());

/// Whether conversions of float16 are hardware instructions that round to nearest even.
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL
inline constexpr bool kHasHalf = true;
#else
inline constexpr bool kHasHalf = false;
#endif

template <class T>
HWY_INLINE VF widen(VU16 bits) {
  const DF df;
  if constexpr (std::is_same_v<T, BFloat16>) {
    return hn::BitCast(df, hn::ShiftLeft<16>(hn::PromoteTo(DU32(), bits)));
  } else if constexpr (kHasHalf) {
    return hn::PromoteTo(df, hn::BitCast(hn::Rebind<hwy::float16_t, DF>(), bits));
  } else {
    HWY_ALIGN T narrow[kMaxLanes];
    HWY_ALIGN float wide[kMaxLanes];
    hn::Store(bits, DU16(), reinterpret_cast<std::uint16_t*>(narrow));
    for (std::size_t i = 0; i < hn::Lanes(df); ++i) wide[i] = to_float(narrow[i]);
    return hn::Load(df, wide);
  }
}

/// Highway 1.0.3 truncates float32 -> bfloat16, so the rounding (ties to even) is done here; adding
/// it to a NaN could carry into the sign, so a NaN only gets its quiet bit.
template <class T>
HWY_INLINE VU16 narrow(VF v) {
  const DF df;
  const DU32 du32;
  if constexpr (std::is_same_v<T, BFloat16>) {
    const auto bits = hn::BitCast(du32, v);
    const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du32, 1));
    const auto rounded = hn::Add(bits, hn::Add(odd, hn::Set(du32, 0x7fff)));
    const auto quiet = hn::Or(bits, hn::Set(du32, 0x400000));
    const auto chosen = hn::IfThenElse(hn::RebindMask(du32, hn::IsNaN(v)), quiet, rounded);
    return hn::DemoteTo(DU16(),
                        hn::BitCast(hn::Rebind<std::int32_t, DF>(), hn::ShiftRight<16>(chosen)));
  } else if constexpr (kHasHalf) {
    return hn::BitCast(DU16(), hn::DemoteTo(hn::Rebind<hwy::float16_t, DF>(), v));
  } else {
    HWY_ALIGN T narrow[kMaxLanes];
    HWY_ALIGN float wide[kMaxLanes];
    hn::Store(v, df, wide);
    for (std::size_t i = 0; i < hn::Lanes(df); ++i) narrow[i] = from_float<T>(wide[i]);
    return hn::Load(DU16(), reinterpret_cast<const std::uint16_t*>(narrow));
  }
}

template <class T>
HWY_INLINE VF load_row(const T* p) {
  if constexpr (std::is_same_v<T, float>) {
    return hn::LoadU(DF(), p);
  } else {
    return widen<T>(hn::LoadU(DU16(), reinterpret_cast<const std::uint16_t*>(p)));
  }
}

template <class T>
HWY_INLINE void store_row(VF v, T* p) {
  if constexpr (std::is_same_v<T, float>) {
    hn::StoreU(v, DF(), p);
  } else {
    hn::StoreU(narrow<T>(v), DU16(), reinterpret_cast<std::uint16_t*>(p));
  }
}

/// Whether a row of T can be written past the caches: Highway's Stream writes at least 16 bytes.
template <class T>
inline constexpr bool kStreams = kMaxLanes * sizeof(T) >= 16;

/// store_row past the caches; p must be aligned to the vector.
template <class T>
HWY_INLINE void stream_row(VF v, T* p) {
  if constexpr (std::is_same_v<T, float>) {
    hn::Stream(v, DF(), p);
  } else {
    hn::Stream(narrow<T>(v), DU16(), reinterpret_cast<std::uint16_t*>(p));
  }
}

/// Bits of 16-bit taps 2i and 2i + 1 of a channel, as one 32-bit lane.
template <class T>
HWY_INLINE VF even_tap(hn::Vec<DU32> pair) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    return hn::BitCast(DF(), hn::ShiftLeft<16>(pair));
  } else {
    return widen<T>(hn::TruncateTo(DU16(), pair));
  }
}
template <class T>
HWY_INLINE VF odd_tap(hn::Vec<DU32> pair) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    return hn::BitCast(DF(), hn::And(pair, hn::Set(DU32(), 0xffff0000u)));
  } else {
    return widen<T>(hn::TruncateTo(DU16(), hn::ShiftRight<16>(pair)));
  }
}
template <class T>
HWY_INLINE hn::Vec<DU32> pair_taps(VF even, VF odd) {
  const DU32 du32;
  return hn::Or(hn::PromoteTo(du32, narrow<T>(even)),
                hn::ShiftLeft<16>(hn::PromoteTo(du32, narrow<T>(odd))));
}

}  // namespace HWY_NAMESPACE
}  // namespace mortar::dynamic_conv::cpu
HWY_AFTER_NAMESPACE();

#endif
