// SPDX-License-Identifier: Apache-2.0
// The two 8-bit floats of OCP, as they lie in the memory of host and device: E4M3 has no infinities
// and reaches 448, E5M2 has them and reaches 57344. Widening to float32 is exact. Narrowing
// saturates, infinities included, and keeps subnormals and the sign of zero; a NaN becomes 0x7f, as
// with the conversion instructions of GPUs. Nothing here branches on a table, so that SIMD and
// device code can do the same steps.
#pragma once

#include <bit>
#include <cstdint>

#include "core/int_math.h"

namespace mortar {

struct Float8E4M3 {
  static constexpr int kMantissaBits = 3;
  static constexpr int kLeastExponent = -6;  ///< of the smallest normal
  static constexpr float kLargest = 448.0f;
  std::uint8_t bits;
};
struct Float8E5M2 {
  static constexpr int kMantissaBits = 2;
  static constexpr int kLeastExponent = -14;
  static constexpr float kLargest = 57344.0f;
  std::uint8_t bits;
};

inline constexpr std::uint8_t kFloat8NaN = 0x7f;

/// Random bits that decide where a value is rounded to: those of a float32 below the last place.
template <class T>
inline constexpr int kDrawnBits = 23 - T::kMantissaBits;

MORTAR_HOST_DEVICE inline float to_float(Float8E4M3 v) {
  const std::uint32_t sign = (v.bits & 0x80u) << 24, magnitude = v.bits & 0x7fu;
  std::uint32_t bits = (magnitude << 20) + (120u << 23);
  if (magnitude == 0x7f) bits = 0x7fc00000u;
  if (magnitude < 8) bits = std::bit_cast<std::uint32_t>(static_cast<float>(magnitude) * 0x1p-9f);
  return std::bit_cast<float>(bits | sign);
}

MORTAR_HOST_DEVICE inline float to_float(Float8E5M2 v) {
  const std::uint32_t sign = (v.bits & 0x80u) << 24, magnitude = v.bits & 0x7fu;
  std::uint32_t bits = (magnitude << 21) + (112u << 23);
  if (magnitude >= 0x7c) bits = 0x7f800000u | (magnitude & 3u) << 21;
  if (magnitude < 4) bits = std::bit_cast<std::uint32_t>(static_cast<float>(magnitude) * 0x1p-16f);
  return std::bit_cast<float>(bits | sign);
}

namespace detail {

/// |v| as bits, at most the largest value, and the power of two at or below it, at least that of
/// the subnormals. The last place of the result is worth power * 2^-kMantissaBits.
template <class T>
struct Float8Scale {
  std::uint32_t magnitude, power;

  MORTAR_HOST_DEVICE explicit Float8Scale(std::uint32_t magnitude_) : magnitude(magnitude_) {
    constexpr std::uint32_t kLargest = std::bit_cast<std::uint32_t>(T::kLargest);
    constexpr std::uint32_t kLeast = static_cast<std::uint32_t>(T::kLeastExponent + 127) << 23;
    if (magnitude > kLargest) magnitude = kLargest;
    power = magnitude & 0x7f800000u;
    if (power < kLeast) power = kLeast;
  }

  /// The code of `units` last places.
  MORTAR_HOST_DEVICE std::uint32_t code(std::uint32_t units) const {
    constexpr std::uint32_t kLeast = T::kLeastExponent + 127;
    return units + (power >> (23 - T::kMantissaBits)) - (kLeast << T::kMantissaBits);
  }
};

}  // namespace detail

/// The nearest value, ties to even.
template <class T>
MORTAR_HOST_DEVICE T float8_nearest(float v) {
  const auto bits = std::bit_cast<std::uint32_t>(v);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {kFloat8NaN};
  const detail::Float8Scale<T> scale(bits & 0x7fffffffu);
  // The float32 adder rounds at the last place of the result.
  const std::uint32_t shift =
      scale.power + (static_cast<std::uint32_t>(23 - T::kMantissaBits) << 23);
  const float sum = std::bit_cast<float>(scale.magnitude) + std::bit_cast<float>(shift);
  const std::uint32_t code = scale.code(std::bit_cast<std::uint32_t>(sum) - shift);
  return {static_cast<std::uint8_t>(code | (bits >> 24 & 0x80u))};
}

/// One of the two neighbours of v, chosen by the highest kDrawnBits of 32 random bits such that the
/// mean is v; v itself where it can be represented. A float32 has no more bits than these below the
/// last place of a normal value; a subnormal is rounded to them first, to nearest even, so its mean
/// may be off by 2^-21 of a place (2^-22 for E5M2).
template <class T>
MORTAR_HOST_DEVICE T float8_stochastic(float v, std::uint32_t random) {
  const auto bits = std::bit_cast<std::uint32_t>(v);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {kFloat8NaN};
  const detail::Float8Scale<T> scale(bits & 0x7fffffffu);
  const std::uint32_t inverse =
      (static_cast<std::uint32_t>(254 + T::kMantissaBits) << 23) - scale.power;
  const float places = std::bit_cast<float>(scale.magnitude) * std::bit_cast<float>(inverse);
  const auto below = static_cast<std::int32_t>(places);
  const float fraction = places - static_cast<float>(below);
  constexpr int kBits = kDrawnBits<T>;
  // The float32 adder rounds the share of the random numbers that lead upwards.
  const float share = fraction * static_cast<float>(1 << kBits) + 0x1p23f;
  const std::uint32_t threshold =
      std::bit_cast<std::uint32_t>(share) - std::bit_cast<std::uint32_t>(0x1p23f);
  const bool up = random >> (32 - kBits) < threshold;
  const std::uint32_t code = scale.code(static_cast<std::uint32_t>(below) + (up ? 1u : 0u));
  return {static_cast<std::uint8_t>(code | (bits >> 24 & 0x80u))};
}

}  // namespace mortar
