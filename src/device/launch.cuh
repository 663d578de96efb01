// SPDX-License-Identifier: Apache-2.0
// Checked kernel launches: one call that opts in to large shared memory and sets the attributes.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>

#include "core/check.h"
#include "device/driver.h"
#include "mortar/stream.h"

namespace mortar::device {

inline constexpr int kMaxDevices = 64;
inline constexpr int kSystemSmem = 1024;

/// What launch choices depend on; read once per device.
struct DeviceInfo {
  int index = 0;
  int num_sms = 0;
  int arch = 0;      ///< 10 * major + minor
  int max_smem = 0;  ///< bytes a CTA may opt in to
  int sm_smem = 0;   ///< bytes of an SM, of which the system keeps kSystemSmem for each CTA
  int l2_bytes = 0;
};

inline DeviceInfo read_device_info(int index) {
  DeviceInfo info;
  info.index = index;
  int major = 0, minor = 0;
  cuda_check(cudaDeviceGetAttribute(&info.num_sms, cudaDevAttrMultiProcessorCount, index),
             "device");
  cuda_check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index), "device");
  cuda_check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index), "device");
  cuda_check(cudaDeviceGetAttribute(&info.l2_bytes, cudaDevAttrL2CacheSize, index), "device");
  cuda_check(cudaDeviceGetAttribute(&info.max_smem, cudaDevAttrMaxSharedMemoryPerBlockOptin, index),
             "device");
  cuda_check(
      cudaDeviceGetAttribute(&info.sm_smem, cudaDevAttrMaxSharedMemoryPerMultiprocessor, index),
      "device");
  info.arch = 10 * major + minor;
  return info;
}

/// Of a device by its index, without a call of CUDA but for the first time.
inline const DeviceInfo& device_info(int index) {
  static std::array<std::atomic<const DeviceInfo*>, kMaxDevices> cache{};
  check(index < kMaxDevices, "mortar: at most ", kMaxDevices, " CUDA devices, got index ", index);
  const DeviceInfo* info = cache[index].load(std::memory_order_acquire);
  if (info == nullptr) {
    info = new DeviceInfo(read_device_info(index));  // lives as long as the process
    cache[index].store(info, std::memory_order_release);
  }
  return *info;
}

/// The calling thread's current device.
inline const DeviceInfo& current_device() {
  int index = 0;
  cuda_check(cudaGetDevice(&index), "device");
  return device_info(index);
}

struct Launch {
  dim3 grid;
  unsigned threads = 0;
  std::size_t smem = 0;  ///< dynamic shared memory, bytes
  int per_sm = 0;        ///< CTAs that share an SM's shared memory evenly; 0: as many as fit
  unsigned cluster_x = 1, cluster_y = 1;  ///< CTAs that form a cluster (sm_90 and newer)
  Stream stream;
  bool pdl = false;          ///< may start before the predecessor ends (sm_90 and newer)
  bool cooperative = false;  ///< all CTAs resident at once
  bool carve_out = false;    ///< SMs have all the shared memory they can: room for another kernel
};

/// The driver's handle of kKernel on a device.
template <auto kKernel>
CUfunction function_of(const char* op, const DeviceInfo& device) {
  static std::array<std::atomic<CUfunction>, kMaxDevices> cache{};
  CUfunction function = cache[device.index].load(std::memory_order_relaxed);
  if (function == nullptr) {
    cuda_check(cudaGetFuncBySymbol(&function, reinterpret_cast<const void*>(kKernel)), op);
    cache[device.index].store(function, std::memory_order_relaxed);
  }
  return function;
}

/// Dynamic shared memory that a CTA of kKernel may have beside its static, bytes. Lets it have that
/// much: past 48 KB a kernel must opt in.
template <auto kKernel>
int most_smem(const char* op, const DeviceInfo& device) {
  static std::array<std::atomic<int>, kMaxDevices> cache{};
  int most = cache[device.index].load(std::memory_order_relaxed);
  if (most == 0) {
    cudaFuncAttributes attributes;
    cuda_check(cudaFuncGetAttributes(&attributes, kKernel), op);
    most = device.max_smem - static_cast<int>(attributes.sharedSizeBytes);
    cuda_check(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most),
               op);
    cache[device.index].store(most, std::memory_order_relaxed);
  }
  return most;
}

/// Whether a CTA of kKernel may have that much dynamic shared memory on the current device.
template <auto kKernel>
bool fits(const char* op, std::size_t smem) {
  return smem <= static_cast<std::size_t>(most_smem<kKernel>(op, current_device()));
}

/// SMs that kKernel runs on divide their memory with the least L1.
template <auto kKernel>
void carve_out(const char* op, const DeviceInfo& device) {
  static std::array<std::atomic<bool>, kMaxDevices> done{};
  if (done[device.index].load(std::memory_order_relaxed)) return;
  cuda_check(cudaFuncSetAttribute(kKernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                  cudaSharedmemCarveoutMaxShared),
             op);
  done[device.index].store(true, std::memory_order_relaxed);
}

/// Launches kKernel(params). An empty grid launches nothing.
template <auto kKernel, class Params>
void launch(const char* op, const Launch& l, const Params& params) {
  if (l.grid.x == 0 || l.grid.y == 0 || l.grid.z == 0) return;
  const DeviceInfo& device = current_device();
  const int most = most_smem<kKernel>(op, device);
  int smem = static_cast<int>(l.smem);
  check(smem <= most, op, ": needs ", smem, " bytes of shared memory a block for these sizes, the ",
        "device has ", most);
  if (l.per_sm > 0) {
    const int taken = device.max_smem - most + kSystemSmem;  // beside the dynamic
    smem = std::max(smem, std::min(most, device.sm_smem / l.per_sm - taken));
  }
  if (l.carve_out) carve_out<kKernel>(op, device);
  CUlaunchAttribute attributes[3];
  CUlaunchConfig config{};
  config.gridDimX = l.grid.x;
  config.gridDimY = l.grid.y;
  config.gridDimZ = l.grid.z;
  config.blockDimX = l.threads;
  config.blockDimY = config.blockDimZ = 1;
  config.sharedMemBytes = static_cast<unsigned>(smem);
  config.hStream = static_cast<CUstream>(l.stream.handle);
  config.attrs = attributes;
  if (l.pdl && device.arch >= 90) {
    attributes[config.numAttrs].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attributes[config.numAttrs++].value.programmaticStreamSerializationAllowed = 1;
  }
  if (l.cooperative) {
    attributes[config.numAttrs].id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
    attributes[config.numAttrs++].value.cooperative = 1;
  }
  if (l.cluster_x * l.cluster_y > 1) {
    attributes[config.numAttrs].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    attributes[config.numAttrs].value.clusterDim.x = l.cluster_x;
    attributes[config.numAttrs].value.clusterDim.y = l.cluster_y;
    attributes[config.numAttrs++].value.clusterDim.z = 1;
  }
  const CUfunction function = function_of<kKernel>(op, device);
  void* arguments[] = {const_cast<Params*>(&params)};
  CUresult result = Driver::get().launch(&config, function, arguments, nullptr);
  if (result == CUDA_ERROR_INVALID_CONTEXT) [[unlikely]] {
    // A thread that has used no device yet has no context; this gives it one.
    cuda_check(cudaSetDevice(device.index), op);
    result = Driver::get().launch(&config, function, arguments, nullptr);
  }
  cuda_check(result, op);
}

}  // namespace mortar::device
