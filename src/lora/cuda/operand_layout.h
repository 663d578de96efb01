// SPDX-License-Identifier: Apache-2.0
// What launch choices want to know of how x, y and the weights lie in memory.
#pragma once

#include <cstdint>

#include "device/tensor_copy.cuh"
#include "lora/cuda/backend.cuh"

namespace mortar::lora::cuda {

inline bool is_half(DType d) { return d == DType::kFloat16 || d == DType::kBFloat16; }
inline bool is_aligned(const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; }

/// Whether every row of x and A starts at a multiple of 16 bytes and has no odd end. (The pointers
/// of a table are 16-byte aligned by contract.)
inline bool allows_vectors(const RowsView& x, const WeightsView& w) {
  bool ok = w.hidden % 8 == 0 && is_aligned(x.data) && x.row_stride % 8 == 0;
  for (int i = 0; i < w.num_slices && w.table == nullptr; ++i) {
    const StackedSlice& a = w.slices[i];
    ok = ok && is_aligned(a.a) && a.a_row_stride % 8 == 0 && a.a_adapter_stride % 8 == 0;
  }
  return ok;
}

inline bool allows_vectors(const RowsView& y, const WeightsView& w, std::int64_t offset) {
  bool ok = is_aligned(y.data) && y.row_stride % 8 == 0 && offset % 8 == 0;
  for (int i = 0; i < w.num_slices; ++i) ok = ok && w.widths[i] % 8 == 0;
  return ok;
}

/// Whether all rows of stacked B, and not those of 16, start at multiples of 8 bytes: rank 4.
inline bool rows_by_8(const WeightsView& w) {
  bool by_8 = w.table == nullptr, by_16 = true;
  for (int i = 0; i < w.num_slices && by_8; ++i) {
    const StackedSlice& slice = w.slices[i];
    const auto start = reinterpret_cast<std::uintptr_t>(slice.b);
    const auto strides = static_cast<std::uint64_t>(slice.b_row_stride) |
                         static_cast<std::uint64_t>(slice.b_adapter_stride);
    by_8 = start % 8 == 0 && strides % 4 == 0;
    by_16 = by_16 && start % 16 == 0 && strides % 8 == 0;
  }
  return by_8 && !by_16;
}

/// Whether the rows of stacked B lie without gaps, in whole pieces of four ranks, as many in each
/// slice, so that those of neighbouring columns are one run of bytes, which starts at a multiple of
/// 16; and slices are whole groups of 32 columns.
inline bool lies_in_runs(const WeightsView& w) {
  bool ok = w.table == nullptr;
  for (int i = 0; i < w.num_slices && ok; ++i) {
    const StackedSlice& s = w.slices[i];
    ok = s.rank == w.max_rank && s.b_row_stride == s.rank && s.rank % 4 == 0 && is_aligned(s.b) &&
         s.b_adapter_stride % 8 == 0 && w.widths[i] % 32 == 0;
  }
  return ok;
}

/// Whether the tensor copy engine takes A: stacked, of one rank, which has whole boxes.
inline bool takes_boxes(const WeightsView& w) {
  bool ok = w.table == nullptr && w.ranks == nullptr && is_half(w.dtype) && w.num_adapters > 0;
  for (int i = 0; i < w.num_slices && ok; ++i) {
    const StackedSlice& s = w.slices[i];
    ok = s.rank > 0 && s.rank % kWalkBoxRows == 0 && s.a_row_stride > 0 &&
         s.a_adapter_stride >= 0 && s.a_adapter_stride % s.a_row_stride == 0 &&
         device::takes_tensor_map(s.a, w.hidden, lines_of_a(w, i), s.a_row_stride);
  }
  return ok;
}

/// Whether it takes B, where it takes A.
inline bool takes_boxes_of_b(const WeightsView& w) {
  bool ok = true;
  for (int i = 0; i < w.num_slices && ok; ++i) {
    const StackedSlice& s = w.slices[i];
    ok = s.rank == w.max_rank && w.widths[i] % kWalkCols == 0 && s.b_row_stride > 0 &&
         s.b_adapter_stride >= 0 && s.b_adapter_stride % (kWalkCols * s.b_row_stride) == 0 &&
         device::takes_tensor_map(s.b, s.rank, lines_of_b(w, i), s.b_row_stride);
  }
  return ok;
}

}  // namespace mortar::lora::cuda
