// SPDX-License-Identifier: Apache-2.0
// Checked calls of CUDA, and the driver's functions, which the library does not link.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "core/check.h"

namespace mortar::device {

inline void cuda_check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) [[unlikely]] {
    cudaGetLastError();  // clears it, so that the next call does not report it again
    fail(ErrorKind::kRuntime, concat(what, ": CUDA failed with ", cudaGetErrorString(status)));
  }
}
/// The runtime's numbers are the driver's.
inline void cuda_check(CUresult status, const char* what) {
  cuda_check(static_cast<cudaError_t>(status), what);
}

/// Looked up once. A launch through the runtime takes the host 0.1 us longer, with 1,000 bytes of
/// parameters 0.5 us.
struct Driver {
  decltype(&cuLaunchKernelEx) launch;
  decltype(&cuTensorMapEncodeTiled) encode_tensor_map;

  static const Driver& get() {
    static const Driver driver = [] {
      Driver d{};
      find(d.launch, "cuLaunchKernelEx");
      find(d.encode_tensor_map, "cuTensorMapEncodeTiled");
      return d;
    }();
    return driver;
  }

 private:
  template <class Function>
  static void find(Function& function, const char* name) {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
    cuda_check(cudaGetDriverEntryPointByVersion(name, &entry, 12000, cudaEnableDefault, &found),
               "device");
    check(found == cudaDriverEntryPointSuccess, "device: the driver has no ", name);
    function = reinterpret_cast<Function>(entry);
  }
};

}  // namespace mortar::device
