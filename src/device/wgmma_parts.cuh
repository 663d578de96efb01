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

/// The rows of a step, as planes of parts in shared memory `plane` apart.
struct WgmmaPlanes {
  std::uint64_t at, plane;

  template <int kN>
  __device__ __forceinline__ void multiply(float* d, int part, std::uint64_t b, int add) const {
    wgmma<__nv_bfloat16, kN>(d, at + part * plane, b, add);
  }
};

/// The same in registers.
template <int kParts>
struct WgmmaRegisters {
  std::uint32_t part[kParts][4];

  template <int kN>
  __device__ __forceinline__ void multiply(float* d, int i, std::uint64_t b, int add) const {
    wgmma<kN>(d, part[i], b, add);
  }
};

/// kSteps: steps of 16 elements that are added together. One wait for all of them is less of it
/// where products are short; their first products wait in registers.
template <int kN, int kSteps = 1>
struct WgmmaPartSums {
  /// Columns whose products of first parts wait in registers at a time.
  static constexpr int kChunk = kN % 64 == 0 ? 64 : kN % 48 == 0 ? 48 : kN;
  static constexpr int kChunks = kN / kChunk;
  static_assert(kN % kChunk == 0 && (kSteps == 1 || kChunks == 1));
  float first[kN / 2];  ///< of products of first parts
  float rest[kN / 2];   ///< of all others, one chain
  float step[kSteps][kChunk / 2] = {};

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) first[i] = rest[i] = 0;
  }

  /// Adds kSteps steps of 16 elements; b: descriptor of the first parts' plane, and how far apart
  /// those of the next parts are. Products of first parts are waited for and added while others are
  /// in the queue of the tensor cores, which so never runs empty. When this returns, all operands
  /// of the calls before have been read, and those of this one may still be.
  template <int kPartsA, int kPartsB, class A>
  __device__ __forceinline__ void add(const A (&a)[kSteps], std::uint64_t b,
                                      std::uint64_t b_plane) {
    constexpr int kOthers = num_others(kPartsA, kPartsB);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      wgmma_fence();
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        a[s].template multiply<kChunk>(step[s], 0, b + s * kDescriptorStep + c * kChunk * 128 / 16,
                                       0);
      }
      wgmma_commit();
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        int other = 0;
#pragma unroll
        for (int i = 0; i < kPartsA; ++i) {
#pragma unroll
          for (int j = 0; j < kPartsB; ++j) {
            if (i + j == 0 || i + j > 2) continue;
            if (other >= kOthers * c / kChunks && other < kOthers * (c + 1) / kChunks) {
              a[s].template multiply<kN>(rest, i, b + s * kDescriptorStep + j * b_plane, 1);
            }
            ++other;
          }
        }
      }
      wgmma_commit();
      wgmma_wait<1>();
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        wgmma_keep(step[s]);
#pragma unroll
        for (int i = 0; i < kChunk / 2; ++i) first[c * kChunk / 2 + i] += step[s][i];
      }
    }
  }

  /// Waits for the products of the last step. To be called before total().
  __device__ __forceinline__ void end() {
    wgmma_wait<0>();
    wgmma_keep(rest);
  }

  /// As PartSums::total().
  __device__ __forceinline__ float total(int i) const {
    return fabsf(first[i]) < __uint_as_float(0x7f800000u) ? first[i] + rest[i] : first[i];
  }

 private:
  static constexpr int num_others(int parts_a, int parts_b) {
    int num = 0;
    for (int i = 0; i < parts_a; ++i) num += (parts_b < 3 - i ? parts_b : 3 - i);
    return num - 1;
  }
};

}  // namespace mortar::device
