// SPDX-License-Identifier: Apache-2.0
// Barriers between warps of a thread block that do different work: some of them meet at a named
// one, and a producer and its consumers hand data over at one in shared memory.
#pragma once

#include <cstdint>

#include "device/async_copy.cuh"

namespace mortar::device {

/// Waits for kThreads threads, whole warps but not the whole block: that is __syncthreads, which is
/// barrier 0. kId: 1 to 15.
template <int kId, int kThreads>
__device__ __forceinline__ void named_barrier() {
  asm volatile("bar.sync %0, %1;" ::"n"(kId), "n"(kThreads) : "memory");
}

/// A barrier in shared memory on which other threads wait than those that arrive.
struct Mbarrier {
  std::uint64_t word;

  __device__ __forceinline__ void init(int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(&word)), "r"(arrivals)
                 : "memory");
  }
  /// Makes the inits of this thread visible to the cluster and to copies; a barrier must follow.
  static __device__ __forceinline__ void fence_init() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  }
  __device__ __forceinline__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(&word)) : "memory");
  }
  /// Arrives where CTA `rank` of the cluster has this barrier (sm_90 and newer).
  __device__ __forceinline__ void arrive_in_cluster(int rank) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n"
        ".reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
        "}\n" ::"r"(smem_address(&word)),
        "r"(rank)
        : "memory");
#endif
  }
  /// Arrives, and has the phase end only when so many bytes more have come (sm_90 and newer).
  __device__ __forceinline__ void arrive_and_expect(int bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(&word)),
        "r"(bytes)
        : "memory");
#endif
  }
  /// Arrives when all earlier cp.async of this thread have landed.
  __device__ __forceinline__ void arrive_after_copies() {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(smem_address(&word))
                 : "memory");
  }
  /// Waits for the end of the phase of this parity: 0 for the first (sm_90 and newer).
  __device__ __forceinline__ void wait(std::uint32_t parity) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
        "@!p bra again;\n"
        "}\n" ::"r"(smem_address(&word)),
        "r"(parity)
        : "memory");
#endif
  }
};

}  // namespace mortar::device
