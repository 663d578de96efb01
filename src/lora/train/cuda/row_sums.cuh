// SPDX-License-Identifier: Apache-2.0
// The sums over rows of a backward, dB and dA, and ds where it comes with dB: which kernels make
// them, and their part of the workspace.
#pragma once

#include <optional>

#include "lora/train/cuda/kernels.cuh"
#include "lora/train/cuda/panel.h"
#include "lora/train/cuda/part_columns.cuh"
#include "lora/train/cuda/stored_sums.h"
#include "lora/train/cuda/workspace.h"

namespace mortar::lora::train::cuda {

/// Whether panels take an operand: of one 16-bit type with the weights, or bfloat16 beside float32.
inline bool takes_panels(const Problem& p, const Matrix& wide) {
  return policy_of(wide.dtype, p.weight) != Policy::kSplit || in_part_columns(wide.dtype, p.weight);
}
/// Slices whose dy goes through panels.
bool takes_panels(const Problem& p, int slice);
/// Columns of h and ds that panels have for a rank.
inline int panel_copies(const Problem& p) { return p.weight == DType::kFloat32 ? kSumCopies : 1; }

/// h or ds: as values of the weights' type, and as columns of bfloat16 parts (part_columns.cuh) for
/// the sums over rows and for the sums over ranks. Null: not wanted.
struct HiddenForms {
  char *values = nullptr, *sum_columns = nullptr, *pair_columns = nullptr;
};

/// Whether sums over rows, that is all of them, start beside ds. Other kernels of dA than panels'
/// take it that ds is there when the kernel before them lets them start.
inline bool starts_beside_ds(const Problem& p, const BackwardPlan& plan) {
  return plan.whole && plan.beside_ds && takes_panels(p, p.x);
}

/// Whether ds of a slice comes with dB.
inline bool makes_ds(const Problem& p, const BackwardPlan& plan, int slice) {
  return plan.one_pass && takes_panels(p, slice);
}

/// SMs that ds by a product leaves to all of dB beside it; 0: dB takes longer on these. `copies`:
/// columns of parts of a rank.
inline int free_sms(const ShrinkPlan& plan, std::int64_t rows, int width, int copies,
                    std::int64_t columns, const Machine& machine) {
  const bool whole = copies > 1 && plan.parts == 1;  // another launch adds the copies
  if (!plan.product || !(plan.fused || whole)) return 0;
  const std::int64_t blocks = plan.parts > 1 ? split_tiles(rows, width, plan.ranks) * plan.parts
                                             : product_blocks(rows, width, plan.ranks, 1);
  const bool alone = copies > 1 && !shares_dy(rows, columns, width, kLeaves, copies);
  const ProductCut cut =
      alone ? cut_rows_alone(rows, columns, width, copies) : cut_rows_beside(rows, columns, width);
  return BesideRowSums(rows, columns, width, machine.sms, cut).free_sms(blocks);
}

class RowSums {
 public:
  /// Takes its part of the workspace.
  RowSums(const Problem& p, const BackwardPlan& plan, Arena* arena);

  /// What all launches of a call share.
  void prepare(const PairTable& pairs, const RowGroups& rows, const HiddenColumns& hidden,
               Stream stream);
  /// Sums of dB, from h, where they are wanted and sum_x() does not make them beside those of dA
  /// (stored_sums.h); and ds of the slices that makes_ds() names. `early`, `free_sms`: as
  /// PanelParams has them.
  void sum_dy(const HiddenForms& h, void* ds, bool early, int free_sms);
  /// What dB of the only slice takes of outer_boxes.cu beside ds, if it goes through outer.cu.
  std::optional<OuterParams> beside_ds(const HiddenForms& h) const;
  /// The launch with ds has left its sums.
  void note_beside_ds();
  /// Sums of dA, from ds, and dx in the same pass over rows, where the plan has it so; false, and
  /// nothing done, for operands that input_boxes.cu or input_parts.cu does not take.
  bool sum_x_with_dx(const HiddenForms& ds);
  /// Sums of dA, from ds; and with a plan of whole sums dA itself, and dB from h.
  void sum_x(const HiddenForms& h, const HiddenForms& ds, bool early);
  /// dA and dB of all sums.
  void finish();
  /// Sums of dB of the only slice and adapter, which the kernel that is given them adds; without
  /// partials where finish() does.
  GradSum take_dy_sums();

 private:
  bool sum_parts_with_dx(const HiddenForms& ds);
  bool wants_all_of_x(bool draws) const;
  void run_panels(PanelParams panel);
  bool sums_together(const HiddenForms& h, const HiddenForms& ds, int free_sms) const;
  bool by_products(const PanelParams& panel) const;
  bool stores_grad(const PanelParams& panel, const PanelOperand& o) const;
  int stored_columns_of(const PanelParams& panel, const PanelOperand& o) const;
  GradSizes sizes_of(const PanelParams& panel, const PanelOperand& o) const;
  void add_sums(const PanelParams& panel, const StoredSums& stored = {});
  PanelParams panel_params(Side side, const PanelPlan& plan, const HiddenForms& narrow) const;
  int add_operand(PanelParams* to, Side side, int slice, const HiddenForms& narrow,
                  float* sums) const;
  OuterParams outer_params(Side side, int slice, int num_slices, const Matrix& wide,
                           const void* narrow, std::int64_t columns, std::int64_t mask_first,
                           float* sums, bool early) const;
  void run_outer(Side side, int slice, int num_slices, const Matrix& wide, const void* narrow,
                 std::int64_t columns, std::int64_t mask_first, float* sums, bool early);
  void add_sums(Side side, int slice, int num_slices, std::int64_t columns, const RowCut& chunk,
                const float* sums);
  Policy policy() const {
    return p_.weight == DType::kFloat16 ? Policy::kFloat16 : Policy::kBFloat16;
  }
  int width(int slice, int num_slices) const {
    return num_slices == p_.num_slices ? p_.hidden_width : width_of(p_, slice);
  }

  const Problem& p_;
  const BackwardPlan plan_;
  Stream stream_{};
  float* panels_ = nullptr;  ///< partials of ds
  float* db_[kLoraMaxSlices] = {};
  float* da_ = nullptr;
  WeightGradParams grads_{};
  bool together_ = false;  ///< sum_x() sums dB, too
};

}  // namespace mortar::lora::train::cuda
