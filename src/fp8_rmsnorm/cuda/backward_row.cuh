// SPDX-License-Identifier: Apache-2.0
// What a thread of the backward has beside its part of the rows: their weights, and the sum that it
// makes with the other threads of a row.
#pragma once

#include "device/reduce.cuh"
#include "fp8_rmsnorm/cuda/backward.cuh"
#include "fp8_rmsnorm/cuda/elements.cuh"

namespace mortar::fp8_rmsnorm::cuda {

/// Weights + offset of a thread's runs, which begin at `column` and `step` columns apart: 0 past
/// the end. All loads are in flight together.
template <int kCount, int kRuns>
__device__ __forceinline__ void load_weights(const BackwardParams& params, int column, int step,
                                             float (&weight)[kRuns][kCount]) {
  const Rows& w = params.problem.weight;
  const int hidden = static_cast<int>(params.problem.input.hidden);
  const auto load = [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int kBytes = kCount * int{sizeof(T)}, kWords = kBytes < 16 ? 1 : kBytes / 16;
    uint4 raw[kRuns][kWords] = {};
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
      const char* p =
          static_cast<const char*>(w.data) + std::int64_t{column + run * step} * int{sizeof(T)};
      const int left = hidden - (column + run * step);
      if (params.weight_aligned) {
        if (left <= 0) continue;
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
          if constexpr (kBytes < 16) {
            const uint2 half = __ldcg(reinterpret_cast<const uint2*>(p));
            raw[run][i] = make_uint4(half.x, half.y, 0, 0);
          } else {
            raw[run][i] = __ldcg(reinterpret_cast<const uint4*>(p) + i);
          }
        }
      } else {
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
          constexpr int kPerWord = kCount / kWords;
          raw[run][i] = load_unaligned(p + 16 * i, int{sizeof(T)},
                                       max(0, min(left - i * kPerWord, kPerWord)));
        }
      }
    }
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
      const int left = hidden - (column + run * step);
#pragma unroll
      for (int q = 0; q < kCount / 4; ++q) {
        constexpr int kQuads = kCount / 4 / kWords;  // of a word
        float quad[4];
        unpack4<T>(raw[run][q / kQuads], q % kQuads, quad);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          weight[run][4 * q + i] = 4 * q + i < left ? quad[i] + params.problem.weight_offset : 0.0f;
        }
      }
    }
  };
  if (w.dtype == DType::kFloat32) {
    load(TypeTag<float>());
  } else if (w.dtype == DType::kBFloat16) {
    load(TypeTag<__nv_bfloat16>());
  } else {
    load(TypeTag<__half>());
  }
}

/// Waits for the `count` threads of row group `group`: whole warps, at a barrier of their own.
__device__ __forceinline__ void row_group_barrier(int group, int count) {
  asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "r"(count) : "memory");
}

/// Sums over the threads of a row, in an order that depends on their number alone.
class DotReduction {
 public:
  static constexpr int kMostWarps = BackwardPlan::kMostThreads / 32;
  static constexpr int kScratch = kMostWarps / 2 * 2 * kMostWarps;

  /// `scratch`: a float for each warp that a row may have, twice for each row group, all zero.
  __device__ __forceinline__ DotReduction(float* scratch, int group, int row_threads)
      : sums_(scratch + 2 * group * kMostWarps), group_(group), row_threads_(row_threads) {
    own_ = (static_cast<int>(threadIdx.x) - group * row_threads) / 32;
  }

  __device__ __forceinline__ float sum(float v) {
    if (row_threads_ < 32) return device::sum_lanes(v, row_threads_);
    v = device::sum_lanes(v, 32);
    if (row_threads_ == 32) return v;
    // Two sets of sums in turn: nobody writes one before all have read it.
    sums_ += odd_;
    odd_ = -odd_;
    if (threadIdx.x % 32 == 0) sums_[own_] = v;
    row_group_barrier(group_, row_threads_);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kMostWarps / 4; ++i) {
      if (128 * i >= row_threads_) break;
      const float4 quad = reinterpret_cast<const float4*>(sums_)[i];
      sum += (quad.x + quad.y) + (quad.z + quad.w);
    }
    return sum;
  }

 private:
  float* sums_;
  int group_, row_threads_, own_, odd_ = kMostWarps;
};

}  // namespace mortar::fp8_rmsnorm::cuda
