// SPDX-License-Identifier: Apache-2.0
// Vectors of float32 from and to arrays of float32, float16 and bfloat16, for code that Highway
// compiles once per SIMD level. Widening is exact; narrowing goes to the nearest value with ties
// to even (Highway up to 1.1 truncates to bfloat16, hence the own version), and every level gives
// the bits of core/float16.h.
#if defined(MORTAR_CORE_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MORTAR_CORE_SIMD_INL_H_
#undef MORTAR_CORE_SIMD_INL_H_
#else
#define MORTAR_CORE_SIMD_INL_H_
#endif

#include <cstdint>

#include "core/float16.h"
#include "hwy/highway.h"

/// 1 where the level converts float16 in hardware; elsewhere lanes go one by one.
#undef MORTAR_SIMD_HAS_F16
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3 || (HWY_TARGET == HWY_NEON && HWY_ARCH_ARM_A64)
#define MORTAR_SIMD_HAS_F16 1
#else
#define MORTAR_SIMD_HAS_F16 0
#endif

HWY_BEFORE_NAMESPACE();
namespace mortar {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

/// The widest vector of floats of this level.
using FloatTag = hn::ScalableTag<float>;
using FloatVec = hn::Vec<FloatTag>;
using BitsTag = hn::RebindToUnsigned<FloatTag>;
using BitsVec = hn::Vec<BitsTag>;
using HalfTag = hn::Rebind<std::uint16_t, FloatTag>;
inline constexpr std::int64_t kLanes = hn::MaxLanes(FloatTag());

inline HWY_ATTR BitsVec load_u16(const void* p) {
  const auto u16 = hn::LoadU(HalfTag(), static_cast<const std::uint16_t*>(p));
  return hn::PromoteTo(BitsTag(), u16);
}

/// Stores the low 16 bits of every lane, which hold a value below 2^16.
inline HWY_ATTR void store_u16(BitsVec v, void* p) {
  const hn::RebindToSigned<BitsTag> i32;
  hn::StoreU(hn::DemoteTo(HalfTag(), hn::BitCast(i32, v)), HalfTag(),
             static_cast<std::uint16_t*>(p));
}

inline HWY_ATTR FloatVec load_f32(const float* p) { return hn::LoadU(FloatTag(), p); }

inline HWY_ATTR FloatVec load_f32(const BFloat16* p) {
  return hn::BitCast(FloatTag(), hn::ShiftLeft<16>(load_u16(p)));
}

inline HWY_ATTR FloatVec load_f32(const Float16* p) {
#if MORTAR_SIMD_HAS_F16
  const hn::Rebind<hwy::float16_t, FloatTag> f16;
  return hn::PromoteTo(FloatTag(), hn::BitCast(f16, hn::LoadU(HalfTag(), &p->bits)));
#else
  alignas(64) float lanes[kLanes];
  for (std::int64_t i = 0; i < kLanes; ++i) lanes[i] = to_float(p[i]);
  return hn::Load(FloatTag(), lanes);
#endif
}

inline HWY_ATTR void store_f32(FloatVec v, float* p) { hn::StoreU(v, FloatTag(), p); }

inline HWY_ATTR void store_f32(FloatVec v, BFloat16* p) {
  const BitsTag u32;
  const BitsVec bits = hn::BitCast(u32, v);
  const BitsVec high = hn::ShiftRight<16>(bits);
  const BitsVec odd = hn::And(high, hn::Set(u32, 1u));
  const BitsVec nearest = hn::ShiftRight<16>(hn::Add(hn::Add(bits, hn::Set(u32, 0x7fffu)), odd));
  const BitsVec quiet = hn::Or(high, hn::Set(u32, 0x40u));
  store_u16(hn::IfThenElse(hn::RebindMask(u32, hn::IsNaN(v)), quiet, nearest), p);
}

inline HWY_ATTR void store_f32(FloatVec v, Float16* p) {
#if MORTAR_SIMD_HAS_F16
  const hn::Rebind<hwy::float16_t, FloatTag> f16;
  hn::StoreU(hn::BitCast(HalfTag(), hn::DemoteTo(f16, v)), HalfTag(), &p->bits);
#else
  alignas(64) float lanes[kLanes];
  hn::Store(v, FloatTag(), lanes);
  for (std::int64_t i = 0; i < kLanes; ++i) p[i] = from_float<Float16>(lanes[i]);
#endif
}

}  // namespace HWY_NAMESPACE
}  // namespace mortar
HWY_AFTER_NAMESPACE();

#endif  // MORTAR_CORE_SIMD_INL_H_
