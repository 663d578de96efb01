// SPDX-License-Identifier: Apache-2.0
// The sum and the maximum of a row that several threads share.
#pragma once

#include <cstdint>

#include "device/reduce.cuh"
#include "fp8_rmsnorm/cuda/elements.cuh"

namespace mortar::fp8_rmsnorm::cuda {

/// Sums and maxima over the threads of a row. Sums are made over a binary tree of the row's pieces,
/// from the farthest to the nearest, so that they do not depend on how many threads share the row.
/// kMost: threads of a CTA.
template <int kMost>
class RowReduction {
 public:
  /// `row_threads`: a power of two. Shared memory: 2 * kMost sums, and a maximum for each 32 of
  /// them.
  __device__ RowReduction(int row_threads, float* sums, std::uint32_t* maxima)
      : threads_(row_threads),
        first_(static_cast<int>(threadIdx.x) & -row_threads),
        barrier_(1 + (first_ >> log2_of(row_threads))),
        sums_(sums),
        maxima_(maxima) {}

  /// The sum of the threads' sums, which each of them gets. Every thread of the row calls this (and
  /// of its warp); then all of them have come here, and shared memory is as they left it.
  __device__ __forceinline__ void reduce(float& sum) {
    if (threads_ > 32) {
      float* sums = sums_ + odd_ * kMost;
      odd_ ^= 1;
      sums[threadIdx.x] = sum;
      sync();
      sum = of_warps(sums);
    } else {
      __syncwarp();  // shuffles alone do not order memory
    }
    sum = threads_ >= 32 ? device::sum_lanes(sum, 32) : device::sum_lanes(sum, threads_);
  }
  /// The same, and the largest of the threads' largest.
  __device__ __forceinline__ void reduce(float& sum, std::uint32_t& largest) {
    if (threads_ > 32) {
      std::uint32_t* maxima = maxima_ + odd_ * (kMost / 32);
      const std::uint32_t of_warp = device::max_lanes(largest, 32);
      if (threadIdx.x % 32 == 0) maxima[threadIdx.x / 32] = of_warp;
      reduce(sum);
      const int lane = static_cast<int>(threadIdx.x % 32);
      largest = lane < threads_ / 32 ? maxima[first_ / 32 + lane] : 0u;
    } else {
      reduce(sum);
    }
    largest =
        threads_ >= 32 ? device::max_lanes(largest, 32) : device::max_lanes(largest, threads_);
  }
  /// Waits for all threads of the row.
  __device__ __forceinline__ void sync() const {
    if (threads_ > 32) {
      asm volatile("bar.sync %0, %1;" ::"r"(barrier_), "r"(threads_) : "memory");
    } else {
      __syncwarp();
    }
  }

 private:
  /// The sum of a lane's sums over the row's warps.
  __device__ __forceinline__ float of_warps(const float* sums) const {
    sums += first_ + static_cast<int>(threadIdx.x % 32);
    if (threads_ == 64) return tree<2>(sums);
    if (threads_ == 128) return tree<4>(sums);
    return threads_ == 256 ? tree<8>(sums) : tree<16>(sums);
  }
  template <int kWarps>
  __device__ __forceinline__ static float tree(const float* sums) {
    float part[kWarps];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) part[w] = sums[32 * w];
    return device::add_halves<kWarps>(part);
  }

  int threads_;
  int first_;    ///< thread of the row
  int barrier_;  ///< the number of the row's barrier
  float* sums_;
  std::uint32_t* maxima_;
  int odd_ = 0;
};

}  // namespace mortar::fp8_rmsnorm::cuda
