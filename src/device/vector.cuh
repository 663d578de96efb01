// SPDX-License-Identifier: Apache-2.0
// Vector: neighbouring elements of a thread, moved by as few instructions as possible. load and
// store, `_once` with the hint that the data is not used again (`.cs`: evict first), `_if`
// predicated, `_shared` from shared memory, `_some` for those at the end of a row or at any
// address; conversions from and to float.
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

/// The largest power of two that divides n.
constexpr int power_of_two_in(int n) { return n & -n; }

/// N elements of T as they came from memory, in whole registers: an array of 16-bit elements would
/// take a register for each. They move in equal pieces of 2, 4, 8 or 16 bytes, one instruction
/// each: one piece where N elements are so many bytes, else as few as possible.
template <class T, int N>
struct Vector {
  static constexpr int kPieceElts =
      power_of_two_in(N) < 16 / int{sizeof(T)} ? power_of_two_in(N) : 16 / int{sizeof(T)};
  static constexpr int kPieces = N / kPieceElts;
  static constexpr int kAlignment = kPieceElts * int{sizeof(T)};  ///< bytes of a piece
  static constexpr int kPieceWords = kAlignment < 4 ? 1 : kAlignment / 4;
  unsigned word[kPieces * kPieceWords];

  __device__ __forceinline__ float get(int i) const {
    const int at = i / kPieceElts * kPieceWords, e = i % kPieceElts;
    if constexpr (std::is_same_v<T, float>) {
      return __uint_as_float(word[at + e]);
    } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      return __uint_as_float(e % 2 == 0 ? word[at + e / 2] << 16 : word[at + e / 2] & 0xffff0000u);
    } else {
      const unsigned half = e % 2 == 0 ? word[at + e / 2] & 0xffffu : word[at + e / 2] >> 16;
      return __half2float(__ushort_as_half(static_cast<unsigned short>(half)));
    }
  }
  /// Where piece i of the elements from p on lies in memory. (Where there is one piece, a sum with
  /// its index would keep the compiler from sharing p's address.)
  __device__ __forceinline__ static const Word<kAlignment>* piece_of(const T* p, int i) {
    return reinterpret_cast<const Word<kAlignment>*>(kPieces == 1 ? p : p + i * kPieceElts);
  }
  __device__ __forceinline__ Word<kAlignment> piece(int i) const {
    if constexpr (kAlignment == 2) {
      return static_cast<Word<kAlignment>>(word[i]);
    } else {
      Word<kAlignment> v;
      memcpy(&v, word + i * kPieceWords, sizeof(v));
      return v;
    }
  }
  __device__ __forceinline__ void set_piece(int i, Word<kAlignment> v) {
    if constexpr (kAlignment == 2) {
      word[i] = v;
    } else {
      memcpy(word + i * kPieceWords, &v, sizeof(v));
    }
  }
};

template <class T, int N>
__device__ __forceinline__ void load_once(Vector<T, N>& to, const T* p) {
  using V = Vector<T, N>;
#pragma unroll
  for (int i = 0; i < V::kPieces; ++i) to.set_piece(i, __ldcs(V::piece_of(p, i)));
}
template <class T, int N>
__device__ __forceinline__ Vector<T, N> load_once(const T* p) {
  Vector<T, N> out;
  load_once(out, p);
  return out;
}

template <class T, int N>
__device__ __forceinline__ Vector<T, N> load(const T* p) {
  using V = Vector<T, N>;
  V out;
#pragma unroll
  for (int i = 0; i < V::kPieces; ++i) {
    out.set_piece(i, __ldca(V::piece_of(p, i)));
  }
  return out;
}

/// From shared memory, one piece.
template <class T, int N>
__device__ __forceinline__ Vector<T, N> load_shared(const void* p) {
  using V = Vector<T, N>;
  static_assert(V::kPieces == 1, "one access");
  V out;
  out.set_piece(0, *static_cast<const Word<V::kAlignment>*>(p));
  return out;
}

template <class T, int N>
__device__ __forceinline__ bool is_aligned(const T* p) {
  return reinterpret_cast<std::uintptr_t>(p) % (sizeof(T) * N) == 0;
}

/// Elements [0, valid) of p, and zeros for the rest: one access if p is aligned and all are there.
template <class T, int N>
__device__ __forceinline__ Vector<T, N> load_some(const T* p, std::int64_t valid) {
  using V = Vector<T, N>;
  using Element = Word<int{sizeof(T)}>;
  static_assert(V::kPieces == 1, "one access");
  V out{};
  if (valid >= N && is_aligned<T, N>(p)) {
    out.set_piece(0, *V::piece_of(p, 0));
    return out;
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const unsigned element = i < valid ? reinterpret_cast<const Element*>(p)[i] : Element{0};
    out.word[i * int{sizeof(T)} / 4] |= element << (8 * (i * int{sizeof(T)} % 4));
  }
  return out;
}

/// Writes elements [0, valid) of v to p.
template <class T, int N>
__device__ __forceinline__ void store_some(T* p, const Vector<T, N>& v, std::int64_t valid) {
  using V = Vector<T, N>;
  using Element = Word<int{sizeof(T)}>;
  static_assert(V::kPieces == 1, "one access");
  if (valid >= N && is_aligned<T, N>(p)) {
    *reinterpret_cast<Word<V::kAlignment>*>(p) = v.piece(0);
    return;
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const unsigned word = v.word[i * int{sizeof(T)} / 4];
    if (i < valid) {
      reinterpret_cast<Element*>(p)[i] =
          static_cast<Element>(word >> (8 * (i * int{sizeof(T)} % 4)));
    }
  }
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

/// The same for 4 bytes.
__device__ __forceinline__ void load_if(bool there, unsigned& v, const void* p) {
  asm volatile(
      "{\n.reg .pred there;\nsetp.ne.b32 there, %2, 0;\n"
      "@there ld.global.cg.b32 %0, [%1];\n}"
      : "+r"(v)
      : "l"(p), "r"(static_cast<int>(there)));
}

/// Rounds to nearest even, two values per instruction for the 16-bit types.
template <class T, int N>
__device__ __forceinline__ Vector<T, N> round_to(const float (&v)[N]) {
  using V = Vector<T, N>;
  static_assert(V::kPieces == 1, "one access");
  V out;
#pragma unroll
  for (int i = 0; i < V::kPieceWords; ++i) {
    if constexpr (std::is_same_v<T, float>) {
      out.word[i] = __float_as_uint(v[i]);
    } else {
      const float high = 2 * i + 1 < N ? v[(2 * i + 1) % N] : 0.0f;
      if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(v[2 * i], high);
        memcpy(&out.word[i], &pair, 4);
      } else {
        const __half2 pair = __floats2half2_rn(v[2 * i], high);
        memcpy(&out.word[i], &pair, 4);
      }
    }
  }
  return out;
}

/// One piece, rounded.
template <class T, int N>
__device__ __forceinline__ void store_once(T* p, const float (&v)[N]) {
  using W = Word<Vector<T, N>::kAlignment>;
  __stcs(reinterpret_cast<W*>(p), round_to<T>(v).piece(0));
}

/// The same for any number of pieces, of value(0), ..., value(N - 1).
template <class T, int N, class Value>
__device__ __forceinline__ void store_values_once(T* p, const Value& value) {
  constexpr int kElts = Vector<T, N>::kPieceElts;
#pragma unroll
  for (int i = 0; i < Vector<T, N>::kPieces; ++i) {
    float v[kElts];
#pragma unroll
    for (int e = 0; e < kElts; ++e) v[e] = value(i * kElts + e);
    store_once<T, kElts>(p + i * kElts, v);
  }
}

}  // namespace mortar::device
