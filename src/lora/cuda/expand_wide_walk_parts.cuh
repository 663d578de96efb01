// SPDX-License-Identifier: Apache-2.0
// How CTAs of expand_wide_walk.cu come to h and B of float32, as planes of parts.
#pragma once

#include <cstdint>

#include "device/async_copy.cuh"
#include "device/parts.cuh"
#include "device/pdl.cuh"
#include "device/ring.cuh"
#include "device/swizzle.cuh"
#include "device/vector.cuh"
#include "lora/cuda/expand_wide_walk.cuh"
#include "lora/cuda/split_rows.cuh"

namespace mortar::lora::cuda::wide_walk {

/// A producer's part of a block, 64 ranks of 128 rows of h or B: four neighbouring ranks of every
/// eighth row. Rows `kStep` places further in the block are `near` elements on, four times that far
/// `far` elements.
struct BlockRows {
  static constexpr int kStep = kProducers / 16, kCount = kTokens / kStep;
  static_assert(kStep == 8, "rows of one swizzle phase");
  const float* from;
  std::int64_t near, far;
  int near_rows;  ///< `near` as rows of h, or columns
  int there;      ///< rows from the first one on that there are
  int left;       ///< ranks from the first one on
  bool vector;

  __device__ __forceinline__ bool has(int i) const {
    return left > 0 && i % 4 * near_rows + i / 4 * 32 < there;
  }
};

__device__ __forceinline__ BlockRows rows_of_block(const WalkParams& p, const Step& t, int rank,
                                                   bool of_h) {
  const int thread = static_cast<int>(threadIdx.x) - kConsumers, row0 = thread / 16;
  const std::int64_t stride = of_h ? p.h.row_stride : t.b_stride;
  // Columns are permuted: rows eight places further are those of two columns on.
  const int first = of_h ? row0 : (row0 >> 1) * 8 + (row0 & 1);
  BlockRows r;
  r.near_rows = of_h ? BlockRows::kStep : 2;
  r.near = r.near_rows * stride;
  r.far = 32 * stride;
  r.there = (of_h ? t.count : t.cols) - first;
  const int at = rank + thread % 16 * 4;
  r.left = t.rank - at;
  r.vector = of_h || t.vector;
  r.from = static_cast<const float*>(of_h ? t.h : t.b) + first * stride + (r.left > 0 ? at : 0);
  return r;
}

/// Those elements on their way, in registers.
struct BlockPieces {
  static constexpr int kCount = BlockRows::kCount, kBatch = 4;
  uint4 v[kCount] = {};
  int left = 0;  ///< elements of each that exist

  __device__ __forceinline__ void load(const BlockRows& rows) {
    rows.vector ? move<false, true>(nullptr, rows) : move<false, false>(nullptr, rows);
  }
  /// Writes the parts of all, for the first row to `to`, and asks for those of the next block in
  /// their place.
  __device__ __forceinline__ void store_and_load(unsigned char* to, const BlockRows& next) {
    if (left < 4) {  // what lies past the end may be anything
#pragma unroll
      for (uint4& words : v) {
        if (left < 1) words.x = 0;
        if (left < 2) words.y = 0;
        if (left < 3) words.z = 0;
        words.w = 0;
      }
    }
    next.vector ? move<true, true>(to, next) : move<true, false>(to, next);
  }

 private:
  /// Without a branch around any load: four rows are split side by side.
  template <bool kStores, bool kVector>
  __device__ __forceinline__ void move(unsigned char* to, const BlockRows& rows) {
    const float* from = rows.from;
#pragma unroll
    for (int base = 0; base < kCount; base += kBatch, from += rows.far) {
      if constexpr (kStores) {
        std::uint32_t part[kBatch][kSplitParts][2];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          device::split4<device::TwoParts>(reinterpret_cast<const std::uint32_t*>(&v[base + i]),
                                           part[i]);
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
#pragma unroll
          for (int j = 0; j < kSplitParts; ++j) {
            *reinterpret_cast<uint2*>(to + j * kBlockBytes +
                                      (base + i) * BlockRows::kStep * device::kSwizzleBytes) =
                make_uint2(part[i][j][0], part[i][j][1]);
          }
        }
      }
      const float* row = from;
#pragma unroll
      for (int i = 0; i < kBatch; ++i, row += rows.near) {
        if constexpr (kVector) {
          device::load_if(rows.has(base + i), v[base + i], row);
        } else if (rows.has(base + i)) {
          v[base + i] = device::load_some<float, 4>(row, rows.left).piece(0);
        }
      }
    }
    left = rows.left;
  }
};

/// The block that a CTA's producers take next: B of 64 ranks, then h of these where it is fresh.
struct BlockCursor {
  const WalkParams& p;
  Shared<false, float>& shared;
  device::RingCursor<Room<false, float>::kSteps> now;
  int rank = 0;
  bool of_h = false, more;
  bool waited = false;  ///< for the predecessor, whose h is

  __device__ __forceinline__ BlockCursor(const WalkParams& params, Shared<false, float>& s)
      : p(params), shared(s) {
    shared.told[0].wait(0);
    more = shared.steps[0].rank > 0;
    if (!more) device::pdl_wait();
  }
  __device__ __forceinline__ BlockRows rows() const {
    return rows_of_block(p, shared.steps[now.stage], rank, of_h);  // none past the last step
  }
  __device__ __forceinline__ void next() {
    if (!more) return;
    of_h = !of_h && shared.steps[now.stage].fresh;
    if (of_h) {
      if (!waited) device::pdl_wait();
      waited = true;
      return;
    }
    rank += kStepRanks;
    if (rank < shared.steps[now.stage].rank) return;
    shared.used[now.stage].arrive();
    now.next();
    shared.told[now.stage].wait(now.round & 1);
    rank = 0;
    more = shared.steps[now.stage].rank > 0;
  }
};

/// Fills the rings. Rows of a block are on their way while those of the one before it are split and
/// written, and come in their place.
__device__ __forceinline__ void produce_parts(const WalkParams& p, Shared<false, float>& shared,
                                              unsigned char* ring) {
  using Own = Room<false, float>;
  constexpr int kBlock = Own::kParts * kBlockBytes;
  const int thread = static_cast<int>(threadIdx.x) - kConsumers, quad = thread % 16;
  unsigned char* const place = ring + device::swizzled(thread / 16, quad / 2) + quad % 2 * 8;
  device::RingCursor<Own::kStages> at;
  device::RingCursor<Own::kHBlocks> h_at;
  BlockCursor coming(p, shared);
  BlockPieces pieces;
  pieces.load(coming.rows());
#pragma unroll 1
  while (coming.more) {
    unsigned char* to;
    device::Mbarrier* full;
    if (coming.of_h) {
      if (h_at.round > 0) shared.h_empty[h_at.stage].wait((h_at.round - 1) & 1);
      to = place + h_at.stage * kBlock;
      full = shared.h_full + h_at.stage;
      h_at.next();
    } else {
      if (at.round > 0) shared.empty[at.stage].wait((at.round - 1) & 1);
      to = place + (Own::kHBlocks + at.stage) * kBlock;
      full = shared.full + at.stage;
      at.next();
    }
    coming.next();
    pieces.store_and_load(to, coming.rows());
    full->arrive();
  }
}

}  // namespace mortar::lora::cuda::wide_walk
