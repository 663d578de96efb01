// SPDX-License-Identifier: Apache-2.0
// Small workspaces that outlive a call, each with the graphs of such calls (device/launch_chain.h):
// of the 10 us of host time that a call may take, PyTorch's allocator takes 2.8 to give memory out
// and to take it back, and a second launch 1.6 more than a graph of both.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include "mortar/stream.h"
#include "mortar/tensor.h"

#if defined(MORTAR_HAS_CUDA)
#include <cuda_runtime_api.h>

#include "device/launch_chain.h"
#endif

namespace mortar::ffi {

/// Workspaces by the stream that used them last: its next call may write where that one may still
/// read, as it runs later. While a call has one, no other has it, so threads that share a stream do
/// not mix their slabs up. There are as many as streams, times the threads that call at the same
/// time; they are never freed.
class WorkspacePool {
 public:
  static constexpr std::int64_t kBytes = 4 << 20;  ///< an op may take that much whatever its size

  struct Workspace {
    int device;
    void* stream;
    void* memory;
#if defined(MORTAR_HAS_CUDA)
    device::LaunchChain* chain;
#endif
  };

  static WorkspacePool& get() {
    static auto* pool = new WorkspacePool;  // the driver may be gone when static objects end
    return *pool;
  }

  /// One on the device, the current one; nothing where no memory is left or the stream is being
  /// captured, as the graph may be replayed beside other work of the stream.
  std::optional<Workspace> take([[maybe_unused]] int device, [[maybe_unused]] Stream stream) {
#if defined(MORTAR_HAS_CUDA)
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    const auto handle = static_cast<cudaStream_t>(stream.handle);
    if (cudaStreamIsCapturing(handle, &capture) != cudaSuccess) {
      (void)cudaGetLastError();
      return {};
    }
    if (capture != cudaStreamCaptureStatusNone) return {};
    {
      const std::lock_guard lock(mutex_);
      for (Workspace& w : free_) {
        if (w.device == device && w.stream == stream.handle) {
          const Workspace taken = w;
          w = free_.back();
          free_.pop_back();
          return taken;
        }
      }
    }
    // Captures of other threads stay valid.
    auto mode = cudaStreamCaptureModeRelaxed;
    void* memory = nullptr;
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
    const bool made = cudaMalloc(&memory, kBytes) == cudaSuccess;
    if (!made) (void)cudaGetLastError();
    (void)cudaThreadExchangeStreamCaptureMode(&mode);
    if (made) return Workspace{device, stream.handle, memory, new device::LaunchChain};
#endif
    return {};
  }

  /// Everything that uses it has been queued on its stream.
  void give_back(const Workspace& workspace) {
    const std::lock_guard lock(mutex_);
    free_.push_back(workspace);
  }

 private:
  std::mutex mutex_;
  std::vector<Workspace> free_;
};

/// A workspace of the pool for the time of a call, whose launches it gathers until submit() if they
/// are to be `chained`.
class PooledWorkspace {
 public:
  PooledWorkspace(std::int64_t bytes, Device device, Stream stream, [[maybe_unused]] bool chained)
      : device_(device) {
    if (device.type != DeviceType::kCUDA || bytes > WorkspacePool::kBytes) return;
    workspace_ = WorkspacePool::get().take(device.index, stream);
#if defined(MORTAR_HAS_CUDA)
    if (workspace_.has_value() && chained) launches_.emplace(*workspace_->chain);
#endif
  }
  ~PooledWorkspace() {
#if defined(MORTAR_HAS_CUDA)
    launches_.reset();
#endif
    if (workspace_.has_value()) WorkspacePool::get().give_back(*workspace_);
  }
  PooledWorkspace(const PooledWorkspace&) = delete;
  PooledWorkspace& operator=(const PooledWorkspace&) = delete;

  /// Undefined where there is none.
  Tensor tensor() const {
    if (!workspace_.has_value()) return {};
    return Tensor(workspace_->memory, DType::kUInt8, {WorkspacePool::kBytes}, device_);
  }

  void submit([[maybe_unused]] const char* op) {
#if defined(MORTAR_HAS_CUDA)
    if (launches_.has_value()) launches_->submit(op);
#endif
  }

 private:
  Device device_;
  std::optional<WorkspacePool::Workspace> workspace_;
#if defined(MORTAR_HAS_CUDA)
  std::optional<device::ChainedLaunches> launches_;
#endif
};

}  // namespace mortar::ffi
