// SPDX-License-Identifier: Apache-2.0
// The devices that a test runs on, and the few memory calls that tests need on each.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "mortar/stream.h"
#include "mortar/tensor.h"

#if MORTAR_HAS_CUDA
#include <cuda_runtime.h>
#endif

namespace mortar::testing {

#if MORTAR_HAS_CUDA
inline void cuda_ok(cudaError_t code) {
  if (code != cudaSuccess) throw std::runtime_error(cudaGetErrorString(code));
}
#endif

/// True in a CUDA build on a machine with a GPU.
inline bool has_gpu() {
#if MORTAR_HAS_CUDA
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
#else
  return false;
#endif
}

/// The first GPU, where there is one.
inline std::vector<Device> gpus() {
  return has_gpu() ? std::vector<Device>{{DeviceType::kCUDA, 0}} : std::vector<Device>{};
}

/// The CPU, and the first GPU where there is one.
inline std::vector<Device> devices() {
  std::vector<Device> list{Device{}};
  if (has_gpu()) list.push_back(Device{DeviceType::kCUDA, 0});
  return list;
}

inline std::string device_label(Device device) {
  return device.type == DeviceType::kCPU ? "cpu" : "cuda";
}

/// Memory of a device, 256-byte aligned, freed with the last owner.
inline std::shared_ptr<void> device_memory(std::size_t bytes, Device device) {
  bytes = (bytes + 255) / 256 * 256 + 256;
#if MORTAR_HAS_CUDA
  if (device.type == DeviceType::kCUDA) {
    void* p = nullptr;
    cuda_ok(cudaMalloc(&p, bytes));
    return {p, [](void* q) { cudaFree(q); }};
  }
#endif
  if (device.type != DeviceType::kCPU) throw std::runtime_error("built without CUDA");
  return {std::aligned_alloc(256, bytes), std::free};
}

inline void copy_to_device(void* to, const void* from, std::size_t bytes, Device device) {
#if MORTAR_HAS_CUDA
  if (device.type == DeviceType::kCUDA) {
    cuda_ok(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice));
    return;
  }
#endif
  if (device.type == DeviceType::kCPU) std::memcpy(to, from, bytes);
}

/// Waits for all work of the device first.
inline void copy_to_host(void* to, const void* from, std::size_t bytes, Device device) {
#if MORTAR_HAS_CUDA
  if (device.type == DeviceType::kCUDA) {
    cuda_ok(cudaDeviceSynchronize());
    cuda_ok(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost));
    return;
  }
#endif
  if (device.type == DeviceType::kCPU) std::memcpy(to, from, bytes);
}

}  // namespace mortar::testing
