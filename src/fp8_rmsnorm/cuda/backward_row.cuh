// SPDX-License-Identifier: Apache-2.0
// What a thread of the backward has beside its part of the rows: their weights, the sum that it
// makes with the other threads of a row, and what the row groups of a CTA make of dw.
#pragma once

#include "device/cluster.cuh"
#include "device/reduce.cuh"
#include "fp8_rmsnorm/cuda/backward.cuh"
#include "fp8_rmsnorm/cuda/elements.cuh"

namespace mortar::fp8_rmsnorm::cuda {

/// Weights of a thread's runs, which begin at `column` and `step` columns apart: first as loads
/// that are all in flight together, then as floats.
template <int kCount, int kRuns>
class RunWeights {
 public:
  __device__ __forceinline__ RunWeights(const BackwardParams& params, int column, int step)
      : params_(params), column_(column), step_(step) {
    visit([&](auto tag) {
      using T = typename decltype(tag)::type;
#pragma unroll
      for (int run = 0; run < kRuns; ++run) load<T>(run);
    });
  }

  /// Weights + offset; 0 past the end of the row.
  __device__ __forceinline__ void get(float (&weight)[kRuns][kCount]) const {
    visit([&](auto tag) {
      using T = typename decltype(tag)::type;
      constexpr int kQuads = kCount * int{sizeof(T)} > 16 ? 1 : kCount / 4;  // of a word
#pragma unroll
      for (int run = 0; run < kRuns; ++run) {
#pragma unroll
        for (int q = 0; q < kCount / 4; ++q) {
          float quad[4];
          unpack4<T>(raw_[run][q / kQuads], q % kQuads, quad);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            weight[run][4 * q + i] =
                4 * q + i < left(run) ? quad[i] + params_.problem.weight_offset : 0.0f;
          }
        }
      }
    });
  }

 private:
  /// Vectors of 16 bytes, or one of 8.
  template <class T>
  static constexpr int kWords = kCount* int{sizeof(T)} < 16 ? 1 : kCount* int{sizeof(T)} / 16;

  template <class Use>
  __device__ __forceinline__ void visit(const Use& use) const {
    const DType dtype = params_.problem.weight.dtype;
    if (dtype == DType::kFloat32) {
      use(TypeTag<float>());
    } else if (dtype == DType::kBFloat16) {
      use(TypeTag<__nv_bfloat16>());
    } else {
      use(TypeTag<__half>());
    }
  }
  /// Columns from a run's first to the end of the row.
  __device__ __forceinline__ int left(int run) const {
    return static_cast<int>(params_.problem.input.hidden) - (column_ + run * step_);
  }
  template <class T>
  __device__ __forceinline__ void load(int run) {
    const char* p = static_cast<const char*>(params_.problem.weight.data) +
                    std::int64_t{column_ + run * step_} * int{sizeof(T)};
    if (params_.weight_aligned && left(run) <= 0) return;
#pragma unroll
    for (int i = 0; i < kWords<T>; ++i) {
      constexpr int kPerWord = kCount / kWords<T>;
      if (!params_.weight_aligned) {
        raw_[run][i] = load_unaligned(p + 16 * i, int{sizeof(T)},
                                      max(0, min(left(run) - i * kPerWord, kPerWord)));
      } else if constexpr (kCount * int{sizeof(T)} < 16) {
        const uint2 half = __ldcg(reinterpret_cast<const uint2*>(p));
        raw_[run][i] = make_uint4(half.x, half.y, 0, 0);
      } else {
        raw_[run][i] = __ldcg(reinterpret_cast<const uint4*>(p) + i);
      }
    }
  }

  const BackwardParams& params_;
  int column_, step_;
  uint4 raw_[kRuns][kWords<float>] = {};
};

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
    return row_threads_ <= 256 ? sum_of<2>() : sum_of<4>();
  }

 private:
  /// The sum of the first kQuads quads, all of which are read together: behind the row's warps are
  /// zeros.
  template <int kQuads>
  __device__ __forceinline__ float sum_of() const {
    float4 quads[kQuads];
#pragma unroll
    for (int i = 0; i < kQuads; ++i) quads[i] = reinterpret_cast<const float4*>(sums_)[i];
    float sum = 0.0f;
#pragma unroll
    for (const float4& quad : quads) sum += (quad.x + quad.y) + (quad.z + quad.w);
    return sum;
  }

  float* sums_;
  int group_, row_threads_, own_, odd_ = kMostWarps;
};

/// The dots of a row group's rows of which every CTA of a cluster has a strip, in shared memory, in
/// kSets that are used in turn. Two are enough: a CTA that sends that of step s has those of s - 1,
/// which the others sent when all their threads had those of s - 2.
template <int kSets>
struct StripDots {
  float dots[kSets][BackwardPlan::kMostStrips];
  device::Mbarrier arrived[kSets];

  __device__ __forceinline__ void init(int thread) {
    if (thread < kSets) arrived[thread].init(1);
  }
  /// To all CTAs of the cluster. `thread` is one of the row group.
  __device__ __forceinline__ void send(int step, float dot, int thread, int strips) {
    device::Mbarrier& here = arrived[step % kSets];
    if (thread == 0) here.arrive_and_expect(strips * int{sizeof(float)});
    if (thread < strips) {
      device::send_to_cluster(dots[step % kSets] + blockIdx.y, dot, &here, thread);
    }
  }
  /// Waits for the strips' dots; their sum.
  __device__ __forceinline__ float receive(int step, int strips) {
    arrived[step % kSets].wait(static_cast<std::uint32_t>(step / kSets % 2));
    float dot = 0.0f;
#pragma unroll 1
    for (int s = 0; s < strips; ++s) dot += dots[step % kSets][s];
    return dot;
  }
};

/// dw (+)= the sums of the row groups of the only CTA, which lie in shared memory.
__device__ __forceinline__ void store_dw(const BackwardParams& params, const float* sums,
                                         int thread, int hidden) {
  const Rows& dw = params.problem.dw;
  const int strip = params.plan.strip();
#pragma unroll 1
  for (int n = thread; n < hidden; n += static_cast<int>(blockDim.x)) {
    float sum = 0.0f;
#pragma unroll 4
    for (int g = 0; g < params.plan.row_groups; ++g) sum += sums[g * strip + n];
    if (params.problem.accumulate_dw) {
      sum += device::load_as_float(dw.data, dw.dtype, n);
    }
    device::store_from_float(dw.data, dw.dtype, n, sum);
  }
}

/// The chunk's part of dw: the sums of the row groups in their order, by way of `sums` in shared
/// memory. Run r of a thread's columns begins of_run(r) after column `lanes_column`. kMayBeAll: it
/// is dw itself where there is but one CTA.
template <bool kMayBeAll, int kCount, int kRuns>
__device__ __forceinline__ void store_partials(const BackwardParams& params, float4* sums,
                                               int thread, int group, int hidden, int strip_column,
                                               int lanes_column, const auto& of_run,
                                               const float (&dw)[kRuns][kCount]) {
  const BackwardPlan& plan = params.plan;
  const int strip = plan.strip();
  if (group < plan.row_groups) {
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
      float4* to = sums + (group * strip + lanes_column - strip_column + of_run(run)) / 4;
#pragma unroll
      for (int q = 0; q < kCount / 4; ++q) {
        to[q] =
            make_float4(dw[run][4 * q], dw[run][4 * q + 1], dw[run][4 * q + 2], dw[run][4 * q + 3]);
      }
    }
  }
  __syncthreads();
  if (kMayBeAll && plan.one_cta()) {
    return store_dw(params, reinterpret_cast<const float*>(sums), thread, hidden);
  }
  const int stride = round_up(hidden, 4);
  float4* partials =
      reinterpret_cast<float4*>(params.partials + std::int64_t{blockIdx.x} * stride + strip_column);
  const int quads = min(strip, stride - strip_column) / 4;
#pragma unroll 2
  for (int q = thread; q < quads; q += static_cast<int>(blockDim.x)) {
    float4 sum = sums[q];
#pragma unroll 2
    for (int g = 1; g < plan.row_groups; ++g) {
      const float4 v = sums[g * (strip / 4) + q];
      sum = make_float4(sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w);
    }
    partials[q] = sum;
  }
}

}  // namespace mortar::fp8_rmsnorm::cuda
