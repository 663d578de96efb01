// SPDX-License-Identifier: Apache-2.0
// A ring of stages in shared memory, used in turn: while one is computed on, asynchronous copies
// fill the others.
#pragma once

#include <cstdint>

#include "device/async_copy.cuh"

namespace mortar::device {

/// Waits for the oldest stage of a ring that cp.async fills, one committed group a stage. The ring
/// was filled whole; `refilled`: since then a stage is refilled after each such wait but the first,
/// when the stage before it has been used.
template <int kStages>
__device__ __forceinline__ void wait_for_stage(bool refilled) {
  refilled ? cp_async_wait<kStages - 2>() : cp_async_wait<kStages - 1>();
}

/// A step of a ring that cp.async fills, all of whose stages but one are in flight, one committed
/// group a stage: waits for the oldest and for the whole CTA, which has then used up the one before
/// it; `refill` asks for what comes there next, or for nothing at the end.
template <int kStages, class Refill>
__device__ __forceinline__ void next_stage(Refill refill) {
  cp_async_wait<kStages - 2>();
  __syncthreads();
  refill();
  cp_async_commit();
}

/// The stage that is next, and how often the ring has been walked through: the parity of `round` is
/// that of the stage's barriers.
template <int kStages>
struct RingCursor {
  int stage = 0;
  std::uint32_t round = 0;
  RingCursor() = default;
  /// Of the stage that is taken once `taken` have been.
  __device__ __forceinline__ explicit RingCursor(int taken)
      : stage(taken % kStages), round(static_cast<std::uint32_t>(taken / kStages)) {}
  __device__ __forceinline__ void next() {
    if (++stage == kStages) {
      stage = 0;
      ++round;
    }
  }
};

}  // namespace mortar::device
