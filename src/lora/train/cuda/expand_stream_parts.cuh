// SPDX-License-Identifier: Apache-2.0
// Float32 weights of expand_stream.cu beside bfloat16 y or dx: a warp splits those of its columns
// into bfloat16 parts as it loads them, and multiplies them with the parts of h, which lie in
// memory as columns (part_columns.cuh). The six products of an octet of ranks come in the order of
// these columns, so bits are those of weights that were written out. 4 bytes of a weight come from
// L2, for 12.
#pragma once

#include <cstdint>

#include "device/mma.cuh"
#include "lora/train/cuda/expand_store.cuh"
#include "lora/train/cuda/expand_stream_weights.cuh"
#include "lora/train/cuda/kernels.cuh"
#include "lora/train/cuda/part_columns.cuh"
#include "lora/train/cuda/stream.cuh"

namespace mortar::lora::train::cuda::expand_operands {

/// Pieces of h that an octet of ranks has in a stage: the third parts, the first ones and the
/// second ones as other columns have them, and the first ones with what is not finite.
inline constexpr int kStepsOfOctet = kStreamCopies / 2;

/// Where a piece of the stage lies among the columns of h's parts.
__device__ __forceinline__ int part_piece_column(int first_hidden, int piece) {
  const int copy = piece % kStreamCopies == 3 ? 5 : piece % kStreamCopies;
  return part_column(first_hidden + piece / kStreamCopies * 8, kPairCopies) + 8 * copy;
}

/// Zeros in place of what is not finite among two first parts. Made anew wherever it is wanted,
/// which is rare: kept, it would take the registers of other weights.
__device__ __forceinline__ std::uint32_t finite_parts(std::uint32_t two) {
  asm volatile("" : "+r"(two));
  const auto keep = [&](std::uint32_t exponent) { return (two & exponent) != exponent; };
  return two & ((keep(0x7f80u) ? 0xffffu : 0u) | (keep(0x7f800000u) ? 0xffff0000u : 0u));
}

template <class S>
struct PartWeights {
  static constexpr int kOctets = S::kRanks / (8 * kStreamCopies);
  /// Parts of two ranks of the lane's column in each tile of the MMA, in pairs of registers as it
  /// takes them. `first` is the first part where it is finite, `last` wherever.
  struct Parts {
    std::uint32_t first, third, second, last;
  };
  Parts b[S::kGroups][kOctets][4];
  bool finite;  ///< all of the warp's

  template <class T>
  __device__ __forceinline__ void multiply(std::uint32_t rows_at, int g, int live_steps,
                                           float (&sum)[4][4]) const {
    // Pieces {third, first}, {second, second} and {first, last} of h's parts.
    const bool upper = threadIdx.x % 32 >= 16;
    const std::uint32_t second_at = rows_at ^ (upper ? 48 : 32);
    const std::uint32_t last_at = rows_at ^ (upper ? 32 : 16);
#pragma unroll
    for (int o = 0; o < kOctets; ++o) {
      if (o * kStepsOfOctet >= live_steps) break;
      std::uint32_t a[4];
      const auto add = [&](int j, std::uint32_t b0, std::uint32_t b1) {
        device::mma_16816<T>(sum[j], a, b0, b1);
      };
      const Parts(&own)[4] = b[g][o];
      device::ldmatrix_x4(a, rows_at ^ (o * 64));
#pragma unroll
      for (int j = 0; j < 4; ++j) add(j, own[j].first, own[j].third);
      device::ldmatrix_x4(a, second_at ^ (o * 64));
      if (finite) {
#pragma unroll
        for (int j = 0; j < 4; ++j) add(j, own[j].second, own[j].last);
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) add(j, own[j].second, finite_parts(own[j].last));
      }
      device::ldmatrix_x4(a, last_at ^ (o * 64));
#pragma unroll
      for (int j = 0; j < 4; ++j) add(j, own[j].second, own[j].last);
    }
  }

  __device__ __forceinline__ void load(const ExpandParams& p, const Pairs& pairs,
                                       std::int64_t column, char* /*smem*/) {
    bool own_finite = true;
#pragma unroll
    for (int o = 0; o < kOctets; ++o) {
      Matrix m{};  // [column, rank], from the lane's first rank on
      int ranks = 0;
      if (8 * o < p.width) {
        const int j = p.first_hidden + 8 * o;
        const int s = slice_of(p.hidden, p.first_slice, p.num_slices, j);
        const PairEntry& pair = pairs.slice(s);
        const int first = j - p.hidden.first[s] + static_cast<int>(threadIdx.x) % 4 * 2;
        m = p.side == Side::kB
                ? pair.b
                : Matrix{pair.a.data, pair.a.col_stride, pair.a.row_stride, pair.a.dtype};
        m.data = static_cast<float*>(m.data) + first * m.col_stride;
        ranks = min(pair.rank - first, 2);
      }
#pragma unroll
      for (int g = 0; g < S::kGroups; ++g) {
        float2 two[4];
        load_group(p, m, ranks, column + 32 * g, two);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const PartWords words(two[j].x, two[j].y);
          b[g][o][j] = {words.weight[0], words.weight[1], words.weight[2], words.weight[5]};
          own_finite = own_finite && words.weight[0] == words.weight[5];
        }
      }
    }
    finite = __all_sync(0xffffffffu, own_finite);
  }

 private:
  /// Two ranks of the lane's columns of a group.
  __device__ __forceinline__ static void load_group(const ExpandParams& p, const Matrix& m,
                                                    int ranks, std::int64_t column,
                                                    float2 (&two)[4]) {
    const auto* from = static_cast<const float*>(m.data);
    const int own = static_cast<int>(threadIdx.x) % 32 / 4;
    if (p.weights.vectors && p.weights.rows_are_ranks && column + 32 <= p.columns) {
      // Two lanes share eight neighbouring columns, of which one takes the even ones.
      const bool odd = own % 2 != 0;
      const std::int64_t c = column + own / 2 * 8 + (odd ? 4 : 0);
      float v[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float4 four = make_float4(0, 0, 0, 0);
        if (i < ranks) four = __ldcg(reinterpret_cast<const float4*>(from + i * m.col_stride + c));
        const float x = __shfl_xor_sync(0xffffffffu, odd ? four.x : four.y, 4);
        const float z = __shfl_xor_sync(0xffffffffu, odd ? four.z : four.w, 4);
        v[i][0] = odd ? x : four.x;
        v[i][1] = odd ? z : four.z;
        v[i][2] = odd ? four.y : x;
        v[i][3] = odd ? four.w : z;
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) two[j] = make_float2(v[0][j], v[1][j]);
      return;
    }
    const bool pairs = p.weights.vectors && !p.weights.rows_are_ranks && ranks == 2;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const std::int64_t n = column + real_column(j, own);
      const bool there = n < p.columns;
      const auto* at = from + (there ? n : 0) * m.row_stride;
      two[j] = make_float2(0, 0);
      if (pairs && there) {
        two[j] = __ldcg(reinterpret_cast<const float2*>(at));
      } else if (there) {
        if (ranks > 0) two[j].x = __ldcg(at);
        if (ranks > 1) two[j].y = __ldcg(at + m.col_stride);
      }
    }
  }
};

}  // namespace mortar::lora::train::cuda::expand_operands
