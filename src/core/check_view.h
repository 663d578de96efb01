// SPDX-License-Identifier: Apache-2.0
// What is asked of every view before its sizes are counted with and its memory is touched.
#pragma once

#include <cstdint>

#include "core/check.h"

namespace mortar {

/// Throws if a size is negative. Sizes alone: workspace queries take views without memory.
inline void check_extents(const ArgCheck& arg, const Tensor& t, const char* name) {
  for (int d = 0; d < t.ndim; ++d) {
    check(t.shape[d] >= 0, arg.op(), ": ", name, " must have sizes of 0 or more, got shape ",
          shape_string(t));
  }
}

/// Throws if a size is negative, or if there are elements but no memory.
inline void check_memory(const ArgCheck& arg, const Tensor& t, const char* name) {
  check_extents(arg, t, name);
  if (t.data != nullptr) [[likely]]
    return;
  check(!t.defined() || t.numel() == 0, arg.op(), ": ", name,
        " must have an address for its elements, got null for shape ", shape_string(t));
}

}  // namespace mortar
