// SPDX-License-Identifier: Apache-2.0
// Rows of float32 on their way from global memory to shared memory, in the swizzle that wgmma
// reads: as planes of parts (device/parts.cuh), or rounded to a 16-bit type.
#pragma once

#include <cstdint>
#include <type_traits>

#include "device/async_copy.cuh"
#include "device/convert.cuh"
#include "device/parts.cuh"
#include "device/swizzle.cuh"
#include "device/vector.cuh"

namespace mortar::lora::cuda {

inline constexpr int kSplitParts = device::kParts<device::TwoParts>;

/// kThreads threads' share of kRows rows, 64 elements of each: thread t has the quad of elements
/// t % 16 of every (kThreads / 16)-th row. The elements wait in registers, those of the next rows
/// on their way while the last ones are split: 16 bytes a thread and row in flight, that need no
/// room in shared memory. Rows are null (none: what is written in its place means nothing) or start
/// at any element; those of `vector` at multiples of 16 bytes. To: what they are rounded to;
/// TwoParts: those.
template <int kRows, int kThreads, class To = device::TwoParts>
struct SplitRows {
  static constexpr int kStep = kThreads / 16, kCount = kRows / kStep;
  static_assert(kRows % kStep == 0 && kStep % 8 == 0, "threads copy alike, in one swizzle phase");
  uint4 v[kCount] = {};
  int quad, row0;
  int left = 0;  ///< elements that exist from the first of v on
  bool vector;

  __device__ __forceinline__ SplitRows(int thread, bool rows_by_16)
      : quad(thread % 16), row0(thread / 16), vector(rows_by_16) {}

  /// Asks for elements [first, first + 64) of `rows`, in shared memory; zeros from `end` on.
  __device__ __forceinline__ void load(const void* const* rows, int first, int end) {
    move<false>(nullptr, 0, rows, first, end);
  }
  /// Writes what has come, as parts to planes of `plane_bytes`, and asks for that of `next` in its
  /// place.
  __device__ __forceinline__ void store_and_load(unsigned char* planes, int plane_bytes,
                                                 const void* const* next, int first, int end) {
    move<true>(planes, plane_bytes, next, first, end);
  }

 private:
  template <bool kStores>
  __device__ __forceinline__ void move(unsigned char* planes, int plane_bytes,
                                       const void* const* next, int first, int end) {
    constexpr int kBatch = kCount % 4 == 0   ? 4
                           : kCount % 3 == 0 ? 3
                                             : kCount;  // pointers that are read together
    static_assert(kCount % kBatch == 0);
    if (kStores && left < 4) {  // what lies past the end may be anything
#pragma unroll
      for (uint4& words : v) {
        if (left < 1) words.x = 0;
        if (left < 2) words.y = 0;
        if (left < 3) words.z = 0;
        words.w = 0;
      }
    }
    const int at = first + quad * 4;
    left = end - at;
    unsigned char* to = planes + device::swizzled(row0, quad / 2) + quad % 2 * 8;
#pragma unroll
    for (int base = 0; base < kCount; base += kBatch) {
      const float* row[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        row[i] = static_cast<const float*>(next[row0 + (base + i) * kStep]);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        uint4& own = v[base + i];
        if constexpr (kStores && !std::is_same_v<To, device::TwoParts>) {
          const auto& f = reinterpret_cast<const float(&)[4]>(own);
          *reinterpret_cast<uint2*>(to + (base + i) * kStep * device::kSwizzleBytes) =
              make_uint2(device::pack2<To>(f[0], f[1]), device::pack2<To>(f[2], f[3]));
        } else if constexpr (kStores) {
          std::uint32_t part[kSplitParts][2];
          device::split4<To>(reinterpret_cast<const std::uint32_t*>(&own), part);
#pragma unroll
          for (int j = 0; j < kSplitParts; ++j) {
            *reinterpret_cast<uint2*>(to + j * plane_bytes +
                                      (base + i) * kStep * device::kSwizzleBytes) =
                make_uint2(part[j][0], part[j][1]);
          }
        }
        const bool there = row[i] != nullptr && left > 0;
        if (vector) {
          device::load_if(there, own, row[i] + at);
        } else if (there) {
          own = device::load_some<float, 4>(row[i] + at, left).piece(0);
        }
      }
    }
  }
};

/// The same rows where those of several stages wait in shared memory, `kSlotBytes` each: every
/// thread copies and splits 16 bytes of its own rows, so that no barrier lies between.
template <int kRows, int kThreads>
struct WaitingRows {
  static constexpr int kStep = kThreads / 16, kCount = kRows / kStep;
  static constexpr int kSlotBytes = kRows * 2 * device::kSwizzleBytes;
  static constexpr int kTogether = kCount % 4 == 0 ? 4 : kCount % 3 == 0 ? 3 : kCount;
  static_assert(kRows % kStep == 0 && kStep % 8 == 0, "threads copy alike, in one swizzle phase");
  unsigned char* waiting;  ///< the thread's first 16 bytes
  const void* const* rows;
  int quad, row0;

  __device__ __forceinline__ WaitingRows(int thread, unsigned char* slots,
                                         const void* const* all_rows)
      : waiting(slots + thread * 16),
        rows(all_rows + thread / 16),
        quad(thread % 16),
        row0(thread / 16) {}

  /// Asks for elements [first, first + 64); zeros from `end` on. kVector: as above.
  template <bool kVector>
  __device__ __forceinline__ void copy(int slot, int first, int end) const {
    const int left = end - first - quad * 4, at = left > 0 ? first + quad * 4 : 0;
    const int bytes = min(max(left, 0), 4) * 4;
    unsigned char* const to = waiting + slot * kSlotBytes;
#pragma unroll
    for (int base = 0; base < kCount; base += kTogether) {
      const float* row[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        row[i] = static_cast<const float*>(rows[(base + i) * kStep]);
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (row[i] == nullptr) continue;
        unsigned char* const place = to + (base + i) * kThreads * 16;
        if constexpr (kVector) {
          device::cp_async_16(device::smem_address(place), row[i] + at, bytes);
        } else {
          *reinterpret_cast<uint4*>(place) =
              device::load_some<float, 4>(row[i] + at, left).piece(0);
        }
      }
    }
  }
  /// Writes what has come to planes.
  __device__ __forceinline__ void split(int slot, unsigned char* planes, int plane_bytes) const {
    const unsigned char* const from = waiting + slot * kSlotBytes;
    unsigned char* const to = planes + device::swizzled(row0, quad / 2) + quad % 2 * 8;
#pragma unroll
    for (int base = 0; base < kCount; base += kTogether) {
      uint4 v[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        v[i] = *reinterpret_cast<const uint4*>(from + (base + i) * kThreads * 16);
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        std::uint32_t part[kSplitParts][2];
        device::split4<device::TwoParts>(reinterpret_cast<const std::uint32_t*>(&v[i]), part);
#pragma unroll
        for (int j = 0; j < kSplitParts; ++j) {
          *reinterpret_cast<uint2*>(to + j * plane_bytes +
                                    (base + i) * kStep * device::kSwizzleBytes) =
              make_uint2(part[j][0], part[j][1]);
        }
      }
    }
  }
};

}  // namespace mortar::lora::cuda
