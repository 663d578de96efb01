// SPDX-License-Identifier: Apache-2.0
// From y to codes: scales, their reciprocals, and the rounding.
#pragma once

#include <cfloat>
#include <cstdint>

#include "core/philox.h"
#include "device/reduce.cuh"
#include "fp8_rmsnorm/cuda/elements.cuh"
#include "fp8_rmsnorm/cuda/kernels.cuh"
#include "fp8_rmsnorm/scale.h"

namespace mortar::fp8_rmsnorm::cuda {

/// scale_of() in steps without branches: the division is correctly rounded, by one Newton step on
/// the product with the rounded reciprocal (Markstein, 1990).
__device__ __forceinline__ float fast_scale(const Quantize& out, float amax) {
  const bool e4m3 = out.dtype == DType::kFloat8E4M3;
  const float largest = e4m3 ? Float8E4M3::kLargest : Float8E5M2::kLargest;
  const float inverse = e4m3 ? 1.0f / Float8E4M3::kLargest : 1.0f / Float8E5M2::kLargest;
  const float above = amax <= kLeastAmax ? kLeastAmax : amax;  // keeps a NaN
  const float quotient = __fmul_rn(above, inverse);
  const float refined = __fmaf_rn(__fmaf_rn(-quotient, largest, above), inverse, quotient);
  const float scale = above <= FLT_MAX ? refined : quotient;
  const std::uint32_t bits = __float_as_uint(scale);
  if (!out.pow2_scale || bits >= 0x7f800000u) return scale;
  return __uint_as_float((bits + 0x7fffffu) & 0x7f800000u);
}

/// inverse_of() to a last place or two.
__device__ __forceinline__ float approximate_inverse_of(float scale) {
  float inverse;
  asm("rcp.approx.f32 %0, %1;" : "=f"(inverse) : "f"(scale));
  return finite_or_nan(inverse);
}

/// The scale for values up to `amax`; NaN for NaN.
__device__ __forceinline__ float scale_for(const Quantize& out, float amax) {
  const float largest =
      out.dtype == DType::kFloat8E4M3 ? Float8E4M3::kLargest : Float8E5M2::kLargest;
  if (out.numerics == Fp8Numerics::kCompat) {
    return device::to_float(device::from_float<__nv_bfloat16>((amax + kLeastAmax) / largest));
  }
  return scale_of(amax, largest, out.pow2_scale);
}

/// y / scale, correctly rounded where the quotient is a normal float: one Newton step on the
/// product with the rounded reciprocal (Markstein, 1990).
__device__ __forceinline__ float divide(float y, float scale, float inverse) {
  const float quotient = __fmul_rn(y, inverse);
  const float refined = __fmaf_rn(__fmaf_rn(-quotient, scale, y), inverse, quotient);
  return fabsf(refined) <= FLT_MAX ? copysignf(refined, y) : quotient;  // keeps -0, infinities
}

/// A quotient of COAT's chain, in which the norm's y is rounded to bfloat16 before.
__device__ __forceinline__ float divide_compat(float y, bool rounds, float scale, float inverse) {
  if (rounds) y = device::to_float(device::from_float<__nv_bfloat16>(y));
  return divide(y, scale, inverse);
}

/// The generator's state, read on the device.
struct Draws {
  std::uint64_t seed = 0, offset = 0;

  __device__ __forceinline__ explicit Draws(const std::int64_t* rng) {
    if (rng != nullptr) {
      seed = static_cast<std::uint64_t>(__ldcg(reinterpret_cast<const long long*>(rng)));
      offset = static_cast<std::uint64_t>(__ldcg(reinterpret_cast<const long long*>(rng) + 1));
    }
  }
};

/// The words of draws of adjacent elements from `index` on, four of them a word, where `index` is a
/// multiple of their number: 4, 8 or 16.
template <int kWords>
__device__ __forceinline__ void draw_words(Draws draws, std::uint64_t index,
                                           std::uint32_t (&words)[kWords]) {
  static_assert(kWords == 1 || kWords == 2 || kWords == 4, "a block or an even part of one");
  const PhiloxWords block = philox_quad(draws.seed, draws.offset, index / kDrawsOfBlock);
  const unsigned in_block = static_cast<unsigned>(index % kDrawsOfBlock);
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    if constexpr (kWords == 4) {
      words[i] = block.word[i];
    } else {
      const unsigned at = in_block / kDrawsOfWord + i;
      const std::uint32_t low = at == 1 ? block.word[1] : block.word[0];
      const std::uint32_t high = at == 3 ? block.word[3] : block.word[2];
      words[i] = at < 2 ? low : high;
    }
  }
}

/// The draws of elements index to index + 3. A function of its own: inlined for each of a thread's
/// quads it is more code than the instruction caches hold.
__device__ __noinline__ inline uint4 draw4(Draws draws, std::uint64_t index) {
  const unsigned first = static_cast<unsigned>(index % kDrawsOfWord);
  std::uint32_t low[1], high[1];
  draw_words(draws, index - first, high);
  low[0] = high[0];
  if (first != 0) draw_words(draws, index - first + kDrawsOfWord, high);
  const auto draw = [&](unsigned i) {
    const std::uint32_t word = i < kDrawsOfWord ? low[0] : high[0];
    return __funnelshift_l(word, word, 8 * i);
  };
  return make_uint4(draw(first), draw(first + 1), draw(first + 2), draw(first + 3));
}

/// The codes of four values that are already divided by their scales. `index`: of the first of them
/// in y, for its draws.
__device__ __forceinline__ std::uint32_t encode4(const Quantize& out, const Draws& draws,
                                                 std::uint64_t index, const float (&v)[4]) {
  if (out.rng != nullptr) {
    const uint4 words = draw4(draws, index);
    if (out.dtype == DType::kFloat8E4M3) {
      return device::pack_fp8x4<Float8E4M3>(v, {words.x, words.y, words.z, words.w});
    }
    return device::pack_fp8x4<Float8E5M2>(v, {words.x, words.y, words.z, words.w});
  }
  if (out.dtype == DType::kFloat8E4M3) return device::pack_fp8x4<Float8E4M3>(v);
  return device::pack_fp8x4<Float8E5M2>(v);
}

/// y of COAT's chain: z * scale * rstd * weight, every product rounded.
__device__ __forceinline__ float normalise(float z, float scale, float rstd, float weight) {
  return __fmul_rn(__fmul_rn(__fmul_rn(z, scale), rstd), weight);
}

/// Of a row's sum of squares; 1 where there is no norm.
template <class Int>
__device__ __forceinline__ float rstd_of(const ForwardParams& p, float sum, Int hidden) {
  const float mean = __fdiv_rn(sum, static_cast<float>(hidden));
  return p.norm ? __frcp_rn(__fsqrt_rn(mean + p.eps)) : 1.0f;
}

/// The place of an element in y as if its rows were dense, which its draws follow from.
__device__ __forceinline__ std::uint64_t draw_index(std::int64_t row, int column, int hidden) {
  return static_cast<std::uint64_t>(row) * static_cast<std::uint64_t>(hidden) +
         static_cast<std::uint64_t>(column);
}

/// amax of the whole tensor from the maxima of the CTAs of an earlier kernel; every thread gets it.
/// Not read by each warp for itself: all would ask the same lines of L2 (2048 x 4096, 4 us more).
__device__ __forceinline__ float reduce_maxima(const std::uint32_t* maxima, int count,
                                               std::uint32_t* scratch) {
  std::uint32_t largest = 0;
  for (int i = threadIdx.x; i < count; i += blockDim.x) largest = max(largest, __ldcg(maxima + i));
  return __uint_as_float(device::max_block(largest, scratch));
}

/// Writes amax where the scale does not need it, as it was given: by one CTA, whose threads all
/// call this.
__device__ __forceinline__ void store_amax(const ForwardParams& p, std::uint32_t* scratch) {
  if (!p.makes_maxima() || !p.plan.rows || blockIdx.x != 0) return;
  const float amax = reduce_maxima(p.maxima, p.maxima_count, scratch);
  if (threadIdx.x == 0) *p.out.amax = amax;
}

/// The scale of the whole tensor, given or from the maxima of the rows; the first CTA writes what
/// the caller wants of it. Every thread of a CTA calls this.
__device__ __forceinline__ float tensor_scale(const ForwardParams& p, std::uint32_t* scratch) {
  if (p.out.given_scale) {
    store_amax(p, scratch);
    return __ldcg(p.out.scale.data);
  }
  const bool first = blockIdx.x == 0 && threadIdx.x == 0;
  float amax = 0.0f;
  if (p.makes_maxima() && p.plan.rows) {
    amax = reduce_maxima(p.maxima, p.maxima_count, scratch);
    if (first && p.out.amax != nullptr) *p.out.amax = amax;
  }
  const float scale = scale_for(p.out, amax);
  if (first) *p.out.scale.data = scale;
  return scale;
}

}  // namespace mortar::fp8_rmsnorm::cuda
