// SPDX-License-Identifier: Apache-2.0
// What this build of the library can do.
#include "convert.h"
#include "core/cpu_target.h"
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

}  // namespace
}  // namespace mortar::ffi

TVM_FFI_DLL_EXPORT_TYPED_FUNC(has_cuda, mortar::ffi::wrapped<mortar::ffi::has_cuda>)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cpu_target, mortar::ffi::wrapped<mortar::ffi::cpu_target>)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(lend_torch, mortar::ffi::wrapped<mortar::ffi::TorchHost::lend>)
