// SPDX-License-Identifier: Apache-2.0
// Vectors of float32 from and to arrays of float32, float16 and bfloat16, for code that Highway
// compiles once per SIMD level. Widening is exact; narrowing goes to the nearest value with ties
// to even (Highway up to 1.1 truncates to bfloat16, hence the own version), and every level gives
// the bits of core/float16.h. A family's own per-level namespace takes these names in with
// `using namespace mortar::HWY_NAMESPACE;`.
#if defined(MORTAR_CORE_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MORTAR_CORE_SIMD_INL_H_
#undef MORTAR_CORE_SIMD_INL_H_
#else
#define MORTAR_CORE_SIMD_INL_H_
#endif

#include <cstdint>
#include <type_traits>

#include "core/float16.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace mortar {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// The widest vector of floats of this level, its bits, and as many 16-bit elements.
using FloatTag = hn::ScalableTag<float>;
using FloatVec = hn::Vec<FloatTag>;
using BitsTag = hn::RebindToUnsigned<FloatTag>;
using BitsVec = hn::Vec<BitsTag>;
using HalfTag = hn::Rebind<std::uint16_t, FloatTag>;
using HalfVec = hn::Vec<HalfTag>;
inline constexpr std::int64_t kLanes = hn::MaxLanes(FloatTag());

/// Whether the level converts float16 in hardware, rounding to nearest even; elsewhere lanes go one
/// by one.
inline constexpr bool kHasFloat16 = (HWY_TARGET & (HWY_AVX2 | HWY_AVX3 | HWY_AVX3_DL)) != 0 ||
                                    (HWY_TARGET == HWY_NEON && HWY_ARCH_ARM_A64);

template <class T>
HWY_INLINE FloatVec widen(HalfVec bits) {
  const FloatTag f32;
  if constexpr (std::is_same_v<T, BFloat16>) {
    return hn::BitCast(f32, hn::ShiftLeft<16>(hn::PromoteTo(BitsTag(), bits)));
  } else if constexpr (kHasFloat16) {
    return hn::PromoteTo(f32, hn::BitCast(hn::Rebind<hwy::float16_t, FloatTag>(), bits));
  } else {
    HWY_ALIGN T narrow[kLanes];
    HWY_ALIGN float wide[kLanes];
    hn::Store(bits, HalfTag(), &narrow[0].bits);
    for (std::int64_t i = 0; i < kLanes; ++i) wide[i] = to_float(narrow[i]);
    return hn::Load(f32, wide);
  }
}

/// The nearest bfloat16 in the upper half of every lane; the lower one holds nothing.
HWY_INLINE BitsVec nearest_bf16(FloatVec v) {
  const BitsTag u32;
  const BitsVec bits = hn::BitCast(u32, v);
  const BitsVec odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(u32, 1u));
  const BitsVec nearest = hn::Add(hn::Add(bits, hn::Set(u32, 0x7fffu)), odd);
  const BitsVec quiet = hn::Or(bits, hn::Set(u32, 0x400000u));  // adding to a NaN could carry
  return hn::IfThenElse(hn::RebindMask(u32, hn::IsNaN(v)), quiet, nearest);
}

template <class T>
HWY_INLINE HalfVec narrow(FloatVec v) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    const BitsVec high = hn::ShiftRight<16>(nearest_bf16(v));
    return hn::DemoteTo(HalfTag(), hn::BitCast(hn::RebindToSigned<BitsTag>(), high));
  } else if constexpr (kHasFloat16) {
    return hn::BitCast(HalfTag(), hn::DemoteTo(hn::Rebind<hwy::float16_t, FloatTag>(), v));
  } else {
    HWY_ALIGN T narrow[kLanes];
    HWY_ALIGN float wide[kLanes];
    hn::Store(v, FloatTag(), wide);
    for (std::int64_t i = 0; i < kLanes; ++i) narrow[i] = from_float<T>(wide[i]);
    return hn::Load(HalfTag(), &narrow[0].bits);
  }
}

/// Two 16-bit elements a lane: those in the low halves, those in the high halves, and both back.
template <class T>
HWY_INLINE FloatVec widen_low(BitsVec pair) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    return hn::BitCast(FloatTag(), hn::ShiftLeft<16>(pair));
  } else {
    return widen<T>(hn::TruncateTo(HalfTag(), pair));
  }
}
template <class T>
HWY_INLINE FloatVec widen_high(BitsVec pair) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    return hn::BitCast(FloatTag(), hn::And(pair, hn::Set(BitsTag(), 0xffff0000u)));
  } else {
    return widen<T>(hn::TruncateTo(HalfTag(), hn::ShiftRight<16>(pair)));
  }
}
template <class T>
HWY_INLINE BitsVec narrow_pair(FloatVec low, FloatVec high) {
  return hn::Or(hn::PromoteTo(BitsTag(), narrow<T>(low)),
                hn::ShiftLeft<16>(hn::PromoteTo(BitsTag(), narrow<T>(high))));
}

template <class T>
HWY_INLINE FloatVec load_f32(const T* p) {
  if constexpr (std::is_same_v<T, float>) {
    return hn::LoadU(FloatTag(), p);
  } else {
    return widen<T>(hn::LoadU(HalfTag(), reinterpret_cast<const std::uint16_t*>(p)));
  }
}

template <class T>
HWY_INLINE void store_f32(FloatVec v, T* p) {
  if constexpr (std::is_same_v<T, float>) {
    hn::StoreU(v, FloatTag(), p);
  } else {
    hn::StoreU(narrow<T>(v), HalfTag(), reinterpret_cast<std::uint16_t*>(p));
  }
}

/// store_f32 of two vectors, the second behind the first: bfloat16 are packed and stored together.
template <class T>
HWY_INLINE void store_f32(FloatVec first, FloatVec second, T* p) {
#if HWY_TARGET != HWY_SCALAR
  if constexpr (std::is_same_v<T, BFloat16>) {
    const hn::Repartition<std::uint16_t, FloatTag> u16;
    const auto low = hn::BitCast(u16, nearest_bf16(first));
    const auto high = hn::BitCast(u16, nearest_bf16(second));
    hn::StoreU(hn::ConcatOdd(u16, high, low), u16, reinterpret_cast<std::uint16_t*>(p));
    return;
  }
#endif
  store_f32(first, p);
  store_f32(second, p + kLanes);
}

/// Whether a vector of T can be written past the caches: Highway's Stream writes at least 16 bytes.
template <class T>
inline constexpr bool kStreams = kLanes * sizeof(T) >= 16;

/// store_f32 past the caches; p must be aligned to the vector.
template <class T>
HWY_INLINE void stream_f32(FloatVec v, T* p) {
  if constexpr (std::is_same_v<T, float>) {
    hn::Stream(v, FloatTag(), p);
  } else {
    hn::Stream(narrow<T>(v), HalfTag(), reinterpret_cast<std::uint16_t*>(p));
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace mortar
HWY_AFTER_NAMESPACE();

#endif  // MORTAR_CORE_SIMD_INL_H_
