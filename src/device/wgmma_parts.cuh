// SPDX-License-Identifier: Apache-2.0
// Products of parts (device/parts.cuh) on the warpgroup tensor cores of sm_90a: the sums of
// PartSums, bit for bit, of 64 rows by kN columns.
//
// On sm_90 an MMA step adds its 16 products and the sum before them as one, whatever their order,
// with mma.sync and wgmma alike. So it does not matter that planes for mma.sync hold a step's
// elements in another order than those here.
#pragma once

#include <cstdint>

#include "device/parts.cuh"
#include "device/wgmma.cuh"

namespace mortar::device {

template <int kN>
struct WgmmaPartSums {
  /// Columns whose products of first parts wait in registers at a time.
  static constexpr int kChunk = kN % 64 == 0 ? 64 : 48;
  static_assert(kN % kChunk == 0);
  float first[kN / 2];  ///< of products of first parts
  float rest[kN / 2];   ///< of all others, one chain
  float step[kChunk / 2] = {};

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) first[i] = rest[i] = 0;
  }

  /// Adds a step of 16 elements; descriptors of the first parts' planes, and how far apart those of
  /// the next parts are. The warpgroup's operands have been read when this returns.
  template <int kPartsA, int kPartsB>
  __device__ __forceinline__ void add(std::uint64_t a, std::uint64_t a_plane, std::uint64_t b,
                                      std::uint64_t b_plane) {
    wgmma_keep(rest);
#pragma unroll
    for (int c = 0; c < kN; c += kChunk) {
      wgmma_keep(step);
      wgmma_fence();
      wgmma<__nv_bfloat16, kChunk>(step, a, b + c * 128 / 16, 0);
      wgmma_commit();
      if (c == 0) {
#pragma unroll
        for (int i = 0; i < kPartsA; ++i) {
#pragma unroll
          for (int j = 0; j < kPartsB; ++j) {
            if (i + j > 0 && i + j <= 2) {
              wgmma<__nv_bfloat16, kN>(rest, a + i * a_plane, b + j * b_plane, 1);
            }
          }
        }
        wgmma_commit();
        wgmma_wait<1>();
      } else {
        wgmma_wait<0>();
      }
      wgmma_keep(step);
#pragma unroll
      for (int i = 0; i < kChunk / 2; ++i) first[c / 2 + i] += step[i];
    }
    if (kN == kChunk) wgmma_wait<0>();
    wgmma_keep(rest);
  }

  /// As PartSums::total().
  __device__ __forceinline__ float total(int i) const {
    return fabsf(first[i]) < __uint_as_float(0x7f800000u) ? first[i] + rest[i] : first[i];
  }
};

}  // namespace mortar::device
