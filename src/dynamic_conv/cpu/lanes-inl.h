// SPDX-License-Identifier: Apache-2.0
// Vectors of float32 from and to float32, bfloat16 and float16 memory, one channel a lane; W taps
// of a channel lie next to each other in memory and land in W vectors. Included once per target.
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

/// v[w] = tap w of Lanes(DF) channels at p.
template <class T, int W>
HWY_INLINE void load_taps(const T* p, VF (&v)[W]) {
  using Raw = std::conditional_t<std::is_same_v<T, float>, float, std::uint16_t>;
  using D = hn::Rebind<Raw, DF>;
  const auto* raw = reinterpret_cast<const Raw*>(p);
  const auto wide = [](hn::Vec<D> bits) {
    if constexpr (std::is_same_v<T, float>) {
      return bits;
    } else {
      return widen<T>(bits);
    }
  };
  if constexpr (W == 1) {
    v[0] = load_row(p);
  } else if constexpr (W <= 4) {
    hn::Vec<D> r[W];
    if constexpr (W == 2) hn::LoadInterleaved2(D(), raw, r[0], r[1]);
    if constexpr (W == 3) hn::LoadInterleaved3(D(), raw, r[0], r[1], r[2]);
    if constexpr (W == 4) hn::LoadInterleaved4(D(), raw, r[0], r[1], r[2], r[3]);
    for (int w = 0; w < W; ++w) v[w] = wide(r[w]);
  } else if constexpr (W % 2 == 0 && !std::is_same_v<T, float>) {
    const auto* words = reinterpret_cast<const std::uint32_t*>(p);
    hn::Vec<DU32> r[W / 2];
    if constexpr (W == 6) hn::LoadInterleaved3(DU32(), words, r[0], r[1], r[2]);
    if constexpr (W == 8) hn::LoadInterleaved4(DU32(), words, r[0], r[1], r[2], r[3]);
    for (int i = 0; i < W / 2; ++i) {
      v[2 * i] = even_tap<T>(r[i]);
      v[2 * i + 1] = odd_tap<T>(r[i]);
    }
  } else if constexpr (std::is_same_v<T, float>) {
    const auto index = hn::Mul(hn::Iota(hn::Rebind<std::int32_t, DF>(), 0),
                               hn::Set(hn::Rebind<std::int32_t, DF>(), W));
    for (int w = 0; w < W; ++w) v[w] = hn::GatherIndex(DF(), p + w, index);
  } else {
    // Odd W: taps (0, 1), (2, 3), ... as words at any 2-byte address, and (W - 2, W - 1) for the
    // last one, so that nothing past the channel is read.
    const auto offset = hn::Mul(hn::Iota(hn::Rebind<std::int32_t, DF>(), 0),
                                hn::Set(hn::Rebind<std::int32_t, DF>(), 2 * W));
    const auto words = [&](int w) {
      return hn::GatherOffset(DU32(), reinterpret_cast<const std::uint32_t*>(p + w), offset);
    };
    for (int w = 0; w + 1 < W; w += 2) {
      const auto pair = words(w);
      v[w] = even_tap<T>(pair);
      v[w + 1] = odd_tap<T>(pair);
    }
    v[W - 1] = odd_tap<T>(words(W - 2));
  }
}

/// The reverse of load_taps.
template <class T, int W>
HWY_INLINE void store_taps(const VF (&v)[W], T* p) {
  using Raw = std::conditional_t<std::is_same_v<T, float>, float, std::uint16_t>;
  using D = hn::Rebind<Raw, DF>;
  auto* raw = reinterpret_cast<Raw*>(p);
  const auto small = [](VF x) {
    if constexpr (std::is_same_v<T, float>) {
      return x;
    } else {
      return narrow<T>(x);
    }
  };
  if constexpr (W == 1) {
    store_row(v[0], p);
  } else if constexpr (W == 2) {
    hn::StoreInterleaved2(small(v[0]), small(v[1]), D(), raw);
  } else if constexpr (W == 3) {
    hn::StoreInterleaved3(small(v[0]), small(v[1]), small(v[2]), D(), raw);
  } else if constexpr (W == 4) {
    hn::StoreInterleaved4(small(v[0]), small(v[1]), small(v[2]), small(v[3]), D(), raw);
  } else if constexpr (W % 2 == 0 && !std::is_same_v<T, float>) {
    hn::Vec<DU32> r[W / 2];
    for (int i = 0; i < W / 2; ++i) r[i] = pair_taps<T>(v[2 * i], v[2 * i + 1]);
    auto* words = reinterpret_cast<std::uint32_t*>(p);
    if constexpr (W == 6) hn::StoreInterleaved3(r[0], r[1], r[2], DU32(), words);
    if constexpr (W == 8) hn::StoreInterleaved4(r[0], r[1], r[2], r[3], DU32(), words);
  } else {
    HWY_ALIGN Raw tile[W][kMaxLanes];
    for (int w = 0; w < W; ++w) hn::Store(small(v[w]), D(), tile[w]);
    for (std::size_t i = 0; i < hn::Lanes(DF()); ++i) {
      for (int w = 0; w < W; ++w) raw[i * W + static_cast<std::size_t>(w)] = tile[w][i];
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace mortar::dynamic_conv::cpu
HWY_AFTER_NAMESPACE();

#endif
