// SPDX-License-Identifier: Apache-2.0
// Which kernels a call of LoRA training runs on CUDA, one after the other:
//
//   forward   h by shrink over K and its reduction; y by expand, slice by slice
//   backward  ds and the sums of dB in one pass over dy, or ds by shrink over N of every slice and
//             then the sums of dB; dx by expand over all slices; the sums of dA; dA and dB from
//             their sums (row_sums.cuh)
//
// x is read once in each direction; dy once, or twice where panel.h finds that cheaper.
#include <cuda_runtime.h>

#include <algorithm>
#include <optional>

#include "core/check.h"
#include "device/launch.cuh"
#include "lora/train/cuda/backend.cuh"
#include "lora/train/cuda/kernels.cuh"
#include "lora/train/cuda/row_sums.cuh"

namespace mortar::lora::train::cuda {
namespace {

Machine current_machine() {
  const device::DeviceInfo& d = device::current_device();
  return {d.num_sms, d.arch >= 90, d.arch == 90};
}

/// Split-K partials that h or ds may leave.
std::int64_t most_parts_of(const Problem& p, std::int64_t columns, int width) {
  const Machine machine = current_machine();
  const int unfused = unfused_parts(p.num_rows, width);
  if (!machine.products || width < kLeastProductRanks) return unfused;
  return std::max(unfused, cut_shrink(p.num_rows, columns, width, kLeaves, machine.sms).parts);
}

/// The workspace of a call.
struct Work {
  PairEntry* entries = nullptr;
  char *h = nullptr, *ds = nullptr;
  float* partials = nullptr;
  std::optional<RowSums> row_sums;
  std::int64_t bytes = 0;

  /// `plan` null: a forward.
  Work(const Problem& p, const BackwardPlan* plan) {
    Arena arena(p.workspace);
    if (p.num_adapters > 1) entries = arena.take<PairEntry>(p.num_adapters * p.num_slices);
    const std::int64_t hidden = p.num_rows * p.hidden_width;
    const std::int64_t size = dtype_size(p.weight);
    std::int64_t most_parts = 0;
    if (plan == nullptr || (p.wants_db && p.h == nullptr)) {
      if (p.h == nullptr) h = arena.take<char>(hidden * size);
      most_parts = most_parts_of(p, p.hidden, p.hidden_width);
    }
    if (plan != nullptr) {
      ds = arena.take<char>(hidden * size);
      for (int s = 0; s < p.num_slices; ++s) {
        if (makes_ds(p, *plan, s)) continue;
        most_parts = std::max(most_parts, most_parts_of(p, p.slices[s].width, width_of(p, s)));
      }
      row_sums.emplace(p, *plan, &arena);
    }
    partials = arena.take<float>(most_parts * hidden);
    bytes = arena.used();
  }
};

Matrix transposed(const Matrix& m) { return {m.data, m.col_stride, m.row_stride, m.dtype}; }

/// One call.
class Call {
 public:
  /// `plan` null: a forward.
  Call(const Problem& p, const BackwardPlan* plan, Stream stream, const ForcedPlans& forced = {})
      : p_(p), plan_(plan), forced_(forced), work_(p, plan), stream_(stream) {
    h_ = p.h != nullptr ? static_cast<char*>(p.h) : work_.h;
    make_table();
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
  }

  void forward() {
    make_h();
    for (int s = 0; s < p_.num_slices; ++s) {
      const SliceView& slice = p_.slices[s];
      run_expand(Side::kB, s, 1, h_, slice.base, slice.y, slice.width, p_.drops_delta(),
                 {p_.rng, p_.total_width, slice.first_column});
    }
  }

  void backward() {
    if (p_.wants_db && p_.h == nullptr) make_h();
    const bool needs_ds = p_.dx.data != nullptr || p_.wants_da;
    RowSums& sums = *work_.row_sums;
    sums.prepare(table_, rows_, hidden_, stream_);
    for (int s = 0; s < p_.num_slices; ++s) {
      const SliceView& slice = p_.slices[s];
      if (!needs_ds || makes_ds(p_, *plan_, s)) continue;
      run_shrink(Side::kB, s, 1, slice.dy, slice.width, work_.ds, p_.drops_delta(),
                 {p_.rng, p_.total_width, slice.first_column});
    }
    sums.sum_dy(h_, work_.ds);
    if (p_.dx.data != nullptr) {
      run_expand(Side::kA, 0, p_.num_slices, work_.ds, p_.add_dx ? p_.dx : Matrix{}, p_.dx,
                 p_.hidden, p_.drops_input(), {p_.rng, p_.hidden, 0});
    }
    sums.sum_x(work_.ds);
    sums.finish();
  }

 private:
  void make_table() {
    table_.num_slices = p_.num_slices;
    table_.entries = work_.entries;
    UploadParams batch{work_.entries, 0, {}};
    for (std::int64_t i = 0; i < p_.num_adapters * p_.num_slices; ++i) {
      const Pair pair = p_.pair(i / p_.num_slices, static_cast<int>(i % p_.num_slices));
      const PairEntry entry{
          pair.a,      pair.b,         pair.da,   pair.db,
          pair.factor, pair.threshold, pair.rank, (pair.add_a ? 1 : 0) | (pair.add_b ? 2 : 0)};
      note_layout(pair);
      if (work_.entries == nullptr) {
        table_.own[i] = entry;
        continue;
      }
      batch.entries[batch.count++] = entry;
      if (batch.count < kUploadEntries && i + 1 < p_.num_adapters * p_.num_slices) continue;
      upload(batch, stream_);
      batch.to += batch.count;
      batch.count = 0;
    }
  }

  /// What all weights have in common, seen as [r, wide] and as [wide, r].
  struct Common {
    bool dense = true, async = true, vectors = true;
    void note(const Matrix& m) {
      dense = dense && m.col_stride == 1;
      async = async && copies_async(m);
      vectors = vectors && loads_vectors(m);
    }
  };
  void note_layout(const Pair& pair) {
    if (pair.rank == 0) return;
    ranks_a_.note(pair.a);
    wide_a_.note(transposed(pair.a));
    ranks_b_.note(transposed(pair.b));
    wide_b_.note(pair.b);
  }
  WeightLayout layout(Side side, Policy policy) const {
    const Common& by_ranks = side == Side::kA ? ranks_a_ : ranks_b_;
    const Common& by_wide = side == Side::kA ? wide_a_ : wide_b_;
    WeightLayout l;
    l.rows_are_ranks = by_ranks.dense || !by_wide.dense;
    const Common& own = l.rows_are_ranks ? by_ranks : by_wide;
    l.async = policy != Policy::kSplit && own.async;
    l.vectors = own.vectors;
    l.parts = parts_of(p_.weight);
    return l;
  }

  static Fetch fetch_of(const Matrix& m, Policy policy) {
    return {m, policy != Policy::kSplit && copies_async(m), loads_vectors(m), parts_of(m.dtype)};
  }
  Fetch fetch_hidden(char* data, Policy policy) const {
    return fetch_of({data, p_.hidden_width, 1, p_.weight}, policy);
  }

  void make_h() {
    run_shrink(Side::kA, 0, p_.num_slices, p_.x, p_.hidden, h_, p_.drops_input(),
               {p_.rng, p_.hidden, 0});
  }

  void run_shrink(Side side, int slice, int num_slices, const Matrix& wide, std::int64_t columns,
                  char* to, bool masked, const MaskParams& mask) {
    const Policy policy = policy_of(wide.dtype, p_.weight);
    ShrinkParams s{};
    s.pairs = table_;
    s.rows = rows_;
    s.wide = fetch_of(wide, policy);
    s.mask = mask;
    s.masked = masked;
    s.side = side;
    s.first_slice = slice;
    s.num_slices = num_slices;
    s.hidden = hidden_;
    s.first_hidden = p_.slices[slice].first_hidden;
    s.width = num_slices == p_.num_slices ? p_.hidden_width : width_of(p_, slice);
    s.weights = layout(side, policy);
    s.columns = columns;
    s.partials = work_.partials;
    s.plan = choose_shrink(p_.num_rows, columns, s.width, groups(), masked,
                           policy != Policy::kSplit && s.wide.async && s.weights.async &&
                               (!masked || (mask.columns | mask.first) % kMaskGroup == 0),
                           machine(takes_products(s, policy)));
    if (forced_.shrink != nullptr) s.plan = *forced_.shrink;
    s.max_tiles = most_tiles(p_, s.plan.rows);
    s.h = to;
    if (s.width == 0) return;
    if (s.plan.product) {
      shrink_products(s, policy, stream_);
    } else {
      s.plan.stream ? shrink_stream(s, policy, stream_) : shrink(s, policy, stream_);
    }
    if (s.plan.fused) return;
    HiddenParams h{};
    h.pairs = table_;
    h.rows = rows_;
    h.hidden = hidden_;
    h.first_slice = slice;
    h.num_slices = num_slices;
    h.first_hidden = s.first_hidden;
    h.width = s.width;
    h.parts = s.plan.parts;
    h.partials = work_.partials;
    h.h = to;
    h.dtype = p_.weight;
    h.rows_of_block = std::max(1, kThreads * 4 / s.width);
    h.max_tiles = most_tiles(p_, h.rows_of_block);
    reduce_hidden(h, stream_);
  }

  void run_expand(Side side, int slice, int num_slices, char* h, const Matrix& base,
                  const Matrix& out, std::int64_t columns, bool masked, const MaskParams& mask) {
    const Policy policy = policy_of(p_.weight, p_.weight);
    ExpandParams e{};
    e.pairs = table_;
    e.rows = rows_;
    e.h = fetch_hidden(h, policy);
    e.hidden = hidden_;
    e.side = side;
    e.first_slice = slice;
    e.num_slices = num_slices;
    e.first_hidden = p_.slices[slice].first_hidden;
    e.width = num_slices == p_.num_slices ? p_.hidden_width : width_of(p_, slice);
    e.weights = layout(side, policy);
    e.columns = columns;
    e.base = base;
    e.out = out;
    e.vectors = (!masked || (mask.columns | mask.first) % kMaskGroup == 0) &&
                out.dtype == p_.weight && loads_vectors(out) &&
                (base.data == nullptr || (base.dtype == p_.weight && loads_vectors(base)));
    e.pairs_of_columns = moves_in_pairs(out) && (base.data == nullptr || moves_in_pairs(base));
    e.plain = e.vectors && base.data == nullptr && !masked && rows_.sorted == nullptr &&
              columns % kPiece == 0;
    e.mask = mask;
    e.masked = masked;
    e.plan = choose_expand(p_.num_rows, columns, e.width, groups(), base.data == nullptr ? 1 : 2,
                           policy, machine(takes_products(e, policy)));
    if (forced_.expand != nullptr) e.plan = *forced_.expand;
    e.max_tiles = most_tiles(p_, e.plan.tile_rows);
    switch (e.plan.kernel) {
      case ExpandPlan::Kernel::kStream:
        return expand_stream(e, policy, stream_);
      case ExpandPlan::Kernel::kWide:
        return expand_wide(e, policy, stream_);
      case ExpandPlan::Kernel::kSplit:
        return expand(e, stream_);
      case ExpandPlan::Kernel::kProduct:
        return expand_products(e, policy, stream_);
    }
  }

  Machine machine(bool takes_products) const {
    Machine own = machine_;
    own.products = own.products && takes_products;
    return own;
  }

  /// Adapters whose last tiles may not be full.
  std::int64_t groups() const { return grouped(p_) ? p_.num_adapters : 0; }

  static bool moves_in_pairs(const Matrix& m) {
    return m.col_stride == 1 && m.row_stride % 2 == 0 &&
           reinterpret_cast<std::uintptr_t>(m.data) % (2 * dtype_size(m.dtype)) == 0;
  }

  const Problem& p_;
  const BackwardPlan* const plan_;
  const ForcedPlans forced_;
  const Machine machine_ = current_machine();
  Work work_;
  const Stream stream_;
  char* h_ = nullptr;
  PairTable table_{};
  RowGroups rows_{};
  HiddenColumns hidden_{};
  Common ranks_a_, wide_a_, ranks_b_, wide_b_;
};

void chosen_forward(const Problem& p, Stream stream) { Call(p, nullptr, stream).forward(); }
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
  Call(p, &plan, stream).backward();
}

void forward(const Problem& p, const ForcedPlans& forced, Stream stream) {
  Call(p, nullptr, stream, forced).forward();
}

const Backend kBackend = {chosen_forward, chosen_backward, forward_workspace,
                          chosen_backward_workspace, read_offsets};

}  // namespace mortar::lora::train::cuda
