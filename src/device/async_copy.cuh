// SPDX-License-Identifier: Apache-2.0
// cp.async: copies from global to shared memory that hold no registers while in flight.
#pragma once

#include <cstdint>

namespace mortar::device {

__device__ __forceinline__ std::uint32_t smem_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

/// 16 bytes, cached in L2 only; both addresses 16-byte aligned.
__device__ __forceinline__ void cp_async_16(std::uint32_t dst, const void* src) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}
__device__ __forceinline__ void cp_async_16(void* dst, const void* src) {
  cp_async_16(smem_address(dst), src);
}
/// The same to a shared-memory address; `bytes` below 16 reads only so many and fills with zeros.
__device__ __forceinline__ void cp_async_16(std::uint32_t dst, const void* src, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes)
               : "memory");
}
/// The same by a policy of L2 (sm_90 and newer; cache_policy.cuh).
__device__ __forceinline__ void cp_async_16(std::uint32_t dst, const void* src, int bytes,
                                            std::uint64_t policy) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(dst),
               "l"(src), "r"(bytes), "l"(policy)
               : "memory");
#else
  cp_async_16(dst, src, bytes);
#endif
}
/// 8 bytes, of which `bytes` are read, the others zeros. L1 keeps what it read, so not for what a
/// predecessor may have written.
__device__ __forceinline__ void cp_async_8(std::uint32_t dst, const void* src, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(dst), "l"(src), "r"(bytes)
               : "memory");
}
/// Asks for the 128-byte line in L2; reads nothing, so what it holds may still change.
__device__ __forceinline__ void prefetch_l2(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}
/// The same for `count` elements a thread, which its neighbours' follow: once per line.
template <class T>
__device__ __forceinline__ void prefetch_lines(const T* p, int count) {
  if (reinterpret_cast<std::uintptr_t>(p) % 128 < count * sizeof(T)) prefetch_l2(p);
}
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

/// Waits until at most N of this thread's committed groups are in flight.
template <int N>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

}  // namespace mortar::device
