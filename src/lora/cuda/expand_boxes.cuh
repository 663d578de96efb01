// SPDX-License-Identifier: Apache-2.0
// h and B of expand as boxes that the tensor copy engine brings to shared memory.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "device/swizzle.cuh"
#include "device/tensor_copy.cuh"
#include "lora/cuda/backend.cuh"

namespace mortar::lora::cuda {

inline constexpr int kBoxRanks = device::kSwizzleBytes / 2;  ///< of a box of h, or of B
/// Columns of B whose rows are permuted together (permuted() in expand_tile.cuh), and of a box.
inline constexpr int kPermutedCols = 32, kBoxCols = 64, kBoxGroups = kBoxCols / kPermutedCols;

struct BoxParams : ExpandParams {
  CUtensorMap h_map, b_map[kLoraMaxSlices];
  int adapter_groups[kLoraMaxSlices];  ///< groups of columns of B from an adapter's to the next
};

/// Sets the maps of h, in boxes of so many rows, and of B, whose rows come to the places that the
/// permutation of columns gives them.
inline void set_maps(BoxParams& p, int h_rows) {
  const HView& h = p.h;
  device::set_tensor_map(p.h_map, h.dtype, h.data, h.row_stride, p.tiles.num_tokens, h.row_stride,
                         h_rows);
  for (int i = 0; i < p.weights.num_slices; ++i) {
    const StackedSlice& s = p.weights.slices[i];
    const std::int64_t row = s.b_row_stride, rows = lines_of_b(p.weights, i);
    p.adapter_groups[i] = static_cast<int>(s.b_adapter_stride / row / kPermutedCols);
    device::set_tensor_map<5>(
        p.b_map[i], p.weights.dtype, s.b, {s.rank, 2, 4, 4, rows / kPermutedCols},
        {row, 8 * row, 2 * row, kPermutedCols * row}, {kBoxRanks, 2, 4, 4, kBoxGroups});
  }
}

}  // namespace mortar::lora::cuda
