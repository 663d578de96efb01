// SPDX-License-Identifier: Apache-2.0
// Copies of runs of bytes to shared memory by the copy engine of sm_90: one thread asks, a barrier
// in shared memory counts the bytes. PTX ISA, "cp.async.bulk".
#pragma once

#include <cstdint>

#include "device/barrier.cuh"

namespace mortar::device {

/// Copies `bytes` bytes and counts them at the barrier. Both addresses and `bytes` are multiples
/// of 16.
__device__ __forceinline__ void copy_bulk(std::uint32_t to, const void* from, int bytes,
                                          Mbarrier* barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(smem_address(&barrier->word))
      : "memory");
#endif
}

/// The same by a policy of L2 (cache_policy.cuh).
__device__ __forceinline__ void copy_bulk(std::uint32_t to, const void* from, int bytes,
                                          Mbarrier* barrier, std::uint64_t policy) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(smem_address(&barrier->word)), "l"(policy)
      : "memory");
#endif
}

/// Makes this thread's accesses to shared memory (cp.async that has landed, too) known to wgmma and
/// to the copy engine, which come after them once a barrier has followed.
__device__ __forceinline__ void fence_async_proxy() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

}  // namespace mortar::device
