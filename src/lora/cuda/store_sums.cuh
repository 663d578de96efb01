// SPDX-License-Identifier: Apache-2.0
// Sums of wgmma on their way to h: between the CTAs of a cluster, and to the rows of h.
#pragma once

#include <cstdint>

#include "device/cluster.cuh"
#include "device/convert.cuh"
#include "device/quad_transpose.cuh"
#include "lora/cuda/params.cuh"
#include "lora/cuda/rank_rows.cuh"

namespace mortar::lora::cuda {

/// put_sums() stores the sums of each of kThreads threads in shared memory, add_sums() adds them to
/// those of the thread with the same index. Groups of 16 bytes of all threads lie side by side, so
/// that accesses have no bank conflicts.
template <int kThreads, int kCount>
__device__ __forceinline__ void put_sums(float4* to, const float (&sum)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    to[i / 4 * kThreads + threadIdx.x] = make_float4(sum[i], sum[i + 1], sum[i + 2], sum[i + 3]);
  }
}
/// send_sums() stores them where CTA `rank` of the cluster has `to`, and counts their bytes at its
/// barrier.
template <int kThreads, int kCount>
__device__ __forceinline__ void send_sums(float4* to, const float (&sum)[kCount],
                                          device::Mbarrier* barrier, int rank) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    device::send_to_cluster(reinterpret_cast<float*>(to + i / 4 * kThreads + threadIdx.x),
                            make_float4(sum[i], sum[i + 1], sum[i + 2], sum[i + 3]), barrier, rank);
  }
}
template <int kThreads, int kCount>
__device__ __forceinline__ void add_sums(float (&sum)[kCount], const float4* from) {
#pragma unroll
  for (int i = 0; i < kCount; i += 4) {
    const float4 v = from[i / 4 * kThreads + threadIdx.x];
    sum[i] += v.x;
    sum[i + 1] += v.y;
    sum[i + 2] += v.z;
    sum[i + 3] += v.w;
  }
}

/// Which groups of eight rank rows of a CTA can be stored to h as one vector. Such a row group
/// (octet) is a column range of h: eight neighbouring columns that begin at a multiple of 8. Groups
/// at the end of an adapter's rank, or across two slices, may not be. Lies in shared memory.
template <int kRows>
struct Octets {
  std::int64_t place[kRows / 8];  ///< first column in h; negative: not one vector
  int irregular;                  ///< not 0: at least one group with live rows is not one vector

  /// By one thread, a barrier before fill().
  __device__ __forceinline__ void begin() { irregular = 0; }
  /// By threads 0 to kThreads - 1. A barrier must follow before use.
  template <int kThreads>
  __device__ __forceinline__ void fill(const RankRows<kRows>& rows) {
    for (int i = threadIdx.x * 8; i < kRows; i += kThreads * 8) {
      bool whole = rows.place[i] % 8 == 0;
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        whole = whole && i + c < rows.count && rows.weights[i + c] != nullptr &&
                rows.place[i + c] == rows.place[i] + c;
      }
      place[i / 8] = whole ? rows.place[i] : -1;
      if (!whole && i < rows.count) atomicOr(&irregular, 1);  // by any number of threads
    }
  }
};

using device::transpose_quad;

/// Stores a thread's sums: rows of h at `base` (negative: none) of its two tokens, columns 8 j +
/// lane % 4 * 2 and the next, counted from `first`, a multiple of 8. Called by whole warps.
template <class H, int kCount, int kRows>
__device__ __forceinline__ void store_sums(const HView& h, const std::int64_t (&base)[2],
                                           const RankRows<kRows>& rows, const Octets<kRows>& octets,
                                           int first, const float (&sum)[kCount]) {
  constexpr int kOctets = kCount / 4;
  H* const data = static_cast<H*>(h.data);
  const int quad_lane = static_cast<int>(threadIdx.x) % 4, own = first + quad_lane * 2;
  const auto scales = [&](int j) {
    if (h.raw) return make_float2(1, 1);
    return *reinterpret_cast<const float2*>(rows.scale + own + 8 * j);
  };
  const bool aligned = reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && h.row_stride % 8 == 0 &&
                       h.slab_stride % 8 == 0;
  if (!aligned || octets.irregular != 0) {
#pragma unroll
    for (int j = 0; j < kOctets; ++j) {
      const float2 scale = scales(j);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int row = own + 8 * j + c;
        const bool zero = rows.weights[row] == nullptr;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (base[i] < 0 || row >= rows.count) continue;
          const float v = sum[4 * j + 2 * i + c] * (c == 0 ? scale.x : scale.y);
          data[base[i] + rows.place[row]] = device::from_float<H>(zero ? 0.0f : v);
        }
      }
    }
  } else if constexpr (sizeof(H) == 4) {
    // Of two octets a lane writes half of one and its neighbour half of the other.
    const bool odd = quad_lane % 2 == 1;
    const auto scaled = [&](int j, int i) {
      const float2 scale = scales(j);
      return make_float2(sum[4 * j + 2 * i] * scale.x, sum[4 * j + 2 * i + 1] * scale.y);
    };
#pragma unroll
    for (int j = 0; j + 1 < kOctets; j += 2) {
      const std::int64_t place = octets.place[first / 8 + j + quad_lane % 2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 even = scaled(j, i), next = scaled(j + 1, i);
        const float2 kept = odd ? next : even, given = odd ? even : next;
        const float2 got = make_float2(__shfl_xor_sync(0xffffffffu, given.x, 1),
                                       __shfl_xor_sync(0xffffffffu, given.y, 1));
        if (base[i] < 0 || place < 0) continue;
        *reinterpret_cast<float4*>(data + base[i] + place + quad_lane / 2 * 4) =
            odd ? make_float4(got.x, got.y, kept.x, kept.y)
                : make_float4(kept.x, kept.y, got.x, got.y);
      }
    }
    if constexpr (kOctets % 2 == 1) {
      const std::int64_t place = octets.place[first / 8 + kOctets - 1];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (base[i] < 0 || place < 0) continue;
        *reinterpret_cast<float2*>(data + base[i] + place + quad_lane * 2) = scaled(kOctets - 1, i);
      }
    }
  } else {  // a lane writes an octet
#pragma unroll
    for (int j = 0; j < kOctets; j += 4) {
      std::uint32_t words[2][4] = {};
#pragma unroll
      for (int k = 0; k < 4 && j + k < kOctets; ++k) {
        const float2 scale = scales(j + k);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int at = 4 * (j + k) + 2 * i;
          words[i][k] = device::pack2<H>(sum[at] * scale.x, sum[at + 1] * scale.y);
        }
      }
      const std::int64_t place =
          j + quad_lane < kOctets ? octets.place[first / 8 + j + quad_lane] : -1;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        transpose_quad(words[i]);
        if (base[i] < 0 || place < 0) continue;
        *reinterpret_cast<uint4*>(data + base[i] + place) =
            make_uint4(words[i][0], words[i][1], words[i][2], words[i][3]);
      }
    }
  }
}

/// Calls `store` with the dtype that h has.
template <class Store>
__device__ __forceinline__ void visit_h(const HView& h, Store&& store) {
  using DTypes = DTypeList<DType::kFloat32, DType::kBFloat16, DType::kFloat16>;
  device::visit_checked_dtype(DTypes(), h.dtype, store);
}

}  // namespace mortar::lora::cuda
