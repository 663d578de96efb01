// SPDX-License-Identifier: Apache-2.0
// Elements as the kernels move them: a piece is 16 bytes of x, and beside it lie as many elements
// of the other operands, whose dtypes are known only at run time.
#pragma once

#include <cstdint>
#include <type_traits>

#include "device/fp8.cuh"
#include "device/vector.cuh"
#include "fp8_rmsnorm/problem.h"

namespace mortar::fp8_rmsnorm::cuda {

using InputDTypes = DTypeList<DType::kFloat8E4M3, DType::kFloat8E5M2, DType::kBFloat16,
                              DType::kFloat16, DType::kFloat32>;

/// Those of one or two bytes.
using NarrowDTypes =
    DTypeList<DType::kFloat8E4M3, DType::kFloat8E5M2, DType::kBFloat16, DType::kFloat16>;

template <class T>
inline constexpr bool kIsFloat8 = sizeof(T) == 1;

/// Elements of a piece.
template <class T>
inline constexpr int kPiece = 16 / static_cast<int>(sizeof(T));

/// Elements 4 k to 4 k + 3 of a piece.
template <class T>
__device__ __forceinline__ void unpack4(const uint4& piece, int k, float (&out)[4]) {
  const std::uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
  if constexpr (kIsFloat8<T>) {
    device::unpack_fp8x4<T>(words[k], out);
  } else if constexpr (sizeof(T) == 2) {
    const float2 low = device::unpack2<T>(words[2 * k]),
                 high = device::unpack2<T>(words[2 * k + 1]);
    out[0] = low.x;
    out[1] = low.y;
    out[2] = high.x;
    out[3] = high.y;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i] = __uint_as_float(words[i]);
  }
}

template <class T>
__device__ __forceinline__ T* offset_bytes(T* p, std::int64_t bytes) {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  return reinterpret_cast<T*>(reinterpret_cast<Byte*>(p) + bytes);
}

/// The first `count` elements of `size` bytes at p, which lies at a multiple of `size`; zeros after
/// them. For rows that are not aligned, or end within a piece.
__device__ __forceinline__ uint4 load_unaligned(const void* p, int size, int count) {
  std::uint32_t words[4] = {};
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    const std::uint32_t v = size == 1   ? __ldcg(static_cast<const unsigned char*>(p) + i)
                            : size == 2 ? __ldcg(static_cast<const unsigned short*>(p) + i)
                                        : __ldcg(static_cast<const unsigned*>(p) + i);
    const int bit = i * size * 8;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if (w == bit / 32) words[w] |= v << (bit % 32);
    }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

/// `bytes` bytes of v to p.
__device__ __forceinline__ void store_unaligned(void* p, uint4 v, int bytes) {
  const std::uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll 1
  for (int i = 0; i < bytes; ++i) {
    std::uint32_t word = 0;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if (w == i / 4) word = words[w];
    }
    static_cast<unsigned char*>(p)[i] = static_cast<unsigned char>(word >> (i % 4 * 8));
  }
}

/// Elements [index, index + kCount) of a float dtype, of which `count` are there; past L1.
template <int kCount>
__device__ __forceinline__ void load_run(const void* data, DType dtype, std::int64_t index,
                                         int count, bool aligned, float (&out)[kCount]) {
  static_assert(kCount == 4 || kCount == 8, "one or two quads");
  const auto load = [&](const void* p, int size, int first, int most) {
    if (aligned) return __ldcg(static_cast<const uint4*>(p));
    return load_unaligned(p, size, max(0, min(count - first, most)));
  };
  const auto unpack = [&](auto tag, const uint4& raw) {
#pragma unroll
    for (int q = 0; q < kCount / 4; ++q) {
      float v[4];
      unpack4<typename decltype(tag)::type>(raw, q, v);
#pragma unroll
      for (int i = 0; i < 4; ++i) out[4 * q + i] = v[i];
    }
  };
  if (dtype == DType::kFloat32) {
    const float* p = static_cast<const float*>(data) + index;
#pragma unroll
    for (int q = 0; q < kCount / 4; ++q) {
      float v[4];
      unpack4<float>(load(p + 4 * q, 4, 4 * q, 4), 0, v);
#pragma unroll
      for (int i = 0; i < 4; ++i) out[4 * q + i] = v[i];
    }
    return;
  }
  const std::uint16_t* p = static_cast<const std::uint16_t*>(data) + index;
  uint4 raw{};
  if (kCount == 4 && aligned) {
    const uint2 half = __ldcg(reinterpret_cast<const uint2*>(p));
    raw.x = half.x;
    raw.y = half.y;
  } else {
    raw = load(p, 2, 0, kCount);
  }
  if (dtype == DType::kBFloat16) {
    unpack(TypeTag<__nv_bfloat16>(), raw);
  } else {
    unpack(TypeTag<__half>(), raw);
  }
}

/// Rounds each value to nearest even in the dtype, stores it, and leaves it as it was rounded.
template <int kCount>
__device__ __forceinline__ void store_run(void* data, DType dtype, std::int64_t index, int count,
                                          bool aligned, float (&v)[kCount]) {
  static_assert(kCount == 4 || kCount == 8, "one or two quads");
  const auto store = [&](void* p, const uint4& raw, int size, int first, int most) {
    if (!aligned) {
      if (count > first) store_unaligned(p, raw, min(count - first, most) * size);
    } else if (size * most == 16) {
      __stcs(static_cast<uint4*>(p), raw);
    } else {
      __stcs(static_cast<uint2*>(p), make_uint2(raw.x, raw.y));
    }
  };
  if (dtype == DType::kFloat32) {
    float* p = static_cast<float*>(data) + index;
#pragma unroll
    for (int q = 0; q < kCount / 4; ++q) {
      const uint4 raw = make_uint4(__float_as_uint(v[4 * q]), __float_as_uint(v[4 * q + 1]),
                                   __float_as_uint(v[4 * q + 2]), __float_as_uint(v[4 * q + 3]));
      store(p + 4 * q, raw, 4, 4 * q, 4);
    }
    return;
  }
  std::uint16_t* p = static_cast<std::uint16_t*>(data) + index;
  const auto round = [&](auto tag) {
    using T = typename decltype(tag)::type;
    std::uint32_t words[4] = {};
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      words[i / 2] = device::pack2<T>(v[i], v[i + 1]);
      const float2 rounded = device::unpack2<T>(words[i / 2]);
      v[i] = rounded.x;
      v[i + 1] = rounded.y;
    }
    store(p, make_uint4(words[0], words[1], words[2], words[3]), 2, 0, kCount);
  };
  if (dtype == DType::kBFloat16) {
    round(TypeTag<__nv_bfloat16>());
  } else {
    round(TypeTag<__half>());
  }
}

/// kBytes (4, 8 or 16) of codes to p, of which `count` are in the row.
template <int kBytes>
__device__ __forceinline__ void store_codes(void* p, const std::uint32_t (&word)[kBytes / 4],
                                            int count, bool aligned) {
  if constexpr (kBytes == 16) {
    const uint4 v = make_uint4(word[0], word[1], word[2], word[3]);
    if (aligned) return __stcs(static_cast<uint4*>(p), v);
    store_unaligned(p, v, min(count, kBytes));
  } else if constexpr (kBytes == 8) {
    if (aligned) return __stcs(static_cast<uint2*>(p), make_uint2(word[0], word[1]));
    store_unaligned(p, make_uint4(word[0], word[1], 0, 0), min(count, kBytes));
  } else {
    if (aligned) return __stcs(static_cast<unsigned*>(p), word[0]);
    store_unaligned(p, make_uint4(word[0], 0, 0, 0), min(count, kBytes));
  }
}

/// The exponent of a power of two; -1 for 0.
__device__ __forceinline__ int log2_of(int power) { return __ffs(power) - 1; }

/// Scales of x as words, which become floats only when they are used: a conversion right behind
/// each load would wait for it.
class ScaleReader {
 public:
  __device__ __forceinline__ explicit ScaleReader(const Input& in)
      : data_(in.x_scale.data),
        stride_(in.x_scale.row_stride),
        group_shift_(log2_of(in.x_group)),
        narrow_(in.x_scale.dtype != DType::kFloat32),
        given_(in.x_group != 0) {}

  /// The word for the elements from `column` on, in row `row`; that of 1 where x has no scales.
  __device__ __forceinline__ std::uint32_t load(std::int64_t row, int column) const {
    std::uint32_t word = unit();
    if (!given_) return word;
    const std::int64_t at = row * stride_ + (column >> group_shift_);
    if (narrow_) {
      word = __ldcg(static_cast<const std::uint16_t*>(data_) + at);
    } else {
      word = __ldcg(static_cast<const std::uint32_t*>(data_) + at);
    }
    return word;
  }
  __device__ __forceinline__ std::uint32_t unit() const { return narrow_ ? 0x3f80u : 0x3f800000u; }
  __device__ __forceinline__ float to_float(std::uint32_t word) const {
    return __uint_as_float(narrow_ ? word << 16 : word);
  }

 private:
  const void* data_;
  std::int64_t stride_;
  int group_shift_;
  bool narrow_, given_;
};

/// Weights + offset, by float: use(i, w) for i = first, first + step, ... below `end`, with w = 0
/// for those from `count` on. Eight loads are in flight together.
template <class Use>
__device__ __forceinline__ void for_weights(const Rows& weight, float offset, int begin, int count,
                                            int end, int first, int step, const Use& use) {
  constexpr int kBatch = 8;
  const bool wide = weight.dtype == DType::kFloat32, bf16 = weight.dtype == DType::kBFloat16;
  for (int base = first; base < end; base += kBatch * step) {
    std::uint32_t word[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int n = base + i * step;
      word[i] = 0;
      if (n < end && n < count) {
        if (wide) {
          word[i] = __ldcg(static_cast<const std::uint32_t*>(weight.data) + begin + n);
        } else {
          word[i] = __ldcg(static_cast<const std::uint16_t*>(weight.data) + begin + n);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int n = base + i * step;
      if (n >= end) break;
      float w = __uint_as_float(wide ? word[i] : word[i] << 16);
      if (!wide && !bf16) w = __half2float(__ushort_as_half(static_cast<unsigned short>(word[i])));
      use(n, n < count ? w + offset : 0.0f);
    }
  }
}

/// Whether the rows begin at multiples of `bytes`.
inline bool rows_aligned(const Rows& r, std::int64_t bytes) {
  return reinterpret_cast<std::uintptr_t>(r.data) % static_cast<std::uintptr_t>(bytes) == 0 &&
         r.row_stride * dtype_size(r.dtype) % bytes == 0;
}

}  // namespace mortar::fp8_rmsnorm::cuda
