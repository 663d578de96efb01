// SPDX-License-Identifier: Apache-2.0
// Rows of 16-bit elements on their way from global memory to the stages of a ring in shared memory,
// in the swizzle that wgmma reads.
#pragma once

#include <cstdint>

#include "core/int_math.h"
#include "device/async_copy.cuh"
#include "device/swizzle.cuh"

namespace mortar::lora::cuda {

/// A thread's pieces of kRows rows, 64 elements a stage: of kThreads threads each has the same 16
/// bytes of every (kThreads / 8)-th row. The pointers stay in registers, as producer warps are few
/// and every instruction delays a copy. (us a call of which the wide expand looked up each pointer
/// in shared memory, and so: 825 tokens of 4 adapters, rank 512, 768 to 1,024, 16.0 and 10.9; 300
/// of two, rank 128, qkv of 2,048, 10.7 and 9.3.) One that is null is no row: its place in a stage
/// stays as it is.
template <class T, int kRows, int kThreads>
struct RowPieces {
  static constexpr int kStep = kThreads / 8, kCopies = ceil_div(kRows, kStep);
  static_assert(kStep % 8 == 0, "rows of one thread have one swizzle");
  const T* row[kCopies];
  unsigned there = 0;  ///< a bit for each row that is one

  __device__ __forceinline__ RowPieces(const void* const* rows, int first) {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int at = first + i * kStep;
      row[i] = at < kRows ? static_cast<const T*>(rows[at]) : nullptr;
      there |= (row[i] != nullptr ? 1u : 0u) << i;
    }
    asm("" : "+r"(there));  // or the compiler would compare the pointers again in every step
  }
  /// So many bytes of the piece from element k on; the rest of the 16 becomes zeros.
  __device__ __forceinline__ void copy(std::uint32_t to, int k, int bytes) const {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      if ((there >> i & 1) != 0) {
        device::cp_async_16(to + i * kStep * device::kSwizzleBytes, row[i] + k, bytes);
      }
    }
  }
};

}  // namespace mortar::lora::cuda
