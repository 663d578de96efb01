// SPDX-License-Identifier: Apache-2.0
// The row kernels, once per instruction set.
//
// y[c] = f(sum_w k[c][w] * x[W-1-w][c]), one time step, C channels
// bytes  = C (W e_k + 2 e_x) from and to memory; the last W - 1 rows of x, and the backward's
//          float32 rows, come from the caches
// limit  : memory. A core streams about 5 B a cycle, 16 channels at W = 4 in 40 to 75 cycles; with
//          AVX-512 their arithmetic takes some 20, and SiLU 10 more.
#include "dynamic_conv/cpu/rows.h"

#include <cmath>
#include <cstring>

#include "core/check.h"
#include "core/dtype_visitor.h"

// A register array of vectors is not possible with vectors of unknown size.
// Levels: AVX2, AVX-512, NEON, and the baseline of the compiler, as everywhere in Mortar.
#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_SSE4 | HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "dynamic_conv/cpu/rows.cpp"
#include "hwy/cache_control.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// After highway.h: these are included once per target.
#include "dynamic_conv/cpu/taps-inl.h"

HWY_BEFORE_NAMESPACE();
namespace mortar::dynamic_conv::cpu {
namespace HWY_NAMESPACE {

/// Runs body(i, p + i * W) for groups of Lanes(FloatTag) channels; the last, incomplete group works
/// on a copy of its taps, which is written back if `writes`.
template <class T, int W, bool writes, class Body>
HWY_INLINE void for_each_group(T* p, std::int64_t n, const Body& body) {
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(FloatTag()));
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes) body(i, p + i * W);
  if (i == n) return;
  std::remove_const_t<T> tail[kLanes * W] = {};
  const auto bytes = static_cast<std::size_t>(n - i) * W * sizeof(T);
  std::memcpy(tail, p + i * W, bytes);
  body(i, tail);
  if constexpr (writes) std::memcpy(p + i * W, tail, bytes);
}

/// Asks for what lies kAhead behind the `bytes` at p. The hardware's prefetchers stop at the end of
/// a 4 KB page. Nothing is read, so that may lie outside the tensor.
template <std::size_t bytes>
HWY_INLINE void prefetch_ahead(const void* p) {
  constexpr std::size_t kAhead = 4096, kLine = 64;
  const auto begin = reinterpret_cast<std::uintptr_t>(p) + kAhead;
  for (std::size_t b = 0; b < bytes; b += kLine) {
    hwy::Prefetch(reinterpret_cast<const char*>(begin + b));
  }
}

template <class T>
void widen_row(const void* from, std::int64_t n, float* to) {
  for_each_group<const T, 1, false>(
      static_cast<const T*>(from), n,
      [&](std::int64_t i, const T* p) { hn::Store(load_f32(p), FloatTag(), to + i); });
}

template <class T>
void narrow_row(const float* from, std::int64_t n, void* to) {
  for_each_group<T, 1, true>(static_cast<T*>(to), n, [&](std::int64_t i, T* p) {
    store_f32(hn::Load(FloatTag(), from + i), p);
  });
}

template <class T, int L>
void widen_state(const void* state, std::int64_t n, float* const* rows) {
  for_each_group<const T, L, false>(static_cast<const T*>(state), n,
                                    [&](std::int64_t i, const T* p) {
                                      FloatVec v[L];
                                      load_taps<T, L>(p, v);
                                      for (int j = 0; j < L; ++j)
                                        hn::Store(v[j], FloatTag(), rows[j] + i);
                                    });
}

template <class T, int L>
void narrow_state(const float* const* rows, std::int64_t n, void* state) {
  for_each_group<T, L, true>(static_cast<T*>(state), n, [&](std::int64_t i, T* p) {
    FloatVec v[L];
    for (int j = 0; j < L; ++j) v[j] = hn::Load(FloatTag(), rows[j] + i);
    store_taps<T, L>(v, p);
  });
}

/// exp(a) for a <= 0, to 1.02 ulp. 0 below -86, where SiLU would be at most 4e-36, and for a NaN.
HWY_INLINE FloatVec exp_of_negative(FloatVec a) {
  const FloatTag df;
  const BitsTag bits;
  // a = n ln 2 + r, |r| <= ln 2 / 2: adding 1.5 * 2^23 leaves n, rounded, in the low bits.
  const FloatVec magic = hn::Set(df, 0x1.8p23f);
  const FloatVec shifted = hn::MulAdd(a, hn::Set(df, 0x1.715476p0f), magic);
  const FloatVec n = hn::Sub(shifted, magic);
  FloatVec r = hn::NegMulAdd(n, hn::Set(df, 0x1.62e4p-1f), a);
  r = hn::NegMulAdd(n, hn::Set(df, 0x1.7f7d1cp-20f), r);
  // exp(r) = 1 + r + r^2 q(r), q minimax: 0.05 ulp.
  const FloatVec r2 = hn::Mul(r, r);
  const FloatVec high = hn::MulAdd(hn::Set(df, 0x1.123a2p-7f), r, hn::Set(df, 0x1.5558f2p-5f));
  const FloatVec low = hn::MulAdd(hn::Set(df, 0x1.555492p-3f), r, hn::Set(df, 0x1.fffffcp-2f));
  const FloatVec q = hn::MulAdd(hn::MulAdd(hn::Set(df, 0x1.6a23dp-10f), r2, high), r2, low);
  const FloatVec p = hn::Add(hn::MulAdd(q, r2, r), hn::Set(df, 1.0f));
  const auto scale = hn::ShiftLeft<23>(hn::BitCast(bits, shifted));
  const FloatVec e = hn::BitCast(df, hn::Add(hn::BitCast(bits, p), scale));
  return hn::IfThenElseZero(hn::Gt(a, hn::Set(df, -86.0f)), e);
}

/// 1 / (1 + exp(-s)) from exp(-|s|), which never overflows.
HWY_INLINE FloatVec sigmoid(FloatVec s) {
  const FloatTag df;
  const FloatVec one = hn::Set(df, 1.0f);
  const FloatVec e = exp_of_negative(hn::Neg(hn::Abs(s)));
  return hn::Div(hn::IfThenElse(hn::Lt(s, hn::Zero(df)), e, one), hn::Add(one, e));
}

/// Lanes(FloatTag) channels of y.
template <class X, class K, int W>
HWY_INLINE void convolve_group(const X* const* x, std::int64_t i, const K* k, Finish finish, X* y) {
  prefetch_ahead<kLanes * W * sizeof(K)>(k);
  FloatVec taps[W];
  load_taps<K, W>(k, taps);
  FloatVec s = hn::Mul(taps[0], load_f32(x[W - 1] + i));
  for (int w = 1; w < W; ++w) s = hn::MulAdd(taps[w], load_f32(x[W - 1 - w] + i), s);
  if (finish.silu) s = hn::Mul(s, sigmoid(s));
  if constexpr (kStreams<X>) {
    if (finish.stream) return stream_f32(s, y);
  }
  store_f32(s, y);
}

template <class X, class K, int W>
void convolve_row(const void* const* rows, const void* taps, std::int64_t n, Finish finish,
                  void* to) {
  const X* x[W];
  for (int j = 0; j < W; ++j) x[j] = static_cast<const X*>(rows[j]);
  const auto* k = static_cast<const K*>(taps);
  auto* y = static_cast<X*>(to);
  finish.stream = finish.stream && reinterpret_cast<std::uintptr_t>(y) % (kLanes * sizeof(X)) == 0;
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) convolve_group<X, K, W>(x, i, k + i * W, finish, y + i);
  if (i == n) return;
  // The last, incomplete group works on copies: nothing past the row is touched.
  const auto left = static_cast<std::size_t>(n - i);
  X inputs[W][kLanes] = {}, output[kLanes];
  K tail[kLanes * W] = {};
  const void* copies[W];
  for (int j = 0; j < W; ++j) {
    std::memcpy(inputs[j], x[j] + i, left * sizeof(X));
    copies[j] = inputs[j];
  }
  std::memcpy(tail, k + i * W, left * W * sizeof(K));
  convolve_row<X, K, W>(copies, tail, kLanes, {.silu = finish.silu}, output);
  std::memcpy(y + i, output, left * sizeof(X));
}

/// pending[j] += g * k[W - 1 - j] for one group of channels.
template <class T, int W>
HWY_INLINE void scatter_group(const T* k, FloatVec g, std::int64_t i, float* const* pending) {
  prefetch_ahead<kLanes * W * sizeof(T)>(k);
  FloatVec taps[W];
  load_taps<T, W>(k, taps);
  hn::Store(hn::Mul(g, taps[W - 1]), FloatTag(), pending[0] + i);
  for (int j = 1; j < W; ++j) {
    hn::Store(hn::MulAdd(g, taps[W - 1 - j], hn::Load(FloatTag(), pending[j] + i)), FloatTag(),
              pending[j] + i);
  }
}

template <class T, int W>
void scatter_row(const float* const* x, const void* k, const float* g, std::int64_t n, void* dk,
                 float* const* pending) {
  for_each_group<const T, W, false>(static_cast<const T*>(k), n, [&](std::int64_t i, const T* p) {
    scatter_group<T, W>(p, hn::Load(FloatTag(), g + i), i, pending);
  });
  if (dk == nullptr) return;
  for_each_group<T, W, true>(static_cast<T*>(dk), n, [&](std::int64_t i, T* p) {
    const FloatVec gi = hn::Load(FloatTag(), g + i);
    FloatVec d[W];
    for (int w = 0; w < W; ++w) d[w] = hn::Mul(gi, hn::Load(FloatTag(), x[W - 1 - w] + i));
    store_taps<T, W>(d, p);
  });
}

void silu_gradient_row(const float* s, std::int64_t n, float* g) {
  for_each_group<float, 1, true>(g, n, [&](std::int64_t i, float* p) {
    const FloatVec v = hn::Load(FloatTag(), s + i);
    const FloatVec q = sigmoid(v);
    const FloatVec one = hn::Set(FloatTag(), 1.0f);
    const FloatVec slope = hn::Mul(q, hn::MulAdd(v, hn::Sub(one, q), one));
    hn::StoreU(hn::Mul(hn::LoadU(FloatTag(), p), slope), FloatTag(), p);
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

RowKernels kernels(DType x_dtype, DType k_dtype, int width, int state_length) {
  constexpr char kOp[] = "dynamic_conv";
  RowKernels r{};
  r.silu_gradient = silu_gradient_row;
  visit_dtype<FloatDTypes>(x_dtype, kOp, [&](auto x) {
    using X = typename decltype(x)::type;
    r.widen = widen_row<X>;
    r.narrow = narrow_row<X>;
    if (state_length == 0) return;
    with_int(state_length, [&](auto length) {
      r.widen_state = widen_state<X, decltype(length)::value>;
      r.narrow_state = narrow_state<X, decltype(length)::value>;
    });
  });
  visit_dtype<FloatDTypes>(k_dtype, kOp, [&](auto k) {
    with_int(width, [&](auto w) {
      using K = typename decltype(k)::type;
      constexpr int W = decltype(w)::value;
      visit_dtype<FloatDTypes>(x_dtype, kOp, [&](auto x) {
        r.convolve = convolve_row<typename decltype(x)::type, K, W>;
      });
      r.convolve_scratch = convolve_row<float, K, W>;
      r.scatter = scatter_row<K, W>;
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
