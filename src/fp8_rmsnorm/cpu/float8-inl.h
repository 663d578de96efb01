// SPDX-License-Identifier: Apache-2.0
// Vectors of float32 from and to 8-bit floats, the bits of core/float8.h, by the same steps.
// Included once per target.
#if defined(MORTAR_FP8_RMSNORM_FLOAT8_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MORTAR_FP8_RMSNORM_FLOAT8_INL_H_
#undef MORTAR_FP8_RMSNORM_FLOAT8_INL_H_
#else
#define MORTAR_FP8_RMSNORM_FLOAT8_INL_H_
#endif

#include <bit>
#include <cstdint>

#include "core/float8.h"
#include "core/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace mortar::fp8_rmsnorm::cpu {
namespace HWY_NAMESPACE {
using namespace mortar::HWY_NAMESPACE;

using ByteTag = hn::Rebind<std::uint8_t, FloatTag>;
using IntTag = hn::RebindToSigned<BitsTag>;

/// Compares magnitudes, which have no sign bit, as signed: AVX2 has no unsigned comparison.
HWY_INLINE auto above(BitsVec magnitude, std::uint32_t limit) {
  const IntTag i32;
  return hn::Gt(hn::BitCast(i32, magnitude), hn::Set(i32, static_cast<std::int32_t>(limit)));
}

template <class T>
HWY_INLINE FloatVec widen8(const T* p) {
  const FloatTag f32;
  const BitsTag u32;
  constexpr int kShift = 23 - T::kMantissaBits;
  constexpr std::uint32_t kNormal = 1u << T::kMantissaBits;
  const BitsVec code = hn::PromoteTo(u32, hn::LoadU(ByteTag(), &p->bits));
  const BitsVec magnitude = hn::And(code, hn::Set(u32, 0x7fu));
  const BitsVec sign = hn::ShiftLeft<24>(hn::Xor(code, magnitude));
  const BitsVec bias = hn::Set(u32, static_cast<std::uint32_t>(126 + T::kLeastExponent) << 23);
  BitsVec bits = hn::Add(hn::ShiftLeft<kShift>(magnitude), bias);
  // Infinities and NaN get the exponent that float32 has for them.
  constexpr std::uint32_t kSpecial = T::kMantissaBits == 2 ? 0x7cu : 0x7fu;
  const auto special = hn::RebindMask(u32, above(magnitude, kSpecial - 1));
  bits = hn::Or(bits, hn::IfThenElseZero(special, hn::Set(u32, 0x7f800000u)));
  // Subnormals are their code in units of the least one.
  const float least = std::bit_cast<float>(
      static_cast<std::uint32_t>(127 + T::kLeastExponent - T::kMantissaBits) << 23);
  const FloatVec units = hn::ConvertTo(f32, hn::BitCast(IntTag(), magnitude));
  const FloatVec small = hn::Mul(units, hn::Set(f32, least));
  const auto normal = hn::RebindMask(f32, above(magnitude, kNormal - 1));
  const FloatVec value = hn::IfThenElse(normal, hn::BitCast(f32, bits), small);
  return hn::Or(value, hn::BitCast(f32, sign));
}

/// Codes in the low bytes of lanes of 32 bits; what lies above them is of no account. kStochastic:
/// by the draws at p.
template <class T, bool kStochastic>
HWY_INLINE BitsVec narrow8(FloatVec v, const std::uint32_t* p) {
  const FloatTag f32;
  const BitsTag u32;
  constexpr int kMantissa = T::kMantissaBits;
  constexpr std::uint32_t kLeast = static_cast<std::uint32_t>(T::kLeastExponent + 127);
  const BitsVec bits = hn::BitCast(u32, v);
  const BitsVec magnitude = hn::And(bits, hn::Set(u32, 0x7fffffffu));
  const auto nan = hn::RebindMask(u32, above(magnitude, 0x7f800000u));
  const BitsVec clamped =
      hn::Min(magnitude, hn::Set(u32, std::bit_cast<std::uint32_t>(T::kLargest)));
  const BitsVec power =
      hn::Max(hn::And(clamped, hn::Set(u32, 0x7f800000u)), hn::Set(u32, kLeast << 23));
  BitsVec units;
  if constexpr (kStochastic) {
    const IntTag i32;
    const BitsVec inverse = hn::Sub(hn::Set(u32, (254u + kMantissa) << 23), power);
    const FloatVec places = hn::Mul(hn::BitCast(f32, clamped), hn::BitCast(f32, inverse));
    const auto below = hn::ConvertTo(i32, places);
    const FloatVec fraction = hn::Sub(places, hn::ConvertTo(f32, below));
    // The float32 adder rounds the share of the random numbers that lead upwards.
    constexpr int kBits = kDrawnBits<T>;
    const FloatVec share = hn::Add(hn::Mul(fraction, hn::Set(f32, static_cast<float>(1 << kBits))),
                                   hn::Set(f32, 0x1p23f));
    const BitsVec threshold =
        hn::Sub(hn::BitCast(u32, share), hn::Set(u32, std::bit_cast<std::uint32_t>(0x1p23f)));
    const auto random = hn::BitCast(i32, hn::ShiftRight<32 - kBits>(hn::LoadU(u32, p)));
    // -1 where it goes up.
    const auto up = hn::VecFromMask(i32, hn::Lt(random, hn::BitCast(i32, threshold)));
    units = hn::BitCast(u32, hn::Sub(below, up));
  } else {
    // The power of two that is added has no bits in the low byte.
    const BitsVec shift = hn::Add(power, hn::Set(u32, (23u - kMantissa) << 23));
    units = hn::BitCast(u32, hn::Add(hn::BitCast(f32, clamped), hn::BitCast(f32, shift)));
  }
  const BitsVec exponent = hn::ShiftRight<23 - kMantissa>(power);
  const BitsVec code = hn::Sub(hn::Add(units, exponent), hn::Set(u32, kLeast << kMantissa));
  const BitsVec both = hn::OrAnd(code, hn::ShiftRight<24>(bits), hn::Set(u32, 0x80u));
  return hn::IfThenElse(nan, hn::Set(u32, std::uint32_t{kFloat8NaN}), both);
}

HWY_INLINE void store8(BitsVec codes, std::uint8_t* to) {
  hn::StoreU(hn::TruncateTo(ByteTag(), codes), ByteTag(), to);
}

}  // namespace HWY_NAMESPACE
}  // namespace mortar::fp8_rmsnorm::cpu
HWY_AFTER_NAMESPACE();

#endif  // MORTAR_FP8_RMSNORM_FLOAT8_INL_H_
