// SPDX-License-Identifier: Apache-2.0
// Programmatic dependent launch (PDL): a kernel may start while kernels before it in the stream
// still run, and waits for them just before it touches what they wrote.
//
// A kernel calls pdl_trigger() first thing, right after pdl_wait() or never. So when a kernel
// starts, any number of its predecessors may still run: all back to the last one that waited before
// it triggered or that was launched without PDL, before which everything has ended, or to one that
// never triggers, which has ended itself.
//
// Rules that every Mortar kernel keeps:
// - Every CTA executes pdl_wait() before it does anything that others see, and the first CTA of the
//   grid in any case: a kernel's end then means the end of all kernels before it. Others that have
//   nothing to do may leave at once (pdl_leave()).
// - Nothing is written to global memory before pdl_wait().
// - Nothing is read before it but what cannot be in the making any more: weights and groups, which
//   lora_plan (launched without PDL, it never triggers) or a kernel that waited before it triggered
//   separates from the kernels that read them; the contract is in mortar/lora.h. x, y and h are
//   read after it; asking for their lines in L2 earlier does no harm, since writes go there too.
//   Inside one call a kernel may also read what its predecessor does not write, if that one waits
//   before it triggers: all before it has then ended. Such reads go past L1.
#pragma once

namespace mortar::device {

/// Waits until all grids before this one in the stream have completed and their writes are visible.
__device__ __forceinline__ void pdl_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Lets the next grid of the stream start once every CTA of this one has called it or ended. Says
/// nothing about this grid's writes.
__device__ __forceinline__ void pdl_trigger() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// For a CTA that has nothing to do, right before it returns: its place on the SM is free at once.
__device__ __forceinline__ void pdl_leave() {
  if (blockIdx.x + blockIdx.y + blockIdx.z == 0) pdl_wait();
}

/// How a kernel begins. An `early` one lets its successor start at once, and waits later itself;
/// any other waits, so that everything before it has ended when its successor starts.
__device__ __forceinline__ void pdl_begin(bool early) {
  if (!early) pdl_wait();
  pdl_trigger();
}

}  // namespace mortar::device
