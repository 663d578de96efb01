// SPDX-License-Identifier: Apache-2.0
// The one choice of a backend, for every family.
#pragma once

#include "core/check.h"

namespace mortar {

/// The family's table of functions for tensors on `device`. `kCuda` is declared in every build but
/// defined only in those with CUDA; others do not use it and refuse a CUDA tensor: a type error.
template <const auto& kCpu, const auto& kCuda>
const auto& choose_backend([[maybe_unused]] const ArgCheck& arg, Device device) {
  if (device.type == DeviceType::kCPU) return kCpu;
#if MORTAR_HAS_CUDA
  return kCuda;
#else
  arg.fail_without_cuda(device);
#endif
}

}  // namespace mortar
