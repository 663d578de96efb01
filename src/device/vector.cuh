// SPDX-License-Identifier: Apache-2.0
// Vectors of 2 to 16 bytes, moved by one instruction: load and store, `_once` with the hint that
// the data is not used again (`.cs`: evict first), and conversions from and to float.
#pragma once

#include <cstring>
#include <type_traits>

#include "device/convert.cuh"

namespace mortar::device {

/// The built-in type whose load is one instruction.
template <int kBytes>
using Word = std::conditional_t<
    kBytes == 16, uint4,
    std::conditional_t<kBytes == 8, uint2,
                       std::conditional_t<kBytes == 4, unsigned, unsigned short>>>;

/// N elements of T as they came from memory, in whole registers: an array of 16-bit elements would
/// take a register for each.
template <class T, int N>
struct Bits {
  static constexpr int kBytes = int{sizeof(T)} * N;
  static_assert(kBytes == 2 || kBytes == 4 || kBytes == 8 || kBytes == 16,
                "A vector is 2, 4, 8 or 16 bytes.");
  static constexpr int kWords = kBytes < 4 ? 1 : kBytes / 4;
  unsigned word[kWords];

  __device__ __forceinline__ float get(int i) const {
    if constexpr (std::is_same_v<T, float>) {
      return __uint_as_float(word[i]);
    } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      return __uint_as_float(i % 2 == 0 ? word[i / 2] << 16 : word[i / 2] & 0xffff0000u);
    } else {
      const unsigned half = i % 2 == 0 ? word[i / 2] & 0xffffu : word[i / 2] >> 16;
      return __half2float(__ushort_as_half(static_cast<unsigned short>(half)));
    }
  }
};

template <class T, int N>
__device__ __forceinline__ Bits<T, N> to_bits(Word<Bits<T, N>::kBytes> word) {
  Bits<T, N> out;
  if constexpr (sizeof(word) == 2) {
    out.word[0] = word;
  } else {
    memcpy(&out, &word, sizeof(word));
  }
  return out;
}

template <class T, int N>
__device__ __forceinline__ Bits<T, N> load_once(const T* p) {
  return to_bits<T, N>(__ldcs(reinterpret_cast<const Word<Bits<T, N>::kBytes>*>(p)));
}

template <class T, int N>
__device__ __forceinline__ Bits<T, N> load(const T* p) {
  return to_bits<T, N>(__ldca(reinterpret_cast<const Word<Bits<T, N>::kBytes>*>(p)));
}

/// From shared memory.
template <class T, int N>
__device__ __forceinline__ Bits<T, N> load_shared(const void* p) {
  return to_bits<T, N>(*static_cast<const Word<Bits<T, N>::kBytes>*>(p));
}

/// Reads 16 bytes through L2 into v if `there`, in one predicated instruction: loads in branches
/// would wait for each other.
__device__ __forceinline__ void load_if(bool there, uint4& v, const void* p) {
  asm volatile(
      "{\n.reg .pred there;\nsetp.ne.b32 there, %5, 0;\n"
      "@there ld.global.cg.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
      : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
      : "l"(p), "r"(static_cast<int>(there)));
}

/// The same for 8 bytes.
__device__ __forceinline__ void load_if(bool there, uint2& v, const void* p) {
  asm volatile(
      "{\n.reg .pred there;\nsetp.ne.b32 there, %3, 0;\n"
      "@there ld.global.cg.v2.b32 {%0, %1}, [%2];\n}"
      : "+r"(v.x), "+r"(v.y)
      : "l"(p), "r"(static_cast<int>(there)));
}

/// Rounds to nearest even, two values per instruction for the 16-bit types.
template <class T, int N>
__device__ __forceinline__ void store_once(T* p, const float (&v)[N]) {
  using W = Word<Bits<T, N>::kBytes>;
  Bits<T, N> bits;
#pragma unroll
  for (int i = 0; i < Bits<T, N>::kWords; ++i) {
    if constexpr (std::is_same_v<T, float>) {
      bits.word[i] = __float_as_uint(v[i]);
    } else {
      const float high = 2 * i + 1 < N ? v[(2 * i + 1) % N] : 0.0f;
      if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(v[2 * i], high);
        memcpy(&bits.word[i], &pair, 4);
      } else {
        const __half2 pair = __floats2half2_rn(v[2 * i], high);
        memcpy(&bits.word[i], &pair, 4);
      }
    }
  }
  if constexpr (sizeof(W) == 2) {
    __stcs(reinterpret_cast<W*>(p), static_cast<W>(bits.word[0]));
  } else {
    W word;
    memcpy(&word, &bits, sizeof(W));
    __stcs(reinterpret_cast<W*>(p), word);
  }
}

}  // namespace mortar::device
