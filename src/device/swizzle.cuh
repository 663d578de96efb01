// SPDX-License-Identifier: Apache-2.0
// XOR swizzle: the 16-byte piece p of row r lies at piece p ^ swizzle(r) of its row in shared
// memory, so that eight neighbouring rows' pieces of one number, which ldmatrix and wgmma read
// together, lie in different banks.
#pragma once

#include <cstdint>

#include "device/async_copy.cuh"

namespace mortar::device {

/// What the numbers of the pieces of a row are XORed with, in rows of 2^kLogPieces pieces. Rows
/// that share a line of 128 bytes lie in different banks anyway, so each line's swizzle is one more
/// than that of the line before.
template <int kLogPieces>
__device__ __forceinline__ int swizzle(int row) {
  return kLogPieces >= 3 ? row & 7 : (row & 7) >> (kLogPieces >= 3 ? 0 : 3 - kLogPieces);
}

inline constexpr int kSwizzleBytes = 128;  ///< of a row in the swizzle that wgmma reads

/// Byte offset of the 16-byte piece `piece` of row `row` in a block of such rows.
__device__ __forceinline__ std::uint32_t swizzled(int row, int piece) {
  return row * kSwizzleBytes + (piece ^ swizzle<3>(row)) * 16;
}

/// Copies kRows rows into a swizzled block, 64 elements of each from element k on, 16 bytes at a
/// time: kThreads threads share the work, thread t with `rows` at row t / 8, `to` at its place
/// swizzled(t / 8, t % 8) and k for its piece. The rows' pointers lie in shared memory; a null one
/// is no row: its place in the block stays as it is. k_end is a multiple of 8: what lies past it is
/// not read and becomes zeros.
template <class T, int kRows, int kThreads>
__device__ __forceinline__ void copy_swizzled(const void* const* rows, std::uint32_t to, int k,
                                              int k_end) {
  constexpr int kStep = kThreads / 8, kCopies = kRows / kStep;
  constexpr int kBatch = 4;  // pointers read together, or every one would wait for shared memory
  static_assert(kRows % kStep == 0 && kStep % 8 == 0, "threads copy alike, in one swizzle phase");
  const int bytes = k < k_end ? 16 : 0;
#pragma unroll
  for (int base = 0; base < kCopies; base += kBatch) {
    const T* row[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      row[i] = base + i < kCopies ? static_cast<const T*>(rows[(base + i) * kStep]) : nullptr;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (base + i < kCopies && row[i] != nullptr) {
        cp_async_16(to + (base + i) * kStep * kSwizzleBytes, row[i] + k, bytes);
      }
    }
  }
}

}  // namespace mortar::device
