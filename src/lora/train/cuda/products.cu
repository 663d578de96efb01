// SPDX-License-Identifier: Apache-2.0
// h and ds, y and dx, and the sums over rows of one adapter's wide ranks, as operands of the
// product in lora/cuda/product.cu.
#include "core/check.h"
#include "device/launch.cuh"
#include "lora/cuda/product.h"
#include "lora/cuda/product_split_floats.h"
#include "lora/train/cuda/forward_once.cuh"
#include "lora/train/cuda/kernels.cuh"
#include "lora/train/cuda/stored_sums.h"

namespace mortar::lora::train::cuda {
namespace {

using lora::cuda::kProductStep;
using lora::cuda::launch_product;
using lora::cuda::launch_split_product;
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

/// Rows lie side by side, and all adapters' operands have room in a launch.
bool takes_rows(const RowGroups& rows, const PairTable& pairs) {
  return rows.groups == nullptr && pairs.entries == nullptr;
}
void set_rows(Product* p, const RowGroups& rows) {
  p->offsets = rows.offsets;
  p->segments = rows.offsets != nullptr ? rows.num_adapters : 1;
}

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
  set_rows(&p, s.rows);
  p.a[0] = by_columns(s.wide.m, s.rows.num_rows, s.columns);
  int slices[kLoraMaxSlices];
  for (int i = s.first_slice; i < s.first_slice + s.num_slices; ++i) {
    if (width_of(s.hidden, i) == 0) continue;
    slices[p.pairs] = i;
    p.first_column[p.pairs] = s.hidden.first[i];
    p.columns[p.pairs++] = width_of(s.hidden, i);
  }
  for (int i = 0; i < p.segments * p.pairs; ++i) {
    const PairEntry& pair = s.pairs.own[i / p.pairs * s.pairs.num_slices + slices[i % p.pairs]];
    if (pair.rank == 0) continue;
    p.b[i] = weights_of(pair, s.side, s.weights.rows_are_ranks, s.columns, false);
    p.factor[i] = pair.factor;
    if (s.masked) p.thresholds[i] = pair.threshold;
    p.values[i] = s.ranks[i / p.pairs * s.pairs.num_slices + slices[i % p.pairs]];
  }
  p.scaled = true;
  if (s.masked) {
    p.rng = s.mask.rng;
    p.mask_columns = s.mask.columns;
    p.mask_first = s.mask.first;
  }
  p.out = s.h;
  p.out_stride = s.hidden.width / s.copies;
  p.sum_columns = s.sum_columns;
  p.pair_columns = s.pair_columns;
  const ProductEnd whole = s.copies > 1 ? ProductEnd::kForms : ProductEnd::kStore;
  p.end = s.plan.fused ? whole : ProductEnd::kPartials;
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
  set_rows(&p, e.rows);
  int slices[kLoraMaxSlices];
  for (int i = e.first_slice; i < e.first_slice + e.num_slices; ++i) {
    if (width_of(e.hidden, i) == 0) continue;
    slices[p.pairs] = i;
    Matrix h = e.h.m;
    h.data = static_cast<unsigned short*>(h.data) + e.hidden.first[i];
    // Past an adapter's rank h has zeros.
    p.a[p.pairs++] = by_columns(h, e.rows.num_rows, width_of(e.hidden, i));
  }
  for (int i = 0; i < p.segments * p.pairs; ++i) {
    const PairEntry& pair = e.pairs.own[i / p.pairs * e.pairs.num_slices + slices[i % p.pairs]];
    if (pair.rank == 0) continue;
    p.b[i] = weights_of(pair, e.side, e.weights.rows_are_ranks, e.columns, true);
    if (e.masked) p.thresholds[i / p.pairs * p.pairs] = pair.threshold;  // of all slices
  }
  if (e.masked) {
    p.rng = e.mask.rng;
    p.mask_columns = e.mask.columns;
    p.mask_first = e.mask.first;
  }
  p.columns[0] = e.columns;
  p.out = e.out.data;
  p.out_stride = e.out.row_stride;
  p.base = e.base.data;
  p.base_stride = e.base.row_stride;
  p.beside = e.beside;
  return p;
}

/// The columns of h or ds that a sum over rows has.
Matrix narrow_of(const PanelParams& s, const PanelOperand& own, Policy policy) {
  return {static_cast<unsigned short*>(const_cast<void*>(s.s)) + own.first_hidden, s.hidden_width,
          1, type_of(policy)};
}

/// dA, whose rows are ranks, or dB.
Product stored_product_of(const PanelParams& s, const PanelOperand& own, Policy policy) {
  const bool of_a = s.side == Side::kA;
  const PairEntry& pair = s.pairs.own[own.slice];
  const Matrix grad = pair.grad(of_a);
  const ProductOperand ranks = by_rows(narrow_of(s, own, policy), s.rows.num_rows, pair.rank);
  const ProductOperand wide = by_rows(own.wide, s.rows.num_rows, own.columns);
  Product p;
  p.dtype = type_of(policy);
  p.a[0] = of_a ? ranks : wide;
  p.b[0] = of_a ? wide : ranks;
  p.columns[0] = p.b[0].rows;
  p.early = s.early;
  p.out = grad.data;
  p.out_stride = grad.row_stride;
  p.partials = own.sums;
  if ((pair.adds >> (of_a ? 0 : 1) & 1) != 0) {
    p.base = grad.data;
    p.base_stride = grad.row_stride;
  }
  return p;
}

/// Of these those up to the last one of a segment that has a gradient; of one adapter all.
std::int64_t live_columns(const PanelParams& s, const PanelOperand& own, int segment) {
  if (s.rows.offsets == nullptr) return own.width;
  int end = 0;
  for (int i = own.slice; i < own.slice + own.num_slices; ++i) {
    const PairEntry& pair = s.pairs.own[segment * s.pairs.num_slices + i];
    if (pair.rank == 0 || pair.grad(s.side == Side::kA).data == nullptr) continue;
    end = s.copies * (s.hidden.first[i] + round_up(pair.rank, kHiddenGranule)) - own.first_hidden;
  }
  return end;
}

Product product_of(const PanelParams& s, const PanelOperand& own, Policy policy) {
  const Matrix narrow = narrow_of(s, own, policy);
  Product p;
  p.dtype = type_of(policy);
  set_rows(&p, s.rows);
  p.chunk = s.chunk;
  p.a[0] = by_rows(own.wide, s.rows.num_rows, own.columns);
  p.b[0] = by_rows(narrow, s.rows.num_rows, own.width);
  for (int i = 0; i < p.segments; ++i) p.columns[i] = live_columns(s, own, i);
  p.end = ProductEnd::kPartials;
  p.early = s.early;
  if (s.masked) {
    p.rng = s.mask.rng;
    p.mask_columns = s.mask.columns;
    p.mask_first = own.mask_first;
    for (int i = 0; i < p.segments; ++i) {
      for (int slice = own.slice; slice < own.slice + own.num_slices; ++slice) {
        const PairEntry& pair = s.pairs.own[i * s.pairs.num_slices + slice];
        if (pair.rank > 0) p.thresholds[i] = pair.threshold;
      }
    }
  }
  p.partials = own.sums;
  const bool of_a = s.side == Side::kA;
  const int width = own.width / s.copies;
  p.adds_copies = s.copies > 1;
  p.row_stride = of_a ? 1 : width;
  p.column_stride = of_a ? grad_stride(own.columns) : 1;
  p.part_stride = width * (of_a ? p.column_stride : own.columns);
  return p;
}

ProductPlan split_plan(const ShrinkParams& s) {
  ProductPlan plan{s.plan.ranks, s.plan.parts, s.plan.leaf, s.plan.leaves / s.plan.parts};
  plan.rows = s.plan.rows;
  return plan;
}

bool takes_operands(const Product& p) {
  bool takes = p.pairs > 0 && takes_product(p.a[0]);
  for (int i = 1; p.along_depth && i < p.pairs; ++i) takes = takes && takes_product(p.a[i]);
  for (int i = 0; i < p.segments * p.pairs; ++i) {
    takes = takes && (p.b[i].data == nullptr || takes_product(p.b[i]));
  }
  return takes;
}

}  // namespace

bool takes_products(const ShrinkParams& s, Policy policy) {
  // With dropout: columns of parts, and weights that are dense along the sum.
  return policy != Policy::kSplit && (!s.masked || s.copies > 1 || s.weights.rows_are_ranks) &&
         takes_rows(s.rows, s.pairs) && s.weights.async && s.wide.async &&
         takes_operands(product_of(s, policy));
}
bool takes_products(const ExpandParams& e, Policy policy) {
  const bool takes_base =
      e.base.data == nullptr || takes_product(by_columns(e.base, e.rows.num_rows, e.columns));
  return policy != Policy::kSplit && takes_rows(e.rows, e.pairs) && e.weights.async && e.vectors &&
         e.columns % 8 == 0 && takes_base && takes_operands(product_of(e, policy));
}
bool takes_products(const PanelParams& s, Policy policy) {
  bool takes = takes_rows(s.rows, s.pairs);
  for (int i = 0; i < s.num_operands; ++i) {
    const std::int64_t first = s.mask.columns | s.operands[i].mask_first;
    takes = takes && (!s.masked ||
                      ((s.copies == 1 || s.operands[i].width <= 192) && first % kMaskGroup == 0));
    takes = takes && s.operands[i].async && takes_operands(product_of(s, s.operands[i], policy));
  }
  return takes;
}

bool splits_weights(const ShrinkParams& s, const PairEntry& own, Policy policy) {
  if (!s.plan.product || !s.plan.fused || s.copies == 1 || !s.ahead || s.num_slices > 1 ||
      s.side != Side::kA || own.rank == 0 || own.a.col_stride != 1) {
    return false;
  }
  ShrinkParams floats = s;
  floats.pairs.own[0] = own;
  return lora::cuda::takes_split_floats(product_of(floats, policy), split_plan(s));
}

void shrink_products(const ShrinkParams& s, Policy policy, Stream stream) {
  check(!s.masked || (s.plan.fused && s.plan.parts > 1),
        "lora_train: clusters that share the depth drop elements of rows");
  const ProductPlan plan = split_plan(s);
  const Product product = product_of(s, policy);
  if (by_floats(s)) {
    return lora::cuda::launch_split_floats("lora_train", product, plan, stream);
  }
  s.plan.fused&& s.plan.parts > 1 ? launch_split_product("lora_train", product, plan, stream)
                                  : launch_product("lora_train", product, plan, stream);
}

void expand_products(const ExpandParams& e, Policy policy, Stream stream) {
  ProductPlan plan;
  plan.columns = e.plan.tile_columns;
  plan.defers = defers_tile(e.width);
  launch_product("lora_train", product_of(e, policy), plan, stream);
}

bool forward_products(const ShrinkParams& s, const ExpandParams& e, Policy policy,
                      const ForwardPlan& plan, Stream stream) {
  if (!takes_products(s, policy) || !takes_products(e, policy)) return false;
  lora::cuda::ForwardProduct product;
  product.h = product_of(s, policy);
  product.h.end = ProductEnd::kStore;
  const Product y = product_of(e, policy);
  product.b = y.b[0];
  if (y.base != nullptr) product.base = by_columns(e.base, e.rows.num_rows, e.columns);
  product.y = y.out;
  product.y_stride = y.out_stride;
  if (!takes_forward(product)) return false;
  launch_forward("lora_train", product, plan, stream);
  return true;
}

void panel_products(const PanelParams& s, const StoredSums& stored, Policy policy, Stream stream) {
  for (int i = 0; i < s.num_operands; ++i) {
    const PanelOperand& own = s.operands[i];
    ProductPlan plan;
    plan.columns =
        s.masked ? rows_masked_tile(own.width, s.copies) : rows_launch_tile(own.width, s.copies);
    plan.parts = static_cast<int>(ceil_div<std::int64_t>(s.rows.num_rows, s.chunk.rows));
    plan.leaf = s.chunk.rows;
    if (s.rows.offsets != nullptr) {
      plan.parts = static_cast<int>(s.max_tiles);
      plan.leaf = 0;
    }
    const bool stores = stored.columns[i] > 0;
    if (stores) {
      plan.columns = stored.columns[i];
      plan.leaves = plan.parts;
      plan.parts = 1;
    }
    plan.clusters = s.free_sms / lora::cuda::kProductCluster;
    launch_product("lora_train",
                   stores ? stored_product_of(s, own, policy) : product_of(s, own, policy), plan,
                   stream);
  }
}

}  // namespace mortar::lora::train::cuda
