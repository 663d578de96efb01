// SPDX-License-Identifier: Apache-2.0
// The ring and the sums of the wide expand where B and h are float32: expand_wide_parts.cu.
#pragma once

#include <cstdint>

#include "core/int_math.h"
#include "device/async_copy.cuh"
#include "device/parts.cuh"
#include "device/pdl.cuh"
#include "device/ring.cuh"
#include "device/swizzle.cuh"
#include "device/wgmma.cuh"
#include "device/wgmma_parts.cuh"
#include "lora/cuda/expand_wide_traits.cuh"
#include "lora/cuda/split_rows.cuh"

namespace mortar::lora::cuda::wide_expand {

/// Fills the ring from rows of float32, 64 at a time: B first, as h is the predecessor's. kVector:
/// rows of B start at multiples of 16 bytes; asked for each row, it would keep their loads from
/// being in flight together.
template <class Tr, bool kVector>
__device__ __forceinline__ void produce_parts(Shared<Tr>& shared, unsigned char* ring, int rank) {
  constexpr int kRows = 64, kParts = Tr::kPlaneBytes / (kRows * device::kSwizzleBytes);
  const int num_steps = ceil_div(rank, kStepRanks);
  const auto rows_of = [&](int part) { return shared.rows + part * kRows; };
  SplitRows<kRows, Tr::kProducers> rows(static_cast<int>(threadIdx.x) - Tr::kConsumers, kVector);
  rows.load(rows_of(Tr::kTiles), 0, rank);
  device::RingCursor<Tr::kStages> at;
#pragma unroll 1
  for (int step = 0; step < num_steps; ++step, at.next()) {
    if (step >= Tr::kStages) shared.empty[at.stage].wait((at.round - 1) & 1);
#pragma unroll 1
    for (int i = 0; i < kParts; ++i) {
      const int own = (i + Tr::kTiles) % kParts, next = (own + 1) % kParts;
      if (step == 0 && next == 0) device::pdl_wait();
      rows.vector = kVector || next < Tr::kTiles;  // rows of h always are
      rows.store_and_load(ring + at.stage * Tr::kStageBytes + own * kRows * device::kSwizzleBytes,
                          Tr::kPlaneBytes, rows_of(next),
                          (i + 1 == kParts ? step + 1 : step) * kStepRanks, rank);
    }
    shared.full[at.stage].arrive();
  }
}

/// A step of 16 ranks: the products of parts, in the order of expand_parts.cu.
template <int kCols, class H>
__device__ __forceinline__ void multiply_parts(float (&sum)[kCols / 2], const H& h, std::uint64_t b,
                                               std::uint64_t b_plane) {
#pragma unroll
  for (int i = 0; i < kSplitParts; ++i) {
#pragma unroll
    for (int j = 0; i + j < kSplitParts; ++j)
      h.template multiply<kCols>(sum, i, b + j * b_plane, 1);
  }
}

/// The same of float32.
template <class Tr>
__device__ __forceinline__ void consume_parts(Shared<Tr>& shared, std::uint32_t ring, int rank,
                                              float (&acc)[Tr::kCols / 2]) {
  constexpr std::uint64_t kPlane = Tr::kPlaneBytes / 16;
  const int warpgroup = static_cast<int>(threadIdx.x) / 128;
  const int num_steps = ceil_div(rank, kStepRanks);
  const bool signals = threadIdx.x % 32 == 0;
#pragma unroll
  for (float& v : acc) v = 0;
  device::RingCursor<Tr::kStages> at;
  int last = -1;  // stage of the MMAs in flight
#pragma unroll 1
  for (int step = 0; step < num_steps; ++step, at.next()) {
    shared.full[at.stage].wait(at.round & 1);
    device::fence_async_proxy();  // parts came through the generic proxy
    device::wgmma_keep(acc);
    device::wgmma_fence();
    const std::uint32_t stage = ring + at.stage * Tr::kStageBytes;
    const auto h = device::wgmma_descriptor(stage + warpgroup * 64 * device::kSwizzleBytes);
    const auto b = device::wgmma_descriptor(stage + Tr::kTokenBytes);
#pragma unroll
    for (int i = 0; i < kStepRanks / 16; ++i) {
      const device::WgmmaPlanes own{h + i * device::kDescriptorStep, kPlane};
      multiply_parts<Tr::kCols>(acc, own, b + i * device::kDescriptorStep, kPlane);
    }
    device::wgmma_commit();
    if constexpr (Tr::kStages == 1) {
      device::wgmma_wait<0>();
      if (signals) shared.empty[at.stage].arrive();
    } else {
      device::wgmma_wait<1>();
      if (last >= 0 && signals) shared.empty[last].arrive();
      last = at.stage;
    }
  }
  device::wgmma_wait<0>();
  device::wgmma_keep(acc);
}

/// Where the 16-byte piece `piece` of 64 ranks of h of a token lies: in rows of 256 bytes, whose
/// pieces are swizzled in pairs, so that a half-warp's reads of four rows and of two neighbouring
/// ranks a lane hit all banks.
__device__ __forceinline__ int raw_h_offset(int row, int piece) {
  return row * 4 * kStepRanks + (piece ^ (row & 3) << 1) * 16;
}

/// 64 ranks of h from `first` on, as they are; zeros past `rank`.
template <class Tr>
__device__ __forceinline__ void copy_raw_h(const Shared<Tr>& shared, std::uint32_t to, int first,
                                           int rank) {
  constexpr int kStep = Tr::kProducers / 16, kBatch = 4;  // rows whose pointers are read together
  const int thread = static_cast<int>(threadIdx.x) % Tr::kProducers;
  const int piece = thread % 16, row0 = thread / 16, left = rank - first - piece * 4;
  const int at = left > 0 ? first + piece * 4 : 0, bytes = min(max(left, 0), 4) * 4;
  const std::uint32_t dst = to + raw_h_offset(row0, piece);
#pragma unroll
  for (int base = 0; base < Tr::kTokens / kStep; base += kBatch) {
    const float* row[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      row[i] = static_cast<const float*>(shared.rows[row0 + (base + i) * kStep]);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (row[i] == nullptr) continue;
      device::cp_async_16(dst + (base + i) * kStep * 4 * kStepRanks, row[i] + at, bytes);
    }
  }
}

/// Fills the ring with h as it is and parts of B, whose first rows do not wait for the predecessor.
/// A thread arrives at a stage twice, for either.
template <class Tr, bool kVector>
__device__ __forceinline__ void produce_raw_h(Shared<Tr>& shared, unsigned char* ring, int rank) {
  const int num_steps = ceil_div(rank, kStepRanks);
  const WaitingRows<Tr::kCols, Tr::kProducers> rows(static_cast<int>(threadIdx.x) - Tr::kConsumers,
                                                    ring + Tr::kRowRing, shared.rows + Tr::kTokens);
#pragma unroll 1
  for (int step = 0; step < Tr::kAhead; ++step) {
    rows.template copy<kVector>(step, step * kStepRanks, rank);
    device::cp_async_commit();
  }
  device::pdl_wait();
  const auto copy_h = [&](int stage, int step) {
    copy_raw_h<Tr>(shared, device::smem_address(ring) + stage * Tr::kStageBytes, step * kStepRanks,
                   rank);
    shared.full[stage].arrive_after_copies();
  };
#pragma unroll 1
  for (int step = 0; step < min(num_steps, Tr::kStages); ++step) copy_h(step, step);
  device::RingCursor<Tr::kStages> at;
  int slot = 0;
#pragma unroll 1
  for (int step = 0; step < num_steps; ++step, at.next()) {
    if (step >= Tr::kStages) {
      shared.empty[at.stage].wait((at.round - 1) & 1);
      copy_h(at.stage, step);
    }
    device::cp_async_wait<Tr::kAhead - 1>();  // for the rows of B of this step
    rows.split(slot, ring + at.stage * Tr::kStageBytes + Tr::kTokenBytes, Tr::kPlaneBytes);
    shared.full[at.stage].arrive();
    if (step + Tr::kAhead < num_steps) {
      rows.template copy<kVector>(slot, (step + Tr::kAhead) * kStepRanks, rank);
    }
    device::cp_async_commit();
    if (++slot == Tr::kAhead) slot = 0;
  }
}

/// A thread's elements of a step of 16 ranks of h, in parts.
__device__ __forceinline__ void load_raw_h(device::WgmmaRegisters<kSplitParts>& h,
                                           const unsigned char* rows, int offset) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {  // two rows, eight apart, of two pairs of ranks, eight apart
    const auto v =
        *reinterpret_cast<const float2*>(rows + i % 2 * 8 * 4 * kStepRanks + (offset ^ i / 2 * 32));
    std::uint32_t part[kSplitParts];
    device::split_in_two(v.x, v.y, part);
#pragma unroll
    for (int j = 0; j < kSplitParts; ++j) h.part[j][i] = part[j];
  }
}

/// acc = h B^T of a consumer warpgroup, in the order of expand_parts.cu. The steps past the rank
/// add zeros.
template <class Tr>
__device__ __forceinline__ void consume_raw_h(Shared<Tr>& shared, const unsigned char* ring,
                                              int rank, float (&acc)[Tr::kCols / 2]) {
  constexpr std::uint64_t kPlane = Tr::kPlaneBytes / 16;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int row = static_cast<int>(threadIdx.x) / 32 * 16 + lane / 4;
  const int offset = raw_h_offset(row, lane % 4 / 2) - row * 4 * kStepRanks + lane % 2 * 8;
  const int num_steps = ceil_div(rank, kStepRanks);
#pragma unroll
  for (float& v : acc) v = 0;
  device::WgmmaRegisters<kSplitParts> h[2];  // one for the products in flight
  device::RingCursor<Tr::kStages> at;
  int last = -1;  // stage of the MMAs in flight
#pragma unroll 1
  for (int step = 0; step < num_steps; ++step, at.next()) {
    shared.full[at.stage].wait(at.round & 1);
    device::fence_async_proxy();  // parts came through the generic proxy
    const unsigned char* const stage = ring + at.stage * Tr::kStageBytes;
    const auto b = device::wgmma_descriptor(device::smem_address(stage) + Tr::kTokenBytes);
#pragma unroll
    for (int i = 0; i < kStepRanks / 16; ++i) {
      load_raw_h(h[i % 2], stage + row * 4 * kStepRanks, offset ^ i * 64);
      device::wgmma_keep(acc);
      device::wgmma_fence();
      multiply_parts<Tr::kCols>(acc, h[i % 2], b + i * device::kDescriptorStep, kPlane);
      device::wgmma_commit();
      device::wgmma_wait<1>();
      if (i == 0 && last >= 0) shared.empty[last].arrive();  // every thread: each has read its h
    }
    last = at.stage;
  }
  device::wgmma_wait<0>();
  device::wgmma_keep(acc);
}

}  // namespace mortar::lora::cuda::wide_expand
