// SPDX-License-Identifier: Apache-2.0
// Checked kernel launches: one call that opts in to large shared memory and sets the attributes.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <cstddef>

#include "core/check.h"
#include "mortar/stream.h"

namespace mortar::device {

inline constexpr int kMaxDevices = 64;

inline void cuda_check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) [[unlikely]] {
    cudaGetLastError();  // clears it, so that the next call does not report it again
    fail(ErrorKind::kRuntime, concat(what, ": CUDA failed with ", cudaGetErrorString(status)));
  }
}

/// What launch choices depend on; read once per device.
struct DeviceInfo {
  int index = 0;
  int num_sms = 0;
  int arch = 0;      ///< 10 * major + minor
  int max_smem = 0;  ///< bytes a CTA may opt in to
};

inline DeviceInfo read_device_info(int index) {
  DeviceInfo info;
  info.index = index;
  int major = 0, minor = 0;
  cuda_check(cudaDeviceGetAttribute(&info.num_sms, cudaDevAttrMultiProcessorCount, index),
             "device");
  cuda_check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index), "device");
  cuda_check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index), "device");
  cuda_check(cudaDeviceGetAttribute(&info.max_smem, cudaDevAttrMaxSharedMemoryPerBlockOptin, index),
             "device");
  info.arch = 10 * major + minor;
  return info;
}

/// The calling thread's current device.
inline const DeviceInfo& current_device() {
  static std::array<std::atomic<const DeviceInfo*>, kMaxDevices> cache{};
  int index = 0;
  cuda_check(cudaGetDevice(&index), "device");
  check(index < kMaxDevices, "mortar: at most ", kMaxDevices, " CUDA devices, got index ", index);
  const DeviceInfo* info = cache[index].load(std::memory_order_acquire);
  if (info == nullptr) {
    info = new DeviceInfo(read_device_info(index));  // lives as long as the process
    cache[index].store(info, std::memory_order_release);
  }
  return *info;
}

struct Launch {
  dim3 grid;
  unsigned threads = 0;
  std::size_t smem = 0;    ///< dynamic shared memory, bytes
  unsigned cluster_y = 1;  ///< CTAs along y that form a cluster (sm_90 and newer)
  Stream stream;
  bool pdl = false;          ///< may start before the predecessor ends (sm_90 and newer)
  bool cooperative = false;  ///< all CTAs resident at once
};

/// Launches kKernel(params). An empty grid launches nothing.
template <auto kKernel, class Params>
void launch(const char* op, const Launch& l, const Params& params) {
  if (l.grid.x == 0 || l.grid.y == 0 || l.grid.z == 0) return;
  const DeviceInfo& device = current_device();
  static std::array<std::atomic<bool>, kMaxDevices> opted_in{};
  // Past 48 KB a kernel must opt in; its static shared memory, a few KB, counts too.
  if (l.smem > 32 * 1024 && !opted_in[device.index].load(std::memory_order_relaxed)) {
    cudaFuncAttributes attributes;
    cuda_check(cudaFuncGetAttributes(&attributes, kKernel), op);
    const int most = device.max_smem - static_cast<int>(attributes.sharedSizeBytes);
    cuda_check(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most),
               op);
    opted_in[device.index].store(true, std::memory_order_relaxed);
  }
  cudaLaunchAttribute attributes[3];
  cudaLaunchConfig_t config{};
  config.gridDim = l.grid;
  config.blockDim = dim3(l.threads);
  config.dynamicSmemBytes = l.smem;
  config.stream = static_cast<cudaStream_t>(l.stream.handle);
  config.attrs = attributes;
  if (l.pdl && device.arch >= 90) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (l.cooperative) {
    attributes[config.numAttrs].id = cudaLaunchAttributeCooperative;
    attributes[config.numAttrs++].val.cooperative = 1;
  }
  if (l.cluster_y > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs].val.clusterDim.x = 1;
    attributes[config.numAttrs].val.clusterDim.y = l.cluster_y;
    attributes[config.numAttrs++].val.clusterDim.z = 1;
  }
  cuda_check(cudaLaunchKernelEx(&config, kKernel, params), op);
}

}  // namespace mortar::device
