// SPDX-License-Identifier: Apache-2.0
// Launches of clusters that are larger than those every device has.
#pragma once

#include "device/launch.cuh"

namespace mortar::device {

/// Lets kKernel run in clusters of more than eight CTAs, where the device has them.
template <auto kKernel>
void allow_large_clusters(const char* op, const DeviceInfo& device) {
  static std::array<std::atomic<bool>, kMaxDevices> done{};
  if (device.arch < 90 || done[device.index].load(std::memory_order_relaxed)) return;
  cuda_check(cudaFuncSetAttribute(kKernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), op);
  done[device.index].store(true, std::memory_order_relaxed);
}

}  // namespace mortar::device
