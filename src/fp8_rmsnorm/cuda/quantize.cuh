// SPDX-License-Identifier: Apache-2.0
// From y to codes: scales, their reciprocals, and the rounding.
#pragma once

#include <cfloat>
#include <cstdint>

#include "core/philox.h"
#include "device/reduce.cuh"
#include "fp8_rmsnorm/cuda/elements.cuh"
#include "fp8_rmsnorm/scale.h"

namespace mortar::fp8_rmsnorm::cuda {

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

/// The random words of elements index to index + 3.
__device__ __forceinline__ uint4 draw4(Draws draws, std::uint64_t index) {
  const PhiloxWords a = philox_quad(draws.seed, draws.offset, index / 4);
  if (index % 4 == 0) return make_uint4(a.word[0], a.word[1], a.word[2], a.word[3]);
  // They straddle two blocks.
  const PhiloxWords b = philox_quad(draws.seed, draws.offset, index / 4 + 1);
  if (index % 4 == 1) return make_uint4(a.word[1], a.word[2], a.word[3], b.word[0]);
  if (index % 4 == 2) return make_uint4(a.word[2], a.word[3], b.word[0], b.word[1]);
  return make_uint4(a.word[3], b.word[0], b.word[1], b.word[2]);
}

/// The codes of four values that are already divided by their scales. `index`: of the first of them
/// in y, for its draws. Without kMayDraw the rounding is to nearest.
template <bool kMayDraw>
__device__ __forceinline__ std::uint32_t encode4(const Quantize& out, const Draws& draws,
                                                 std::uint64_t index, const float (&v)[4]) {
  if (kMayDraw && out.rng != nullptr) {
    const uint4 words = draw4(draws, index);
    const std::uint32_t random[4] = {words.x, words.y, words.z, words.w};
    if (out.dtype == DType::kFloat8E4M3) return device::pack_fp8x4<Float8E4M3>(v, random);
    return device::pack_fp8x4<Float8E5M2>(v, random);
  }
  if (out.dtype == DType::kFloat8E4M3) return device::pack_fp8x4<Float8E4M3>(v);
  return device::pack_fp8x4<Float8E5M2>(v);
}

/// y = z * scale * rstd * weight, every product rounded. In fast numerics the caller has multiplied
/// the two factors of the row before, and passes 1 for `rstd`.
__device__ __forceinline__ float normalise(float z, float scale, float rstd, float weight) {
  return __fmul_rn(__fmul_rn(__fmul_rn(z, scale), rstd), weight);
}

/// amax of the whole tensor from the maxima of the CTAs of an earlier kernel; every thread gets it.
__device__ __forceinline__ float reduce_maxima(const std::uint32_t* maxima, int count,
                                               std::uint32_t* scratch) {
  std::uint32_t largest = 0;
  for (int i = threadIdx.x; i < count; i += blockDim.x) largest = max(largest, __ldcg(maxima + i));
  return __uint_as_float(device::max_block(largest, scratch));
}

}  // namespace mortar::fp8_rmsnorm::cuda
