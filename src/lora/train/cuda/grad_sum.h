// SPDX-License-Identifier: Apache-2.0
// One gradient's partial sums, as a kernel that has threads to spare takes them to add.
#pragma once

#include <cstdint>

#include "lora/train/problem.h"

namespace mortar::lora::train::cuda {

/// dA or dB of an adapter's slice, of whole vectors (adds_vectors()): the sum over chunks of rows
/// of partials, in order.
struct GradSum {
  Matrix out;
  const float* partials = nullptr;  ///< [chunks][lines][dense]; null: there are none
  std::int64_t stride = 0;          ///< floats of a chunk
  std::int64_t columns = 0;
  /// Of dA the lines are ranks and `dense` is grad_stride(columns), of dB these are columns and
  /// rank columns.
  int dense = 0;
  int chunks = 0, ranks = 0;
  bool of_a = false, adds = false;
};

inline constexpr int kGradVector = 4;  ///< sums of a thread, neighbours in their gradient's rows

/// Whether a gradient's rows are dense and whole vectors; of dA they have `length` columns, of dB
/// so many ranks.
inline bool adds_vectors(const Matrix& grad, std::int64_t length) {
  const auto bytes = static_cast<std::uintptr_t>(kGradVector * dtype_size(grad.dtype));
  return grad.data == nullptr ||
         (grad.col_stride == 1 && grad.row_stride % kGradVector == 0 && length % kGradVector == 0 &&
          reinterpret_cast<std::uintptr_t>(grad.data) % bytes == 0);
}

}  // namespace mortar::lora::train::cuda
