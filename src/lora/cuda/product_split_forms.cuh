// SPDX-License-Identifier: Apache-2.0
// The end of products whose clusters share the depth, where b has columns of parts of float32
// weights (product_split.cu, product_split_floats.cu).
#pragma once

#include "device/leaf_sums.cuh"
#include "lora/cuda/product_split.cuh"
#include "lora/train/cuda/part_columns.cuh"

namespace mortar::lora::cuda::product {

/// This thread block's share of the tile's rows: all blocks' sums of three columns a value.
template <class S>
__device__ __forceinline__ void store_forms_share(const Params& p, const Unit<S>& unit,
                                                  const float* sums) {
  namespace parts = lora::train::cuda;
  constexpr int kOctetColumns = 8 * parts::kSumCopies, kOctets = S::kColumns / kOctetColumns;
  const int own_rows = S::kRows / p.parts;
  const float factor = p.factor[unit.first_b];
  const int live = p.live[unit.first_b];
  const int first = static_cast<int>(p.groups[unit.group].first_column) / parts::kSumCopies;
  for (int i = threadIdx.x; i < own_rows * kOctets * 2; i += kConsumers) {
    const int own_row = i / (2 * kOctets), octet = i / 2 % kOctets, half = i % 2;
    const int row = unit.row + unit.part * own_rows + own_row, value = 8 * octet + 4 * half;
    if (row >= unit.end || octet * kOctetColumns >= unit.columns) continue;
    float4 column[parts::kSumCopies];
#pragma unroll
    for (int q = 0; q < parts::kSumCopies; ++q) {
      column[q] = sum_received<S>(sums, p.parts, own_rows, own_row,
                                  parts::part_column(value, parts::kSumCopies) + 8 * q);
    }
    const float4 sum = parts::sum_of_columns(column[0], column[1], column[2]);
    parts::store_forms(p.out, p.sum_columns, p.pair_columns, row, static_cast<int>(p.out_stride),
                       first + value, parts::scaled(sum, factor, live - value));
  }
}

}  // namespace mortar::lora::cuda::product
