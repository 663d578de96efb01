// SPDX-License-Identifier: Apache-2.0
// What this build of the library can do.
#include <tvm/ffi/container/map.h>

#include <cstdint>
#include <string>

#include "convert.h"
#include "core/cpu_target.h"
#include "mortar/dynamic_conv.h"
#include "mortar/fp8_rmsnorm.h"
#include "mortar/lora.h"
#include "torch_objects.h"

namespace mortar::ffi {
namespace {

bool has_cuda() {
#if defined(MORTAR_HAS_CUDA)
  return true;
#else
  return false;
#endif
}

std::string cpu_target() { return mortar::cpu_target(); }

/// The limits of the public headers by name, for python/mortar/_limits.py.
tvm::ffi::Map<tvm::ffi::String, std::int64_t> limits() {
  return {{"memory_alignment", kMemoryAlignment},
          {"lora_max_slices", kLoraMaxSlices},
          {"lora_max_rank", kLoraMaxRank},
          {"lora_max_adapters", kLoraMaxAdapters},
          {"lora_max_tokens", kLoraMaxTokens},
          {"dynamic_conv_max_width", kDynamicConvMaxWidth},
          {"fp8_rmsnorm_max_hidden", kFp8RmsNormMaxHidden}};
}

}  // namespace
}  // namespace mortar::ffi

TVM_FFI_DLL_EXPORT_TYPED_FUNC(has_cuda, mortar::ffi::wrapped<mortar::ffi::has_cuda>)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cpu_target, mortar::ffi::wrapped<mortar::ffi::cpu_target>)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(limits, mortar::ffi::wrapped<mortar::ffi::limits>)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(lend_torch, mortar::ffi::wrapped<mortar::ffi::TorchHost::lend>)
