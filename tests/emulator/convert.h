// SPDX-License-Identifier: Apache-2.0
// Conversions and other arithmetic of PTX that C++ has no operator for.
#pragma once

#include "kernel.h"

EMU_INLINE f32 emu_half(u16 v) { return static_cast<f32>(BITS(_Float16, v)); }
EMU_INLINE u16 emu_to_half(f32 v) { return v != v ? 0x7fff : BITS(u16, static_cast<_Float16>(v)); }
EMU_INLINE f32 emu_bfloat(u16 v) { return BITS(f32, static_cast<u32>(v) << 16); }
EMU_INLINE u16 emu_to_bfloat(f32 v) {
  const u32 u = BITS(u32, v);
  return v != v ? 0x7fff : static_cast<u16>((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
EMU_INLINE u16 emu_to_bfloat_rz(f32 v) {
  return v != v ? 0x7fff : static_cast<u16>(BITS(u32, v) >> 16);
}
/// The nearest float8 of `kMantissa` bits of mantissa, saturated; NaN stays one.
EMU_INLINE u8 emu_to_float8(f32 v, int mantissa, int bias, f32 most, u8 most_bits) {
  const u8 sign = static_cast<u8>(BITS(u32, v) >> 24 & 0x80);
  if (v != v) return 0x7f;
  const f32 a = __builtin_fabsf(v);
  if (a >= most) return static_cast<u8>(sign | most_bits);
  int exponent = static_cast<int>(BITS(u32, a) >> 23) - 127;
  if (exponent < 1 - bias) exponent = 1 - bias;  // below it numbers are denormal
  // a in units of its last place, rounded to even
  const f32 unit = BITS(f32, static_cast<u32>(exponent - mantissa + 127) << 23);
  const f32 count = __builtin_rintf(a / unit);
  const int whole = static_cast<int>(count) + ((exponent + bias - 1) << mantissa);
  return static_cast<u8>(sign | whole);
}
EMU_INLINE u8 emu_to_e4m3(f32 v) { return emu_to_float8(v, 3, 7, 448.0f, 0x7e); }
EMU_INLINE u8 emu_to_e5m2(f32 v) { return emu_to_float8(v, 2, 15, 57344.0f, 0x7b); }
EMU_INLINE f32 emu_e4m3(u8 v) {
  if ((v & 0x7f) == 0x7f) return __builtin_nanf("");
  const int exponent = v >> 3 & 15, mantissa = v & 7;
  const f32 a = exponent == 0
                    ? mantissa * 0x1p-9f
                    : (8 + mantissa) * BITS(f32, static_cast<u32>(exponent - 10 + 127) << 23);
  return v & 0x80 ? -a : a;
}
EMU_INLINE f32 emu_e5m2(u8 v) { return emu_half(static_cast<u16>(v << 8)); }

EMU_INLINE f32 emu_max(f32 a, f32 b) {
  if (a != a) return b != b ? BITS(f32, 0x7fffffffu) : b;
  if (b != b) return a;
  if (a == 0 && b == 0) return BITS(u32, a) >> 31 ? b : a;
  return a > b ? a : b;
}
EMU_INLINE f32 emu_min(f32 a, f32 b) {
  if (a != a) return b != b ? BITS(f32, 0x7fffffffu) : b;
  if (b != b) return a;
  if (a == 0 && b == 0) return BITS(u32, a) >> 31 ? a : b;
  return a < b ? a : b;
}
EMU_INLINE f32 emu_max_nan(f32 a, f32 b) {
  return a != a || b != b ? BITS(f32, 0x7fffffffu) : emu_max(a, b);
}
EMU_INLINE f32 emu_min_nan(f32 a, f32 b) {
  return a != a || b != b ? BITS(f32, 0x7fffffffu) : emu_min(a, b);
}
/// The one NaN that float32 arithmetic of a GPU makes.
EMU_INLINE f32 emu_one_nan(f32 v) { return v != v ? BITS(f32, 0x7fffffffu) : v; }
/// Denormal numbers become zeros of their sign.
EMU_INLINE f32 emu_flush(f32 v) {
  return (BITS(u32, v) & 0x7f800000u) == 0 ? BITS(f32, BITS(u32, v) & 0x80000000u) : v;
}

template <class To>
EMU_INLINE To emu_saturate(f64 v, f64 least, f64 most, To low, To high) {
  return v != v ? To{0} : v <= least ? low : v >= most ? high : static_cast<To>(v);
}

EMU_INLINE u32 emu_prmt(u32 a, u32 b, u32 selector) {
  const u64 bytes = a | static_cast<u64>(b) << 32;
  u32 out = 0;
  for (u32 i = 0; i < 4; ++i) {
    const u32 s = selector >> (4 * i);
    u32 byte = static_cast<u32>(bytes >> (8 * (s & 7))) & 0xff;
    if (s & 8) byte = byte & 0x80 ? 0xff : 0;
    out |= byte << (8 * i);
  }
  return out;
}
EMU_INLINE u32 emu_dp4a(u32 a, u32 b, u32 c, bool a_signed, bool b_signed) {
  for (u32 i = 0; i < 32; i += 8) {
    const s32 x = a_signed ? static_cast<s8>(a >> i) : static_cast<u8>(a >> i);
    const s32 y = b_signed ? static_cast<s8>(b >> i) : static_cast<u8>(b >> i);
    c += static_cast<u32>(x * y);
  }
  return c;
}
template <class T>
EMU_INLINE T emu_bfi(T a, T b, u32 position, u32 length) {
  constexpr u32 kBits = sizeof(T) * 8;
  position &= 0xff;
  length &= 0xff;
  if (position >= kBits || length == 0) return b;
  const T ones = length >= kBits ? ~T{0} : (T{1} << length) - 1;
  const T mask = ones << position;
  return (b & ~mask) | ((a << position) & mask);
}
template <class T, class S>
EMU_INLINE T emu_bfe(S a, u32 position, u32 length) {
  constexpr u32 kBits = sizeof(T) * 8;
  position &= 0xff;
  length &= 0xff;
  const bool is_signed = S(-1) < S(0);
  const u32 last = position + length - 1 < kBits - 1 ? position + length - 1 : kBits - 1;
  const T sign = is_signed && length != 0 ? T(a) >> last & 1 : 0;
  T out = position >= kBits ? 0 : T(a) >> position;
  if (length < kBits) {
    const T mask = (T{1} << length) - 1;
    out &= mask;
    if (sign) out |= ~mask;
  }
  if (position >= kBits && sign) out = ~T{0};
  return out;
}
template <class T, class S>
EMU_INLINE u32 emu_bfind(S a, bool shift_amount) {
  T v = T(a);
  if (S(-1) < S(0) && a < 0) v = ~v;
  if (v == 0) return ~0u;
  const u32 top = 63 - __builtin_clzll(static_cast<u64>(v));
  return shift_amount ? sizeof(T) * 8 - 1 - top : top;
}
EMU_INLINE u32 emu_brev(u32 v) {
  v = (v >> 1 & 0x55555555) | (v & 0x55555555) << 1;
  v = (v >> 2 & 0x33333333) | (v & 0x33333333) << 2;
  v = (v >> 4 & 0x0f0f0f0f) | (v & 0x0f0f0f0f) << 4;
  return __builtin_bswap32(v);
}
EMU_INLINE u64 emu_brev(u64 v) {
  return static_cast<u64>(emu_brev(static_cast<u32>(v))) << 32 |
         emu_brev(static_cast<u32>(v >> 32));
}
EMU_INLINE u32 emu_f16x2(f32 high, f32 low) {
  return emu_to_half(low) | u32{emu_to_half(high)} << 16;
}
EMU_INLINE u32 emu_bf16x2(f32 high, f32 low) {
  return emu_to_bfloat(low) | u32{emu_to_bfloat(high)} << 16;
}
/// a b + c, rounded to odd where it is not exact, so that rounding it again is rounding once.
EMU_INLINE f32 emu_fma_odd(f32 a, f32 b, f32 c) {
  const f64 exact = static_cast<f64>(a) * b + c;
  const f32 near = static_cast<f32>(exact);
  if (near == exact || near != near) return near;
  u32 bits = BITS(u32, near);
  if ((near > exact) == (near > 0)) --bits;  // towards zero
  return BITS(f32, bits | 1);
}
