// SPDX-License-Identifier: Apache-2.0
// Which kernels a call of LoRA training runs on CUDA, one after the other:
//
//   forward   h by shrink over K and its reduction; y by expand, slice by slice
//   backward  ds by shrink over N of every slice and its reduction; dB by outer of dy and h; dA by
//             outer of x and ds; dx by expand over all slices
//
// x is read once in each direction, and dy twice where dB is wanted.
#include <cuda_runtime.h>

#include <algorithm>

#include "core/check.h"
#include "device/launch.cuh"
#include "lora/train/cuda/kernels.cuh"

namespace mortar::lora::train::cuda {
namespace {

constexpr std::int64_t kAlignment = 256;

/// Pieces of the workspace; without memory it counts bytes alone.
class Arena {
 public:
  explicit Arena(void* memory) : memory_(static_cast<char*>(memory)) {}
  template <class T>
  T* take(std::int64_t count) {
    char* at = memory_ == nullptr ? nullptr : memory_ + used_;
    used_ += round_up<std::int64_t>(count * static_cast<std::int64_t>(sizeof(T)), kAlignment);
    return reinterpret_cast<T*>(at);
  }
  std::int64_t used() const { return used_; }

 private:
  char* memory_;
  std::int64_t used_ = 0;
};

bool grouped(const Problem& p) { return p.rows.offsets != nullptr || p.rows.plan != nullptr; }

/// Most tiles of so many rows; groups and the base rows may each leave one that is not full.
std::int64_t most_tiles(const Problem& p, std::int64_t rows) {
  return ceil_div(p.num_rows, rows) + (grouped(p) ? p.num_adapters + 1 : 0);
}

/// Columns of h of a slice.
int width_of(const Problem& p, int slice) { return round_up(p.slices[slice].rank, kHiddenGranule); }

ShrinkPlan plan_h(const Problem& p) {
  return choose_shrink(p.num_rows, p.hidden, p.hidden_width, policy_of(p.x.dtype, p.weight));
}
ShrinkPlan plan_ds(const Problem& p, int s) {
  return choose_shrink(p.num_rows, p.slices[s].width, width_of(p, s),
                       policy_of(p.slices[s].dy.dtype, p.weight));
}
OuterPlan plan_da(const Problem& p) {
  return choose_outer(p.num_rows, p.hidden, p.hidden_width, policy_of(p.x.dtype, p.weight));
}
OuterPlan plan_db(const Problem& p, int s) {
  return choose_outer(p.num_rows, p.slices[s].width, width_of(p, s),
                      policy_of(p.slices[s].dy.dtype, p.weight));
}

/// The workspace of a call.
struct Work {
  PairEntry* entries = nullptr;
  char *h = nullptr, *ds = nullptr;
  float *splits = nullptr, *chunks = nullptr;
  std::int64_t bytes = 0;

  Work(const Problem& p, bool backward) {
    Arena arena(p.workspace);
    if (p.num_adapters > 1) entries = arena.take<PairEntry>(p.num_adapters * p.num_slices);
    const std::int64_t hidden = p.num_rows * p.hidden_width;
    const std::int64_t size = dtype_size(p.weight);
    std::int64_t most_splits = 0, most_chunks = 0;
    if (!backward || (p.wants_db && p.h == nullptr)) {
      if (p.h == nullptr) h = arena.take<char>(hidden * size);
      most_splits = plan_h(p).splits;
    }
    if (backward) {
      ds = arena.take<char>(hidden * size);
      for (int s = 0; s < p.num_slices; ++s) {
        most_splits = std::max<std::int64_t>(most_splits, plan_ds(p, s).splits);
        if (!p.wants_db) continue;
        most_chunks = std::max(most_chunks, most_tiles(p, plan_db(p, s).chunk_rows) *
                                                width_of(p, s) * p.slices[s].width);
      }
      if (p.wants_da) {
        most_chunks =
            std::max(most_chunks, most_tiles(p, plan_da(p).chunk_rows) * p.hidden_width * p.hidden);
      }
      chunks = arena.take<float>(most_chunks);
    }
    splits = arena.take<float>(most_splits * hidden);
    bytes = arena.used();
  }
};

Matrix transposed(const Matrix& m) { return {m.data, m.col_stride, m.row_stride, m.dtype}; }

/// One call.
class Call {
 public:
  Call(const Problem& p, bool backward, Stream stream)
      : p_(p), work_(p, backward), stream_(stream) {
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
    for (int s = 0; s < p_.num_slices; ++s) {
      const SliceView& slice = p_.slices[s];
      const MaskParams mask{p_.rng, p_.total_width, slice.first_column};
      if (needs_ds) {
        run_shrink(Side::kB, s, 1, slice.dy, slice.width, plan_ds(p_, s), work_.ds,
                   p_.drops_delta(), mask);
      }
      if (p_.wants_db) {
        run_outer(Side::kB, s, 1, slice.dy, h_, slice.width, plan_db(p_, s), p_.drops_delta(),
                  mask);
      }
    }
    const MaskParams mask{p_.rng, p_.hidden, 0};
    if (p_.wants_da) {
      run_outer(Side::kA, 0, p_.num_slices, p_.x, work_.ds, p_.hidden, plan_da(p_),
                p_.drops_input(), mask);
    }
    if (p_.dx.data != nullptr) {
      run_expand(Side::kA, 0, p_.num_slices, work_.ds, p_.add_dx ? p_.dx : Matrix{}, p_.dx,
                 p_.hidden, p_.drops_input(), mask);
    }
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
    run_shrink(Side::kA, 0, p_.num_slices, p_.x, p_.hidden, plan_h(p_), h_, p_.drops_input(),
               {p_.rng, p_.hidden, 0});
  }

  void run_shrink(Side side, int slice, int num_slices, const Matrix& wide, std::int64_t columns,
                  const ShrinkPlan& plan, char* to, bool masked, const MaskParams& mask) {
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
    s.chunk = plan.chunk;
    s.splits = plan.splits;
    s.ranks = plan.ranks;
    s.max_tiles = most_tiles(p_, kTileRows);
    s.partials = work_.splits;
    if (s.width > 0) shrink(s, policy, stream_);
    HiddenParams h{};
    h.pairs = table_;
    h.rows = rows_;
    h.hidden = hidden_;
    h.first_slice = slice;
    h.num_slices = num_slices;
    h.first_hidden = s.first_hidden;
    h.width = s.width;
    h.splits = plan.splits;
    h.partials = work_.splits;
    h.h = to;
    h.dtype = p_.weight;
    h.max_tiles = most_tiles(p_, kReduceRows);
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
    e.weights = layout(side, policy);
    e.columns = columns;
    e.base = base;
    e.out = out;
    e.pairs_of_columns = moves_in_pairs(out) && (base.data == nullptr || moves_in_pairs(base));
    e.mask = mask;
    e.masked = masked;
    e.max_tiles = most_tiles(p_, kTileRows);
    expand(e, policy, stream_);
  }

  static bool moves_in_pairs(const Matrix& m) {
    return m.col_stride == 1 && m.row_stride % 2 == 0 &&
           reinterpret_cast<std::uintptr_t>(m.data) % (2 * dtype_size(m.dtype)) == 0;
  }

  void run_outer(Side side, int slice, int num_slices, const Matrix& wide, char* narrow,
                 std::int64_t columns, const OuterPlan& plan, bool masked, const MaskParams& mask) {
    const Policy policy = policy_of(wide.dtype, p_.weight);
    OuterParams o{};
    o.pairs = table_;
    o.rows = rows_;
    o.wide = fetch_of(wide, policy);
    o.s = fetch_hidden(narrow, policy);
    o.mask = mask;
    o.masked = masked;
    o.first_hidden = p_.slices[slice].first_hidden;
    o.width = num_slices == p_.num_slices ? p_.hidden_width : width_of(p_, slice);
    o.columns = columns;
    o.chunk_rows = plan.chunk_rows;
    o.ranks = plan.ranks;
    o.max_tiles = most_tiles(p_, plan.chunk_rows);
    o.partials = work_.chunks;
    if (o.width == 0) return;
    outer(o, policy, stream_);
    WeightGradParams g{};
    g.pairs = table_;
    g.rows = rows_;
    g.hidden = hidden_;
    g.side = side;
    g.first_slice = slice;
    g.num_slices = num_slices;
    g.first_hidden = o.first_hidden;
    g.width = o.width;
    g.columns = columns;
    g.chunk_rows = plan.chunk_rows;
    g.num_adapters = static_cast<int>(p_.num_adapters);
    g.partials = work_.chunks;
    reduce_outer(g, stream_);
  }

  const Problem& p_;
  const Work work_;
  const Stream stream_;
  char* h_ = nullptr;
  PairTable table_{};
  RowGroups rows_{};
  HiddenColumns hidden_{};
  Common ranks_a_, wide_a_, ranks_b_, wide_b_;
};

void forward(const Problem& p, Stream stream) { Call(p, false, stream).forward(); }
void backward(const Problem& p, Stream stream) { Call(p, true, stream).backward(); }
std::int64_t forward_workspace(const Problem& p) { return Work(p, false).bytes; }
std::int64_t backward_workspace(const Problem& p) { return Work(p, true).bytes; }

void read_offsets(const std::int32_t* offsets, std::int64_t count, std::int32_t* to,
                  Stream stream) {
  const auto handle = static_cast<cudaStream_t>(stream.handle);
  device::cuda_check(
      cudaMemcpyAsync(to, offsets, count * sizeof(std::int32_t), cudaMemcpyDeviceToHost, handle),
      "lora_train_check");
  device::cuda_check(cudaStreamSynchronize(handle), "lora_train_check");
}

}  // namespace

const Backend kBackend = {forward, backward, forward_workspace, backward_workspace, read_offsets};

}  // namespace mortar::lora::train::cuda
