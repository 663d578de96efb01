// SPDX-License-Identifier: Apache-2.0
// What a call of LoRA training keeps in its workspace: from sizes, dtypes and what is wanted alone.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "device/launch.cuh"
#include "lora/train/cuda/float_plan.h"
#include "lora/train/cuda/part_columns.cuh"
#include "lora/train/cuda/row_sums.cuh"
#include "lora/train/cuda/weight_parts.cuh"
#include "lora/train/cuda/workspace.h"

namespace mortar::lora::train::cuda {

inline Machine current_machine() {
  const device::DeviceInfo& d = device::current_device();
  return {d.num_sms, d.arch >= 90, d.arch == 90};
}

/// Float32 partials of h or ds that there may be for each value: split-K parts, times copies.
/// `beside`: of ds.
inline std::int64_t most_partials_of(const Problem& p, DType wide, std::int64_t columns, int width,
                                     bool masked, bool beside) {
  const Machine machine = current_machine();
  const bool in_parts = in_part_columns(wide, p.weight);
  const int copies = in_parts ? kSumCopies : 1;
  const std::int64_t groups = grouped(p) ? p.num_adapters : 0;
  const bool one_type = policy_of(wide, p.weight) != Policy::kSplit;
  if (one_type) {
    const int leaves =
        leaves_of(p.num_rows, columns, width, groups, masked, beside, ShrinkOperands::kOneType);
    if (leaves < kLeaves) return leaves;  // of operands of any strides
  }
  int most = wide == DType::kFloat32 ? float_unfused_parts(p.num_rows, copies * width)
                                     : unfused_parts(p.num_rows, copies * width);
  if (in_parts) {
    // Whether rows are dense and aligned is not known before the call.
    Machine none = machine;
    none.products = false;
    most = std::max(most, choose_shrink(p.num_rows, columns, copies * width, groups, masked, true,
                                        ShrinkOperands::kPartColumns, none)
                              .parts);
  }
  if (machine.products &&
      copies * width >= (in_parts ? kLeastPartProductRanks : kLeastProductRanks)) {
    const std::int64_t rows = product_rows(p.num_rows, groups);
    most = std::max(
        most, cut_shrink(rows, columns, copies * width, kLeaves, !in_parts, machine.sms).parts);
  }
  return std::int64_t{most} * copies;
}

/// Whether some slice's y or dy lies so that its product with float32 weights is one of parts, or
/// (`others`) so that it is not.
inline bool some_slice(const Problem& p, Matrix SliceView::*which, bool others) {
  for (int s = 0; s < p.num_slices; ++s) {
    if (in_part_columns((p.slices[s].*which).dtype, p.weight) != others) return true;
  }
  return false;
}

/// The workspace of a call.
struct Work {
  PairEntry* entries = nullptr;
  WeightParts weights;
  HiddenForms h, ds;
  float* partials = nullptr;
  std::optional<RowSums> row_sums;
  std::int64_t bytes = 0;
  int tables = 1;  ///< of pairs: as given, and with the copies of float32 weights

  /// `plan` null: a forward.
  Work(const Problem& p, const BackwardPlan* plan) {
    Arena arena(p.workspace);
    const bool forward = plan == nullptr;
    const bool makes_h = forward || (p.wants_db && p.h == nullptr);
    const bool makes_any_ds = !forward && (p.wants_da || p.dx.data != nullptr);
    const auto in_parts = [&](const Matrix& m) { return in_part_columns(m.dtype, p.weight); };
    PartNeeds needs;
    needs.sum_a = makes_h && in_parts(p.x);
    needs.pair_b = forward && some_slice(p, &SliceView::y, false);
    needs.sum_b = makes_any_ds && some_slice(p, &SliceView::dy, false);
    needs.pair_a = p.dx.data != nullptr && in_parts(p.dx);
    weights = WeightParts(p, needs, &arena);
    tables = needs.any() ? 3 : 1;
    if (p.num_adapters * p.num_slices > kOwnPairs) {
      entries = arena.take<PairEntry>(tables * p.num_adapters * p.num_slices);
    }
    // h and ds in the forms that something reads.
    const std::int64_t hidden = p.num_rows * p.hidden_width, part = dtype_size(DType::kBFloat16);
    const auto take = [&](bool wanted, std::int64_t bytes_of_value) {
      return wanted ? arena.take<char>(hidden * bytes_of_value) : nullptr;
    };
    const bool all = p.weight != DType::kFloat32;
    h.values = static_cast<char*>(p.h);
    if (makes_h && p.h == nullptr) {
      h.values = take(all || forward || some_slice(p, &SliceView::dy, true), dtype_size(p.weight));
    }
    h.pair_columns = take(needs.pair_b, kPairCopies * part);
    const auto take_columns = [&](bool wanted) {
      const std::int64_t line = part * part_stride(p.hidden_width, kSumCopies);
      return wanted ? arena.take<char>(p.num_rows * line) : nullptr;
    };
    h.sum_columns = take_columns(!forward && p.wants_db && some_slice(p, &SliceView::dy, false));
    const bool da_by_values = p.wants_da && !in_parts(p.x);
    ds.values =
        take(!forward && (all || p.dx.data != nullptr || da_by_values), dtype_size(p.weight));
    ds.pair_columns = take(needs.pair_a, kPairCopies * part);
    ds.sum_columns = take_columns(p.wants_da && in_parts(p.x));

    std::int64_t most_partials = 0;
    if (makes_h)
      most_partials =
          most_partials_of(p, p.x.dtype, p.hidden, p.hidden_width, p.drops_input(), false);
    for (int s = 0; !forward && s < p.num_slices; ++s) {
      if (makes_ds(p, *plan, s)) continue;
      const SliceView& slice = p.slices[s];
      most_partials = std::max(
          most_partials,
          most_partials_of(p, slice.dy.dtype, slice.width, width_of(p, s), p.drops_delta(), true));
    }
    if (!forward) row_sums.emplace(p, *plan, &arena);
    partials = arena.take<float>(most_partials * hidden);
    bytes = arena.used();
  }
};

}  // namespace mortar::lora::train::cuda
