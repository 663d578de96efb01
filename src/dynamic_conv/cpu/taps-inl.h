// SPDX-License-Identifier: Apache-2.0
// W taps of a channel lie next to each other in memory and land in W vectors of float32, one
// channel a lane, and back. Included once per target.
//
// Two steps make every W, on vectors of N lanes:
//   even W : W / 2 taps of each half of a channel first, as if there were twice as many channels;
//            the even lanes of two vectors are then one tap, the odd lanes another
//   odd W  : of W consecutive vectors each position p has tap w in exactly one, vector j with
//            (j N + p) mod W = w; W - 1 blends collect a tap, and one permutation orders it
// A pair of 16-bit taps is one 32-bit word, so that an even W of them costs as much as W / 2 words.
// AVX-512, a vector of channels: W = 4 takes 8 shuffles of float32 and 2 of 16 bits, W = 8 24 and
// 8, where loads of gathered elements took 128 and Highway's LoadInterleaved4 16.
#if defined(MORTAR_DYNAMIC_CONV_TAPS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MORTAR_DYNAMIC_CONV_TAPS_INL_H_
#undef MORTAR_DYNAMIC_CONV_TAPS_INL_H_
#else
#define MORTAR_DYNAMIC_CONV_TAPS_INL_H_
#endif

#include <array>
#include <cstdint>

#include "dynamic_conv/cpu/lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace mortar::dynamic_conv::cpu {
namespace HWY_NAMESPACE {

using VU32 = hn::Vec<DU32>;

template <class U>
struct alignas(64) Lanes {
  U of[kMaxLanes];
};

/// All ones in the positions p with p mod W = place.
template <class U, int W>
constexpr std::array<Lanes<U>, W> place_masks() {
  std::array<Lanes<U>, W> masks{};
  for (std::size_t p = 0; p < kMaxLanes; ++p) masks[p % W].of[p] = static_cast<U>(~U{0});
  return masks;
}

/// Lane i wants tap w of channel i from where the blend left it: position (i W + w) mod N.
template <int W>
constexpr std::array<Lanes<std::int32_t>, W> load_orders() {
  std::array<Lanes<std::int32_t>, W> orders{};
  for (std::size_t w = 0; w < W; ++w) {
    for (std::size_t i = 0; i < kMaxLanes; ++i) {
      orders[w].of[i] = static_cast<std::int32_t>((i * W + w) % kMaxLanes);
    }
  }
  return orders;
}

/// The inverse: the channel whose tap w belongs in a position.
template <int W>
constexpr std::array<Lanes<std::int32_t>, W> store_orders() {
  std::array<Lanes<std::int32_t>, W> orders{};
  for (std::size_t w = 0; w < W; ++w) {
    for (std::size_t i = 0; i < kMaxLanes; ++i) {
      orders[w].of[(i * W + w) % kMaxLanes] = static_cast<std::int32_t>(i);
    }
  }
  return orders;
}

/// Lanes 0 0 1 1 ... of the lower or the upper half of a vector.
constexpr Lanes<std::int32_t> each_twice(std::size_t first) {
  Lanes<std::int32_t> order{};
  for (std::size_t i = 0; i < kMaxLanes; ++i)
    order.of[i] = static_cast<std::int32_t>(first + i / 2);
  return order;
}

template <class U, int W>
inline constexpr auto kPlaceMasks = place_masks<U, W>();
template <int W>
inline constexpr auto kLoadOrders = load_orders<W>();
template <int W>
inline constexpr auto kStoreOrders = store_orders<W>();
inline constexpr auto kLowTwice = each_twice(0), kHighTwice = each_twice(kMaxLanes / 2);

/// to[a] = at each position the vector from[b] that `a` and `b` share it with: (tap, vector) of a
/// load, (vector, tap) of a store, W odd.
template <bool load, class D, int W>
HWY_INLINE void exchange(D d, const hn::Vec<D> (&from)[W], hn::Vec<D> (&to)[W]) {
  using U = hn::TFromD<D>;
  constexpr int kLanes = static_cast<int>(kMaxLanes);
  for (int a = 0; a < W; ++a) {
    to[a] = from[0];
    for (int b = 1; b < W; ++b) {
      const int tap = load ? a : b, vector = load ? b : a;
      const int place = (tap + vector * kLanes * (W - 1)) % W;  // tap - vector * N, never negative
      const auto mask = hn::MaskFromVec(hn::Load(d, kPlaceMasks<U, W>[place].of));
      to[a] = hn::IfThenElse(mask, from[b], to[a]);
    }
  }
}

template <class V>
HWY_INLINE V permute(V v, const Lanes<std::int32_t>& order) {
  const hn::DFromV<V> d;
  return hn::TableLookupLanes(v, hn::SetTableIndices(d, order.of));
}

/// even, odd = the even and the odd lanes of low and high; zip is the reverse.
HWY_INLINE void unzip(VU32 low, VU32 high, VU32& even, VU32& odd) {
#if HWY_TARGET == HWY_SCALAR
  even = low;
  odd = high;
#else
  even = hn::ConcatEven(DU32(), high, low);
  odd = hn::ConcatOdd(DU32(), high, low);
#endif
}
HWY_INLINE void zip(VU32 even, VU32 odd, VU32& low, VU32& high) {
#if HWY_TARGET == HWY_SCALAR
  low = even;
  high = odd;
#else
  low = hn::OddEven(permute(odd, kLowTwice), permute(even, kLowTwice));
  high = hn::OddEven(permute(odd, kHighTwice), permute(even, kHighTwice));
#endif
}

/// v[w] = words w, W + w, 2 W + w, ... at p.
template <int W>
HWY_INLINE void load_words(const std::uint32_t* p, VU32 (&v)[W]) {
  const DU32 d;
  if constexpr (W == 1) {
    v[0] = hn::LoadU(d, p);
  } else if constexpr (W % 2 == 0) {
    VU32 low[W / 2], high[W / 2];
    load_words<W / 2>(p, low);
    load_words<W / 2>(p + kMaxLanes * W / 2, high);
    for (int i = 0; i < W / 2; ++i) {
      unzip(low[i], high[i], v[i], v[i + W / 2]);
    }
  } else {
    VU32 r[W];
    for (int j = 0; j < W; ++j) r[j] = hn::LoadU(d, p + j * kMaxLanes);
    exchange<true>(d, r, v);
    for (int w = 0; w < W; ++w) v[w] = permute(v[w], kLoadOrders<W>[w]);
  }
}

/// v[w] = tap w of Lanes(DF) channels at p.
template <class T, int W>
HWY_INLINE void load_taps(const T* p, VF (&v)[W]) {
  if constexpr (W == 1) {
    v[0] = load_row(p);
  } else if constexpr (std::is_same_v<T, float>) {
    VU32 r[W];
    load_words<W>(reinterpret_cast<const std::uint32_t*>(p), r);
    for (int w = 0; w < W; ++w) v[w] = hn::BitCast(DF(), r[w]);
  } else if constexpr (W % 2 == 0) {
    VU32 r[W / 2];
    load_words<W / 2>(reinterpret_cast<const std::uint32_t*>(p), r);
    for (int i = 0; i < W / 2; ++i) {
      v[2 * i] = even_tap<T>(r[i]);
      v[2 * i + 1] = odd_tap<T>(r[i]);
    }
  } else {
    const auto* raw = reinterpret_cast<const std::uint16_t*>(p);
    VU16 r[W], taps[W];
    for (int j = 0; j < W; ++j) r[j] = hn::LoadU(DU16(), raw + j * kMaxLanes);
    exchange<true>(DU16(), r, taps);
    for (int w = 0; w < W; ++w) v[w] = permute(widen<T>(taps[w]), kLoadOrders<W>[w]);
  }
}

/// The reverse of load_words.
template <int W>
HWY_INLINE void store_words(const VU32 (&v)[W], std::uint32_t* p) {
  const DU32 d;
  if constexpr (W == 1) {
    hn::StoreU(v[0], d, p);
  } else if constexpr (W == 2) {
    hn::StoreInterleaved2(v[0], v[1], d, p);
  } else if constexpr (W == 4) {
    hn::StoreInterleaved4(v[0], v[1], v[2], v[3], d, p);
  } else if constexpr (W % 2 == 0) {
    VU32 low[W / 2], high[W / 2];
    for (int i = 0; i < W / 2; ++i) {
      zip(v[i], v[i + W / 2], low[i], high[i]);
    }
    store_words<W / 2>(low, p);
    store_words<W / 2>(high, p + kMaxLanes * W / 2);
  } else {
    VU32 taps[W], r[W];
    for (int w = 0; w < W; ++w) taps[w] = permute(v[w], kStoreOrders<W>[w]);
    exchange<false>(d, taps, r);
    for (int j = 0; j < W; ++j) hn::StoreU(r[j], d, p + j * kMaxLanes);
  }
}

/// The reverse of load_taps.
template <class T, int W>
HWY_INLINE void store_taps(const VF (&v)[W], T* p) {
  if constexpr (W == 1) {
    store_row(v[0], p);
  } else if constexpr (std::is_same_v<T, float>) {
    VU32 r[W];
    for (int w = 0; w < W; ++w) r[w] = hn::BitCast(DU32(), v[w]);
    store_words<W>(r, reinterpret_cast<std::uint32_t*>(p));
  } else if constexpr (W % 2 == 0) {
    VU32 r[W / 2];
    for (int i = 0; i < W / 2; ++i) r[i] = pair_taps<T>(v[2 * i], v[2 * i + 1]);
    store_words<W / 2>(r, reinterpret_cast<std::uint32_t*>(p));
  } else {
    auto* raw = reinterpret_cast<std::uint16_t*>(p);
    VU16 taps[W], r[W];
    for (int w = 0; w < W; ++w) taps[w] = narrow<T>(permute(v[w], kStoreOrders<W>[w]));
    exchange<false>(DU16(), taps, r);
    for (int j = 0; j < W; ++j) hn::StoreU(r[j], DU16(), raw + j * kMaxLanes);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace mortar::dynamic_conv::cpu
HWY_AFTER_NAMESPACE();

#endif
