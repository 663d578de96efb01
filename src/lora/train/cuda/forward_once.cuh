// SPDX-License-Identifier: Apache-2.0
// h and y in one launch, lora/cuda/product_forward.cu.
#pragma once

#include "lora/train/cuda/forward_plan.h"
#include "lora/train/cuda/kernels.cuh"
#include "lora/train/cuda/part_columns.cuh"

namespace mortar::lora::train::cuda {

/// Whether h and y are of one slice, and products of one 16-bit type, or of float32 weights beside
/// bfloat16, of one adapter without dropout and a base.
inline bool may_run_once(const Problem& p, const PairTable& pairs, const RowGroups& rows,
                         const Machine& machine) {
  if (!machine.products || p.num_slices != 1 || p.hidden_width == 0) return false;
  if (pairs.entries != nullptr || rows.groups != nullptr || p.drops_delta()) return false;
  if (p.slices[0].width == 0) return false;
  const SliceView& slice = p.slices[0];
  if (p.x.dtype != slice.y.dtype) return false;
  return p.weight != DType::kFloat32
             ? p.x.dtype == p.weight
             : in_part_columns(p.x.dtype, p.weight) && slice.base.data == nullptr && !p.drops &&
                   looks_ahead(pairs, rows);
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

/// The product of several adapters' rows, or with dropout; `h`: of 16-bit values.
inline lora::cuda::SegmentForward segment_forward(const Problem& p, const PairTable& pairs,
                                                  const RowGroups& rows, void* h) {
  const SliceView& slice = p.slices[0];
  lora::cuda::SegmentForward f;
  lora::cuda::Product& own = f.h;
  own.dtype = p.weight;
  own.offsets = rows.offsets;
  own.segments = rows.offsets != nullptr ? rows.num_adapters : 1;
  const auto dense = [](const Matrix& m, std::int64_t lines, std::int64_t columns) {
    const bool takes = m.col_stride == 1;
    return lora::cuda::ProductOperand{takes ? m.data : nullptr, lines, columns, m.row_stride};
  };
  own.a[0] = dense(p.x, p.num_rows, p.hidden);
  for (int i = 0; i < own.segments; ++i) {
    const PairEntry& pair = pairs.own[i];
    if (pair.rank == 0) continue;
    own.b[i] = dense(pair.a, pair.rank, p.hidden);
    own.factor[i] = pair.factor;
    own.thresholds[i] = pair.threshold;
    f.b[i] = dense(pair.b, slice.width, pair.rank);
  }
  own.columns[0] = p.hidden_width;
  own.out = h;
  own.out_stride = p.hidden_width;
  if (p.drops) {
    own.rng = p.rng;
    own.mask_columns = p.hidden;
  }
  if (slice.base.data != nullptr) f.base = dense(slice.base, p.num_rows, slice.width);
  f.y = slice.y.col_stride == 1 ? slice.y.data : nullptr;
  f.y_stride = slice.y.row_stride;
  return f;
}
inline bool in_segments(const Problem& p, const RowGroups& rows) {
  return p.drops || rows.offsets != nullptr;
}

/// The launch of both for these; true.
inline bool forward_segments(const Problem& p, const PairTable& pairs, const RowGroups& rows,
                             void* h, const ForwardPlan& plan, Stream stream) {
  lora::cuda::launch_forward("lora_train", segment_forward(p, pairs, rows, h), plan, stream);
  return true;
}

/// For h and y in one launch: `forced` where it is given, if they may be made so.
inline ForwardPlan choose_once(const Problem& p, const PairTable& pairs, const RowGroups& rows,
                               const Machine& machine, const ForwardPlan* forced) {
  if (!may_run_once(p, pairs, rows, machine)) return {};
  if (forced != nullptr) return *forced;
  const bool in_parts = p.weight == DType::kFloat32;
  if (in_parts && !takes_forward(parts_forward(p, pairs.own[0]))) return {};
  if (in_segments(p, rows)) {
    if (!takes_forward(segment_forward(p, pairs, rows, p.h))) return {};
    return choose_segment_forward(p.num_rows, p.hidden, p.slices[0].width, p.hidden_width,
                                  machine.sms, static_cast<int>(p.num_adapters));
  }
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
