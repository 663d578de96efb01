// SPDX-License-Identifier: Apache-2.0
// Conversions between float and the 8-bit floats, four at a time in one word: by instructions from
// sm_89 on, by the integer steps of core/float8.h below, to the same bytes.
#pragma once

#include <cuda_fp16.h>

#include <bit>
#include <cstdint>

#include "core/float8.h"
#include "core/philox.h"
#include "device/convert.cuh"

namespace mortar::device {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define MORTAR_FP8_INSTRUCTIONS 1
#else
#define MORTAR_FP8_INSTRUCTIONS 0
#endif

/// Two float16 in a word from the two bytes of `pair`; exact.
template <class T>
__device__ __forceinline__ std::uint32_t fp8x2_to_half2(std::uint16_t pair);

template <>
__device__ __forceinline__ std::uint32_t fp8x2_to_half2<Float8E5M2>(std::uint16_t pair) {
  return __byte_perm(pair, 0, 0x1404);  // the high byte of a float16 is an E5M2
}
template <>
__device__ __forceinline__ std::uint32_t fp8x2_to_half2<Float8E4M3>(std::uint16_t pair) {
#if MORTAR_FP8_INSTRUCTIONS
  std::uint32_t out;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(out) : "h"(pair));
  return out;
#else
  // Exponents of float16 are 8 larger, so the shifted bits are 2^-8 of the value.
  const std::uint32_t wide = __byte_perm(pair, 0, 0x1404);
  const std::uint32_t moved = ((wide & 0x7f007f00u) >> 1) | (wide & 0x80008000u);
  const __half2 scaled =
      __hmul2(*reinterpret_cast<const __half2*>(&moved), __float2half2_rn(256.0f));
  std::uint32_t out = *reinterpret_cast<const std::uint32_t*>(&scaled);
  if ((pair & 0x7fu) == 0x7fu) out = (out & 0xffff0000u) | 0x7e00u;
  if ((pair & 0x7f00u) == 0x7f00u) out = (out & 0xffffu) | 0x7e000000u;
  return out;
#endif
}

/// The same for the four bytes of `word`, without a shift for its upper half.
template <class T>
__device__ __forceinline__ uint2 fp8x4_to_half4(std::uint32_t word) {
  if constexpr (std::is_same_v<T, Float8E5M2>) {
    return {__byte_perm(word, 0, 0x1404), __byte_perm(word, 0, 0x3424)};
  }
#if MORTAR_FP8_INSTRUCTIONS
  uint2 out;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high;\n}"
      : "=r"(out.x), "=r"(out.y)
      : "r"(word));
  return out;
#else
  return {fp8x2_to_half2<T>(static_cast<std::uint16_t>(word)),
          fp8x2_to_half2<T>(static_cast<std::uint16_t>(word >> 16))};
#endif
}

template <class T>
__device__ __forceinline__ void unpack_fp8x4(std::uint32_t word, float (&out)[4]) {
  const uint2 halves = fp8x4_to_half4<T>(word);
  const float2 low = unpack2<__half>(halves.x), high = unpack2<__half>(halves.y);
  out[0] = low.x;
  out[1] = low.y;
  out[2] = high.x;
  out[3] = high.y;
}

/// Rounds to nearest even.
template <class T>
__device__ __forceinline__ std::uint32_t pack_fp8x4(const float (&v)[4]) {
#if MORTAR_FP8_INSTRUCTIONS
  std::uint16_t low, high;
  if constexpr (std::is_same_v<T, Float8E4M3>) {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(v[1]), "f"(v[0]));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(v[3]), "f"(v[2]));
  } else {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(low) : "f"(v[1]), "f"(v[0]));
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(high) : "f"(v[3]), "f"(v[2]));
  }
  return low | static_cast<std::uint32_t>(high) << 16;
#else
  std::uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) word |= std::uint32_t{float8_nearest<T>(v[i]).bits} << (8 * i);
  return word;
#endif
}

/// Rounds stochastically, value i by the random word i, as float8_stochastic() does.
template <class T>
__device__ __forceinline__ std::uint32_t pack_fp8x4(const float (&v)[4],
                                                    const std::uint32_t (&random)[4]) {
  // With their exponents moved so that subnormals of T are subnormals of float32, the last place of
  // every value is the same bit. Random bits below it are added to a number that is rounded up
  // where they carry; what is left of them is cut off. A NaN has no room for a carry.
  constexpr int kBits = kDrawnBits<T>, kMoved = 126 + T::kLeastExponent;
  constexpr std::uint32_t kPlace = (1u << kBits) - 1u;
  constexpr float kDown = std::bit_cast<float>(static_cast<std::uint32_t>(127 - kMoved) << 23);
  constexpr float kUp = std::bit_cast<float>(static_cast<std::uint32_t>(127 + kMoved) << 23);
  float rounded[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    std::uint32_t bits = __float_as_uint(v[i] * kDown);
    asm("{\n.reg .pred number;\nsetp.num.f32 number, %1, %1;\n@number add.u32 %0, %0, %2;\n}"
        : "+r"(bits)
        : "f"(v[i]), "r"(kPlace - (random[i] >> (32 - kBits))));
    rounded[i] = __uint_as_float(bits & ~kPlace) * kUp;
  }
  return pack_fp8x4<T>(rounded);
}

/// The same for four values that share a word of draws.
template <class T>
__device__ __forceinline__ std::uint32_t pack_fp8x4(const float (&v)[4], std::uint32_t word) {
  return pack_fp8x4<T>(
      v, {turned_draw(word, 0), turned_draw(word, 1), turned_draw(word, 2), turned_draw(word, 3)});
}

}  // namespace mortar::device
