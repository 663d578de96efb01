// SPDX-License-Identifier: Apache-2.0
// A cluster of CTAs that run at the same time and read each other's shared memory. The functions do
// nothing below sm_90: kernels that use them compile there, but are not launched.
#pragma once

#include "device/barrier.cuh"

namespace mortar::device {

/// Half of a barrier: what this thread has written is seen by those that have waited.
__device__ __forceinline__ void cluster_arrive() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
/// The first half without that: for CTAs that end once all others have read their shared memory.
/// (It does not wait for this thread's stores to global memory, as the other does.)
__device__ __forceinline__ void cluster_arrive_relaxed() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
/// The other half: waits until all threads of the cluster have arrived.
__device__ __forceinline__ void cluster_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

/// Stores v where CTA `rank` of the cluster has what this one has at p, and counts 4 bytes at its
/// barrier: whoever waits there for them may read v, without a barrier of the whole cluster.
__device__ __forceinline__ void send_to_cluster(float* p, float v, Mbarrier* barrier, int rank) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .b32 there, bar;\n"
      "mapa.shared::cluster.u32 there, %0, %3;\n"
      "mapa.shared::cluster.u32 bar, %1, %3;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], %2, [bar];\n"
      "}\n" ::"r"(smem_address(p)),
      "r"(smem_address(&barrier->word)), "r"(__float_as_uint(v)), "r"(rank)
      : "memory");
#endif
}

/// The same of 16 bytes, at a multiple of 16.
__device__ __forceinline__ void send_to_cluster(float* p, const float4& v, Mbarrier* barrier,
                                                int rank) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .b32 there, bar;\n"
      "mapa.shared::cluster.u32 there, %0, %6;\n"
      "mapa.shared::cluster.u32 bar, %1, %6;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [there], {%2, %3, %4, %5}, "
      "[bar];\n"
      "}\n" ::"r"(smem_address(p)),
      "r"(smem_address(&barrier->word)), "r"(__float_as_uint(v.x)), "r"(__float_as_uint(v.y)),
      "r"(__float_as_uint(v.z)), "r"(__float_as_uint(v.w)), "r"(rank)
      : "memory");
#endif
}

/// Where CTA `rank` of the cluster has what this one has at p, in shared memory.
template <class T>
__device__ __forceinline__ T* in_cluster(T* p, int rank) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  T* other;
  asm("mapa.u64 %0, %1, %2;" : "=l"(other) : "l"(p), "r"(rank));
  return other;
#else
  return p;
#endif
}

}  // namespace mortar::device
