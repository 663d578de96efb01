// SPDX-License-Identifier: Apache-2.0
// The row kernels, once per instruction set.
//
// y[i] = (z[i] * w[i]) * rstd, q[i] = fp8(y[i] / s) and the rest of what a row needs
// bytes  = only x, x_scale and the outputs cross memory; float32 rows of kRun elements stay in the
//          first-level cache
// limit  : instructions. AVX2 takes about 3 for each element of a forward with a transpose, twice
//          what memory would ask for on one core and less on many.
#include "fp8_rmsnorm/cpu/row_kernels.h"

#include <cstring>

#include "core/dtype_visitor.h"
#include "core/philox.h"

// Arrays of vectors are not possible with vectors of unknown size.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "fp8_rmsnorm/cpu/row_kernels.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// After highway.h: these are included once per target.
#include "fp8_rmsnorm/cpu/float8-inl.h"
#include "fp8_rmsnorm/cpu/transpose-inl.h"

HWY_BEFORE_NAMESPACE();
namespace mortar::fp8_rmsnorm::cpu {
namespace HWY_NAMESPACE {

constexpr int kVectors = kLanesOfSum / static_cast<int>(kLanes);  ///< of 32 lanes

HWY_INLINE FloatVec at(const float* p) { return hn::Load(FloatTag(), p); }
HWY_INLINE void put(FloatVec v, float* p) { hn::Store(v, FloatTag(), p); }
HWY_INLINE BitsVec magnitude(FloatVec v) { return hn::BitCast(BitsTag(), hn::Abs(v)); }

template <class T>
HWY_INLINE FloatVec load(const T* p) {
  if constexpr (sizeof(T) == 1) {
    return widen8(p);
  } else {
    return load_f32(p);
  }
}

/// body(i) for every vector of scratch, padding included.
template <class Body>
HWY_INLINE void for_vectors(std::int64_t n, const Body& body) {
  for (std::int64_t i = 0; i < n; i += kPadding) {
    for (std::int64_t j = 0; j < kPadding; j += kLanes) body(i + j);
  }
}

/// body(i, j) for every vector of scratch, where j counts those of 32 lanes.
template <class Body>
HWY_INLINE void for_lanes(std::int64_t n, const Body& body) {
  for (std::int64_t i = 0; i < n; i += kLanesOfSum) {
    for (int j = 0; j < kVectors; ++j) body(i + j * kLanes, j);
  }
}

HWY_INLINE void clear_padding(std::int64_t n, float* to) {
  for (std::int64_t i = n; i % kPadding != 0; ++i) to[i] = 0.0f;
}

/// convert(p) for every vector of memory; the last one comes through a copy.
template <class T, class Convert>
HWY_INLINE void widen_row(const T* from, std::int64_t n, float* to, const Convert& convert) {
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) put(convert(from + i), to + i);
  if (i < n) {
    T tail[kLanes] = {};
    std::memcpy(tail, from + i, static_cast<std::size_t>(n - i) * sizeof(T));
    put(convert(tail), to + i);
  }
  clear_padding(n, to);
}

template <class T>
void widen(const void* from, std::int64_t n, float* to) {
  widen_row(static_cast<const T*>(from), n, to, [](const T* p) { return load(p); });
}

template <class T>
void widen_plain(const void* x, const void*, int, std::int64_t n, float* z) {
  widen<T>(x, n, z);
}

/// Groups are whole vectors, and so is the row.
template <class T, class S>
void widen_scaled(const void* x, const void* scales, int group, std::int64_t n, float* z) {
  const auto* p = static_cast<const T*>(x);
  const auto* scale = static_cast<const S*>(scales);
  for (std::int64_t first = 0; first < n; first += group, ++scale) {
    const FloatVec s = hn::Set(FloatTag(), to_float(*scale));
    for (std::int64_t i = first; i < first + group; i += kLanes)
      put(hn::Mul(load(p + i), s), z + i);
  }
  clear_padding(n, z);
}

template <class T>
void narrow(const float* from, std::int64_t n, void* to) {
  auto* p = static_cast<T*>(to);
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store_f32(at(from + i), p + i);
  if (i >= n) return;
  T tail[kLanes];
  store_f32(at(from + i), tail);
  std::memcpy(p + i, tail, static_cast<std::size_t>(n - i) * sizeof(T));
}

template <class T, bool kStochastic>
HWY_INLINE void narrow_row8(const float* from, const std::uint32_t* draws, std::int64_t n,
                            std::uint8_t* to) {
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    store8(narrow8<T, kStochastic>(at(from + i), draws + i), to + i);
  }
  if (i >= n) return;
  std::uint8_t tail[kLanes];
  store8(narrow8<T, kStochastic>(at(from + i), draws + i), tail);
  std::memcpy(to + i, tail, static_cast<std::size_t>(n - i));
}

template <class T>
void narrow_q(const float* from, const std::uint32_t* draws, std::int64_t n, void* to) {
  auto* bytes = static_cast<std::uint8_t*>(to);
  if (draws != nullptr) {
    narrow_row8<T, true>(from, draws, n, bytes);
  } else {
    narrow_row8<T, false>(from, nullptr, n, bytes);
  }
}

void add(const float* a, std::int64_t n, float* to) {
  for_vectors(n, [&](std::int64_t i) { put(hn::Add(at(to + i), at(a + i)), to + i); });
}

void add_constant(float a, std::int64_t n, float* to) {
  const FloatVec v = hn::Set(FloatTag(), a);
  for_vectors(n, [&](std::int64_t i) { put(hn::Add(at(to + i), v), to + i); });
  clear_padding(n, to);
}

void normalise(const float* z, const float* w, float factor, std::int64_t n, float* y) {
  const FloatVec f = hn::Set(FloatTag(), factor);
  for_vectors(n, [&](std::int64_t i) { put(hn::Mul(hn::Mul(at(z + i), at(w + i)), f), y + i); });
}

void normalise_compat(const float* z, const float* w, float rstd, std::int64_t n, float* y) {
  const FloatVec r = hn::Set(FloatTag(), rstd);
  for_vectors(n, [&](std::int64_t i) { put(hn::Mul(hn::Mul(at(z + i), r), at(w + i)), y + i); });
}

void round_bf16(std::int64_t n, float* y) {
  for_vectors(n, [&](std::int64_t i) {
    BFloat16 rounded[kLanes];
    store_f32(at(y + i), rounded);
    put(load_f32(rounded), y + i);
  });
}

void multiply(const float* y, float factor, std::int64_t n, float* to) {
  const FloatVec f = hn::Set(FloatTag(), factor);
  for_vectors(n, [&](std::int64_t i) { put(hn::Mul(at(y + i), f), to + i); });
}

void multiply_each(const float* y, const float* factors, std::int64_t n, float* to) {
  for_vectors(n, [&](std::int64_t i) { put(hn::Mul(at(y + i), at(factors + i)), to + i); });
}

void divide(const float* y, float divisor, std::int64_t n, float* to) {
  const FloatVec d = hn::Set(FloatTag(), divisor);
  for_vectors(n, [&](std::int64_t i) { put(hn::Div(at(y + i), d), to + i); });
}

void sum_squares(const float* z, const float* w, std::int64_t n, Sums* sums, Maxima* maxima) {
  const BitsTag u32;
  FloatVec sum[kVectors];
  BitsVec most[kVectors];
  for (int j = 0; j < kVectors; ++j) {
    sum[j] = at(sums->lane + j * kLanes);
    most[j] = hn::Load(u32, maxima->lane + j * kLanes);
  }
  for_lanes(n, [&](std::int64_t i, int j) {
    const FloatVec v = at(z + i);
    sum[j] = hn::MulAdd(v, v, sum[j]);
    most[j] = hn::Max(most[j], magnitude(hn::Mul(v, at(w + i))));
  });
  for (int j = 0; j < kVectors; ++j) {
    put(sum[j], sums->lane + j * kLanes);
    hn::Store(most[j], u32, maxima->lane + j * kLanes);
  }
}

void max_row(const float* y, std::int64_t n, Maxima* maxima) {
  const BitsTag u32;
  BitsVec most[kVectors];
  for (int j = 0; j < kVectors; ++j) most[j] = hn::Load(u32, maxima->lane + j * kLanes);
  for_lanes(n, [&](std::int64_t i, int j) { most[j] = hn::Max(most[j], magnitude(at(y + i))); });
  for (int j = 0; j < kVectors; ++j) hn::Store(most[j], u32, maxima->lane + j * kLanes);
}

void max_columns(const float* y, std::int64_t n, std::uint32_t* maxima) {
  const BitsTag u32;
  for_vectors(n, [&](std::int64_t i) {
    hn::Store(hn::Max(hn::Load(u32, maxima + i), magnitude(at(y + i))), u32, maxima + i);
  });
}

void max_groups(const float* y, int group, std::int64_t n, float* maxima) {
  const BitsTag u32;
  for (std::int64_t first = 0; first < n; first += group) {
    BitsVec most = hn::Zero(u32);
    const std::int64_t last = first + group < n ? first + group : n;
    for (std::int64_t i = first; i < last; i += kLanes) most = hn::Max(most, magnitude(at(y + i)));
    const std::uint32_t bits = hn::GetLane(hn::MaxOfLanes(u32, most));
    *maxima++ = std::bit_cast<float>(bits);
  }
}

void dot(const float* dy, const float* w, const float* z, std::int64_t n, Sums* sums) {
  FloatVec sum[kVectors];
  for (int j = 0; j < kVectors; ++j) sum[j] = at(sums->lane + j * kLanes);
  for_lanes(n, [&](std::int64_t i, int j) {
    sum[j] = hn::MulAdd(hn::Mul(at(dy + i), at(w + i)), at(z + i), sum[j]);
  });
  for (int j = 0; j < kVectors; ++j) put(sum[j], sums->lane + j * kLanes);
}

void gradient(const float* dy, const float* w, const float* z, float rstd, float c, std::int64_t n,
              float* dz) {
  const FloatVec r = hn::Set(FloatTag(), rstd), coefficient = hn::Set(FloatTag(), c);
  for_vectors(n, [&](std::int64_t i) {
    const FloatVec g = hn::Mul(at(dy + i), at(w + i));
    put(hn::Mul(hn::NegMulAdd(at(z + i), coefficient, g), r), dz + i);
  });
}

void weight_gradient(const float* dy, const float* z, float rstd, std::int64_t n, float* dw) {
  const FloatVec r = hn::Set(FloatTag(), rstd);
  for_vectors(n, [&](std::int64_t i) {
    put(hn::MulAdd(at(dy + i), hn::Mul(at(z + i), r), at(dw + i)), dw + i);
  });
}

/// Kernels of x without scales, or null where its dtype needs them.
template <class T>
auto widen_x_of(DType x_scale) {
  if constexpr (sizeof(T) > 1) {
    return &widen_plain<T>;
  } else {
    return visit_dtype<DTypeList<DType::kFloat32, DType::kBFloat16>>(
        x_scale, "fp8_rmsnorm",
        [](auto tag) { return &widen_scaled<T, typename decltype(tag)::type>; });
  }
}

Widen widen_of(DType dtype) {
  return visit_dtype<FloatDTypes>(
      dtype, "fp8_rmsnorm", [](auto tag) -> Widen { return &widen<typename decltype(tag)::type>; });
}

Narrow narrow_of(DType dtype) {
  return visit_dtype<FloatDTypes>(dtype, "fp8_rmsnorm", [](auto tag) -> Narrow {
    return &narrow<typename decltype(tag)::type>;
  });
}

RowKernels kernels_of(const RowTypes& types) {
  using XTypes = DTypeList<DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat8E4M3,
                           DType::kFloat8E5M2>;
  RowKernels k;
  k.widen_x = visit_dtype<XTypes>(types.x, "fp8_rmsnorm", [&](auto tag) {
    return widen_x_of<typename decltype(tag)::type>(types.x_scale);
  });
  k.widen_weight = widen_of(types.weight);
  k.widen_side = widen_of(types.side);
  k.widen_dw = widen_of(types.dw);
  k.narrow_side = narrow_of(types.side);
  k.narrow_dw = narrow_of(types.dw);
  k.narrow_bf16 = &narrow<BFloat16>;
  k.narrow_q = visit_dtype<Float8DTypes>(
      types.q, "fp8_rmsnorm", [](auto tag) { return &narrow_q<typename decltype(tag)::type>; });
  k.add = add;
  k.add_constant = add_constant;
  k.normalise = normalise;
  k.normalise_compat = normalise_compat;
  k.round_bf16 = round_bf16;
  k.multiply = multiply;
  k.multiply_each = multiply_each;
  k.divide = divide;
  k.sum_squares = sum_squares;
  k.max_row = max_row;
  k.max_columns = max_columns;
  k.max_groups = max_groups;
  k.dot = dot;
  k.gradient = gradient;
  k.weight_gradient = weight_gradient;
  k.draw = draw;
  k.transpose = transpose;
  return k;
}

}  // namespace HWY_NAMESPACE
}  // namespace mortar::fp8_rmsnorm::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace mortar::fp8_rmsnorm::cpu {

HWY_EXPORT(kernels_of);

RowKernels row_kernels(const RowTypes& types) { return HWY_DYNAMIC_DISPATCH(kernels_of)(types); }

}  // namespace mortar::fp8_rmsnorm::cpu
#endif
