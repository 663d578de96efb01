// SPDX-License-Identifier: Apache-2.0
// How CTAs of expand_wide_walk.cu come to h and B as boxes, by the tensor copy engine.
#pragma once

#include <cstdint>

#include "device/swizzle.cuh"
#include "device/tensor_copy.cuh"
#include "lora/cuda/expand_wide_walk.cuh"

namespace mortar::lora::cuda::wide_walk {

inline constexpr int kHalfGroups = kBoxGroups, kHalfBytes = kBlockBytes / kPair;
static_assert(kBoxCols * kPair == kCols, "a box is half of a step's columns");

/// A producer that asks for blocks of 64 ranks; one thread.
template <bool kStaged>
struct BoxCopier {
  const WalkParams& p;
  Shared<kStaged>& shared;
  std::uint32_t ring;

  __device__ __forceinline__ const Step& columns(const Step& t) const { return t; }
  __device__ __forceinline__ void h(const Step& t, int block, int rank) const {
    device::Mbarrier* const full = shared.h_full + block;
    full->arrive_and_expect(kBlockBytes);
    device::copy_box(ring + block * kBlockBytes, p.h_map,
                     t.slice * static_cast<int>(p.h.slice_stride) + rank, t.h_line, full);
  }
  /// Of B. Columns that both CTAs of a cluster take come to both, half of them asked for by each,
  /// once both have used up what lay there.
  __device__ __forceinline__ void copy(const Step& t, int stage, int rank) const {
    const int cta = static_cast<int>(blockIdx.x) % kPair;
    device::Mbarrier* const full = shared.full + stage;
    const std::uint32_t to = ring + (Room<kStaged>::kHBlocks + stage) * kBlockBytes;
    const CUtensorMap& map = p.b_map[t.slice];
    full->arrive_and_expect(kBlockBytes);
    if (t.both) {
      constexpr std::uint16_t kAll = (1 << kPair) - 1;
      device::copy_box5_to(kAll, to + cta * kHalfBytes, map, rank, t.b_group + cta * kHalfGroups,
                           full);
      return;
    }
#pragma unroll
    for (int half = 0; half < kPair; ++half) {
      device::copy_box5(to + half * kHalfBytes, map, rank, t.b_group + half * kHalfGroups, full);
    }
  }
  /// The barrier of a stage knows by copy() what comes.
  __device__ __forceinline__ void arrive(const Step& /*t*/, int /*stage*/) const {}
};

}  // namespace mortar::lora::cuda::wide_walk
