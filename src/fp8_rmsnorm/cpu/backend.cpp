// SPDX-License-Identifier: Apache-2.0
// The CPU backend's table. cpu/forward.cpp and cpu/backward.cpp hold the passes.
#include "fp8_rmsnorm/cpu/passes.h"

namespace mortar::fp8_rmsnorm::cpu {

const Backend kBackend = {forward,           backward,           quantize,
                          forward_workspace, backward_workspace, quantize_workspace};

}  // namespace mortar::fp8_rmsnorm::cpu
