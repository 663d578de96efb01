// SPDX-License-Identifier: Apache-2.0
// From a product and its plan to the parameters of a kernel, on the host.
#pragma once

#include <algorithm>

#include "core/check.h"
#include "core/int_math.h"
#include "device/launch.cuh"
#include "lora/cuda/product_shape.cuh"

namespace mortar::lora::cuda::product {

inline void set_map(CUtensorMap& map, const Product& product, const ProductOperand& o,
                    int rows_of_box, int depth_of_box) {
  o.rows_dense
      ? device::set_tensor_map(map, product.dtype, o.data, o.rows, o.depth, o.stride, depth_of_box)
      : device::set_tensor_map(map, product.dtype, o.data, o.depth, o.rows, o.stride, rows_of_box);
}

inline int steps_of(const ProductOperand& o) {
  return static_cast<int>(ceil_div<std::int64_t>(o.depth, kProductStep));
}

/// Whether b is dense along its rows: as those are of which there is data.
inline bool dense_rows_of_b(const Product& product) {
  for (int i = 0; i < product.segments * product.pairs; ++i) {
    if (product.b[i].data != nullptr) return product.b[i].rows_dense;
  }
  return false;
}

/// A launch of so many clusters, of so many thread blocks each.
inline device::Launch cluster_launch(int clusters, int blocks, int threads, int smem,
                                     Stream stream) {
  device::Launch l;
  l.grid = dim3(static_cast<unsigned>(clusters), static_cast<unsigned>(blocks));
  l.cluster_y = static_cast<unsigned>(blocks);
  l.threads = static_cast<unsigned>(threads);
  l.smem = static_cast<std::size_t>(smem);
  l.stream = stream;
  l.pdl = true;
  return l;
}

/// The parameters of a launch of shape S.
template <class S>
Params make_params(const char* op, const Product& product, const ProductPlan& plan) {
  Params p{};
  const bool along_depth = product.along_depth || product.pairs == 1;
  p.num_groups = along_depth ? 1 : product.pairs;
  p.dtype = product.dtype;
  p.forms = product.end == ProductEnd::kForms;
  p.offsets = product.offsets;
  p.rng = product.rng;
  p.mask_columns = product.mask_columns;
  p.mask_first = product.mask_first;
  p.segments = product.segments;
  p.pairs = product.pairs;
  p.tile_rows = S::kRows;
  for (int i = 0; i < product.pairs; ++i) {
    if (i == 0 || along_depth) {
      set_map(p.a[i], product, product.a[i], S::kRows, kProductStep);
    }
    if (i > 0 && along_depth) continue;
    p.groups[i] = {p.tiles, product.first_column[i]};
    p.tiles += static_cast<int>(ceil_div<std::int64_t>(product.columns[i], S::kColumns));
  }
  int all_steps = 0;
  const bool cuts_depth = S::kCutsDepth && p.offsets != nullptr;
  if (cuts_depth) {
    const ProductOperand& b = product.b[0];
    set_map(p.b[0], product, b, S::kColumns / S::kSharers, kProductStep / S::kSharers);
    p.tiles = static_cast<int>(ceil_div<std::int64_t>(b.rows, S::kColumns));
    p.steps[0] = all_steps = steps_of(b);
    p.chunk = product.chunk;
    p.depth = b.depth;
  }
  for (int i = 0; cuts_depth && i < product.segments; ++i) {
    p.columns[i] = static_cast<int>(product.columns[i]);
    p.thresholds[i] = product.thresholds[i];
  }
  for (int first = 0; !cuts_depth && first < product.segments * product.pairs;
       first += product.pairs) {
    int steps = 0;  // of the segment
    for (int i = 0; i < product.pairs; ++i) {
      const ProductOperand& b = product.b[first + i];
      // Of partials those past b's rows are left out, of what is stored none.
      const std::int64_t columns = product.columns[along_depth ? 0 : i];
      const std::int64_t there = b.data == nullptr ? 0 : round_up<std::int64_t>(b.rows, 8);
      const int rows =
          product.end == ProductEnd::kForms ? product.values[first + i] : static_cast<int>(b.rows);
      p.live[first + i] = b.data == nullptr ? 0 : rows;
      p.factor[first + i] = product.factor[first + i];
      p.thresholds[first + i] = product.thresholds[first + i];
      p.columns[first + i] = static_cast<int>(
          product.end == ProductEnd::kPartials ? std::min(columns, there) : columns);
      if (b.data == nullptr) continue;
      set_map(p.b[first + i], product, b, S::kColumns / S::kSharers, kProductStep / S::kSharers);
      p.steps[first + i] = steps_of(b);
      steps = along_depth ? steps + p.steps[first + i] : std::max(steps, p.steps[first + i]);
    }
    all_steps = std::max(all_steps, steps);
  }
  p.parts = plan.parts;
  p.leaves = plan.leaves;
  p.leaf_steps = plan.leaf > 0 ? static_cast<int>(plan.leaf / kProductStep) : all_steps;
  p.part_steps = p.leaf_steps * plan.leaves;
  check(p.part_steps * plan.parts >= all_steps && (S::kCarries || plan.leaves <= 1 << S::kLevels),
        op, ": a product's parts leave some of the depth out");
  p.rows = product.a[0].rows;
  const std::int64_t units = (ceil_div<std::int64_t>(p.rows, S::kSharers * S::kRows) +
                              (p.offsets != nullptr && !cuts_depth ? p.segments : 0)) *
                             p.tiles * (S::kSplit ? 1 : p.parts);
  check(units < std::int64_t{1} << 30, op, ": too many tiles");
  p.units = static_cast<int>(units);
  p.partials = product.partials;
  p.part_stride = product.part_stride;
  p.early = product.early;
  p.adds_copies = product.adds_copies;
  p.scaled = product.scaled;
  p.row_stride = product.row_stride;
  p.column_stride = product.column_stride;
  p.out = product.out;
  // A box ends where the matrix does, and knows nothing of segments.
  p.by_boxes =
      S::kTileBytes > 0 && !S::kSplit && product.offsets == nullptr && along_depth &&
      device::takes_tensor_map(product.out, product.columns[0], p.rows, product.out_stride);
  if (p.by_boxes) {
    auto* const out = static_cast<unsigned short*>(product.out) + product.first_column[0];
    device::set_tensor_map(p.out_map, product.dtype, out, product.columns[0], p.rows,
                           product.out_stride, kProductRows / 2);
  }
  p.base = product.base;
  p.beside = product.beside;
  p.sum_columns = product.sum_columns;
  p.pair_columns = product.pair_columns;
  p.out_stride = product.out_stride;
  check(product.rng != nullptr ? S::kDrops || S::kDropsStored : !S::kDrops, op,
        ": no product of dropped rows");
  check(!p.adds_copies || S::kColumns <= 192, op, ": copies are added in tiles of up to 192");
  check(!p.early || S::kA == Major::kRows, op, ": an early product sums over rows");
  check(S::kAddsBeside || p.beside.partials == nullptr, op, ": a product that adds nothing beside");
  check(product.base == nullptr || S::kBase, op, ": tiles with a base have 128 columns");
  if (product.base != nullptr) {
    device::set_tensor_map(p.base_map, product.dtype, product.base, product.columns[0], p.rows,
                           product.base_stride, kProductRows);
  }
  return p;
}

}  // namespace mortar::lora::cuda::product
