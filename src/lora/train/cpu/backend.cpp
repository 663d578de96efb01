// SPDX-License-Identifier: Apache-2.0
// LoRA training on the CPU. Threads draw chunks of rows, which go through two products while they
// are in the caches:
//
//   forward   h = factor * x A^T, y = base + h B^T
//   backward  ds = factor * dy B, dx = ds A
//
// and then blocks of columns of dA = ds^T x and dB = dy^T h (row_sums.h). Who runs a chunk or a
// block has no influence on any bit.
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "lora/train/cpu/row_sums.h"
#include "lora/train/problem.h"

namespace mortar::lora::train::cpu {
namespace {

/// How many threads `work` multiply-adds are worth.
int threads_for(std::int64_t work) {
  const std::int64_t wanted = work / kWorkPerThread;
  if (wanted <= 1) return 1;
  return static_cast<int>(
      std::min<std::int64_t>(wanted, std::min(omp_get_max_threads(), most_threads())));
}

/// Runs body(item, thread) for every item, drawn by up to that many threads. A parallel region of
/// one thread would cost a system call, and a few microseconds of a small call.
template <class Body>
void for_items(std::int64_t items, std::int64_t most, const Body& body) {
  const int threads = static_cast<int>(std::min(items, most));
  std::atomic<std::int64_t> next{0};
  const auto draw = [&](int thread) {
    for (std::int64_t i = next++; i < items; i = next++) body(i, thread);
  };
  if (threads <= 1) return draw(0);
#pragma omp parallel num_threads(threads)
  draw(omp_get_thread_num());
}

/// One call: what its chunks share.
class Call {
 public:
  Call(const Problem& p, bool backward)
      : p_(p),
        wide_(p),
        layout_(p, backward),
        chunks_(p),
        backward_(backward),
        threads_(threads_for(work(p))),
        sums_(p, wide_, layout_, chunks_, threads_) {}

  void run() {
    prepare();
    for (std::int64_t begin = 0, end; begin < chunks_.size(); begin = end) {
      end = sums_.group_end(begin);
      for_items(end - begin, threads_, [&](std::int64_t i, int thread) {
        Scratch scratch = layout_.scratch(thread);
        backward_ ? backward_step(begin + i, &scratch) : forward_step(begin + i, &scratch);
      });
      for_items(sums_.items(begin, end), threads_, [&](std::int64_t item, int thread) {
        Scratch scratch = layout_.scratch(thread);
        sums_.add(begin, end, item, &scratch);
      });
    }
    base_rows();
    sums_.clear_others();
  }

 private:
  static std::int64_t work(const Problem& p) {
    int rank = 0;
    for (int s = 0; s < p.num_slices; ++s) rank = std::max(rank, p.slices[s].rank);
    return p.num_rows * rank * (p.hidden + p.total_width);
  }

  /// Brings the weights of every adapter into the form that kernels take, kColumns an item.
  void prepare() const {
    constexpr std::int64_t kColumns = 8 * lora::cpu::kPackColumns;
    std::int64_t widest = p_.hidden;
    for (int s = 0; s < p_.num_slices; ++s) widest = std::max(widest, p_.slices[s].width);
    const std::int64_t blocks = ceil_div(widest, kColumns);
    for_items(p_.num_adapters * blocks, threads_, [&](std::int64_t item, int) {
      const std::int64_t adapter = item / blocks, first = item % blocks * kColumns;
      const auto columns_of = [&](std::int64_t width) {
        return Columns{first, std::clamp<std::int64_t>(width - first, 0, kColumns)};
      };
      const Columns in = columns_of(p_.hidden);
      const PreparedWeights to = layout_.weights(adapter);
      const bool packs_at = to.at != nullptr && in.count > 0;
      const Packed at(to.at, total_rank(adapter), p_.weight);
      if (packs_at) at.clear(in);
      std::int64_t first_rank = 0;
      for (int s = 0; s < p_.num_slices; ++s) {
        const Pair pair = p_.pair(adapter, s);
        if (pair.rank == 0) continue;
        const Columns out = columns_of(p_.slices[s].width);
        if (copies_a(pair)) copy_columns(pair.a, pair.rank, in, p_.hidden, to.a[s]);
        if (packs_at) at.put(transposed(pair.a), in, first_rank, pair.rank);
        if (backward_) {
          if (copies_bt(pair)) {
            copy_columns(transposed(pair.b), pair.rank, out, p_.slices[s].width, to.bt[s]);
          }
        } else if (out.count > 0) {
          Packed(to.b[s], pair.rank, p_.weight).put_all(pair.b, out, pair.rank);
        }
        first_rank += pair.rank;
      }
    });
  }

  static bool copies_a(const Pair& pair) { return pair.a.col_stride != 1; }
  static bool copies_bt(const Pair& pair) { return pair.b.row_stride != 1; }
  Matrix dense_a(const Pair& pair, const PreparedWeights& w, int slice) const {
    return copies_a(pair) ? Matrix{w.a[slice], p_.hidden, 1, p_.weight} : pair.a;
  }
  Matrix dense_bt(const Pair& pair, const PreparedWeights& w, int slice) const {
    return copies_bt(pair) ? Matrix{w.bt[slice], p_.slices[slice].width, 1, p_.weight}
                           : transposed(pair.b);
  }

  std::int64_t total_rank(std::int64_t adapter) const {
    std::int64_t rank = 0;
    for (int s = 0; s < p_.num_slices; ++s) rank += p_.pair(adapter, s).rank;
    return rank;
  }

  /// h of the batch, or of the step alone where nobody asked for it.
  NarrowRows h_rows(const Scratch& scratch) const {
    const std::int64_t stride = p_.hidden_width * dtype_size(p_.weight);
    return p_.h != nullptr ? NarrowRows{static_cast<char*>(p_.h), stride, false}
                           : NarrowRows{scratch.h, stride, true};
  }
  NarrowRows ds_rows(const Scratch& scratch) const {
    return {scratch.ds, p_.hidden_width * dtype_size(p_.weight), true};
  }

  void make_h(const Chunk& chunk, const StepRows& rows, Scratch* scratch) const {
    const PreparedWeights w = layout_.weights(chunk.adapter);
    const NarrowRows h = h_rows(*scratch);
    for (std::int64_t i = 0; i < rows.count; ++i) std::memset(h.at(rows, i), 0, h.stride);
    for (int s = 0; s < p_.num_slices; ++s) {
      const Pair pair = p_.pair(chunk.adapter, s);
      if (pair.rank == 0) continue;
      shrink_rows(wide_.x(pair.threshold), rows, dense_a(pair, w, s), pair.rank, pair.factor, h,
                  p_.slices[s].first_hidden, p_.weight, scratch);
    }
  }

  /// Entries of the expand kernel from columns of h or ds, after `first` others in each row.
  void load_entries(const NarrowRows& from, const StepRows& rows, int slice, std::int64_t rank,
                    std::int64_t stride, std::int64_t first, Scratch* scratch) const {
    const std::int64_t column = p_.slices[slice].first_hidden * dtype_size(p_.weight);
    const DType dtype = entry_dtype(p_.weight);
    for (std::int64_t i = 0; i < rows.count; ++i) {
      lora::cpu::kernels().convert(from.at(rows, i) + column, p_.weight, 1.0f, rank,
                                   scratch->entries + (i * stride + first) * dtype_size(dtype),
                                   dtype);
    }
  }

  void forward_step(std::int64_t i, Scratch* scratch) const {
    const Chunk& chunk = chunks_.chunks()[i];
    const StepRows rows = chunks_.rows(i);
    const PreparedWeights w = layout_.weights(chunk.adapter);
    make_h(chunk, rows, scratch);
    for (int s = 0; s < p_.num_slices; ++s) {
      const Pair pair = p_.pair(chunk.adapter, s);
      const SliceView& slice = p_.slices[s];
      const OutRows out{slice.y, slice.base, slice.width,
                        wide_.mask(pair.threshold, LoraDropoutOn::kDelta, s)};
      if (pair.rank == 0) {
        copy_rows(out, rows, scratch);
        continue;
      }
      const std::int64_t stride = entry_stride(pair.rank);
      clear_entries(rows.count * stride, scratch);
      load_entries(h_rows(*scratch), rows, s, pair.rank, stride, 0, scratch);
      expand_rows(out, rows, Packed(w.b[s], pair.rank, p_.weight), stride, p_.weight, scratch);
    }
  }

  void clear_entries(std::int64_t count, Scratch* scratch) const {
    std::memset(scratch->entries, 0, count * dtype_size(entry_dtype(p_.weight)));
  }

  /// The kernel reads whole units: two entries for 16-bit weights.
  std::int64_t entry_stride(std::int64_t rank) const {
    return round_up<std::int64_t>(rank, 4 / dtype_size(p_.weight));
  }

  void backward_step(std::int64_t i, Scratch* scratch) const {
    const Chunk& chunk = chunks_.chunks()[i];
    const StepRows rows = chunks_.rows(i);
    const PreparedWeights w = layout_.weights(chunk.adapter);
    const NarrowRows ds = ds_rows(*scratch);
    if (p_.wants_db) {
      if (p_.h == nullptr) make_h(chunk, rows, scratch);
      sums_.keep_h(i, rows, h_rows(*scratch));
    }
    for (int s = 0; s < p_.num_slices; ++s) {
      const Pair pair = p_.pair(chunk.adapter, s);
      if (pair.rank == 0 || (p_.dx.data == nullptr && pair.da.data == nullptr)) continue;
      shrink_rows(wide_.dy(pair.threshold, s), rows, dense_bt(pair, w, s), pair.rank, pair.factor,
                  ds, p_.slices[s].first_hidden, p_.weight, scratch);
    }
    if (p_.wants_da) sums_.keep_ds(i, rows, ds);
    if (p_.dx.data != nullptr) dx_step(chunk, rows, w, ds, scratch);
  }

  void dx_step(const Chunk& chunk, const StepRows& rows, const PreparedWeights& w,
               const NarrowRows& ds, Scratch* scratch) const {
    const std::int64_t rank = total_rank(chunk.adapter), stride = entry_stride(rank);
    OutRows out{p_.dx, p_.add_dx ? p_.dx : Matrix{}, p_.hidden, {}};
    if (rank == 0) return copy_rows(out, rows, scratch);
    clear_entries(rows.count * stride, scratch);
    std::int64_t first = 0;
    for (int s = 0; s < p_.num_slices; ++s) {
      const Pair pair = p_.pair(chunk.adapter, s);
      if (pair.rank == 0) continue;
      out.mask = wide_.mask(pair.threshold, LoraDropoutOn::kInput, 0);
      load_entries(ds, rows, s, pair.rank, stride, first, scratch);
      first += pair.rank;
    }
    expand_rows(out, rows, Packed(w.at, rank, p_.weight), stride, p_.weight, scratch);
  }

  /// Rows that no delta reaches: y = base, h = 0, dx = 0.
  void base_rows() const {
    const auto& base = chunks_.base_rows();
    for_items(static_cast<std::int64_t>(base.size()), threads_, [&](std::int64_t i, int thread) {
      Scratch scratch = layout_.scratch(thread);
      base_step(base[i], &scratch);
    });
  }

  void base_step(const StepRows& rows, Scratch* scratch) const {
    if (backward_) {
      const OutRows out{p_.dx, p_.add_dx ? p_.dx : Matrix{}, p_.hidden, {}};
      if (p_.dx.data != nullptr) copy_rows(out, rows, scratch);
      return;
    }
    for (int s = 0; s < p_.num_slices; ++s) {
      const SliceView& slice = p_.slices[s];
      copy_rows({slice.y, slice.base, slice.width, {}}, rows, scratch);
    }
    const NarrowRows h = h_rows(*scratch);
    for (std::int64_t i = 0; i < rows.count; ++i) std::memset(h.at(rows, i), 0, h.stride);
  }

  const Problem& p_;
  const WideOperands wide_;
  const WorkLayout layout_;
  const RowChunks chunks_;
  const bool backward_;
  const int threads_;
  const RowSums sums_;
};

void forward(const Problem& p, Stream) { Call(p, false).run(); }
void backward(const Problem& p, Stream) { Call(p, true).run(); }

std::int64_t forward_workspace(const Problem& p) { return WorkLayout(p, false).bytes(); }
std::int64_t backward_workspace(const Problem& p) { return WorkLayout(p, true).bytes(); }

void read_offsets(const std::int32_t* offsets, std::int64_t count, std::int32_t* to, Stream) {
  std::copy_n(offsets, count, to);
}

}  // namespace

const Backend kBackend = {forward, backward, forward_workspace, backward_workspace, read_offsets};

}  // namespace mortar::lora::train::cpu
