// SPDX-License-Identifier: Apache-2.0
// Registration and launches of kernels, and tensor maps.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>

#include "machine.h"
#include "memory.h"
#include "module.h"
#include "runtime.h"
#include "tensor_map.h"

namespace emulator {
namespace {

std::recursive_mutex device_mutex;
u64 grid_workspace = 0;
unsigned long launches = 0;

struct Call {
  Kernel* kernel;
  std::array<unsigned, 3> grid, block, cluster{1, 1, 1};
  unsigned smem = 0;
  bool cooperative = false, early = false;
  std::vector<unsigned char> params;
};

CUresult refuse(const Kernel& kernel, const char* what, CUresult code) {
  std::fprintf(stderr, "emulator: %s: the launch has %s\n", kernel.name.c_str(), what);
  return code;
}

CUresult check_call(const Call& c) {
  const Kernel& k = *c.kernel;
  const unsigned threads = c.block[0] * c.block[1] * c.block[2];
  if (threads == 0 || threads > 1024) {
    return refuse(k, "no such number of threads", CUDA_ERROR_INVALID_VALUE);
  }
  if (threads > k.max_threads) {
    return refuse(k, "more threads than its launch bounds", CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES);
  }
  if (c.grid[0] == 0 || c.grid[1] == 0 || c.grid[2] == 0 || c.grid[0] > 0x7fffffff ||
      c.grid[1] > 65535 || c.grid[2] > 65535) {
    return refuse(k, "no such grid", CUDA_ERROR_INVALID_VALUE);
  }
  if (c.smem > k.max_dynamic_smem ||
      c.smem + k.static_smem > static_cast<unsigned>(this_device().most_smem())) {
    return refuse(k, "more shared memory than allowed", CUDA_ERROR_INVALID_VALUE);
  }
  unsigned in_cluster = 1;
  for (int d = 0; d < 3; ++d) {
    in_cluster *= c.cluster[d];
    if (c.grid[d] % c.cluster[d] != 0) {
      return refuse(k, "a grid that is not whole clusters", CUDA_ERROR_INVALID_CLUSTER_SIZE);
    }
  }
  if (!this_device().clusters() && (in_cluster > 1 || c.early)) {
    return refuse(k, "a cluster or an early start, which the device does not know",
                  CUDA_ERROR_INVALID_VALUE);
  }
  if (in_cluster > k.max_cluster) {
    return refuse(k, "too large a cluster", CUDA_ERROR_INVALID_CLUSTER_SIZE);
  }
  const unsigned resident =
      std::min({2048 / ((threads + 31) / 32 * 32),
                static_cast<unsigned>(this_device().sm_smem) / (c.smem + k.static_smem + 1024),
                32u}) *
      static_cast<unsigned>(num_sms());
  if (c.cooperative && c.grid[0] * c.grid[1] * c.grid[2] > resident) {
    return refuse(k, "too many blocks to cooperate", CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE);
  }
  return CUDA_SUCCESS;
}

cudaError_t run(const Call& c) {
  const std::lock_guard lock(device_mutex);
  static const char* shown = std::getenv("MORTAR_EMULATOR_TRACE");
  if (shown != nullptr) {
    std::fprintf(stderr, "emulator: launch %lu: %s grid (%u,%u,%u) block %u smem %u\n", ++launches,
                 c.kernel->name.c_str(), c.grid[0], c.grid[1], c.grid[2], c.block[0], c.smem);
  }
  LaunchRequest request;
  request.name = c.kernel->name;
  request.entry = c.kernel->entry;
  request.grid = c.grid;
  request.block = c.block;
  request.cluster = c.cluster;
  request.static_smem = c.kernel->static_smem;
  request.dynamic_smem = c.smem;
  request.cooperative = c.cooperative;
  request.symbols = c.kernel->symbols.data();
  request.describe = [&](unsigned at) { return c.kernel->describe(at); };
  void* params = device_malloc(std::max<std::size_t>(c.params.size(), 1));
  std::memcpy(params, c.params.data(), c.params.size());
  request.params = reinterpret_cast<u64>(params);
  grid_workspace = 0;
  void* workspace = nullptr;
  if (c.cooperative) {
    workspace = device_malloc(4096);
    std::memset(workspace, 0, 4096);
    grid_workspace = reinterpret_cast<u64>(workspace);
  }
  const std::string failure = run_grid(request);
  device_free(params);
  device_free(workspace);
  return failure.empty() ? cudaSuccess : cudaErrorIllegalAddress;
}

std::vector<unsigned char> gather(const Kernel& kernel, void** arguments) {
  std::vector<unsigned char> bytes(kernel.param_bytes);
  for (std::size_t i = 0; i < kernel.params.size(); ++i) {
    std::memcpy(bytes.data() + kernel.params[i].first, arguments[i], kernel.params[i].second);
  }
  return bytes;
}

CUresult launch(Call call, CUstream stream) {
  if (const CUresult bad = check_call(call); bad != CUDA_SUCCESS) return bad;
  const auto shared = std::make_shared<Call>(std::move(call));
  return static_cast<CUresult>(enqueue(stream, [shared] { return run(*shared); }));
}

struct Configuration {
  dim3 grid, block;
  std::size_t smem;
  cudaStream_t stream;
};
thread_local std::vector<Configuration> configurations;

}  // namespace

CUresult emulated_cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** params,
                                   void** extra) {
  if (function == nullptr || extra != nullptr) return CUDA_ERROR_INVALID_VALUE;
  Call call;
  call.kernel = reinterpret_cast<Kernel*>(function);
  call.grid = {config->gridDimX, config->gridDimY, config->gridDimZ};
  call.block = {config->blockDimX, config->blockDimY, config->blockDimZ};
  call.smem = config->sharedMemBytes;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const CUlaunchAttribute& a = config->attrs[i];
    if (a.id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) {
      call.cluster = {a.value.clusterDim.x, a.value.clusterDim.y, a.value.clusterDim.z};
    } else if (a.id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE) {
      call.cooperative = a.value.cooperative != 0;
    } else if (a.id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION) {
      call.early = a.value.programmaticStreamSerializationAllowed != 0;
    }
  }
  call.params = gather(*call.kernel, params);
  return launch(std::move(call), config->hStream);
}

static CUresult refuse_map(const char* why) {
  std::fprintf(stderr, "emulator: a tensor map is refused: %s\n", why);
  return CUDA_ERROR_INVALID_VALUE;
}

CUresult emulated_cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type,
                                         cuuint32_t rank, void* base, const cuuint64_t* dims,
                                         const cuuint64_t* strides, const cuuint32_t* box,
                                         const cuuint32_t* element_strides,
                                         CUtensorMapInterleave interleave,
                                         CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                                         CUtensorMapFloatOOBfill) {
  static constexpr u8 kBytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};
  if (reinterpret_cast<u64>(map) % 64 != 0) return refuse_map("a misaligned map");
  if (rank < 1 || rank > 5) return refuse_map("its rank");
  if (reinterpret_cast<u64>(base) % 16 != 0) return refuse_map("a misaligned tensor");
  if (interleave != CU_TENSOR_MAP_INTERLEAVE_NONE || static_cast<unsigned>(type) >= sizeof kBytes) {
    return refuse_map("an interleave or type that is not emulated");
  }
  TensorMap out{};
  out.magic = TensorMap::kMagic;
  out.base = reinterpret_cast<u64>(base);
  out.rank = static_cast<u8>(rank);
  out.element_bytes = kBytes[type];
  out.swizzle = static_cast<u8>(swizzle);
  const u64 span = u64{box[0]} * out.element_bytes;
  if (span % 16 != 0 || (swizzle != 0 && span > (16ull << swizzle)) || swizzle > 3) {
    return refuse_map("its box's row");
  }
  for (unsigned d = 0; d < rank; ++d) {
    if (dims[d] == 0 || dims[d] > 1ull << 32 || box[d] == 0 || box[d] > 256 ||
        element_strides[d] != 1) {
      return refuse_map("its sizes");
    }
    out.dims[d] = dims[d];
    out.box[d] = box[d];
    if (d == 0) continue;
    if (strides[d - 1] % 16 != 0 || strides[d - 1] >= 1ull << 40) return refuse_map("its strides");
    out.strides[d - 1] = strides[d - 1];
  }
  std::memset(map, 0, sizeof *map);
  std::memcpy(map, &out, sizeof out);
  return CUDA_SUCCESS;
}

}  // namespace emulator

using namespace emulator;

u32 emu_envreg(u32 number) {
  return static_cast<u32>(number == 2 ? grid_workspace : grid_workspace >> 32);
}
u64 emu_clock() {
  static u64 ticks = 0;
  return ticks += 100;
}

extern "C" {

void** __cudaRegisterFatBinary(void* wrapper) {
  static const bool mapped = (map_memory(), true);
  (void)mapped;
  struct Wrapper {
    int magic, version;
    const void* data;
    void* file;
  };
  return reinterpret_cast<void**>(const_cast<void*>(static_cast<Wrapper*>(wrapper)->data));
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void** fatbin, const char* host, char*, const char* name, int, uint3*,
                            uint3*, dim3*, dim3*, int*) {
  register_kernel(fatbin, host, name);
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, std::size_t, int, int) {}
char __cudaInitModule(void**) { return 1; }

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, std::size_t smem, CUstream_st* stream) {
  configurations.push_back({grid, block, smem, stream});
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, std::size_t* smem, void* stream) {
  const Configuration c = configurations.back();
  configurations.pop_back();
  *grid = c.grid;
  *block = c.block;
  *smem = c.smem;
  *static_cast<cudaStream_t*>(stream) = c.stream;
  return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(find_kernel(function));
  return *kernel ? cudaSuccess : note(cudaErrorInvalidDeviceFunction);
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments,
                               std::size_t smem, cudaStream_t stream) {
  if (kernel == nullptr) return note(cudaErrorInvalidDeviceFunction);
  Call call;
  call.kernel = reinterpret_cast<Kernel*>(kernel);
  call.grid = {grid.x, grid.y, grid.z};
  call.block = {block.x, block.y, block.z};
  call.smem = static_cast<unsigned>(smem);
  call.params = gather(*call.kernel, arguments);
  return note(static_cast<cudaError_t>(launch(std::move(call), stream)));
}
cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments,
                             std::size_t smem, cudaStream_t stream) {
  return __cudaLaunchKernel(reinterpret_cast<cudaKernel_t>(find_kernel(function)), grid, block,
                            arguments, smem, stream);
}

cudaError_t cudaGetFuncBySymbol(cudaFunction_t* function, const void* symbol) {
  *function = reinterpret_cast<cudaFunction_t>(find_kernel(symbol));
  return *function ? cudaSuccess : note(cudaErrorInvalidDeviceFunction);
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* symbol) {
  const Kernel* kernel = find_kernel(symbol);
  if (kernel == nullptr) return note(cudaErrorInvalidDeviceFunction);
  *attributes = {};
  attributes->sharedSizeBytes = kernel->static_smem;
  attributes->maxThreadsPerBlock = static_cast<int>(kernel->max_threads);
  attributes->numRegs = 32;
  attributes->maxDynamicSharedSizeBytes = static_cast<int>(kernel->max_dynamic_smem);
  attributes->ptxVersion = attributes->binaryVersion = this_device().arch;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void* symbol, cudaFuncAttribute attribute, int value) {
  Kernel* kernel = find_kernel(symbol);
  if (kernel == nullptr) return note(cudaErrorInvalidDeviceFunction);
  if (attribute == cudaFuncAttributeNonPortableClusterSizeAllowed) {
    kernel->max_cluster = value != 0 ? 16 : 8;
  }
  if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) {
    if (value < 0 || value + static_cast<int>(kernel->static_smem) > this_device().most_smem()) {
      return note(cudaErrorInvalidValue);
    }
    kernel->max_dynamic_smem = static_cast<unsigned>(value);
  }
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* symbol,
                                                                   int threads, std::size_t smem,
                                                                   unsigned) {
  const Kernel* kernel = find_kernel(symbol);
  if (kernel == nullptr) return note(cudaErrorInvalidDeviceFunction);
  *blocks = std::min<int>(
      {2048 / ((threads + 31) / 32 * 32),
       static_cast<int>(this_device().sm_smem / (smem + kernel->static_smem + 1024)), 32});
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* symbol,
                                                          int threads, std::size_t smem) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, symbol, threads, smem, 0);
}

}  // extern "C"
