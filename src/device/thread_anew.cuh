// SPDX-License-Identifier: Apache-2.0
// threadIdx.x for kernels whose blocks walk over work in turns.
#pragma once

namespace mortar::device {

/// threadIdx.x, read anew: what follows from it would else be kept in registers from one piece of
/// work to the next.
__device__ __forceinline__ int thread_anew() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

}  // namespace mortar::device
