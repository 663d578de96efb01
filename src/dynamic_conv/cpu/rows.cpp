// SPDX-License-Identifier: Apache-2.0
// The row kernels, once per instruction set.
//
// s[c] = sum_w k[c][w] * x[W-1-w][c], one time step, C channels
// bytes  = C (W e_k + 4 (W + 1)), of which only k's C W e_k come from memory: the float32 rows stay
//          in the first-level cache
// limit  : memory. 2 W flop per W e_k bytes of k; a core streams about 4 B a cycle and
// deinterleaves
//          and multiplies 16 taps in some 10 cycles with AVX-512.
#include "dynamic_conv/cpu/rows.h"

#include <cmath>
#include <cstring>

#include "core/check.h"
#include "core/float16.h"

// A register array of vectors is not possible with vectors of unknown size.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "dynamic_conv/cpu/rows.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// After highway.h: these are included once per target.
#include "dynamic_conv/cpu/lanes-inl.h"
#include "hwy/contrib/math/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace mortar::dynamic_conv::cpu {
namespace HWY_NAMESPACE {

/// Runs body(i, p + i * W) for groups of Lanes(DF) channels; the last, incomplete group works on a
/// copy of its taps, which is written back if `writes`.
template <class T, int W, bool writes, class Body>
HWY_INLINE void for_each_group(T* p, std::int64_t n, const Body& body) {
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(DF()));
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes) body(i, p + i * W);
  if (i == n) return;
  std::remove_const_t<T> tail[kMaxLanes * W] = {};
  const auto bytes = static_cast<std::size_t>(n - i) * W * sizeof(T);
  std::memcpy(tail, p + i * W, bytes);
  body(i, tail);
  if constexpr (writes) std::memcpy(p + i * W, tail, bytes);
}

template <class T>
void widen_row(const void* from, std::int64_t n, float* to) {
  for_each_group<const T, 1, false>(
      static_cast<const T*>(from), n,
      [&](std::int64_t i, const T* p) { hn::Store(load_row(p), DF(), to + i); });
}

template <class T>
void narrow_row(const float* from, std::int64_t n, void* to) {
  for_each_group<T, 1, true>(static_cast<T*>(to), n,
                             [&](std::int64_t i, T* p) { store_row(hn::Load(DF(), from + i), p); });
}

template <class T, int L>
void widen_state(const void* state, std::int64_t n, float* const* rows) {
  for_each_group<const T, L, false>(static_cast<const T*>(state), n,
                                    [&](std::int64_t i, const T* p) {
                                      VF v[L];
                                      load_taps<T, L>(p, v);
                                      for (int j = 0; j < L; ++j)
                                        hn::Store(v[j], DF(), rows[j] + i);
                                    });
}

template <class T, int L>
void narrow_state(const float* const* rows, std::int64_t n, void* state) {
  for_each_group<T, L, true>(static_cast<T*>(state), n, [&](std::int64_t i, T* p) {
    VF v[L];
    for (int j = 0; j < L; ++j) v[j] = hn::Load(DF(), rows[j] + i);
    store_taps<T, L>(v, p);
  });
}

template <class T, int W>
void convolve_row(const float* const* x, const void* k, std::int64_t n, float* sum) {
  for_each_group<const T, W, false>(static_cast<const T*>(k), n, [&](std::int64_t i, const T* p) {
    VF taps[W];
    load_taps<T, W>(p, taps);
    VF s = hn::Mul(taps[0], hn::Load(DF(), x[W - 1] + i));
    for (int w = 1; w < W; ++w) s = hn::MulAdd(taps[w], hn::Load(DF(), x[W - 1 - w] + i), s);
    hn::Store(s, DF(), sum + i);
  });
}

/// pending[j] += g * k[W - 1 - j] for one group of channels.
template <class T, int W>
HWY_INLINE void scatter_group(const T* k, VF g, std::int64_t i, float* const* pending) {
  VF taps[W];
  load_taps<T, W>(k, taps);
  hn::Store(hn::Mul(g, taps[W - 1]), DF(), pending[0] + i);
  for (int j = 1; j < W; ++j) {
    hn::Store(hn::MulAdd(g, taps[W - 1 - j], hn::Load(DF(), pending[j] + i)), DF(), pending[j] + i);
  }
}

template <class T, int W>
void scatter_row(const float* const* x, const void* k, const float* g, std::int64_t n, void* dk,
                 float* const* pending) {
  for_each_group<const T, W, false>(static_cast<const T*>(k), n, [&](std::int64_t i, const T* p) {
    scatter_group<T, W>(p, hn::Load(DF(), g + i), i, pending);
  });
  if (dk == nullptr) return;
  for_each_group<T, W, true>(static_cast<T*>(dk), n, [&](std::int64_t i, T* p) {
    const VF gi = hn::Load(DF(), g + i);
    VF d[W];
    for (int w = 0; w < W; ++w) d[w] = hn::Mul(gi, hn::Load(DF(), x[W - 1 - w] + i));
    store_taps<T, W>(d, p);
  });
}

/// 1 / (1 + exp(-s)) from exp(-|s|), which never overflows.
HWY_INLINE VF sigmoid(VF s) {
  const DF df;
  const VF one = hn::Set(df, 1.0f);
  const VF e = hn::Exp(df, hn::Neg(hn::Abs(s)));
  return hn::Div(hn::IfThenElse(hn::Lt(s, hn::Zero(df)), e, one), hn::Add(one, e));
}

void silu_row(float* s, std::int64_t n) {
  for_each_group<float, 1, true>(s, n, [&](std::int64_t, float* p) {
    const VF v = hn::LoadU(DF(), p);
    hn::StoreU(hn::Mul(v, sigmoid(v)), DF(), p);
  });
}

void silu_gradient_row(const float* s, std::int64_t n, float* g) {
  for_each_group<float, 1, true>(g, n, [&](std::int64_t i, float* p) {
    const VF v = hn::Load(DF(), s + i);
    const VF q = sigmoid(v);
    const VF one = hn::Set(DF(), 1.0f);
    const VF slope = hn::Mul(q, hn::MulAdd(v, hn::Sub(one, q), one));
    hn::StoreU(hn::Mul(hn::LoadU(DF(), p), slope), DF(), p);
  });
}

/// Calls body(std::integral_constant<int, n>) for the n that equals `value`.
template <int n = kMaxWidth, class Body>
void with_int(int value, const Body& body) {
  if constexpr (n == 0) {
    check(false, "dynamic_conv: no kernel for a width of ", value);
  } else {
    if (value == n) return body(std::integral_constant<int, n>());
    with_int<n - 1>(value, body);
  }
}

template <class Body>
void with_type(DType dtype, const Body& body) {
  if (dtype == DType::kFloat32) return body(float());
  if (dtype == DType::kFloat16) return body(Float16());
  body(BFloat16());
}

RowKernels kernels(DType x_dtype, DType k_dtype, int width, int state_length) {
  RowKernels r{};
  r.silu = silu_row;
  r.silu_gradient = silu_gradient_row;
  with_type(x_dtype, [&](auto x) {
    using X = decltype(x);
    r.widen = widen_row<X>;
    r.narrow = narrow_row<X>;
    if (state_length == 0) return;
    with_int(state_length, [&](auto length) {
      r.widen_state = widen_state<X, decltype(length)::value>;
      r.narrow_state = narrow_state<X, decltype(length)::value>;
    });
  });
  with_type(k_dtype, [&](auto k) {
    with_int(width, [&](auto w) {
      r.convolve = convolve_row<decltype(k), decltype(w)::value>;
      r.scatter = scatter_row<decltype(k), decltype(w)::value>;
    });
  });
  return r;
}

}  // namespace HWY_NAMESPACE
}  // namespace mortar::dynamic_conv::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace mortar::dynamic_conv::cpu {

HWY_EXPORT(kernels);

RowKernels row_kernels(DType x_dtype, DType k_dtype, int width, int state_length) {
  return HWY_DYNAMIC_DISPATCH(kernels)(x_dtype, k_dtype, width, state_length);
}

}  // namespace mortar::dynamic_conv::cpu
#endif
