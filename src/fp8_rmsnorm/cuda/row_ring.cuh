// SPDX-License-Identifier: Apache-2.0
// Rows on their way into a ring in shared memory. The lanes of a warp that share a row copy its
// adjacent vectors of 16 bytes together, and read back runs of neighbouring elements that may have
// been copied by another lane: that is why lanes meet between the two.
#pragma once

#include <cstdint>

#include "device/async_copy.cuh"
#include "fp8_rmsnorm/cuda/elements.cuh"

namespace mortar::fp8_rmsnorm::cuda {

/// What a lane copies of one operand: kCount vectors of a row, `lanes` vectors apart. Past the end
/// of the row it fills with zeros.
template <class T, int kElements, bool kAligned>
struct RowCopies {
  static constexpr int kPerVector = 16 / int{sizeof(T)}, kCount = kElements / kPerVector;
  const char* next;  ///< the lane's first vector, of the row that is copied next
  int columns_left;  ///< from that vector to the end of the row

  /// The lanes' columns begin at `column`.
  __device__ __forceinline__ RowCopies(const Rows& rows, std::int64_t row, int column, int lane,
                                       int hidden)
      : columns_left(hidden - column - lane * kPerVector) {
    next = static_cast<const char*>(rows.data) +
           (row * rows.row_stride + column + lane * kPerVector) * int{sizeof(T)};
  }

  /// Asks for the row `ahead` bytes after the next one in L2, once per 128-byte line.
  __device__ __forceinline__ void prefetch(int lanes, std::int64_t ahead) const {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      if (j * lanes * kPerVector < columns_left) {
        device::prefetch_lines(next + ahead + j * lanes * 16, 16);
      }
    }
  }

  /// Starts the copy of the next row to where the lane's first vector belongs in shared memory. The
  /// row after it lies `step` bytes on.
  __device__ __forceinline__ void copy(std::uint32_t to, int lanes, std::int64_t step) {
    if constexpr (kAligned) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        const int ahead = j * lanes;
        device::cp_async_16(to + ahead * 16, next + ahead * 16,
                            ahead * kPerVector < columns_left ? 16 : 0);
      }
    } else {
#pragma unroll 1
      for (int j = 0; j < kCount; ++j) {
        const int ahead = j * lanes;
        const uint4 v = load_unaligned(next + ahead * 16, int{sizeof(T)},
                                       min(columns_left - ahead * kPerVector, kPerVector));
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to + ahead * 16), "r"(v.x),
                     "r"(v.y), "r"(v.z), "r"(v.w)
                     : "memory");
      }
    }
    next += step;
  }
};

/// kBytes (4, 8 or 16) at an address in shared memory.
template <int kBytes>
__device__ __forceinline__ uint4 read_shared(std::uint32_t from) {
  uint4 v{};
  if constexpr (kBytes == 16) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(from)
                 : "memory");
  } else if constexpr (kBytes == 8) {
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(from) : "memory");
  } else {
    static_assert(kBytes == 4, "4, 8 or 16 bytes");
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v.x) : "r"(from) : "memory");
  }
  return v;
}

/// The kCount elements in v.
template <class T, int kCount>
__device__ __forceinline__ void unpack_run(const uint4& v, float (&out)[kCount]) {
#pragma unroll
  for (int q = 0; q < kCount / 4; ++q) {
    float quad[4];
    unpack4<T>(v, q, quad);
#pragma unroll
    for (int i = 0; i < 4; ++i) out[4 * q + i] = quad[i];
  }
}

/// kCount elements to global memory, rounded to nearest even; `left` of them are in the row.
template <class T, bool kAligned, int kCount>
__device__ __forceinline__ void store_run(char* p, const float (&v)[kCount], int left) {
  std::uint32_t word[4] = {};
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) word[i] = __float_as_uint(v[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) word[i] = device::pack2<T>(v[2 * i], v[2 * i + 1]);
  }
  constexpr int kBytes = kCount * int{sizeof(T)};
  if constexpr (!kAligned) {
    store_unaligned(p, make_uint4(word[0], word[1], word[2], word[3]),
                    min(left, kCount) * int{sizeof(T)});
  } else if constexpr (kBytes == 16) {
    asm volatile(
        "{\n.reg .pred there;\nsetp.gt.s32 there, %5, 0;\n"
        "@there st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};\n}" ::"l"(p),
        "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3]), "r"(left)
        : "memory");
  } else {
    static_assert(kBytes == 8, "8 or 16 bytes");
    asm volatile(
        "{\n.reg .pred there;\nsetp.gt.s32 there, %3, 0;\n"
        "@there st.global.cs.v2.b32 [%0], {%1, %2};\n}" ::"l"(p),
        "r"(word[0]), "r"(word[1]), "r"(left)
        : "memory");
  }
}

/// Waits until at most `pending` of this thread's committed groups are in flight.
__device__ __forceinline__ void wait_for_copies(int pending) {
  if (pending == 3) {
    device::cp_async_wait<3>();
  } else if (pending == 2) {
    device::cp_async_wait<2>();
  } else if (pending == 1) {
    device::cp_async_wait<1>();
  } else {
    device::cp_async_wait<0>();
  }
}

}  // namespace mortar::fp8_rmsnorm::cuda
