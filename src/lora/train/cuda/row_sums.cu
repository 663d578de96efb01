// SPDX-License-Identifier: Apache-2.0
// Which kernels sum over rows. Operands of one 16-bit type go through panel.cu, dy of all slices in
// one launch; so does bfloat16 beside float32 weights, whose h and ds come as columns of bfloat16
// parts (part_columns.cuh). Every other mixture goes through outer.cu, slice by slice.
#include "lora/train/cuda/row_sums.cuh"

#include <algorithm>

#include "device/launch.cuh"
#include "device/tensor_copy.cuh"
#include "lora/train/cuda/backend.cuh"
#include "lora/train/cuda/input_parts.h"
#include "lora/train/cuda/panel_boxes.cuh"

namespace mortar::lora::train::cuda {
namespace {

/// As outer.cu's operands.
Fetch parts_fetch(const Matrix& m) { return {m, false, loads_vectors(m), parts_of(m.dtype)}; }

}  // namespace

bool takes_panels(const Problem& p, int slice) {
  return width_of(p, slice) > 0 && p.slices[slice].width > 0 && takes_panels(p, p.slices[slice].dy);
}

RowSums::RowSums(const Problem& p, const BackwardPlan& plan, Arena* arena) : p_(p), plan_(plan) {
  std::int64_t panels = 0;
  for (int s = 0; s < p.num_slices; ++s) {
    const std::int64_t columns = p.slices[s].width;
    if (makes_ds(p, plan, s)) {
      panels =
          std::max(panels, ceil_div<std::int64_t>(columns, kPanelShapes[plan.dy.shape].columns));
    }
    if (!p.wants_db || width_of(p, s) == 0) continue;
    const bool panels_take = takes_panels(p, s);
    if (panels_take && plan.whole) continue;
    const int chunk = panels_take ? plan.dy.chunk.rows
                                  : choose_outer(p.num_rows, columns, width_of(p, s)).chunk_rows;
    db_[s] = arena->take<float>(most_tiles(p, chunk) * width_of(p, s) * columns);
  }
  if (p.wants_da && !(plan.whole && takes_panels(p, p.x))) {
    const bool panels_take = takes_panels(p, p.x);
    const int chunk = panels_take ? plan.x.chunk.rows
                                  : choose_outer(p.num_rows, p.hidden, p.hidden_width).chunk_rows;
    da_ = arena->take<float>(most_tiles(p, chunk) * p.hidden_width * grad_stride(p.hidden));
  }
  panels_ = arena->take<float>(panels * p.num_rows * p.hidden_width);
}

void RowSums::prepare(const PairTable& pairs, const RowGroups& rows, const HiddenColumns& hidden,
                      Stream stream) {
  grads_.pairs = pairs;
  grads_.rows = rows;
  grads_.hidden = hidden;
  grads_.num_adapters = static_cast<int>(p_.num_adapters);
  stream_ = stream;
}

void RowSums::sum_dy(const HiddenForms& h, void* ds, bool early, int free_sms) {
  if (!p_.wants_db && !plan_.one_pass) return;
  if (!together_) {
    together_ = early && sums_together(h, {static_cast<char*>(ds)}, free_sms);
    if (together_) return;
  }
  PanelParams all = panel_params(Side::kB, plan_.dy, h);
  all.early = early && !plan_.one_pass;
  all.free_sms = all.early ? free_sms : 0;
  DsParams end{};
  for (int s = 0; s < p_.num_slices; ++s) {
    const SliceView& slice = p_.slices[s];
    if (takes_panels(p_, s)) {
      if (plan_.whole) continue;
      end.panels[s] = add_operand(&all, Side::kB, s, h, db_[s]);
    } else if (p_.wants_db) {
      run_outer(Side::kB, s, 1, slice.dy, h.values, slice.width, slice.first_column, db_[s], early);
    }
  }
  if (all.num_operands == 0) return;
  if (!p_.wants_db) all.s = ds;  // an address that nothing is read from
  run_panels(all);
  if (!plan_.one_pass) return;
  end.pairs = grads_.pairs;
  end.rows = grads_.rows;
  end.hidden = grads_.hidden;
  end.partials = panels_;
  end.ds = ds;
  end.dtype = p_.weight;
  const int most = *std::max_element(end.panels, end.panels + p_.num_slices);
  end.few_panels = p_.hidden_width <= 16 ? 2 * kFewPanels : kFewPanels;
  const bool shares = p_.num_rows * p_.hidden_width <= kMostSharedSums && most > end.few_panels;
  end.parts = shares ? kDsParts : 1;
  end.rows_of_block = std::max(1, kThreads / end.parts * 4 / p_.hidden_width);
  end.max_tiles = most_tiles(p_, end.rows_of_block);
  sum_ds(end, stream_);
}

bool RowSums::sum_x_with_dx(const HiddenForms& ds) {
  if (p_.weight == DType::kFloat32) return sum_parts_with_dx(ds);
  const PanelPlan& plan = plan_.x;
  const bool chain = plan.shape == kChainPanels;
  const bool takes_plan =
      plan_.with_dx != DxPanels::kNone && !plan_.whole &&
      (plan.shape == kInputPanels || plan.shape == kInputPanels32 ||
       (chain && (plan_.with_dx == DxPanels::k64 || grads_.rows.offsets == nullptr))) &&
      (plan.chunk.at_once > 0 ? plan.chunk.unit : plan.chunk.rows) % kBlockRows == 0 &&
      p_.hidden_width <= kPanelShapes[plan.shape].ranks;
  const auto takes = [&](const Matrix& m, std::int64_t columns) {
    return m.dtype == p_.weight && m.col_stride == 1 &&
           device::takes_tensor_map(m.data, columns, p_.num_rows, m.row_stride);
  };
  if (!takes_plan || !fills_boxes(grads_.rows) || device::current_device().arch != 90 ||
      p_.add_dx || !takes(p_.x, p_.hidden) || !takes(p_.dx, p_.hidden) ||
      !takes({ds.values, p_.hidden_width, 1, p_.weight}, p_.hidden_width)) {
    return false;
  }
  if (!wants_all_of_x(!chain)) return false;
  PanelParams all = panel_params(Side::kA, plan, ds);
  add_operand(&all, Side::kA, 0, ds, da_);
  add_sums(all);
  input_boxes(all, p_.dx, plan_.with_dx, policy_of(p_.weight, p_.weight), stream_);
  return true;
}

/// Whether each pair has ranks, dA is wanted, and what is dropped of x a pass with dx may draw, if
/// it draws at all.
bool RowSums::wants_all_of_x(bool draws) const {
  for (std::int64_t i = 0; i < p_.num_adapters * p_.num_slices; ++i) {
    const Pair pair = p_.pair(i / p_.num_slices, static_cast<int>(i % p_.num_slices));
    const bool takes = !p_.drops_input() || (draws && p_.hidden % kMaskGroup == 0 &&
                                             pair.threshold > 0 && pair.threshold < kDropAll);
    if (pair.rank == 0 || pair.da.data == nullptr || !takes) return false;
  }
  return true;
}

/// The same of float32 weights, where dx is made of ds in float32.
bool RowSums::sum_parts_with_dx(const HiddenForms& ds) {
  const auto takes = [&](const Matrix& m, std::int64_t columns) {
    return in_part_columns(m.dtype, p_.weight) && m.col_stride == 1 &&
           device::takes_tensor_map(m.data, columns, p_.num_rows, m.row_stride);
  };
  const bool by_values =
      ds.values != nullptr && ds.sum_columns != nullptr && ds.pair_columns == nullptr;
  if (plan_.with_dx != DxPanels::k128 || plan_.x.shape != kChainPanels ||
      plan_.x.chunk.rows % kBlockRows != 0 || device::current_device().arch != 90 ||
      p_.hidden_width > kMostInputPartsRanks || p_.drops_input() || p_.add_dx || !by_values ||
      !looks_ahead(grads_.pairs, grads_.rows) || !takes(p_.x, p_.hidden) ||
      !takes(p_.dx, p_.hidden) || !wants_all_of_x(false)) {
    return false;
  }
  PanelParams all = panel_params(Side::kA, plan_.x, ds);
  add_operand(&all, Side::kA, 0, ds, da_);
  add_sums(all);
  input_parts(all, {ds.values, p_.hidden_width, 1, p_.weight}, p_.dx, stream_);
  return true;
}

void RowSums::sum_x(const HiddenForms& h, const HiddenForms& ds, bool early) {
  if (together_) sum_dy(h, ds.values, early, 0);
  PanelParams all = panel_params(Side::kA, plan_.x, ds);
  all.early = early;
  all.beside_ds = early && starts_beside_ds(p_, plan_);
  if (p_.wants_da && p_.hidden_width > 0) {
    if (takes_panels(p_, p_.x)) {
      add_operand(&all, Side::kA, 0, ds, da_);
    } else {
      run_outer(Side::kA, 0, p_.num_slices, p_.x, ds.values, p_.hidden, 0, da_, early);
    }
  }
  for (int s = 0; plan_.whole && p_.wants_db && s < p_.num_slices; ++s) {
    if (takes_panels(p_, s)) add_operand(&all, Side::kB, s, h, nullptr);
  }
  if (all.num_operands > 0) run_panels(all);
}

void RowSums::run_panels(PanelParams panel) {
  panel.ahead = looks_ahead(panel.pairs, panel.rows) && !panel.masked && !panel.early;
  if (plan_.whole) return whole_sums(panel, plan_.whole_ranks, p_.drops, stream_);
  if (by_products(panel)) {
    StoredSums stored;
    for (int i = 0; i < panel.num_operands; ++i) {
      stored.columns[i] = stored_columns_of(panel, panel.operands[i]);
    }
    add_sums(panel, stored);
    return panel_products(panel, stored, policy(), stream_);
  }
  add_sums(panel);
  if (plan_.boxes && panel_boxes(panel, policy(), stream_)) return;
  panels(panel, stream_);
}

bool RowSums::by_products(const PanelParams& panel) const {
  const PanelShape& shape = kPanelShapes[panel.shape];
  return shape.ranks == kMostRanks && shape.groups == 1 &&
         panel.chunk.in_steps(lora::cuda::kProductStep) && plan_.products &&
         takes_products(panel, policy());
}

/// Whether a product may store dA or dB, dense along its rows and of the operands' type.
bool RowSums::stores_grad(const PanelParams& panel, const PanelOperand& o) const {
  if (panel.rows.offsets != nullptr || o.num_slices > 1 || panel.pairs.entries != nullptr ||
      panel.copies > 1 || panel.masked) {
    return false;
  }
  const PairEntry& pair = panel.pairs.own[o.slice];
  const bool of_a = panel.side == Side::kA;
  const Matrix grad = pair.grad(of_a);
  const std::int64_t dense = of_a ? o.columns : pair.rank, lines = of_a ? pair.rank : o.columns;
  return grad.data != nullptr && grad.dtype == p_.weight && grad.col_stride == 1 &&
         device::takes_tensor_map(grad.data, dense, lines, grad.row_stride);
}

/// Columns of the tiles in which it does; 0: it leaves partial sums.
int RowSums::stored_columns_of(const PanelParams& panel, const PanelOperand& o) const {
  if (!stores_grad(panel, o)) return 0;
  const int sms = panel.free_sms > 0 ? panel.free_sms : device::current_device().num_sms;
  return together_ ? kWideStoredTile : stored_columns(sizes_of(panel, o), sms, plan_.stores);
}

GradSizes RowSums::sizes_of(const PanelParams& panel, const PanelOperand& o) const {
  const bool of_a = panel.side == Side::kA;
  const bool adds = (panel.pairs.own[o.slice].adds >> (of_a ? 0 : 1) & 1) != 0;
  return {p_.num_rows, o.columns, o.width, panel.chunk.rows, of_a, adds};
}

/// Whether dB waits for dx, and is stored beside dA then.
bool RowSums::sums_together(const HiddenForms& h, const HiddenForms& ds, int free_sms) const {
  const bool forced = plan_.stores == StoredBy::kTogether;
  const bool others = plan_.whole || plan_.one_pass || plan_.with_dx != DxPanels::kNone ||
                      (plan_.stores != StoredBy::kModel && !forced);
  if (others || (free_sms > 0 && !forced) || p_.num_slices > 1 || !p_.wants_db || !p_.wants_da ||
      p_.dx.data == nullptr || width_of(p_, 0) == 0 || !takes_panels(p_, 0) ||
      !takes_panels(p_, p_.x)) {
    return false;
  }
  PanelParams dy = panel_params(Side::kB, plan_.dy, h), x = panel_params(Side::kA, plan_.x, ds);
  add_operand(&dy, Side::kB, 0, h, db_[0]);
  add_operand(&x, Side::kA, 0, ds, da_);
  for (const PanelParams* panel : {&dy, &x}) {
    const PanelOperand& o = panel->operands[0];
    if (!by_products(*panel) || !stores_grad(*panel, o) || !stores_wide(sizes_of(*panel, o))) {
      return false;
    }
  }
  return forced || stores_together(sizes_of(dy, dy.operands[0]), sizes_of(x, x.operands[0]),
                                   device::current_device().num_sms);
}

/// What is left to be added when a pass over x or dy has ended.
void RowSums::add_sums(const PanelParams& panel, const StoredSums& stored) {
  for (int i = 0; i < panel.num_operands; ++i) {
    // Not by the address of the sums: without rows there are none, and no workspace.
    const PanelOperand& o = panel.operands[i];
    if (stored.columns[i] > 0 || o.width == 0 || (panel.side == Side::kB && !p_.wants_db)) continue;
    add_sums(panel.side, o.slice, o.num_slices, o.columns, panel.chunk, o.sums);
  }
}

GradSum RowSums::take_dy_sums() {
  if (grads_.num_sums != 1 || !looks_ahead(grads_.pairs, grads_.rows)) return {};
  const GradSums& db = grads_.sums[0];
  if (db.side != Side::kB || db.num_slices > 1 || p_.num_rows == 0) return {};
  const auto chunks = static_cast<int>(ceil_div<std::int64_t>(p_.num_rows, db.chunk.rows));
  const GradSum sum = grad_sum_of(grads_.pairs.own[db.first_slice], db, 0, chunks);
  if (!adds_vectors(sum.out, sum.ranks)) return {};
  if (sum.partials != nullptr) grads_.num_sums = 0;
  return sum;
}

void RowSums::finish() {
  if (grads_.num_sums > 0) sum_weight_grads(&grads_, stream_);
}

PanelParams RowSums::panel_params(Side side, const PanelPlan& plan,
                                  const HiddenForms& narrow) const {
  PanelParams to{};
  to.pairs = grads_.pairs;
  to.rows = grads_.rows;
  to.s = panel_copies(p_) == 1 ? narrow.values : narrow.sum_columns;
  const int copies = panel_copies(p_);
  to.hidden_width = copies == 1 ? p_.hidden_width : part_stride(p_.hidden_width, copies);
  to.hidden = grads_.hidden;
  to.copies = panel_copies(p_);
  to.side = side;
  to.mask = {p_.rng, side == Side::kA ? p_.hidden : p_.total_width, 0};
  to.masked = side == Side::kA ? p_.drops_input() : p_.drops_delta();
  to.shape = plan.shape;
  to.groups = 1;
  to.chunk = plan.chunk;
  to.max_tiles = most_tiles(p_, plan.chunk.rows);
  to.ds = panels_;
  return to;
}

/// x, or dy of a slice. Gives the panels that it has.
int RowSums::add_operand(PanelParams* to, Side side, int slice, const HiddenForms& narrow,
                         float* sums) const {
  const bool of_a = side == Side::kA;
  const int num_slices = of_a ? p_.num_slices : 1;
  const std::int64_t columns = of_a ? p_.hidden : p_.slices[slice].width;
  const PanelShape& shape = kPanelShapes[to->shape];
  const int shape_columns = plan_.whole ? kBlockColumns : shape.columns;
  const int shape_ranks = plan_.whole ? plan_.whole_ranks : shape.ranks;
  PanelOperand& o = to->operands[to->num_operands];
  if (to->num_operands > 0) {
    const PanelOperand& before = to->operands[to->num_operands - 1];
    o.first_panel = before.first_panel + before.panels;
  }
  ++to->num_operands;
  o.wide = of_a ? p_.x : p_.slices[slice].dy;
  o.async = copies_async(o.wide);
  o.slice = slice;
  o.num_slices = num_slices;
  o.columns = columns;
  o.mask_first = of_a ? 0 : p_.slices[slice].first_column;
  o.panels = static_cast<int>(ceil_div<std::int64_t>(columns, shape_columns));
  o.side = side;
  o.s = narrow.values;
  o.rng = p_.rng;
  o.mask_columns = of_a ? p_.hidden : p_.total_width;
  const int copies = panel_copies(p_);
  o.first_hidden = copies * p_.slices[slice].first_hidden;
  o.width = copies * width(slice, num_slices);
  o.sums = sums;
  to->group_columns = whole_octets(shape_ranks, copies);
  check(to->group_columns > 0, "lora_train: a panel has all copies of an octet of ranks");
  to->groups = std::max(to->groups, ceil_div(o.width, to->group_columns));
  const bool masked = of_a ? p_.drops_input() : p_.drops_delta();
  for (int i = slice; plan_.whole && i < slice + num_slices; ++i) {
    const Pair pair = p_.pair(0, i);
    if (pair.rank == 0) continue;
    if (masked) o.threshold = pair.threshold;
    if ((of_a ? pair.da : pair.db).data == nullptr) continue;
    o.live = p_.slices[i].first_hidden + round_up(pair.rank, kHiddenGranule) - o.first_hidden;
  }
  return o.panels;
}

OuterParams RowSums::outer_params(Side side, int slice, int num_slices, const Matrix& wide,
                                  const void* narrow, std::int64_t columns, std::int64_t mask_first,
                                  float* sums, bool early) const {
  OuterParams o{};
  o.width = width(slice, num_slices);
  const OuterPlan plan = choose_outer(p_.num_rows, columns, o.width);
  o.pairs = grads_.pairs;
  o.rows = grads_.rows;
  o.wide = parts_fetch(wide);
  o.s = parts_fetch({const_cast<void*>(narrow), p_.hidden_width, 1, p_.weight});
  o.mask = {p_.rng, side == Side::kA ? p_.hidden : p_.total_width, mask_first};
  o.masked = side == Side::kA ? p_.drops_input() : p_.drops_delta();
  o.first_hidden = p_.slices[slice].first_hidden;
  o.columns = columns;
  o.chunk_rows = plan.chunk_rows;
  o.ranks = plan.ranks;
  o.max_tiles = most_tiles(p_, plan.chunk_rows);
  o.side = side;
  o.partials = sums;
  o.early = early;
  return o;
}

void RowSums::run_outer(Side side, int slice, int num_slices, const Matrix& wide,
                        const void* narrow, std::int64_t columns, std::int64_t mask_first,
                        float* sums, bool early) {
  if (width(slice, num_slices) == 0) return;
  const OuterParams o =
      outer_params(side, slice, num_slices, wide, narrow, columns, mask_first, sums, early);
  outer(o, stream_);
  add_sums(side, slice, num_slices, columns, RowCut{o.chunk_rows}, sums);
}

std::optional<OuterParams> RowSums::beside_ds(const HiddenForms& h) const {
  const bool one_slice = p_.num_slices == 1 && width_of(p_, 0) > 0;
  if (!plan_.together || !one_slice || !p_.wants_db || takes_panels(p_, 0)) return {};
  const SliceView& slice = p_.slices[0];
  return outer_params(Side::kB, 0, 1, slice.dy, h.values, slice.width, slice.first_column, db_[0],
                      false);
}

void RowSums::note_beside_ds() {
  const std::int64_t columns = p_.slices[0].width;
  add_sums(Side::kB, 0, 1, columns,
           RowCut{choose_outer(p_.num_rows, columns, width_of(p_, 0)).chunk_rows}, db_[0]);
}

void RowSums::add_sums(Side side, int slice, int num_slices, std::int64_t columns,
                       const RowCut& chunk, const float* sums) {
  GradSums& g = grads_.sums[grads_.num_sums++];
  g.side = side;
  g.first_slice = slice;
  g.num_slices = num_slices;
  g.first_hidden = p_.slices[slice].first_hidden;
  g.width = width(slice, num_slices);
  g.columns = columns;
  g.chunk = chunk;
  g.partials = sums;
}

}  // namespace mortar::lora::train::cuda
