// SPDX-License-Identifier: Apache-2.0
// Matrix products of float32 and 16-bit operands in any mixture on bfloat16 tensor cores: a value
// is the exact sum of bfloat16 parts, and a product the sum of products of parts.
//
// v = part[0] + part[1] + part[2]: each part is what is left, cut (not rounded) to bfloat16.
// a b = sum of a[i] b[j] with i + j <= 2. What that drops of two float32 values is at most 2^-21 of
// |a b|, 2^-24 on average; of float16 by float32 at most 2^-22; with any other pair of types
// nothing. Parts below 2^-133 lose bits.
//
// Tensor cores cut sums to float32 instead of rounding them, which adds up along a chain. So each
// step's products of first parts start from zero and are added by an ordinary, rounded addition;
// the other products, smaller by 2^-7 or more, are one chain.
//
// First parts alone tell whether a result is finite. An Inf or NaN among the operands leaves NaN
// in its own lower parts, and NaN where it meets a lower part that is zero: so where the sum of
// first parts is not finite, total() is that sum, which has all the true Inf and NaN. (A NaN whose
// only bits are among its 16 lowest, which no arithmetic makes, becomes an Inf.)
//
// TwoParts are for sums that are rounded to bfloat16 in the end: the first part is cut, the second
// rounded, so that a value is good to 2^-16 of itself, and of products those with i + j <= 1 count.
// They are one chain, as sums of 16-bit values are; split_in_two() says what becomes of Inf.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "device/convert.cuh"
#include "device/mma.cuh"

namespace mortar::device {

/// A float32 value in memory that counts as the sum of two parts.
struct TwoParts {
  float value;
};

/// Parts that any finite T is the sum of, or counts as.
template <class T>
inline constexpr int kParts = std::is_same_v<T, float>      ? 3
                              : std::is_same_v<T, __half>   ? 2
                              : std::is_same_v<T, TwoParts> ? 2
                                                            : 1;

/// part[i]: part i of `low` in the low half, of `high` in the high half.
template <int kNum>
__device__ __forceinline__ void split2(float low, float high, std::uint32_t (&part)[kNum]) {
#pragma unroll
  for (int i = 0; i < kNum; ++i) {
    const std::uint32_t l = __float_as_uint(low), h = __float_as_uint(high);
    part[i] = __byte_perm(l, h, 0x7632);
    // Never fused with a product that made the value: parts are of what it was rounded to.
    low = __fsub_rn(low, __uint_as_float(l & 0xffff0000u));
    high = __fsub_rn(high, __uint_as_float(h & 0xffff0000u));
  }
}

/// Two values as TwoParts: the second part is rounded, has the value's sign and is not zero where
/// the value is 2^-110 or larger, so that no product of them with Inf is NaN or of another sign.
__device__ __forceinline__ void split_in_two(float low, float high, std::uint32_t (&part)[2]) {
  constexpr float kUp = 1 + 0x1p-23f;
  const std::uint32_t l = __float_as_uint(low), h = __float_as_uint(high);
  part[0] = __byte_perm(l, h, 0x7632);
  // Of Inf, Inf: the difference is NaN, and the smaller of the two what is a number.
  const auto rest = [&](float v, std::uint32_t bits) {
    const float left = __fmaf_rn(v, kUp, -__uint_as_float(bits & 0xffff0000u));
    return fminf(fabsf(left), fabsf(v));
  };
  part[1] = pack2<__nv_bfloat16>(rest(low, l), rest(high, h)) | (part[0] & 0x80008000u);
}

/// The words of four neighbouring elements of T, as they came from memory, in parts: part[i] holds
/// the first two elements' parts i, then the others'.
template <class T>
__device__ __forceinline__ void split4(const std::uint32_t* words,
                                       std::uint32_t (&part)[kParts<T>][2]) {
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      part[0][pair] = words[pair];
    } else {
      std::uint32_t own[kParts<T>];
      if constexpr (std::is_same_v<T, float>) {
        split2(__uint_as_float(words[2 * pair]), __uint_as_float(words[2 * pair + 1]), own);
      } else if constexpr (std::is_same_v<T, TwoParts>) {
        split_in_two(__uint_as_float(words[2 * pair]), __uint_as_float(words[2 * pair + 1]), own);
      } else {
        const float2 v = unpack2<__half>(words[pair]);
        split2(v.x, v.y, own);
      }
#pragma unroll
      for (int i = 0; i < kParts<T>; ++i) part[i][pair] = own[i];
    }
  }
}

/// d = a b, fragments as mma_16816 takes them.
__device__ __forceinline__ void product_16816(float (&d)[4], const std::uint32_t (&a)[4],
                                              const std::uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%10,%10,%10,%10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(0.0f));
}

/// Sums of one MMA tile of 16 rows by 8 columns.
///
/// Where an element lies in its step of 16 does not matter as long as both operands agree: lane q
/// of a row has elements 4q to 4q + 3, a 16-byte read of float32. ldmatrix gives it the same of a
/// plane of parts whose pairs of elements lie in the order 0 2 4 6 1 3 5 7 (plane_word()).
struct PartSums {
  float first[4] = {};  ///< of products of first parts
  float rest[4] = {};   ///< of all others

  /// Adds a step of 16 elements.
  template <int kPartsA, int kPartsB>
  __device__ __forceinline__ void add(const std::uint32_t (&a)[kPartsA][4],
                                      const std::uint32_t (&b)[kPartsB][2]) {
    float step[4];
    product_16816(step, a[0], b[0]);
#pragma unroll
    for (int i = 0; i < kPartsA; ++i) {
#pragma unroll
      for (int j = 0; j < kPartsB; ++j) {
        if (i + j > 0 && i + j <= 2) mma_16816<__nv_bfloat16>(rest, a[i], b[j][0], b[j][1]);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) first[i] += step[i];
  }

  __device__ __forceinline__ float total(int i) const {
    return fabsf(first[i]) < __uint_as_float(0x7f800000u) ? first[i] + rest[i] : first[i];
  }
};

/// The same of bfloat16 values and TwoParts: one chain.
struct ChainSums {
  float sum[4] = {};

  template <int kPartsA, int kPartsB>
  __device__ __forceinline__ void add(const std::uint32_t (&a)[kPartsA][4],
                                      const std::uint32_t (&b)[kPartsB][2]) {
#pragma unroll
    for (int i = 0; i < kPartsA; ++i) {
#pragma unroll
      for (int j = 0; i + j < 2 && j < kPartsB; ++j) {
        mma_16816<__nv_bfloat16>(sum, a[i], b[j][0], b[j][1]);
      }
    }
  }
  __device__ __forceinline__ float total(int i) const { return sum[i]; }
};

/// Sums of products by values of T.
template <class T>
using SumsBy = std::conditional_t<std::is_same_v<T, TwoParts>, ChainSums, PartSums>;

/// Where pair `i` of neighbouring elements lies in a plane's row, in words.
__device__ __forceinline__ int plane_word(int i) { return (i & ~7) | (i & 1) << 2 | (i >> 1 & 3); }

}  // namespace mortar::device
