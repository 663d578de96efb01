// SPDX-License-Identifier: Apache-2.0
// The row kernels, once per instruction set.
//
// y[i] = (z[i] * w[i]) * rstd, q[i] = fp8(y[i] / s) and the rest of what a row needs
// bytes  = only x, x_scale and the outputs cross memory; what lies in scratch, at most kRun
//          elements a row, stays in the first-level cache
// limit  : instructions where rows are in a cache, else memory as well. A forward of bfloat16 with
//          a transpose takes about 2 of AVX-512 for each element: 0.4 for the sum of squares, 1.2
//          for codes, 0.4 to turn bytes over.
#include "fp8_rmsnorm/cpu/row_kernels.h"

#include <cstring>

#include "core/dtype_visitor.h"
#include "core/philox.h"

// Arrays of vectors are not possible with vectors of unknown size.
// Levels: AVX2, AVX-512, NEON, and the baseline of the compiler, as everywhere in Mortar.
#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_SSE4 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "fp8_rmsnorm/cpu/row_kernels.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// After highway.h: these are included once per target.
#include "fp8_rmsnorm/cpu/backward_rows-inl.h"
#include "fp8_rmsnorm/cpu/forward_rows-inl.h"
#include "fp8_rmsnorm/cpu/transpose-inl.h"

HWY_BEFORE_NAMESPACE();
namespace mortar::fp8_rmsnorm::cpu {
namespace HWY_NAMESPACE {

template <class T>
HWY_INLINE FloatVec load(const T* p) {
  if constexpr (sizeof(T) == 1) {
    return widen8(p);
  } else {
    return load_f32(p);
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

void add(const float* a, std::int64_t n, float* to) {
  for_vectors(n, [&](std::int64_t i) { put(hn::Add(at(to + i), at(a + i)), to + i); });
}

void add_constant(float a, std::int64_t n, float* to) {
  const FloatVec v = hn::Set(FloatTag(), a);
  for_vectors(n, [&](std::int64_t i) { put(hn::Add(at(to + i), v), to + i); });
  clear_padding(n, to);
}

void round_bf16(std::int64_t n, float* y) {
  for_vectors(n, [&](std::int64_t i) {
    BFloat16 rounded[kLanes];
    store_f32(at(y + i), rounded);
    put(load_f32(rounded), y + i);
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
  k.add = add;
  k.add_constant = add_constant;
  k.round_bf16 = round_bf16;
  k.max_row_y = max_row<float>;
  k.max_groups = max_groups;
  visit_dtype<FloatDTypes>(types.z, "fp8_rmsnorm", [&](auto z_tag) {
    using Z = typename decltype(z_tag)::type;
    k.normalise = normalise<Z>;
    k.normalise_compat = normalise_compat<Z>;
    k.sum_squares = sum_squares<Z>;
    k.max_row = max_row<Z>;
    k.max_columns = max_columns<Z>;
    visit_dtype<Float8DTypes>(types.q, "fp8_rmsnorm", [&](auto q_tag) {
      using Q = typename decltype(q_tag)::type;
      k.quantise = quantise<Z, Q>;
      k.quantise_y = quantise<float, Q>;
      k.quantise_each = quantise_each<Q>;
      k.quantise_divided = quantise_divided<Q>;
    });
    visit_dtype<FloatDTypes>(types.side, "fp8_rmsnorm", [&](auto side_tag) {
      using Side = typename decltype(side_tag)::type;
      k.dot = dot<Z, Side>;
      k.gradients = gradients<Z, Side>;
    });
  });
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
