// SPDX-License-Identifier: Apache-2.0
// Row kernels of the forward that read z, or a y that is given, where it lies. Included once per
// target.
#if defined(MORTAR_FP8_RMSNORM_FORWARD_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef MORTAR_FP8_RMSNORM_FORWARD_ROWS_INL_H_
#undef MORTAR_FP8_RMSNORM_FORWARD_ROWS_INL_H_
#else
#define MORTAR_FP8_RMSNORM_FORWARD_ROWS_INL_H_
#endif

#include "fp8_rmsnorm/cpu/float8-inl.h"
#include "fp8_rmsnorm/cpu/rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace mortar::fp8_rmsnorm::cpu {
namespace HWY_NAMESPACE {

template <class Z>
void sum_squares(const void* from, const float* w, std::int64_t n, Sums* sums, Maxima* maxima) {
  const BitsTag u32;
  const auto* z = static_cast<const Z*>(from);
  FloatVec sum[kVectors];
  BitsVec most[kVectors];
  for (int j = 0; j < kVectors; ++j) {
    sum[j] = at(sums->lane + j * kLanes);
    most[j] = hn::Load(u32, maxima->lane + j * kLanes);
  }
  for_blocks(n, [&](std::int64_t i, auto block) {
    Z copy[kLanesOfSum];
    const Z* p = block.in(z + i, copy);
    for (int j = 0; j < kVectors; ++j) {
      const FloatVec v = load_f32(p + j * kLanes);
      sum[j] = hn::MulAdd(v, v, sum[j]);
      most[j] = hn::Max(most[j], magnitude(hn::Mul(v, at(w + i + j * kLanes))));
    }
  });
  for (int j = 0; j < kVectors; ++j) {
    put(sum[j], sums->lane + j * kLanes);
    hn::Store(most[j], u32, maxima->lane + j * kLanes);
  }
}

/// value(z, w) of every element into scratch.
template <class Z, class Value>
HWY_INLINE void weigh(const void* from, const float* w, std::int64_t n, float* y,
                      const Value& value) {
  const auto* z = static_cast<const Z*>(from);
  for_blocks(n, [&](std::int64_t i, auto block) {
    Z copy[kLanesOfSum];
    const Z* p = block.in(z + i, copy);
    for (int j = 0; j < kLanesOfSum; j += kLanes)
      put(value(load_f32(p + j), at(w + i + j)), y + i + j);
  });
}

template <class Z>
void normalise(const void* z, const float* w, float factor, std::int64_t n, float* y) {
  const FloatVec f = hn::Set(FloatTag(), factor);
  weigh<Z>(z, w, n, y, [&](FloatVec v, FloatVec u) { return hn::Mul(hn::Mul(v, u), f); });
}

template <class Z>
void normalise_compat(const void* z, const float* w, float rstd, std::int64_t n, float* y) {
  const FloatVec r = hn::Set(FloatTag(), rstd);
  weigh<Z>(z, w, n, y, [&](FloatVec v, FloatVec u) { return hn::Mul(hn::Mul(v, r), u); });
}

template <class Z>
void max_row(const void* from, std::int64_t n, Maxima* maxima) {
  const BitsTag u32;
  const auto* y = static_cast<const Z*>(from);
  BitsVec most[kVectors];
  for (int j = 0; j < kVectors; ++j) most[j] = hn::Load(u32, maxima->lane + j * kLanes);
  for_blocks(n, [&](std::int64_t i, auto block) {
    Z copy[kLanesOfSum];
    const Z* p = block.in(y + i, copy);
    for (int j = 0; j < kVectors; ++j) {
      most[j] = hn::Max(most[j], magnitude(load_f32(p + j * kLanes)));
    }
  });
  for (int j = 0; j < kVectors; ++j) hn::Store(most[j], u32, maxima->lane + j * kLanes);
}

/// (z * w) * factor, or without weights z * factor.
template <bool kWeighted, class Z>
HWY_INLINE FloatVec scaled(const Z* z, const float* w, FloatVec factor) {
  const FloatVec v = load_f32(z);
  return hn::Mul(kWeighted ? hn::Mul(v, at(w)) : v, factor);
}

template <bool kWeighted, class Z>
HWY_INLINE void max_columns_of(const Z* z, const float* w, float factor, std::int64_t n,
                               std::uint32_t* maxima) {
  const BitsTag u32;
  const FloatVec f = hn::Set(FloatTag(), factor);
  for_blocks(n, [&](std::int64_t i, auto block) {
    Z copy[kLanesOfSum];
    const Z* p = block.in(z + i, copy);
    for (int j = 0; j < kLanesOfSum; j += kLanes) {
      std::uint32_t* most = maxima + i + j;
      const BitsVec v = magnitude(scaled<kWeighted>(p + j, w + i + j, f));
      hn::Store(hn::Max(hn::Load(u32, most), v), u32, most);
    }
  });
}

template <class Z>
void max_columns(const void* z, const float* w, float factor, std::int64_t n,
                 std::uint32_t* maxima) {
  const auto* p = static_cast<const Z*>(z);
  w != nullptr ? max_columns_of<true>(p, w, factor, n, maxima)
               : max_columns_of<false>(p, w, factor, n, maxima);
}

/// Codes of value(i), a vector of the run at element i, or of its block's copy.
template <class T, bool kStochastic, class Z, class Value>
HWY_INLINE void quantise_row(const Z* from, const std::uint32_t* draws, std::int64_t n, void* to,
                             const Value& value) {
  auto* bytes = static_cast<std::uint8_t*>(to);
  for_blocks(n, [&](std::int64_t i, auto block) {
    Z in[kLanesOfSum];
    std::uint8_t out[kLanesOfSum];
    const Z* p = block.in(from + i, in);
    std::uint8_t* codes = block.out(bytes + i, out);
    for (int j = 0; j < kLanesOfSum; j += kLanes) {
      store8(narrow8<T, kStochastic>(value(p + j, i + j), draws + i + j), codes + j);
    }
    block.done(bytes + i, out);
  });
}

template <class T, class Z, class Value>
HWY_INLINE void quantise_any(const Z* from, const std::uint32_t* draws, std::int64_t n, void* to,
                             const Value& value) {
  draws != nullptr ? quantise_row<T, true>(from, draws, n, to, value)
                   : quantise_row<T, false>(from, draws, n, to, value);
}

template <class Z, class T>
void quantise(const void* z, const float* w, float factor, const std::uint32_t* draws,
              std::int64_t n, void* to) {
  const auto* from = static_cast<const Z*>(z);
  const FloatVec f = hn::Set(FloatTag(), factor);
  if (w == nullptr) {
    quantise_any<T>(from, draws, n, to,
                    [&](const Z* p, std::int64_t) { return scaled<false>(p, nullptr, f); });
  } else {
    quantise_any<T>(from, draws, n, to,
                    [&](const Z* p, std::int64_t i) { return scaled<true>(p, w + i, f); });
  }
}

template <class T>
void quantise_each(const float* y, const float* factors, const std::uint32_t* draws, std::int64_t n,
                   void* to) {
  quantise_any<T>(y, draws, n, to, [&](const float* p, std::int64_t i) {
    return hn::Mul(hn::LoadU(FloatTag(), p), at(factors + i));
  });
}

template <class T>
void quantise_divided(const float* y, float divisor, const std::uint32_t* draws, std::int64_t n,
                      void* to) {
  const FloatVec d = hn::Set(FloatTag(), divisor);
  quantise_any<T>(y, draws, n, to, [&](const float* p, std::int64_t) {
    return hn::Div(hn::LoadU(FloatTag(), p), d);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace mortar::fp8_rmsnorm::cpu
HWY_AFTER_NAMESPACE();

#endif  // MORTAR_FP8_RMSNORM_FORWARD_ROWS_INL_H_
