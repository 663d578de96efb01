// SPDX-License-Identifier: Apache-2.0
// Small workspaces that outlive a call: taking one from PyTorch's allocator and giving it back
// costs the host 2.8 us of the 10 that a call may take.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "mortar/stream.h"
#include "mortar/tensor.h"

#if defined(MORTAR_HAS_CUDA)
#include <cuda_runtime_api.h>
#endif

namespace mortar::ffi {

/// Workspaces by the stream that used them last: its next call may write where that one may still
/// read, as it runs later. While a call has one, no other has it, so threads that share a stream do
/// not mix their slabs up. There are as many as streams, times the threads that call at the same
/// time; they are never freed.
class WorkspacePool {
 public:
  static constexpr std::int64_t kBytes = 4 << 20;  ///< an op may take that much whatever its size

  static WorkspacePool& get() {
    static auto* pool = new WorkspacePool;  // the driver may be gone when static objects end
    return *pool;
  }

  /// Memory on the device, the current one, or null: none is left, or the stream is being captured,
  /// whose graph may be replayed beside other work of the stream.
  void* take([[maybe_unused]] int device, [[maybe_unused]] Stream stream) {
#if defined(MORTAR_HAS_CUDA)
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    const auto handle = static_cast<cudaStream_t>(stream.handle);
    if (cudaStreamIsCapturing(handle, &capture) != cudaSuccess) {
      (void)cudaGetLastError();
      return nullptr;
    }
    if (capture != cudaStreamCaptureStatusNone) return nullptr;
    {
      const std::lock_guard lock(mutex_);
      for (Entry& entry : free_) {
        if (entry.device == device && entry.stream == stream.handle) {
          void* memory = entry.memory;
          entry = free_.back();
          free_.pop_back();
          return memory;
        }
      }
    }
    // Captures of other threads stay valid.
    auto mode = cudaStreamCaptureModeRelaxed;
    void* memory = nullptr;
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
    if (cudaMalloc(&memory, kBytes) != cudaSuccess) {
      (void)cudaGetLastError();
      memory = nullptr;
    }
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
    return memory;
#else
    return nullptr;
#endif
  }

  /// Everything that uses the memory has been queued on the stream.
  void give_back(int device, Stream stream, void* memory) {
    const std::lock_guard lock(mutex_);
    free_.push_back({device, stream.handle, memory});
  }

 private:
  struct Entry {
    int device;
    void* stream;
    void* memory;
  };
  std::mutex mutex_;
  std::vector<Entry> free_;
};

/// A workspace of the pool for the time of a call.
class PooledBytes {
 public:
  PooledBytes(std::int64_t bytes, Device device, Stream stream) : device_(device), stream_(stream) {
    if (device.type == DeviceType::kCUDA && bytes <= WorkspacePool::kBytes) {
      memory_ = WorkspacePool::get().take(device.index, stream);
    }
  }
  ~PooledBytes() {
    if (memory_ != nullptr) WorkspacePool::get().give_back(device_.index, stream_, memory_);
  }
  PooledBytes(const PooledBytes&) = delete;
  PooledBytes& operator=(const PooledBytes&) = delete;

  /// Undefined where there is none.
  Tensor tensor() const {
    if (memory_ == nullptr) return {};
    return Tensor(memory_, DType::kUInt8, {WorkspacePool::kBytes}, device_);
  }

 private:
  Device device_;
  Stream stream_;
  void* memory_ = nullptr;
};

}  // namespace mortar::ffi
