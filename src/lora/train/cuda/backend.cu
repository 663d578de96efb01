// SPDX-License-Identifier: Apache-2.0
// Which kernels a call of LoRA training runs on CUDA, one after the other:
//
//   forward   h by shrink over K and its reduction; y by expand, slice by slice
//   backward  ds and the sums of dB in one pass over dy, or ds by shrink over N of every slice and
//             then the sums of dB; dx by expand over all slices; the sums of dA, or both in one
//             pass over x; dA and dB from their sums (row_sums.cuh). The sums of dB start beside
//             the last shrink, whose parts are added after them, and those of dA beside expand
//
// x is read once in each direction; dy once, or twice where panel.h finds that cheaper. Float32
// weights beside bfloat16 are first written out as columns of bfloat16 parts (part_columns.cuh).
#include <cuda_runtime.h>

#include <algorithm>
#include <optional>

#include "core/check.h"
#include "device/launch.cuh"
#include "lora/train/cuda/backend.cuh"
#include "lora/train/cuda/dy_boxes.cuh"
#include "lora/train/cuda/expand_choice.h"
#include "lora/train/cuda/float_plan.h"
#include "lora/train/cuda/float_ring.cuh"
#include "lora/train/cuda/forward_once.cuh"
#include "lora/train/cuda/kernels.cuh"
#include "lora/train/cuda/operands.cuh"
#include "lora/train/cuda/part_choice.cuh"
#include "lora/train/cuda/part_columns.cuh"
#include "lora/train/cuda/work.cuh"

namespace mortar::lora::train::cuda {
namespace {

class Call {
 public:
  /// `plan` null: a forward.
  Call(const Problem& p, const BackwardPlan* plan, Stream stream, const ForcedPlans& forced = {})
      : p_(p), plan_(plan), forced_(forced), work_(p, plan), stream_(stream) {
    make_tables();
    rows_.num_rows = p.num_rows;
    rows_.num_adapters = static_cast<int>(p.num_adapters);
    rows_.offsets = p.rows.offsets;
    if (p.rows.plan != nullptr) {
      const PlanLayout layout = PlanLayout::make(p.num_rows, p.num_adapters);
      rows_.header = p.rows.plan;
      rows_.groups = p.rows.plan + layout.groups;
      rows_.sorted = p.rows.plan + layout.sorted;
    }
    hidden_.num_slices = p.num_slices;
    hidden_.width = p.hidden_width;
    for (int s = 0; s < p.num_slices; ++s) {
      hidden_.first[s] = p.slices[s].first_hidden;
      hidden_.rank[s] = p.slices[s].rank;
    }
    PartNeeds needs = part_choice().needs(work_.weights.needs());
    once_ = plan_once();
    if (once_.parts > 0 && p.weight == DType::kFloat32) needs = {};  // splits them itself
    part_choice().leave_out(&work_, plan == nullptr);
    needs.sum_a =
        needs.sum_a && !by_floats(shrink_params(Side::kA, 0, p_.num_slices, p_.x, p_.hidden,
                                                work_.h, p_.drops_input(), {p_.rng, p_.hidden, 0}));
    SavedHidden saved;
    if (plan_ != nullptr && p.h != nullptr && work_.h.sum_columns != nullptr &&
        looks_ahead(table_, rows_)) {
      saved = {static_cast<const float*>(p.h), work_.h.sum_columns, p.num_rows, hidden_};
      copies_h_ = false;
    }
    split_weights(p, needs, table_, sum_table_, pair_table_, saved, stream);
  }

  void forward() {
    if (once_.parts > 0 && runs_once()) return;
    make_h();
    for (int s = 0; s < p_.num_slices; ++s) {
      const SliceView& slice = p_.slices[s];
      run_expand(Side::kB, s, 1, work_.h, slice.base, slice.y, slice.width, p_.drops_delta(),
                 {p_.rng, p_.total_width, slice.first_column});
    }
  }

  void backward() {
    if (p_.wants_db && p_.h == nullptr) make_h();
    if (copies_h_ && p_.h != nullptr && work_.h.sum_columns != nullptr) copy_h();
    const bool needs_ds = p_.dx.data != nullptr || p_.wants_da;
    RowSums& sums = *work_.row_sums;
    sums.prepare(table_, rows_, hidden_, stream_);
    std::optional<HiddenParams> parts;
    bool shrinks = false;
    for (int s = 0; s < p_.num_slices; ++s) {
      const SliceView& slice = p_.slices[s];
      if (!needs_ds || makes_ds(p_, *plan_, s) || width_of(p_, s) == 0) continue;
      shrinks = true;
      if (parts) reduce_hidden(*parts, stream_);
      parts = run_shrink(Side::kB, s, 1, slice.dy, slice.width, work_.ds, p_.drops_delta(),
                         {p_.rng, p_.total_width, slice.first_column}, sums.beside_ds(work_.h));
    }
    // Beside the last shrink; its parts are added when both have ended.
    made_db_ ? sums.note_beside_ds() : sums.sum_dy(work_.h, work_.ds.values, shrinks, free_sms_);
    if (parts) reduce_hidden(*parts, stream_);
    if (sums.sum_x_with_dx(work_.ds)) return sums.finish();
    if (p_.dx.data != nullptr) {
      run_expand(Side::kA, 0, p_.num_slices, work_.ds, p_.add_dx ? p_.dx : Matrix{}, p_.dx,
                 p_.hidden, p_.drops_input(), {p_.rng, p_.hidden, 0});
    }
    sums.sum_x(work_.h, work_.ds, p_.dx.data != nullptr);
    sums.finish();
  }

 private:
  void make_tables() {
    const std::int64_t pairs = p_.num_adapters * p_.num_slices;
    PairTable* tables[] = {&table_, &sum_table_, &pair_table_};
    UploadParams batch{work_.entries, 0, {}};
    for (int t = 0; t < work_.tables; ++t) {
      PairTable& table = *tables[t];
      table.num_slices = p_.num_slices;
      table.entries = work_.entries == nullptr ? nullptr : work_.entries + t * pairs;
      for (std::int64_t i = 0; i < pairs; ++i) {
        const int slice = static_cast<int>(i % p_.num_slices);
        const Pair pair = p_.pair(i / p_.num_slices, slice);
        PairEntry entry{
            pair.a,      pair.b,         pair.da,   pair.db,
            pair.factor, pair.threshold, pair.rank, (pair.add_a ? 1 : 0) | (pair.add_b ? 2 : 0)};
        if (t == 0) layouts_.note(pair);
        if (t > 0) {
          entry = work_.weights.next(p_, entry, slice, t == 1 ? kSumCopies : kPairCopies);
        }
        if (work_.entries == nullptr) {
          table.own[i] = entry;
          continue;
        }
        batch.entries[batch.count++] = entry;
        const bool last = t + 1 == work_.tables && i + 1 == pairs;
        if (batch.count < kUploadEntries && !last) continue;
        upload(batch, stream_);
        batch.to += batch.count;
        batch.count = 0;
      }
    }
  }

  PartChoice part_choice() const {
    return {p_, forced_.expand, looks_ahead(table_, rows_), machine_};
  }

  /// For h and y of one slice.
  ForwardPlan plan_once() const {
    if (plan_ != nullptr || forced_.shrink != nullptr || forced_.expand != nullptr) return {};
    return choose_once(p_, table_, rows_, machine_, forced_.once);
  }

  bool runs_once() {
    if (p_.weight == DType::kFloat32) return forward_parts(p_, table_.own[0], once_, stream_);
    void* h = work_.h.values;
    if (in_segments(p_, rows_)) return forward_segments(p_, table_, rows_, h, once_, stream_);
    const SliceView& s = p_.slices[0];
    const bool taken =
        forward_products(shrink_params(Side::kA, 0, 1, p_.x, p_.hidden, work_.h, false, {}),
                         expand_params(Side::kB, 0, 1, work_.h, s.base, s.y, s.width, false, {}),
                         policy_of(p_.x.dtype, p_.weight), once_, stream_);
    check(taken || forced_.once == nullptr, "lora_train: no launch of h and y for these operands");
    return taken;
  }
  void make_h() {
    const auto parts = run_shrink(Side::kA, 0, p_.num_slices, p_.x, p_.hidden, work_.h,
                                  p_.drops_input(), {p_.rng, p_.hidden, 0});
    if (parts) reduce_hidden(*parts, stream_);
  }
  /// Columns of parts of the h that the forward has saved.
  void copy_h() {
    HiddenParams h = hidden_params(0, p_.num_slices);
    h.given = reinterpret_cast<const float*>(work_.h.values);
    h.sum_columns = work_.h.sum_columns;
    reduce_hidden(h, stream_);
  }
  int width(int slice, int num_slices) const {
    return num_slices == p_.num_slices ? p_.hidden_width : width_of(p_, slice);
  }

  ShrinkParams shrink_params(Side side, int slice, int num_slices, const Matrix& wide,
                             std::int64_t columns, const HiddenForms& to, bool masked,
                             const MaskParams& mask) const {
    const bool in_parts = in_part_columns(wide.dtype, p_.weight);
    const Policy policy = product_policy(wide.dtype, p_.weight);
    const int copies = in_parts ? kSumCopies : 1;
    const ShrinkOperands operands = in_parts                   ? ShrinkOperands::kPartColumns
                                    : policy == Policy::kSplit ? ShrinkOperands::kSplit
                                                               : ShrinkOperands::kOneType;
    ShrinkParams s{};
    s.pairs = in_parts ? sum_table_ : table_;
    s.rows = rows_;
    s.wide = fetch_of(wide, policy);
    s.mask = mask;
    s.masked = masked;
    s.side = side;
    s.first_slice = slice;
    s.num_slices = num_slices;
    s.hidden = in_parts ? part_columns(hidden_, copies) : hidden_;
    s.first_hidden = s.hidden.first[slice];
    s.width = copies * width(slice, num_slices);
    s.weights = in_parts ? part_layout(side) : layouts_.of(side, policy, p_.weight);
    s.columns = columns;
    s.partials = work_.partials;
    s.copies = copies;
    for (int i = 0; i < kOwnPairs; ++i) s.ranks[i] = table_.own[i].rank;
    const bool dense = policy != Policy::kSplit && s.wide.async && s.weights.async &&
                       (!masked || (mask.columns | mask.first) % kMaskGroup == 0);
    const bool stores_h = p_.weight == DType::kFloat32 && to.values != nullptr &&
                          to.sum_columns == nullptr && to.pair_columns == nullptr;
    s.plan = policy == Policy::kSplit && fits_float_ring(s.wide, columns, masked)
                 ? choose_float_shrink(p_.num_rows, columns, s.width, groups(), stores_h,
                                       rows_.groups == nullptr, machine_)
                 : choose_shrink(p_.num_rows, columns, s.width, groups(), masked, dense, operands,
                                 machine(takes_products(s, policy)),
                                 plan_ != nullptr && side == Side::kB, num_slices,
                                 plan_ != nullptr && plan_->shares_dy);
    if (forced_.shrink != nullptr) s.plan = *forced_.shrink;
    s.part_leaves = s.plan.leaves / s.plan.parts;
    s.max_tiles = most_tiles(p_, s.plan.rows);
    s.ahead = looks_ahead(s.pairs, s.rows) && !masked;
    s.h = to.values;
    s.sum_columns = to.sum_columns;
    s.pair_columns = to.pair_columns;
    if (plan_ == nullptr && splits_weights(s, table_.own[0], policy)) s.pairs = table_;
    return s;
  }

  /// Gives what is left to be added, if anything is.
  std::optional<HiddenParams> run_shrink(Side side, int slice, int num_slices, const Matrix& wide,
                                         std::int64_t columns, const HiddenForms& to, bool masked,
                                         const MaskParams& mask,
                                         const std::optional<OuterParams>& beside = {}) {
    const Policy policy = product_policy(wide.dtype, p_.weight);
    const ShrinkParams s = shrink_params(side, slice, num_slices, wide, columns, to, masked, mask);
    free_sms_ = free_sms(s.plan, p_.num_rows, s.width, s.copies, columns, machine_);
    if (s.width == 0) return {};
    made_db_ = beside && dy_boxes(s, *beside, stream_);
    if (s.plan.product) {
      shrink_products(s, policy, stream_);
    } else if (!made_db_) {
      s.plan.stream ? shrink_stream(s, policy, stream_) : shrink(s, policy, stream_);
    }
    if (s.plan.fused) return {};
    HiddenParams h = hidden_params(slice, num_slices);
    h.parts = s.plan.parts;
    h.partials = work_.partials;
    h.h = to.values;
    h.copies = s.copies;
    h.early = plan_ == nullptr && s.copies == 1;
    h.sum_columns = to.sum_columns;
    h.pair_columns = to.pair_columns;
    return h;
  }

  HiddenParams hidden_params(int slice, int num_slices) const {
    HiddenParams h{};
    h.pairs = table_;
    h.rows = rows_;
    h.hidden = hidden_;
    h.first_slice = slice;
    h.num_slices = num_slices;
    h.first_hidden = p_.slices[slice].first_hidden;
    h.width = width(slice, num_slices);
    h.dtype = p_.weight;
    h.rows_of_block = std::max(1, kThreads * 4 / std::max(h.width, 1));
    h.max_tiles = most_tiles(p_, h.rows_of_block);
    return h;
  }

  ExpandParams expand_params(Side side, int slice, int num_slices, const HiddenForms& h,
                             const Matrix& base, const Matrix& out, std::int64_t columns,
                             bool masked, const MaskParams& mask) const {
    const bool in_parts = in_part_columns(out.dtype, p_.weight);
    const DType dtype = in_parts ? DType::kBFloat16 : p_.weight;  // of the operands
    const Policy policy = policy_of(dtype, dtype);
    const int own = width(slice, num_slices);
    const bool whole = part_choice().multiplies(own, base, out, columns, masked, mask);
    const bool splits = !whole && part_choice().streams(side, own, out);
    const int copies = in_parts && !splits && !whole ? kPairCopies : 1;
    ExpandParams e{};
    e.pairs = copies > 1 ? pair_table_ : table_;
    e.rows = rows_;
    const bool by_values = !in_parts || whole;
    e.h = fetch_of({by_values ? h.values : h.pair_columns,
                    std::int64_t{by_values ? 1 : kPairCopies} * p_.hidden_width, 1, dtype},
                   policy);
    e.hidden = copies > 1 ? part_columns(hidden_, copies) : hidden_;
    e.side = side;
    e.first_slice = slice;
    e.num_slices = num_slices;
    e.first_hidden = e.hidden.first[slice];
    e.width = copies * width(slice, num_slices);
    e.weights = copies > 1
                    ? part_layout(side)
                    : layouts_.of(side, splits || whole ? Policy::kSplit : policy, p_.weight);
    e.columns = columns;
    e.base = base;
    e.out = out;
    e.vectors = (!masked || (mask.columns | mask.first) % kMaskGroup == 0) && out.dtype == dtype &&
                loads_vectors(out) &&
                (base.data == nullptr || (base.dtype == dtype && loads_vectors(base)));
    e.pairs_of_columns = moves_in_pairs(out) && (base.data == nullptr || moves_in_pairs(base));
    e.plain = e.vectors && base.data == nullptr && !masked && rows_.sorted == nullptr &&
              columns % kPiece == 0;
    e.mask = mask;
    e.masked = masked;
    const int arrays = base.data == nullptr ? 1 : 2;
    e.plan = whole    ? choose_parts_expand(p_.num_rows, columns, e.width, machine_.sms)
             : splits ? choose_split_expand(p_.num_rows, columns, groups(), arrays, machine_)
                      : choose_expand(p_.num_rows, columns, e.width, groups(), arrays, policy,
                                      machine(takes_products(e, policy)));
    if (forced_.expand != nullptr) e.plan = *forced_.expand;
    e.max_tiles = most_tiles(p_, e.plan.tile_rows);
    e.ahead = looks_ahead(e.pairs, e.rows);
    e.lean = leaves_room(e);
    e.starts_next = plan_ != nullptr && starts_beside_ds(p_, *plan_);
    return e;
  }

  void run_expand(Side side, int slice, int num_slices, const HiddenForms& h, const Matrix& base,
                  const Matrix& out, std::int64_t columns, bool masked, const MaskParams& mask) {
    if (columns == 0) return;  // of no panel, by whose number plans divide
    auto e = expand_params(side, slice, num_slices, h, base, out, columns, masked, mask);
    const Policy policy =
        in_part_columns(out.dtype, p_.weight) ? Policy::kBFloat16 : policy_of(p_.weight, p_.weight);
    switch (e.plan.kernel) {
      case ExpandPlan::Kernel::kStream:
        return expand_stream(e, policy, stream_);
      case ExpandPlan::Kernel::kWide:
        return expand_wide(e, policy, stream_);
      case ExpandPlan::Kernel::kSplit:
        return expand(e, stream_);
      case ExpandPlan::Kernel::kProduct:
        if (plan_ != nullptr) e.beside = work_.row_sums->take_dy_sums();
        return expand_products(e, policy, stream_);
      case ExpandPlan::Kernel::kParts:
        return expand_parts(e, stream_);
    }
  }

  Machine machine(bool takes_products) const {
    return {machine_.sms, machine_.clusters, machine_.products && takes_products};
  }
  /// Adapters whose last tiles may not be full.
  std::int64_t groups() const { return grouped(p_) ? p_.num_adapters : 0; }

  const Problem& p_;
  const BackwardPlan* const plan_;
  const ForcedPlans forced_;
  const Machine machine_ = current_machine();
  Work work_;
  ForwardPlan once_;
  const Stream stream_;
  bool copies_h_ = true;  ///< by a launch of its own, where the backward is given h
  bool made_db_ = false;  ///< sums of dB, in the launch of ds
  int free_sms_ = 0;  ///< that the last shrink leaves to sums beside it; 0: none for all its time
  PairTable table_{}, sum_table_{}, pair_table_{};
  RowGroups rows_{};
  HiddenColumns hidden_{};
  WeightLayouts layouts_;
};

void chosen_forward(const Problem& p, Stream stream) { forward(p, {}, stream); }
void chosen_backward(const Problem& p, Stream stream) { backward(p, plan_backward(p), stream); }
std::int64_t forward_workspace(const Problem& p) { return Work(p, nullptr).bytes; }
std::int64_t chosen_backward_workspace(const Problem& p) {
  return backward_workspace(p, plan_backward(p));
}

void read_offsets(const std::int32_t* offsets, std::int64_t count, std::int32_t* to,
                  Stream stream) {
  const auto handle = static_cast<cudaStream_t>(stream.handle);
  device::cuda_check(
      cudaMemcpyAsync(to, offsets, count * sizeof(std::int32_t), cudaMemcpyDeviceToHost, handle),
      "lora_train_check");
  device::cuda_check(cudaStreamSynchronize(handle), "lora_train_check");
}

}  // namespace

std::int64_t backward_workspace(const Problem& p, const BackwardPlan& plan) {
  return Work(p, &plan).bytes;
}

void backward(const Problem& p, const BackwardPlan& plan, Stream stream) {
  if (!p.drops_whole) return Call(p, &plan, stream).backward();
  if (!drops_all(p)) Call(without_dropped(p), &plan, stream).backward();
  backward_dropped(p, stream);
}

void forward(const Problem& p, const ForcedPlans& forced, Stream stream) {
  if (!p.drops_whole) return Call(p, nullptr, stream, forced).forward();
  if (drops_all(p)) return forward_dropped(p, stream);
  Call(without_dropped(p), nullptr, stream, forced).forward();
}

const Backend kBackend = {chosen_forward, chosen_backward, forward_workspace,
                          chosen_backward_workspace, read_offsets};

}  // namespace mortar::lora::train::cuda
