// SPDX-License-Identifier: Apache-2.0
// The multiply-add units of the Highway levels: float32 vectors, into which every dtype is widened
// exactly as it is loaded.
#if defined(MORTAR_LORA_CPU_UNITS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MORTAR_LORA_CPU_UNITS_INL_H_
#undef MORTAR_LORA_CPU_UNITS_INL_H_
#else
#define MORTAR_LORA_CPU_UNITS_INL_H_
#endif

#include <cstdint>
#include <type_traits>

#include "core/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace mortar {
namespace HWY_NAMESPACE {

// Tiles fill the registers: 24 sums + 3 + 1 (shrink) or 4 + 1 (expand) of the 32 of AVX-512 and
// NEON; 12 + 3 + 1, or 8 + 2 + 1 and temporaries, of AVX2's 16.
inline constexpr bool kFewRegisters = HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_SCALAR;

template <class XType, class AType>
struct ShrinkUnit {
  using X = XType;
  using A = AType;
  using Copy = float;
  using Vec = FloatVec;
  static constexpr std::int64_t kLanes = mortar::HWY_NAMESPACE::kLanes;
  static constexpr std::int64_t kStep = kLanes;
  static constexpr int kTileRanks = kFewRegisters ? 4 : 8;
  static constexpr std::int64_t kChunk = kFewRegisters ? 1024 : 512;  // 16 KB of A
  static constexpr bool kFetchesNext = false;  // true: 2 % slower at rank 64, 5 % faster at 16

  static HWY_INLINE Vec zero() { return hn::Zero(FloatTag()); }
  static HWY_INLINE void store(Vec v, float* p) { hn::Store(v, FloatTag(), p); }
  static HWY_INLINE Vec add_pairs(Vec a, Vec b) {
#if HWY_TARGET == HWY_SCALAR
    return hn::Add(a, b);  // one lane: never called
#else
    const FloatTag f32;
    return hn::Add(hn::ConcatEven(f32, b, a), hn::ConcatOdd(f32, b, a));
#endif
  }
  static HWY_INLINE Vec load_x(const X* p) { return load_f32(p); }
  template <class T>
  static HWY_INLINE Vec load_a(const T* p) {
    Vec v = load_f32(p);
#if HWY_TARGET == HWY_AVX3
    // Keeps it in a register: left alone, GCC repeats the load in every product, 27 instead of 11
    // loads for 24 products (96 GFLOP/s against 132 on one core). AVX2 has no register to spare.
    __asm__("" : "+v"(v.raw));
#endif
    return v;
  }
  static HWY_INLINE Vec dot(Vec x, Vec a, Vec sum) { return hn::MulAdd(x, a, sum); }
  static HWY_INLINE void store_a(Vec v, Copy* to) { hn::Store(v, FloatTag(), to); }
};

template <class B, class YType>
struct ExpandUnit {
  using Y = YType;
  using Entry = float;
  using Vec = FloatVec;
  using Packed = BitsVec;
  static constexpr std::int64_t kLanes = mortar::HWY_NAMESPACE::kLanes;
  static constexpr int kTileTokens = kFewRegisters ? 4 : 6;
  static constexpr int kTileVecs = kFewRegisters ? 2 : 4;
  static constexpr int kParts = sizeof(float) / sizeof(B);

  static HWY_INLINE Vec zero() { return hn::Zero(FloatTag()); }
  static HWY_INLINE Packed load(const std::uint32_t* p) { return hn::Load(BitsTag(), p); }
  static HWY_INLINE Vec broadcast(float h) { return hn::Set(FloatTag(), h); }
  static HWY_INLINE Vec multiply(Vec h, Vec b, Vec sum) { return hn::MulAdd(h, b, sum); }

  /// The kPart-th value of every unit.
  template <int kPart>
  static HWY_INLINE Vec part(Packed unit) {
    if constexpr (std::is_same_v<B, float>) {
      return hn::BitCast(FloatTag(), unit);
    } else {
      return kPart == 0 ? widen_low<B>(unit) : widen_high<B>(unit);
    }
  }

  static HWY_INLINE void update(const Vec (&sum)[kTileVecs], float scale, const Y* base, Y* y) {
    const Vec factor = hn::Set(FloatTag(), scale);
    for (int v = 0; v < kTileVecs; ++v) {
      store_f32(base != nullptr ? hn::MulAdd(sum[v], factor, load_f32(base + v * kLanes))
                                : hn::Mul(sum[v], factor),
                y + v * kLanes);
    }
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace mortar
HWY_AFTER_NAMESPACE();

#endif  // MORTAR_LORA_CPU_UNITS_INL_H_
