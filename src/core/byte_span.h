// SPDX-License-Identifier: Apache-2.0
// The bytes that a view may touch.
#pragma once

#include <cstdint>

#include "mortar/tensor.h"

namespace mortar {

/// Bytes [first, last).
struct ByteSpan {
  std::uintptr_t first = 0, last = 0;

  bool empty() const { return first == last; }
  bool meets(const ByteSpan& other) const {
    return !empty() && !other.empty() && first < other.last && other.first < last;
  }
};

inline ByteSpan byte_span(const Tensor& t) {
  const auto base = reinterpret_cast<std::uintptr_t>(t.data);
  std::int64_t low = 0, high = 0;
  for (int d = 0; d < t.ndim; ++d) {
    if (t.shape[d] == 0) return {base, base};
    const std::int64_t reach = (t.shape[d] - 1) * t.strides[d];
    (reach < 0 ? low : high) += reach;
  }
  const std::int64_t size = dtype_size(t.dtype);
  return {base + low * size, base + (high + 1) * size};
}

}  // namespace mortar
