// SPDX-License-Identifier: Apache-2.0
// Devices, memory, streams and graphs. Everything is done when it is asked for.
#include "runtime.h"

#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "memory.h"

struct CUgraph_st {
  std::vector<std::function<cudaError_t()>> work;
};
struct CUgraphExec_st {
  std::vector<std::function<cudaError_t()>> work;
};
struct CUstream_st {
  CUgraph_st* captured = nullptr;
};
struct CUevent_st {};

namespace emulator {
namespace {

thread_local cudaError_t last_error = cudaSuccess;

int number(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text ? std::atoi(text) : otherwise;
}

bool is_handle(cudaStream_t s) {
  return s != nullptr && s != cudaStreamLegacy && s != cudaStreamPerThread;
}

/// Whether the device's part of a copy may be touched.
bool reachable(const void* p, std::size_t bytes) {
  return !is_device(p) || allowed(reinterpret_cast<std::uint64_t>(p), bytes);
}

}  // namespace

cudaError_t enqueue(cudaStream_t stream, std::function<cudaError_t()> work) {
  if (is_handle(stream) && stream->captured != nullptr) {
    stream->captured->work.push_back(std::move(work));
    return cudaSuccess;
  }
  return work();
}
cudaError_t note(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}
const Device& this_device() {
  static const Device known = [] {
    static constexpr Device kDevices[] = {{80, "Emulated A100", 108, 164 << 10, 40 << 20},
                                          {90, "Emulated H200", 132, 228 << 10, 50 << 20}};
    const int arch = number("MORTAR_EMULATOR_ARCH", 90);
    for (const Device& d : kDevices) {
      if (d.arch == arch) return d;
    }
    std::fprintf(stderr, "emulator: MORTAR_EMULATOR_ARCH is 80 or 90, got %d\n", arch);
    std::abort();
  }();
  return known;
}
int num_sms() { return number("MORTAR_EMULATOR_SMS", this_device().sms); }

}  // namespace emulator

using namespace emulator;

extern "C" {

cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError() { return last_error; }
const char* cudaGetErrorName(cudaError_t error) {
  static thread_local std::string text;
  text = "cudaError " + std::to_string(static_cast<int>(error));
  return text.c_str();
}
const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorIllegalAddress:
      return "an illegal memory access was encountered";
    case cudaErrorInvalidDevice:
      return "invalid device ordinal";
    default:
      return cudaGetErrorName(error);
  }
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  return device == 0 ? cudaSuccess : note(cudaErrorInvalidDevice);
}
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (device != 0) return note(cudaErrorInvalidDevice);
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = num_sms();
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = this_device().arch / 10;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = this_device().arch % 10;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = this_device().most_smem();
      break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = this_device().sm_smem;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = 48 * 1024;
      break;
    case cudaDevAttrMaxThreadsPerBlock:
      *value = 1024;
      break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = 2048;
      break;
    case cudaDevAttrMaxBlocksPerMultiprocessor:
      *value = 32;
      break;
    case cudaDevAttrWarpSize:
      *value = 32;
      break;
    case cudaDevAttrL2CacheSize:
      *value = this_device().l2_bytes;
      break;
    case cudaDevAttrCooperativeLaunch:
      *value = 1;
      break;
    case cudaDevAttrClusterLaunch:
      *value = this_device().clusters();
      break;
    default:
      return note(cudaErrorInvalidValue);
  }
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  if (device != 0) return note(cudaErrorInvalidDevice);
  std::memset(p, 0, sizeof *p);
  std::strcpy(p->name, this_device().name);
  p->major = this_device().arch / 10;
  p->minor = this_device().arch % 10;
  p->multiProcessorCount = num_sms();
  p->sharedMemPerBlockOptin = this_device().most_smem();
  p->sharedMemPerMultiprocessor = this_device().sm_smem;
  p->sharedMemPerBlock = 48 * 1024;
  p->l2CacheSize = this_device().l2_bytes;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 2048;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** entry, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  *entry = nullptr;
  if (std::strcmp(name, "cuLaunchKernelEx") == 0) {
    *entry = reinterpret_cast<void*>(&emulated_cuLaunchKernelEx);
  } else if (std::strcmp(name, "cuTensorMapEncodeTiled") == 0) {
    *entry = reinterpret_cast<void*>(&emulated_cuTensorMapEncodeTiled);
  }
  if (found) *found = *entry ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** p, std::size_t bytes) {
  *p = device_malloc(bytes);
  return *p ? cudaSuccess : note(cudaErrorMemoryAllocation);
}
cudaError_t cudaFree(void* p) { return device_free(p) ? cudaSuccess : note(cudaErrorInvalidValue); }
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  if (!reachable(to, bytes) || !reachable(from, bytes)) return note(cudaErrorInvalidValue);
  return note(enqueue(stream, [=] {
    std::memmove(to, from, bytes);
    return cudaSuccess;
  }));
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
  return cudaMemcpyAsync(to, from, bytes, kind, nullptr);
}
cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t stream) {
  if (!reachable(to, bytes)) return note(cudaErrorInvalidValue);
  return note(enqueue(stream, [=] {
    std::memset(to, value, bytes);
    return cudaSuccess;
  }));
}
cudaError_t cudaMemset(void* to, int value, std::size_t bytes) {
  return cudaMemsetAsync(to, value, bytes, nullptr);
}
cudaError_t cudaMemGetInfo(std::size_t* unused, std::size_t* total) {
  *total = std::size_t{16} << 30;
  *unused = *total - std::min(*total, device_bytes_in_use());
  return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  *stream = new CUstream_st;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  return cudaStreamCreate(stream);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (is_handle(stream) && stream->captured != nullptr) {
    return note(cudaErrorStreamCaptureUnsupported);
  }
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = is_handle(stream) && stream->captured ? cudaStreamCaptureStatusActive
                                                  : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  if (!is_handle(stream)) return note(cudaErrorStreamCaptureUnsupported);
  stream->captured = new CUgraph_st;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  *graph = stream->captured;
  stream->captured = nullptr;
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long) {
  *made = new CUgraphExec_st{graph->work};
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t) {
  for (const auto& work : graph->work) {
    if (const cudaError_t error = work(); error != cudaSuccess) return note(error);
  }
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  delete graph;
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = new CUevent_st;
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  *milliseconds = 1;
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }

}  // extern "C"
