// SPDX-License-Identifier: Apache-2.0
// Float32 weights beside bfloat16 (part_columns.cuh): which kernels split them, h and ds
// themselves, and which weights and forms of h and ds are written out for all others.
#pragma once

#include "lora/train/cuda/kernels.cuh"
#include "lora/train/cuda/part_columns.cuh"
#include "lora/train/cuda/work.cuh"

namespace mortar::lora::train::cuda {

class PartChoice {
 public:
  /// `forced`: of the forward, or null. `one_adapter`: looks_ahead().
  PartChoice(const Problem& p, const ExpandPlan* forced, bool one_adapter, const Machine& machine)
      : p_(p),
        forced_(forced),
        takes_rows_(one_adapter && machine.products && p.num_rows >= kPartsRows &&
                    p.num_rows <= kMostPartsRows) {}

  /// Whether y is made by the stream that splits weights.
  bool streams(Side side, int width, const Matrix& out) const {
    if (forced_ != nullptr) return forced_->splits;
    return side == Side::kB && in_part_columns(out.dtype, p_.weight) && width <= kMostSplitRanks;
  }
  /// Whether y or dx is made by expand_parts.cu, of h or ds in float32.
  bool multiplies(int width, const Matrix& base, const Matrix& out, std::int64_t columns,
                  bool masked, const MaskParams& mask) const {
    if (forced_ != nullptr) return forced_->kernel == ExpandPlan::Kernel::kParts;
    return in_part_columns(out.dtype, p_.weight) && takes_rows_ && width <= kMostPartsRanks &&
           base.data == nullptr && columns % kPiece == 0 && loads_vectors(out) &&
           (!masked || (mask.columns | mask.first) % kMaskGroup == 0);
  }

  /// Of what the workspace has room for, the weights that are written out.
  PartNeeds needs(PartNeeds all) const {
    bool pair_b = false;
    for (int s = 0; s < p_.num_slices; ++s) {
      pair_b = pair_b || !(streams(Side::kB, width_of(p_, s), p_.slices[s].y) || multiplies_y(s));
    }
    all.pair_b = all.pair_b && pair_b;
    all.pair_a = all.pair_a && !multiplies_dx();
    return all;
  }
  /// Leaves out the forms of h and ds that no kernel reads.
  void leave_out(Work* work, bool forward) const {
    if (forward) {
      bool values = p_.h != nullptr, columns = false;
      for (int s = 0; s < p_.num_slices; ++s) {
        const bool by_columns =
            in_part_columns(p_.slices[s].y.dtype, p_.weight) && !multiplies_y(s);
        values = values || !by_columns;
        columns = columns || by_columns;
      }
      if (!values) work->h.values = nullptr;
      if (!columns) work->h.pair_columns = nullptr;
    } else if (work->ds.pair_columns != nullptr) {
      const bool da_by_values = p_.wants_da && work->ds.sum_columns == nullptr;
      if (multiplies_dx()) {
        work->ds.pair_columns = nullptr;
      } else if (!da_by_values) {
        work->ds.values = nullptr;
      }
    }
  }

 private:
  bool multiplies_y(int s) const {
    const SliceView& slice = p_.slices[s];
    return multiplies(width_of(p_, s), slice.base, slice.y, slice.width, p_.drops_delta(),
                      {p_.rng, p_.total_width, slice.first_column});
  }
  bool multiplies_dx() const {
    return multiplies(p_.hidden_width, p_.add_dx ? p_.dx : Matrix{}, p_.dx, p_.hidden,
                      p_.drops_input(), {p_.rng, p_.hidden, 0});
  }

  const Problem& p_;
  const ExpandPlan* forced_;
  bool takes_rows_;
};

}  // namespace mortar::lora::train::cuda
