// SPDX-License-Identifier: Apache-2.0
// What the parts of the emulated runtime share.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <functional>

namespace emulator {

/// What differs between the devices that are emulated.
struct Device {
  int arch;  ///< 10 * major + minor, of MORTAR_EMULATOR_ARCH
  const char* name;
  int sms, sm_smem, l2_bytes;
  int most_smem() const { return sm_smem - 1024; }  ///< of a block
  bool clusters() const { return arch >= 90; }      ///< and launches that start early
};
const Device& this_device();

/// Does it now, or when the graph is launched that the stream captures.
cudaError_t enqueue(cudaStream_t stream, std::function<cudaError_t()> work);
/// Keeps an error for cudaGetLastError.
cudaError_t note(cudaError_t error);
int num_sms();

extern "C" CUresult emulated_cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function,
                                              void** params, void** extra);
extern "C" CUresult emulated_cuTensorMapEncodeTiled(
    CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* base, const cuuint64_t* dims,
    const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* element_strides,
    CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
    CUtensorMapFloatOOBfill fill);

}  // namespace emulator
