// SPDX-License-Identifier: Apache-2.0
// What the two passes of the CPU backend share: how rows are split up, where the workspace's pieces
// lie, and the addresses of elements.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "fp8_rmsnorm/cpu/row_kernels.h"
#include "fp8_rmsnorm/problem.h"

namespace mortar::fp8_rmsnorm::cpu {

/// Rows in at most 64 chunks of whole blocks of 16, by their number alone. dw is summed row by row
/// within a block, block by block within a chunk, chunk by chunk at the end: a fixed tree, whatever
/// the number of threads.
struct RowChunks {
  static constexpr std::int64_t kBlock = 16, kMost = 64;
  std::int64_t rows, size, count;

  explicit RowChunks(std::int64_t rows_)
      : rows(rows_),
        size(kBlock * std::max<std::int64_t>(1, ceil_div(rows_, kBlock * kMost))),
        count(ceil_div(rows_, size)) {}

  std::int64_t begin(std::int64_t chunk) const { return chunk * size; }
  std::int64_t end(std::int64_t chunk) const { return std::min(rows, (chunk + 1) * size); }
};

/// Whether a loop over `pieces` of a matrix wants more than one thread. Below 32,768 elements, some
/// 30 us of work, two are no faster than one on idle cores, and far slower on busy ones.
inline bool wants_threads(const Input& in, std::int64_t pieces) {
  return pieces > 1 && in.rows * in.hidden >= 32768;
}

/// Elements of a float32 row of scratch in the workspace.
inline std::int64_t padded(std::int64_t n) { return round_up<std::int64_t>(n, kPadding); }

/// Where the float32 rows begin in the workspace: vectors are stored at multiples of their size,
/// the caller's memory begins at multiples of kMemoryAlignment alone.
inline constexpr std::int64_t kScratchAlignment = 64;
inline std::int64_t workspace_with_room(std::int64_t bytes) {
  return bytes + kScratchAlignment - kMemoryAlignment;
}
inline float* scratch_of(std::byte* workspace) {
  const auto address = reinterpret_cast<std::uintptr_t>(workspace);
  return reinterpret_cast<float*>(round_up<std::uintptr_t>(address, kScratchAlignment));
}

inline void* element(const Rows& r, std::int64_t row, std::int64_t column) {
  return static_cast<std::byte*>(r.data) + (row * r.row_stride + column) * dtype_size(r.dtype);
}

/// The scale of the first group of columns [column, ...) of a row of x; null without scales.
inline const void* scale_at(const Input& in, std::int64_t row, std::int64_t column) {
  return in.x_group > 0 ? element(in.x_scale, row, column / in.x_group) : nullptr;
}

/// The dtype of the z that row kernels read: 8-bit x goes through float32 scratch, all else is read
/// where it lies. The residual, once x is added to it, is z.
inline DType z_dtype(const Input& in, const Rows& residual) {
  if (residual.given()) return residual.dtype;
  return dtype_size(in.x.dtype) == 1 ? DType::kFloat32 : in.x.dtype;
}

/// Runs body(column, n) for the runs of a row.
template <class Body>
void for_runs(std::int64_t columns, const Body& body) {
  for (std::int64_t c = 0; c < columns; c += kRun) body(c, std::min(kRun, columns - c));
}

/// weight + offset of all columns into float32 scratch.
inline void widen_weight(const RowKernels& k, const Rows& weight, float offset,
                         std::int64_t columns, float* w) {
  for_runs(columns, [&](std::int64_t c, std::int64_t n) {
    k.widen_weight(element(weight, 0, c), n, w + c);
    if (offset != 0.0f) k.add_constant(offset, n, w + c);
  });
}

void forward(const ForwardProblem& p, Stream);
void backward(const BackwardProblem& p, Stream);
void quantize(const QuantizeProblem& p, Stream);
std::int64_t forward_workspace(const ForwardProblem& p, Device);
std::int64_t backward_workspace(const BackwardProblem& p, Device);
std::int64_t quantize_workspace(const QuantizeProblem& p, Device);

}  // namespace mortar::fp8_rmsnorm::cpu
