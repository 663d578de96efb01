// SPDX-License-Identifier: Apache-2.0
// What expand_wide_walk.cu copies to shared memory: h and B, and y of steps ahead.
#pragma once

#include <cstdint>

#include "device/async_copy.cuh"
#include "device/bulk_copy.cuh"
#include "device/pdl.cuh"
#include "device/ring.cuh"
#include "device/swizzle.cuh"
#include "device/vector.cuh"
#include "lora/cuda/expand_tile.cuh"
#include "lora/cuda/expand_wide_walk.cuh"

namespace mortar::lora::cuda::wide_walk {

/// A producer's part of the columns of a step, worked out once for all blocks of its ranks: with
/// addresses of its own a block took 230 instructions in place of 50, some 0.6 us.
template <class T>
struct Columns {
  static constexpr int kStep = kProducers / 8, kCopies = kTokens / kStep;
  static_assert(kStep == 16);
  const T* first;          ///< the row that lies in place row0
  std::int64_t near, far;  ///< elements from it to those 4 and 32 columns on
  int rank, there;         ///< columns from that row's on that there are
  bool vector;

  __device__ __forceinline__ Columns(const Step& t, int piece, int row0) {
    // Rows kStep places further are those of 4 and 28 columns on.
    const int column = (row0 >> 1 & 3) * 8 + (row0 >> 3) * 2 + (row0 & 1);
    const std::int64_t stride = t.b_stride;
    first = static_cast<const T*>(t.b) + column * stride;
    near = 4 * stride;
    far = 32 * stride;
    rank = t.rank - piece * 8;
    there = t.cols - column;
    vector = t.vector;
  }
  /// 64 ranks from `from_rank` on.
  __device__ __forceinline__ void copy(std::uint32_t dst, int piece, int from_rank) const {
    const int left = rank - from_rank;
    const T* from = first + (left > 0 ? from_rank + piece * 8 : 0);
    constexpr int kBytes = kStep * device::kSwizzleBytes, kPairs = kCopies / 2;
    if (!vector) {
#pragma unroll 1
      for (int i = 0; i < kCopies; ++i) {
        if (i / 2 * 32 + i % 2 * 4 >= there) continue;
        *static_cast<uint4*>(__cvta_shared_to_generic(dst + i * kBytes)) =
            device::load_some<T, 8>(from + i / 2 * far + i % 2 * near, left).piece(0);
      }
      return;
    }
    const int bytes = piece_bytes(left);
    if (there > (kPairs - 1) * 32 + 4) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i, from += far) {
        device::cp_async_16(dst + 2 * i * kBytes, from, bytes);
        device::cp_async_16(dst + (2 * i + 1) * kBytes, from + near, bytes);
      }
      return;
    }
#pragma unroll 1
    for (int i = 0; i < kPairs; ++i, from += far) {
      if (i * 32 < there) device::cp_async_16(dst + 2 * i * kBytes, from, bytes);
      if (i * 32 + 4 < there) device::cp_async_16(dst + (2 * i + 1) * kBytes, from + near, bytes);
    }
  }
};

/// A producer that copies 16 bytes of every 16th row; of 128 threads.
template <class T, bool kStaged>
struct RowCopier {
  const WalkParams& p;
  Shared<kStaged>& shared;
  int piece, row0;
  std::uint32_t to;

  __device__ __forceinline__ RowCopier(const WalkParams& params, Shared<kStaged>& s,
                                       std::uint32_t ring)
      : p(params), shared(s) {
    const int thread = static_cast<int>(threadIdx.x) - kConsumers;
    piece = thread % 8;
    row0 = thread / 8;
    to = ring + device::swizzled(row0, piece);
  }
  __device__ __forceinline__ Columns<T> columns(const Step& t) const { return {t, piece, row0}; }
  __device__ __forceinline__ void h(const Step& t, int block, int first) const {
    constexpr int kStep = Columns<T>::kStep;
    const int left = t.rank - first - piece * 8, bytes = piece_bytes(left), count = t.count;
    const std::int64_t stride = p.h.row_stride;
    const T* from = static_cast<const T*>(t.h) + (left > 0 ? first + piece * 8 : 0) + row0 * stride;
    const std::uint32_t dst = to + block * kBlockBytes;
#pragma unroll
    for (int i = 0; i < Columns<T>::kCopies; ++i, from += kStep * stride) {
      if (row0 + i * kStep < count) {
        device::cp_async_16(dst + i * kStep * device::kSwizzleBytes, from, bytes);
      }
    }
    shared.h_full[block].arrive_after_copies();
  }
  /// Of B.
  __device__ __forceinline__ void copy(const Columns<T>& columns, int stage, int rank) const {
    columns.copy(to + (Room<kStaged>::kHBlocks + stage) * kBlockBytes, piece, rank);
  }
  __device__ __forceinline__ void arrive(const Columns<T>& columns, int stage) const {
    if (columns.vector) {
      shared.full[stage].arrive_after_copies();
    } else {
      device::cp_async_commit();
      device::cp_async_wait<0>();
      shared.full[stage].arrive();
    }
  }
};

/// Brings h and B of all steps. A copier does so for a block of 64 ranks, of B by what columns()
/// works out for a step.
template <bool kStaged, class Copier>
__device__ __forceinline__ void produce(Shared<kStaged>& shared, const Copier& copier) {
  constexpr int kHBlocks = Room<kStaged>::kHBlocks, kStages = Room<kStaged>::kStages;
  device::RingCursor<Room<kStaged>::kSteps> now;
  device::RingCursor<kStages> at;
  device::RingCursor<kHBlocks> h_at;
  shared.told[0].wait(0);
  // B of the first step does not depend on the predecessor.
  const int ahead = min(ceil_div(shared.steps[0].rank, kStepRanks), kStages);
#pragma unroll 1
  for (int i = 0; i < ahead; ++i) {
    copier.copy(copier.columns(shared.steps[0]), i, i * kStepRanks);
  }
  device::pdl_wait();
  bool first = true;
#pragma unroll 1
  for (;; now.next(), first = false) {
    shared.told[now.stage].wait(now.round & 1);
    const Step& t = shared.steps[now.stage];
    const int ranks = t.rank;
    if (ranks == 0) return;
    const auto& columns = copier.columns(t);
    const bool fresh = t.fresh;
#pragma unroll 1
    for (int rank = 0; rank < ranks; rank += kStepRanks, at.next()) {
      if (fresh) {
        if (h_at.round > 0) shared.h_empty[h_at.stage].wait((h_at.round - 1) & 1);
        copier.h(t, h_at.stage, rank);
        h_at.next();
      }
      if (!first || rank >= ahead * kStepRanks) {
        if (at.round > 0) shared.empty[at.stage].wait((at.round - 1) & 1);
        copier.copy(columns, at.stage, rank);
      }
      copier.arrive(columns, at.stage);
    }
    shared.used[now.stage].arrive();
  }
}

/// Tells all steps, and copies y of each to shared memory once that of two steps before is used. A
/// row by each scout.
template <class T>
__device__ __forceinline__ void tell_and_copy(const ExpandParams& p, Shared<true>& shared,
                                              Scout<true>& scout, std::uint32_t y_rows) {
  const int thread = static_cast<int>(threadIdx.x) - kFirstScout;
  const T* const y = static_cast<const T*>(p.y.data);
  device::RingCursor<Room<true>::kSteps> now;
  device::RingCursor<kYStages> at;
  bool more = true;
#pragma unroll 1
  for (int step = 0, told = 0;; ++step, now.next(), at.next()) {
    // Two steps ahead, but for the first one, whose y nothing is to delay. In one place, as what
    // lies in several is so much code that reading it is the time until the first step is told.
#pragma unroll 1
    while (more && (told <= step + min(step, 2) || !p.add_inputs)) {
      more = scout.tell();
      told += more ? 1 : 0;
    }
    if (step == told || !p.add_inputs) return;
    if (step == 0) device::pdl_wait();
    shared.told[now.stage].wait(now.round & 1);
    const Step& t = shared.steps[now.stage];
    const std::int64_t row = t.y(p, thread);
    const int bytes = 2 * t.cols;
    if (at.round > 0) shared.y_empty[at.stage].wait((at.round - 1) & 1);
    if (row < 0 || bytes == 0) {
      shared.y_full[at.stage].arrive();
    } else {
      shared.y_full[at.stage].arrive_and_expect(bytes);
      device::copy_bulk(y_rows + (at.stage * kTokens + thread) * kYPitch, y + row, bytes,
                        &shared.y_full[at.stage]);
    }
  }
}

}  // namespace mortar::lora::cuda::wide_walk
