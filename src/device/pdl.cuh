// SPDX-License-Identifier: Apache-2.0
// Programmatic dependent launch: a kernel may start while its predecessor in the stream still
// runs, and waits for it just before it touches what the predecessor wrote.
//
// Rules that every Mortar kernel keeps: every CTA executes pdl_wait(), also one that has nothing
// to do (or completion stops being transitive along the chain); nothing is written to global
// memory before it; pdl_trigger() comes after pdl_wait().
#pragma once

namespace mortar::device {

/// Waits until the preceding grids of the stream have completed and their writes are visible.
__device__ __forceinline__ void pdl_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Lets the next grid of the stream start. Says nothing about this grid's writes.
__device__ __forceinline__ void pdl_trigger() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace mortar::device
