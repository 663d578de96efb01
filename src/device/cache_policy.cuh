// SPDX-License-Identifier: Apache-2.0
// Bulk copies by a policy of L2: what is read once goes first, what is read again stays. PTX ISA,
// "cp.async.bulk" and "createpolicy".
#pragma once

#include <cstdint>

#include "device/bulk_copy.cuh"

namespace mortar::device {

/// As createpolicy.fractional.L2::evict_normal makes it for all lines: what was used least recently
/// goes first. kEvictFirst is in device/async_copy.cuh.
inline constexpr std::uint64_t kEvictNormal = 0x1000000000000000;

/// copy_bulk() by a policy.
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

}  // namespace mortar::device
