// SPDX-License-Identifier: Apache-2.0
// Scalar float16 and bfloat16 <-> float32 on the host: exact widening, and narrowing to the
// nearest value with ties to even. Infinities stay, a NaN becomes a quiet NaN of the same sign.
#pragma once

#include <bit>
#include <cstdint>

namespace mortar {

struct BFloat16 {
  std::uint16_t bits;
};
struct Float16 {
  std::uint16_t bits;
};

inline float to_float(float v) { return v; }

inline float to_float(BFloat16 v) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(v.bits) << 16);
}

inline float to_float(Float16 v) {
  const std::uint32_t sign = static_cast<std::uint32_t>(v.bits & 0x8000u) << 16;
  const std::uint32_t exponent = (v.bits >> 10) & 0x1fu, mantissa = v.bits & 0x3ffu;
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return std::bit_cast<float>(std::bit_cast<std::uint32_t>(magnitude) | sign);
  }
  const std::uint32_t high = exponent == 31 ? 0xffu : exponent + 112;
  return std::bit_cast<float>(sign | (high << 23) | (mantissa << 13));
}

template <class T>
T from_float(float v);

template <>
inline float from_float<float>(float v) {
  return v;
}

template <>
inline BFloat16 from_float<BFloat16>(float v) {
  const auto bits = std::bit_cast<std::uint32_t>(v);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return {static_cast<std::uint16_t>((bits >> 16) | 0x40u)};
  }
  return {static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

template <>
inline Float16 from_float<Float16>(float v) {
  const auto bits = std::bit_cast<std::uint32_t>(v);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  std::uint32_t result;
  if (magnitude > 0x7f800000u) {
    result = 0x7e00u | ((magnitude >> 13) & 0x1ffu);
  } else if (magnitude >= 0x477ff000u) {  // 65520 and more round to infinity
    result = 0x7c00u;
  } else if (magnitude < 0x38800000u) {
    // Below 2^-14: adding 0.5 lets the float32 adder round at 2^-24, the subnormal unit.
    result = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    result = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  }
  return {static_cast<std::uint16_t>(sign | result)};
}

}  // namespace mortar
