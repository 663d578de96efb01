// SPDX-License-Identifier: Apache-2.0
// What product_forward_parts.cu copies and splits: its shared memory, the work of a thread block,
// and how float32 weights become bfloat16 parts.
#pragma once

#include "core/int_math.h"
#include "device/parts.cuh"
#include "lora/cuda/product_forward.h"
#include "lora/cuda/product_split.cuh"
#include "lora/train/cuda/part_columns.cuh"
#include "lora/train/cuda/part_planes.cuh"

namespace mortar::lora::cuda::forward_parts {

using namespace product;
using train::cuda::EightParts;
using train::cuda::kPartPlanes;
using train::cuda::kPartSteps;
using train::cuda::kSumCopies;

inline constexpr int kSplitThreads = 2 * kWarpgroup;
inline constexpr int kSplitters = kSplitThreads / 32;  ///< warps, which have boxes in turns
inline constexpr int kCopyAt = kConsumers + kSplitThreads, kPartsThreads = kCopyAt + kWarpgroup;
inline constexpr int kBoxFloats = 32;  ///< columns of a box of float32
inline constexpr int kAheadSteps = 3;  ///< of x, asked for before the wait
/// 64 columns of A, or 64 rows of B.
inline constexpr int kSlotBytes = kBlockBytes;
inline constexpr int kSlots = 16;
inline constexpr int kPlaneBytes = train::cuda::part_plane_bytes(64);
inline constexpr int kOctetBytes = kPartPlanes * kPlaneBytes;

/// As the products' own shapes say it. kHalves: of a tile's rows, up to 64 each, of which each
/// warpgroup that multiplies makes h of one of two; of one, each makes half of h's columns.
template <int kHalves_>
struct PartsShape {
  static constexpr int kRanks = kPartsForwardRanks, kOctets = kRanks / 8, kHalves = kHalves_;
  static constexpr int kRows = kHalves * kForwardRows;
  static constexpr int kPartColumns = kRanks * kSumCopies;              ///< of h
  static constexpr int kMmaColumns = kHalves == 1 ? 32 : kPartColumns;  ///< no MMA here has 24
  static constexpr int kColumns = kHalves == 1 ? 2 * kMmaColumns : kMmaColumns;
  static constexpr int kSums = kMmaColumns / 2, kSumsPitch = kColumns;
  static constexpr int kStages = kHalves == 1 ? 9 : 4;  ///< of x
  static constexpr int kStageBytes = kHalves * kBlockBytes;
  static constexpr int kSlotsAt = kStages * kStageBytes;
  static constexpr int kSumsAt = kSlotsAt + kSlots * kSlotBytes;
  static constexpr int kHiddenAt = kSumsAt + kRows * kSumsPitch * 4;
  static constexpr int kSmem = kHiddenAt + kRows * kRanks * 4;
  /// Each warp has its own slots: a barrier's phase that is two ahead would be taken for the one
  /// that has ended.
  static_assert(kSlots % kSplitters == 0);
  static_assert(kOctets * kOctetBytes <= kSlotBytes, "parts of B");
  static_assert(kPartColumns * device::kSwizzleBytes <= kSlotBytes, "parts of A");
  static_assert(kRanks <= kBoxFloats);
  static_assert(kSlotsAt >= 4 * kBlockBytes, "y leaves from where x was");
};

struct PartsParams {
  CUtensorMap x, a, y;
  const void* x_data;
  const float* b;
  std::int64_t x_stride, b_stride;
  std::int64_t rows;
  int rank, width;  ///< of the adapter, and in whole octets
  int tile_rows, half_rows, parts, leaves, leaf_steps, part_steps, steps;
  int out_columns, column_tiles;  ///< of y, and by 128
  float factor;
  float* h;
  std::int64_t h_stride;
};

template <class S>
struct Barriers {
  device::Mbarrier x_full[S::kStages], x_empty[S::kStages];
  device::Mbarrier a_full[kSlots], a_ready[kSlots], a_empty[kSlots];
  device::Mbarrier b_ready[kSlots], b_empty[kSlots];
  device::Mbarrier received, came;

  /// Half of them, which are a hundred, by one thread.
  __device__ __forceinline__ void init_copies() {
    for (int i = 0; i < S::kStages; ++i) {
      x_full[i].init(1);
      x_empty[i].init(kConsumers / 32);
    }
    for (int i = 0; i < kSlots; ++i) {
      a_full[i].init(1);
      a_empty[i].init(kConsumers / 32);
    }
    device::Mbarrier::fence_init();
  }
  /// The others, by another thread.
  __device__ __forceinline__ void init_others() {
    for (int i = 0; i < kSlots; ++i) {
      a_ready[i].init(32);
      b_ready[i].init(32);
      b_empty[i].init(kWarpgroup / 32);
    }
    received.init(1);
    came.init(1);
    device::Mbarrier::fence_init();
  }
};

/// What a thread block does: steps of 64 columns of x, then 64 columns of y at a time.
struct Work {
  int part, row, first_step, steps, units, first_slot;

  __device__ __forceinline__ explicit Work(const PartsParams& p) {
    part = static_cast<int>(blockIdx.y);
    row = static_cast<int>(blockIdx.x) * p.tile_rows;
    first_step = part * p.part_steps;
    steps = max(0, min(p.part_steps, p.steps - first_step));
    units = 2 * ((p.column_tiles - part + p.parts - 1) / p.parts);
    first_slot = steps % kSlots;  // that is free first
  }
  __device__ __forceinline__ int column(const PartsParams& p, int unit) const {
    return ((unit / 2 * p.parts + part) * 2 + unit % 2) * 64;
  }
  __device__ __forceinline__ int slot(int unit) const { return (first_slot + unit) % kSlots; }
};

/// Copies x and A; by one thread.
template <class S>
__device__ __forceinline__ void produce(const PartsParams& p, const Work& work, std::uint32_t smem,
                                        Barriers<S>* bars) {
  constexpr int kABytes = S::kRanks * device::kSwizzleBytes;  // of a box
  constexpr int kAAt = kSlotBytes - 2 * kABytes;
  for (int i = 0; i < work.steps; ++i) {
    const int column = (work.first_step + i) * kProductStep, stage = i % S::kStages,
              slot = i % kSlots;
    bars->a_empty[slot].wait((i / kSlots & 1) ^ 1);
    bars->a_full[slot].arrive_and_expect(2 * kABytes);
    const std::uint32_t to = smem + S::kSlotsAt + slot * kSlotBytes + kAAt;
    device::copy_box(to, p.a, 2 * column, 0, bars->a_full + slot);
    device::copy_box(to + kABytes, p.a, 2 * (column + kBoxFloats), 0, bars->a_full + slot);
    bars->x_empty[stage].wait((i / S::kStages & 1) ^ 1);
    bars->x_full[stage].arrive_and_expect(p.tile_rows * device::kSwizzleBytes);
#pragma unroll
    for (int half = 0; half < S::kHalves; ++half) {
      device::copy_box_once(smem + stage * S::kStageBytes + half * kBlockBytes, p.x, column,
                            work.row + half * p.half_rows, bars->x_full + stage);
    }
  }
}

/// Eight neighbouring floats, two pieces of a row.
__device__ __forceinline__ void read_eight(const unsigned char* from, int row, int piece,
                                           float (&v)[8]) {
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const float4 four = *reinterpret_cast<const float4*>(from + device::swizzled(row, piece + k));
    v[4 * k] = four.x, v[4 * k + 1] = four.y, v[4 * k + 2] = four.z, v[4 * k + 3] = four.w;
  }
}

/// Splits 64 columns of A where they lie, by a warp.
template <int kRanks>
__device__ __forceinline__ void split_a(unsigned char* slot) {
  constexpr int kABytes = kRanks * device::kSwizzleBytes, kOctets = kRanks / 8;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const unsigned char* from = slot + kSlotBytes - 2 * kABytes;
  float v[kOctets][2][8];
#pragma unroll
  for (int i = 0; i < kOctets; ++i) {
#pragma unroll
    for (int box = 0; box < 2; ++box) {
      read_eight(from + box * kABytes, 8 * i + lane % 8, lane / 8 * 2, v[i][box]);
    }
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kOctets; ++i) {
#pragma unroll
    for (int box = 0; box < 2; ++box) {
      const EightParts parts(v[i][box]);
      unsigned char* to =
          slot + device::swizzled(8 * kSumCopies * i + lane % 8, 4 * box + lane / 8);
      *reinterpret_cast<uint4*>(to) = parts.whole;
      *reinterpret_cast<uint4*>(to + 8 * device::kSwizzleBytes) = parts.second;
      *reinterpret_cast<uint4*>(to + 16 * device::kSwizzleBytes) = parts.third;
    }
  }
}

/// 64 rows of B on their way to a slot, in the registers of a warp, which has each lane's rows
/// sooner than the copy engine, whose time for a row is the same for 64 bytes as for 128.
template <int kRanks>
struct RowsOfB {
  static constexpr int kOctets = kRanks / 8, kRowsAtOnce = 32 / kOctets, kItems = 64 / kRowsAtOnce;
  float v[kItems][8];

  static __device__ __forceinline__ int octet() {
    return static_cast<int>(threadIdx.x) % 32 / 8 % kOctets;
  }
  static __device__ __forceinline__ int row(int i) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    return i * kRowsAtOnce + lane / 8 / kOctets * 8 + lane % 8;
  }
  /// Zeros past the ranks and the rows.
  __device__ __forceinline__ void load(const PartsParams& p, int first_row) {
    const int ranks = p.rank - 8 * octet();
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int own = first_row + row(i), left = own < p.out_columns ? ranks : 0;
      const float* from = p.b + own * p.b_stride + 8 * octet();
#pragma unroll
      for (int k = 0; k < 8; k += 4) {
        float4 four = make_float4(0, 0, 0, 0);
        if (left >= k + 4) {
          four = __ldg(reinterpret_cast<const float4*>(from + k));
        } else if (left > k) {
          four.x = __ldg(from + k);
          if (left > k + 1) four.y = __ldg(from + k + 1);
          if (left > k + 2) four.z = __ldg(from + k + 2);
        }
        v[i][k] = four.x, v[i][k + 1] = four.y, v[i][k + 2] = four.z, v[i][k + 3] = four.w;
      }
    }
  }
  __device__ __forceinline__ void split(unsigned char* slot) const {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      train::cuda::store_planes<kPlaneBytes>(slot + octet() * kOctetBytes + row(i) * 16, v[i]);
    }
  }
};

/// Splits every kSplitters-th box of A, then of 64 rows of B; by a warp of its own number.
template <class S>
__device__ __forceinline__ void split(const PartsParams& p, const Work& work, unsigned char* smem,
                                      Barriers<S>* bars) {
  const int warp = static_cast<int>(threadIdx.x) / 32 % kSplitters;
  for (int i = warp; i < work.steps; i += kSplitters) {
    const int slot = i % kSlots;
    bars->a_full[slot].wait(i / kSlots & 1);
    split_a<S::kRanks>(smem + S::kSlotsAt + slot * kSlotBytes);
    device::fence_async_proxy();
    bars->a_ready[slot].arrive();
  }
  RowsOfB<S::kRanks> rows;
  if (warp < work.units) rows.load(p, work.column(p, warp));
#pragma unroll 1
  for (int unit = warp; unit < work.units; unit += kSplitters) {
    const int slot = work.slot(unit);
    if (unit >= kSlots) {
      bars->b_empty[slot].wait((unit / kSlots & 1) ^ 1);
    } else if (slot < work.steps) {
      const int uses = (work.steps - slot + kSlots - 1) / kSlots;
      bars->a_empty[slot].wait((uses - 1) & 1);
    }
    rows.split(smem + S::kSlotsAt + slot * kSlotBytes);
    device::fence_async_proxy();
    bars->b_ready[slot].arrive();
    const int next = unit + kSplitters;
    if (next < work.units) rows.load(p, work.column(p, next));
  }
}

}  // namespace mortar::lora::cuda::forward_parts
