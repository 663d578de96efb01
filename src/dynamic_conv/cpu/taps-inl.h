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

#include "core/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace mortar::dynamic_conv::cpu {
namespace HWY_NAMESPACE {
using namespace mortar::HWY_NAMESPACE;

template <class U>
struct alignas(64) Lanes {
  U of[kLanes];
};

/// All ones in the positions p with p mod W = place.
template <class U, int W>
constexpr std::array<Lanes<U>, W> place_masks() {
  std::array<Lanes<U>, W> masks{};
  for (std::size_t p = 0; p < kLanes; ++p) masks[p % W].of[p] = static_cast<U>(~U{0});
  return masks;
}

/// Lane i wants tap w of channel i from where the blend left it: position (i W + w) mod N.
template <int W>
constexpr std::array<Lanes<std::int32_t>, W> load_orders() {
  std::array<Lanes<std::int32_t>, W> orders{};
  for (std::size_t w = 0; w < W; ++w) {
    for (std::size_t i = 0; i < kLanes; ++i) {
      orders[w].of[i] = static_cast<std::int32_t>((i * W + w) % kLanes);
    }
  }
  return orders;
}

/// The inverse: the channel whose tap w belongs in a position.
template <int W>
constexpr std::array<Lanes<std::int32_t>, W> store_orders() {
  std::array<Lanes<std::int32_t>, W> orders{};
  for (std::size_t w = 0; w < W; ++w) {
    for (std::size_t i = 0; i < kLanes; ++i) {
      orders[w].of[(i * W + w) % kLanes] = static_cast<std::int32_t>(i);
    }
  }
  return orders;
}

/// Lanes 0 0 1 1 ... of the lower or the upper half of a vector.
constexpr Lanes<std::int32_t> each_twice(std::size_t first) {
  Lanes<std::int32_t> order{};
  for (std::size_t i = 0; i < kLanes; ++i) order.of[i] = static_cast<std::int32_t>(first + i / 2);
  return order;
}

template <class U, int W>
inline constexpr auto kPlaceMasks = place_masks<U, W>();
template <int W>
inline constexpr auto kLoadOrders = load_orders<W>();
template <int W>
inline constexpr auto kStoreOrders = store_orders<W>();
inline constexpr auto kLowTwice = each_twice(0), kHighTwice = each_twice(kLanes / 2);

/// to[a] = at each position the vector from[b] that `a` and `b` share it with: (tap, vector) of a
/// load, (vector, tap) of a store, W odd.
template <bool load, class D, int W>
HWY_INLINE void exchange(D d, const hn::Vec<D> (&from)[W], hn::Vec<D> (&to)[W]) {
  using U = hn::TFromD<D>;
  for (int a = 0; a < W; ++a) {
    to[a] = from[0];
    for (int b = 1; b < W; ++b) {
      const int tap = load ? a : b, vector = load ? b : a;
      const int place = (tap + vector * static_cast<int>(kLanes) * (W - 1)) %
                        W;  // tap - vector * N, never negative
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
HWY_INLINE void unzip(BitsVec low, BitsVec high, BitsVec& even, BitsVec& odd) {
#if HWY_TARGET == HWY_SCALAR
  even = low;
  odd = high;
#else
  even = hn::ConcatEven(BitsTag(), high, low);
  odd = hn::ConcatOdd(BitsTag(), high, low);
#endif
}
HWY_INLINE void zip(BitsVec even, BitsVec odd, BitsVec& low, BitsVec& high) {
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
HWY_INLINE void load_words(const std::uint32_t* p, BitsVec (&v)[W]) {
  const BitsTag d;
  if constexpr (W == 1) {
    v[0] = hn::LoadU(d, p);
  } else if constexpr (W % 2 == 0) {
    BitsVec low[W / 2], high[W / 2];
    load_words<W / 2>(p, low);
    load_words<W / 2>(p + kLanes * W / 2, high);
    for (int i = 0; i < W / 2; ++i) {
      unzip(low[i], high[i], v[i], v[i + W / 2]);
    }
  } else {
    BitsVec r[W];
    for (int j = 0; j < W; ++j) r[j] = hn::LoadU(d, p + j * kLanes);
    exchange<true>(d, r, v);
    for (int w = 0; w < W; ++w) v[w] = permute(v[w], kLoadOrders<W>[w]);
  }
}

/// v[w] = tap w of Lanes(FloatTag) channels at p.
template <class T, int W>
HWY_INLINE void load_taps(const T* p, FloatVec (&v)[W]) {
  if constexpr (W == 1) {
    v[0] = load_f32(p);
  } else if constexpr (std::is_same_v<T, float>) {
    BitsVec r[W];
    load_words<W>(reinterpret_cast<const std::uint32_t*>(p), r);
    for (int w = 0; w < W; ++w) v[w] = hn::BitCast(FloatTag(), r[w]);
  } else if constexpr (W % 2 == 0) {
    BitsVec r[W / 2];
    load_words<W / 2>(reinterpret_cast<const std::uint32_t*>(p), r);
    for (int i = 0; i < W / 2; ++i) {
      v[2 * i] = widen_low<T>(r[i]);
      v[2 * i + 1] = widen_high<T>(r[i]);
    }
  } else {
    const auto* raw = reinterpret_cast<const std::uint16_t*>(p);
    HalfVec r[W], taps[W];
    for (int j = 0; j < W; ++j) r[j] = hn::LoadU(HalfTag(), raw + j * kLanes);
    exchange<true>(HalfTag(), r, taps);
    for (int w = 0; w < W; ++w) v[w] = permute(widen<T>(taps[w]), kLoadOrders<W>[w]);
  }
}

/// The reverse of load_words.
template <int W>
HWY_INLINE void store_words(const BitsVec (&v)[W], std::uint32_t* p) {
  const BitsTag d;
  if constexpr (W == 1) {
    hn::StoreU(v[0], d, p);
  } else if constexpr (W == 2) {
    hn::StoreInterleaved2(v[0], v[1], d, p);
  } else if constexpr (W == 4) {
    hn::StoreInterleaved4(v[0], v[1], v[2], v[3], d, p);
  } else if constexpr (W % 2 == 0) {
    BitsVec low[W / 2], high[W / 2];
    for (int i = 0; i < W / 2; ++i) {
      zip(v[i], v[i + W / 2], low[i], high[i]);
    }
    store_words<W / 2>(low, p);
    store_words<W / 2>(high, p + kLanes * W / 2);
  } else {
    BitsVec taps[W], r[W];
    for (int w = 0; w < W; ++w) taps[w] = permute(v[w], kStoreOrders<W>[w]);
    exchange<false>(d, taps, r);
    for (int j = 0; j < W; ++j) hn::StoreU(r[j], d, p + j * kLanes);
  }
}

/// The reverse of load_taps.
template <class T, int W>
HWY_INLINE void store_taps(const FloatVec (&v)[W], T* p) {
  if constexpr (W == 1) {
    store_f32(v[0], p);
  } else if constexpr (std::is_same_v<T, float>) {
    BitsVec r[W];
    for (int w = 0; w < W; ++w) r[w] = hn::BitCast(BitsTag(), v[w]);
    store_words<W>(r, reinterpret_cast<std::uint32_t*>(p));
  } else if constexpr (W % 2 == 0) {
    BitsVec r[W / 2];
    for (int i = 0; i < W / 2; ++i) r[i] = narrow_pair<T>(v[2 * i], v[2 * i + 1]);
    store_words<W / 2>(r, reinterpret_cast<std::uint32_t*>(p));
  } else {
    auto* raw = reinterpret_cast<std::uint16_t*>(p);
    HalfVec taps[W], r[W];
    for (int w = 0; w < W; ++w) taps[w] = narrow<T>(permute(v[w], kStoreOrders<W>[w]));
    exchange<false>(HalfTag(), taps, r);
    for (int j = 0; j < W; ++j) hn::StoreU(r[j], HalfTag(), raw + j * kLanes);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace mortar::dynamic_conv::cpu
HWY_AFTER_NAMESPACE();

#endif
