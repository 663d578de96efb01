// SPDX-License-Identifier: Apache-2.0
// h and y in one launch, lora/cuda/product_forward.cu.
#pragma once

#include "lora/train/cuda/forward_plan.h"
#include "lora/train/cuda/kernels.cuh"
#include "lora/train/cuda/part_columns.cuh"

namespace mortar::lora::train::cuda {

/// Whether h and y are of one slice and without dropout, and products of one 16-bit type, or of
/// float32 weights beside bfloat16 and without a base.
inline bool may_run_once(const Problem& p, const Machine& machine) {
  if (!machine.products || p.num_slices != 1 || p.drops || p.hidden_width == 0) return false;
  if (p.slices[0].width == 0) return false;
  const SliceView& slice = p.slices[0];
  if (p.x.dtype != slice.y.dtype) return false;
  return p.weight != DType::kFloat32
             ? p.x.dtype == p.weight
             : in_part_columns(p.x.dtype, p.weight) && slice.base.data == nullptr;
}

/// The product of float32 weights.
inline lora::cuda::PartsForward parts_forward(const Problem& p, const PairEntry& pair) {
  const SliceView& slice = p.slices[0];
  const bool dense = p.x.col_stride == 1 && pair.a.col_stride == 1 && pair.b.col_stride == 1 &&
                     slice.y.col_stride == 1;
  lora::cuda::PartsForward f;
  f.rows = p.num_rows;
  f.columns = p.hidden;
  f.out_columns = slice.width;
  f.rank = dense ? pair.rank : 0;
  f.x = p.x.data;
  f.x_stride = p.x.row_stride;
  f.a = pair.a.data;
  f.a_stride = pair.a.row_stride;
  f.b = pair.b.data;
  f.b_stride = pair.b.row_stride;
  f.factor = pair.factor;
  f.h = static_cast<float*>(p.h);
  f.h_stride = p.hidden_width;
  f.y = slice.y.data;
  f.y_stride = slice.y.row_stride;
  return f;
}

inline bool forward_parts(const Problem& p, const PairEntry& pair, const ForwardPlan& plan,
                          Stream stream) {
  launch_forward("lora_train", parts_forward(p, pair), plan, stream);
  return true;
}

/// For h and y of one adapter's rows.
inline ForwardPlan choose_once(const Problem& p, const PairEntry& pair, const Machine& machine) {
  const bool in_parts = p.weight == DType::kFloat32;
  if (in_parts && !takes_forward(parts_forward(p, pair))) return {};
  return choose_forward(p.num_rows, p.hidden, p.slices[0].width, p.hidden_width, machine.sms,
                        in_parts);
}

/// The launch of both, as the plan says; false where it does not take the operands.
bool forward_products(const ShrinkParams& s, const ExpandParams& e, Policy policy,
                      const ForwardPlan& plan, Stream stream);

/// Whether the clusters of a product make h of float32 weights as they are, `own`, in place of
/// columns of parts that a launch has written; and whether `s` has such weights.
bool splits_weights(const ShrinkParams& s, const PairEntry& own, Policy policy);
inline bool by_floats(const ShrinkParams& s) {
  return s.copies > 1 && s.pairs.entries == nullptr && s.pairs.own[0].a.dtype == DType::kFloat32;
}

}  // namespace mortar::lora::train::cuda
