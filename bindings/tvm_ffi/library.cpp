// SPDX-License-Identifier: Apache-2.0
// What this build of the library can do.
#include "convert.h"
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

}  // namespace
}  // namespace mortar::ffi

TVM_FFI_DLL_EXPORT_TYPED_FUNC(has_cuda, mortar::ffi::wrapped<mortar::ffi::has_cuda>)
TVM_FFI_DLL_EXPORT_TYPED_FUNC(lend_torch, mortar::ffi::wrapped<mortar::ffi::TorchHost::lend>)
