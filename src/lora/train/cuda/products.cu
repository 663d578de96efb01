// SPDX-License-Identifier: Apache-2.0
// h and ds, y and dx, and the sums over rows of one adapter's wide ranks, as operands of the
// product in lora/cuda/product.cu.
#include "core/check.h"
#include "device/launch.cuh"
#include "lora/cuda/product.h"
#include "lora/train/cuda/kernels.cuh"

namespace mortar::lora::train::cuda {
namespace {

using lora::cuda::kProductStep;
using lora::cuda::launch_product;
using lora::cuda::Product;
using lora::cuda::ProductEnd;
using lora::cuda::ProductOperand;
using lora::cuda::ProductPlan;
using lora::cuda::takes_product;

/// Rows of the batch, summed along their dense columns.
ProductOperand by_columns(const Matrix& m, std::int64_t rows, std::int64_t columns) {
  return {m.data, rows, columns, m.row_stride, false};
}
/// The same matrix, summed along its rows.
ProductOperand by_rows(const Matrix& m, std::int64_t rows, std::int64_t columns) {
  return {m.data, columns, rows, m.row_stride, true};
}

/// Weights of a pair, as [rank, wide], summed along either dimension.
ProductOperand weights_of(const PairEntry& pair, Side side, bool rows_are_ranks,
                          std::int64_t columns, bool along_ranks) {
  const Matrix& m = side == Side::kA ? pair.a : pair.b;
  const bool own_rows = (side == Side::kA) == rows_are_ranks;  // rows of `m` are the dense lines
  const std::int64_t stride = own_rows ? m.row_stride : m.col_stride;
  if (along_ranks) return {m.data, columns, pair.rank, stride, rows_are_ranks};
  return {m.data, pair.rank, columns, stride, !rows_are_ranks};
}

bool one_group(const RowGroups& rows) { return rows.offsets == nullptr && rows.groups == nullptr; }

/// Columns of h of a slice.
int width_of(const HiddenColumns& hidden, int slice) {
  return round_up(hidden.rank[slice], kHiddenGranule);
}

DType type_of(Policy policy) {
  return policy == Policy::kFloat16 ? DType::kFloat16 : DType::kBFloat16;
}

Product product_of(const ShrinkParams& s, Policy policy) {
  Product p;
  p.dtype = type_of(policy);
  p.pairs = 0;
  p.a[0] = by_columns(s.wide.m, s.rows.num_rows, s.columns);
  for (int i = s.first_slice; i < s.first_slice + s.num_slices; ++i) {
    if (width_of(s.hidden, i) == 0) continue;
    p.b[p.pairs] = weights_of(s.pairs.own[i], s.side, s.weights.rows_are_ranks, s.columns, false);
    p.first_column[p.pairs] = s.hidden.first[i];
    p.columns[p.pairs++] = width_of(s.hidden, i);
  }
  p.end = ProductEnd::kPartials;
  p.partials = s.partials;
  p.part_stride = s.rows.num_rows * s.hidden.width;
  p.row_stride = s.hidden.width;
  p.column_stride = 1;
  return p;
}

Product product_of(const ExpandParams& e, Policy policy) {
  Product p;
  p.dtype = type_of(policy);
  p.pairs = 0;
  p.along_depth = true;
  for (int i = e.first_slice; i < e.first_slice + e.num_slices; ++i) {
    const PairEntry& pair = e.pairs.own[i];
    if (width_of(e.hidden, i) == 0) continue;
    Matrix h = e.h.m;
    h.data = static_cast<unsigned short*>(h.data) + e.hidden.first[i];
    p.a[p.pairs] = by_columns(h, e.rows.num_rows, pair.rank);
    p.b[p.pairs++] = weights_of(pair, e.side, e.weights.rows_are_ranks, e.columns, true);
  }
  p.columns[0] = e.columns;
  p.out = e.out.data;
  p.out_stride = e.out.row_stride;
  p.base = e.base.data;
  p.base_stride = e.base.row_stride;
  return p;
}

Product product_of(const PanelParams& s, const PanelOperand& own, Policy policy) {
  Product p;
  p.dtype = type_of(policy);
  const Matrix narrow{static_cast<unsigned short*>(const_cast<void*>(s.s)) + own.first_hidden,
                      s.hidden_width, 1, p.dtype};
  p.a[0] = by_rows(own.wide, s.rows.num_rows, own.columns);
  p.b[0] = by_rows(narrow, s.rows.num_rows, own.width);
  p.columns[0] = own.width;
  p.end = ProductEnd::kPartials;
  p.partials = own.sums;
  const bool of_a = s.side == Side::kA;
  p.row_stride = of_a ? 1 : own.width;
  p.column_stride = of_a ? grad_stride(own.columns) : 1;
  p.part_stride = own.width * (of_a ? p.column_stride : own.columns);
  return p;
}

bool takes_operands(const Product& p) {
  bool takes = p.pairs > 0 && takes_product(p.a[0]);
  for (int i = 0; i < p.pairs; ++i) {
    takes = takes && takes_product(p.b[i]) && (!p.along_depth || takes_product(p.a[i]));
  }
  return takes;
}

}  // namespace

bool takes_products(const ShrinkParams& s, Policy policy) {
  return policy != Policy::kSplit && !s.masked && one_group(s.rows) && s.weights.async &&
         s.wide.async && takes_operands(product_of(s, policy));
}
bool takes_products(const ExpandParams& e, Policy policy) {
  const bool takes_base =
      e.base.data == nullptr || takes_product(by_columns(e.base, e.rows.num_rows, e.columns));
  return policy != Policy::kSplit && !e.masked && one_group(e.rows) && e.weights.async &&
         e.vectors && e.columns % 8 == 0 && takes_base && takes_operands(product_of(e, policy));
}
bool takes_products(const PanelParams& s, Policy policy) {
  bool takes = !s.masked && one_group(s.rows);
  for (int i = 0; i < s.num_operands; ++i) {
    takes = takes && s.operands[i].async && takes_operands(product_of(s, s.operands[i], policy));
  }
  return takes;
}

void shrink_products(const ShrinkParams& s, Policy policy, Stream stream) {
  const ProductPlan plan{s.plan.ranks, s.plan.parts, s.plan.leaf, kLeaves / s.plan.parts};
  launch_product("lora_train", product_of(s, policy), plan, stream);
}

void expand_products(const ExpandParams& e, Policy policy, Stream stream) {
  ProductPlan plan;
  plan.columns = e.plan.tile_columns;
  launch_product("lora_train", product_of(e, policy), plan, stream);
}

void panel_products(const PanelParams& s, Policy policy, Stream stream) {
  for (int i = 0; i < s.num_operands; ++i) {
    const PanelOperand& own = s.operands[i];
    ProductPlan plan;
    plan.columns = rows_tile(own.width);
    plan.parts = static_cast<int>(ceil_div<std::int64_t>(s.rows.num_rows, s.chunk_rows));
    plan.leaf = s.chunk_rows;
    launch_product("lora_train", product_of(s, own, policy), plan, stream);
  }
}

}  // namespace mortar::lora::train::cuda
