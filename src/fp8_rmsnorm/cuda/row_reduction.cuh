// SPDX-License-Identifier: Apache-2.0
// The sum and the maximum of a row that several threads share.
#pragma once

#include <cstdint>

#include "device/reduce.cuh"

namespace mortar::fp8_rmsnorm::cuda {

/// Sums and maxima over the threads of a row. Sums are made over a binary tree of the row's pieces,
/// from the farthest to the nearest, so that they do not depend on how many threads share the row.
/// kMost: threads of a CTA.
template <int kMost>
class RowReduction {
 public:
  /// Shared memory: 2 * kMost sums, and a maximum for each 32 of them.
  __device__ RowReduction(int row_threads, float* sums, std::uint32_t* maxima)
      : threads_(row_threads), sums_(sums), maxima_(maxima) {}

  /// Every thread of the row calls this.
  __device__ __forceinline__ void reduce(float& sum, std::uint32_t& largest) {
    if (threads_ > 32) {
      float* sums = sums_ + odd_ * kMost;
      std::uint32_t* maxima = maxima_ + odd_ * (kMost / 32);
      odd_ ^= 1;
      const int first = static_cast<int>(threadIdx.x) / threads_ * threads_;
      const int warps = threads_ / 32, lane = static_cast<int>(threadIdx.x % 32);
      sums[threadIdx.x] = sum;
      const std::uint32_t of_warp = device::max_lanes(largest, 32);
      if (lane == 0) maxima[threadIdx.x / 32] = of_warp;
      asm volatile("bar.sync %0, %1;" ::"r"(1 + first / threads_), "r"(threads_) : "memory");
      float part[kMost / 32];
#pragma unroll
      for (int w = 0; w < kMost / 32; ++w) {
        part[w] = w < warps ? sums[first + 32 * w + lane] : 0.0f;
      }
#pragma unroll
      for (int half = kMost / 64; half > 0; half /= 2) {
#pragma unroll
        for (int w = 0; w < half; ++w) part[w] += part[w + half];
      }
      sum = part[0];
      largest = lane < warps ? maxima[first / 32 + lane] : 0u;
    }
    if (threads_ >= 32) {
      sum = device::sum_lanes(sum, 32);
      largest = device::max_lanes(largest, 32);
      return;
    }
    sum = device::sum_lanes(sum, threads_);
    largest = device::max_lanes(largest, threads_);
  }

 private:
  int threads_;
  float* sums_;
  std::uint32_t* maxima_;
  int odd_ = 0;
};

}  // namespace mortar::fp8_rmsnorm::cuda
