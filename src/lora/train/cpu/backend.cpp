// SPDX-License-Identifier: Apache-2.0
// LoRA training on the CPU. Threads draw chunks of rows; a step of a chunk's rows goes through all
// of its products while its rows of x and dy are in the caches, so each is read from memory once:
//
//   forward   h = factor * x A^T, y = base + h B^T
//   backward  ds = factor * dy B, dB += dy^T h, dA += ds^T x, dx = ds A
//
// dA and dB are partial sums of a chunk, added in order by a second loop. Who runs a chunk has no
// influence on any bit.
#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "core/float_element.h"
#include "lora/plan_layout.h"
#include "lora/train/cpu/layout.h"
#include "lora/train/problem.h"

namespace mortar::lora::train::cpu {
namespace {

/// Runs body(item, thread) for every item, drawn by up to most_threads() threads. A parallel region
/// of one thread would cost a system call, and a few microseconds of a small call.
template <class Body>
void for_items(std::int64_t items, std::int64_t work, const Body& body) {
  const std::int64_t wanted = std::min(items, work / kWorkPerThread);
  const int threads = wanted <= 1 ? 1
                                  : static_cast<int>(std::min<std::int64_t>(
                                        wanted, std::min(omp_get_max_threads(), most_threads())));
  std::atomic<std::int64_t> next{0};
  const auto draw = [&](int thread) {
    for (std::int64_t i = next++; i < items; i = next++) body(i, thread);
  };
  if (threads <= 1) return draw(0);
#pragma omp parallel num_threads(threads)
  draw(omp_get_thread_num());
}

Matrix transposed(const Matrix& m) { return {m.data, m.col_stride, m.row_stride, m.dtype}; }

/// One call: what its chunks share.
class Call {
 public:
  Call(const Problem& p, bool backward)
      : p_(p), layout_(p, backward), chunks_(p), backward_(backward) {
    if (p.rng != nullptr) {
      seed_ = static_cast<std::uint64_t>(p.rng[0]);
      offset_ = static_cast<std::uint64_t>(p.rng[1]);
    }
    if (p.rows.plan != nullptr) {
      sorted_ = p.rows.plan + PlanLayout::make(p.num_rows, p.num_adapters).sorted;
    }
    std::int64_t columns = p.hidden + p.total_width;
    for (int s = 0; s < p.num_slices; ++s) {
      work_ = std::max(work_, p.num_rows * p.slices[s].rank * columns);
    }
  }

  void run() {
    prepare();
    const auto& chunks = chunks_.chunks();
    for_items(static_cast<std::int64_t>(chunks.size()), work_, [&](std::int64_t i, int thread) {
      Scratch scratch = layout_.scratch(thread);
      each_step(chunks[i], [&](const StepRows& rows, bool first) {
        backward_ ? backward_step(chunks[i], i, rows, first, &scratch)
                  : forward_step(chunks[i], rows, &scratch);
      });
    });
    base_rows();
    if (p_.wants_da || p_.wants_db) add_up();
  }

 private:
  template <class Step>
  void each_step(const Chunk& chunk, const Step& step) const {
    for (std::int64_t at = 0; at < chunk.count; at += kStepRows) {
      step(StepRows{sorted_, chunk.start + at, std::min(kStepRows, chunk.count - at)}, at == 0);
    }
  }

  Mask mask(std::uint32_t threshold, LoraDropoutOn on, int slice) const {
    Mask m;
    if (p_.drop_on != on) return m;
    m.threshold = threshold;
    m.columns = on == LoraDropoutOn::kInput ? p_.hidden : p_.total_width;
    m.first = on == LoraDropoutOn::kInput ? 0 : p_.slices[slice].first_column;
    m.seed = seed_;
    m.offset = offset_;
    return m;
  }

  /// Brings the weights of every adapter into the form that kernels take, kColumns an item.
  void prepare() const {
    constexpr std::int64_t kColumns = 8 * lora::cpu::kPackColumns;
    std::int64_t widest = p_.hidden;
    for (int s = 0; s < p_.num_slices; ++s) widest = std::max(widest, p_.slices[s].width);
    const std::int64_t blocks = ceil_div(widest, kColumns);
    for_items(p_.num_adapters * blocks, work_, [&](std::int64_t item, int) {
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

  WideRows x_rows(std::uint32_t threshold) const {
    return {&p_.x, p_.hidden, mask(threshold, LoraDropoutOn::kInput, 0)};
  }
  WideRows dy_rows(std::uint32_t threshold, int slice) const {
    return {&p_.slices[slice].dy, p_.slices[slice].width,
            mask(threshold, LoraDropoutOn::kDelta, slice)};
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
      shrink_rows(x_rows(pair.threshold), rows, dense_a(pair, w, s), pair.rank, pair.factor, h,
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

  void forward_step(const Chunk& chunk, const StepRows& rows, Scratch* scratch) const {
    const PreparedWeights w = layout_.weights(chunk.adapter);
    make_h(chunk, rows, scratch);
    for (int s = 0; s < p_.num_slices; ++s) {
      const Pair pair = p_.pair(chunk.adapter, s);
      const SliceView& slice = p_.slices[s];
      const OutRows out{slice.y, slice.base, slice.width,
                        mask(pair.threshold, LoraDropoutOn::kDelta, s)};
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

  /// entries[first + r][i] = column r of slice `slice` of row i, as outer_rows takes it for `wide`.
  void load_transposed(const NarrowRows& from, const StepRows& rows, const WideRows& wide,
                       int slice, std::int64_t rank, std::int64_t first, Scratch* scratch) const {
    const std::int64_t column = p_.slices[slice].first_hidden;
    if (outer_entry_dtype(wide, p_.weight) == DType::kFloat32) {
      auto* to = reinterpret_cast<float*>(scratch->entries) + first * kStepRows;
      for (std::int64_t i = 0; i < rows.count; ++i) {
        const char* row = from.at(rows, i);
        for (std::int64_t r = 0; r < rank; ++r) {
          to[r * kStepRows + i] = load_float(row, p_.weight, column + r);
        }
      }
      return;
    }
    auto* to = reinterpret_cast<std::uint16_t*>(scratch->entries) + first * kStepRows;
    for (std::int64_t i = 0; i < rows.count; ++i) {
      const auto* row = reinterpret_cast<const std::uint16_t*>(from.at(rows, i)) + column;
      for (std::int64_t r = 0; r < rank; ++r) to[r * kStepRows + i] = row[r];
    }
    for (std::int64_t r = 0; rows.count % 2 != 0 && r < rank; ++r)
      to[r * kStepRows + rows.count] = 0;
  }

  void backward_step(const Chunk& chunk, std::int64_t index, const StepRows& rows, bool first,
                     Scratch* scratch) const {
    const PreparedWeights w = layout_.weights(chunk.adapter);
    const NarrowRows ds = ds_rows(*scratch);
    if (p_.wants_db && p_.h == nullptr) make_h(chunk, rows, scratch);
    for (int s = 0; s < p_.num_slices; ++s) {
      const Pair pair = p_.pair(chunk.adapter, s);
      if (pair.rank == 0) continue;
      const WideRows dy = dy_rows(pair.threshold, s);
      if (p_.dx.data != nullptr || pair.da.data != nullptr) {
        shrink_rows(dy, rows, dense_bt(pair, w, s), pair.rank, pair.factor, ds,
                    p_.slices[s].first_hidden, p_.weight, scratch);
      }
      if (pair.db.data != nullptr) {
        load_transposed(h_rows(*scratch), rows, dy, s, pair.rank, 0, scratch);
        outer_rows(dy, rows, pair.rank, !first, p_.weight, layout_.db_sums(index, s), scratch);
      }
    }
    if (p_.wants_da) {
      std::int64_t rank = 0;
      std::uint32_t threshold = 0;
      for (int s = 0; s < p_.num_slices; ++s) {
        const Pair pair = p_.pair(chunk.adapter, s);
        if (pair.rank == 0 || pair.da.data == nullptr) continue;
        load_transposed(ds, rows, x_rows(0), s, pair.rank, rank, scratch);
        rank += pair.rank;
        threshold = pair.threshold;
      }
      if (rank > 0) {
        outer_rows(x_rows(threshold), rows, rank, !first, p_.weight, layout_.da_sums(index),
                   scratch);
      }
    }
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
      out.mask = mask(pair.threshold, LoraDropoutOn::kInput, 0);
      load_entries(ds, rows, s, pair.rank, stride, first, scratch);
      first += pair.rank;
    }
    expand_rows(out, rows, Packed(w.at, rank, p_.weight), stride, p_.weight, scratch);
  }

  /// Rows without an adapter: y = base, h = 0, dx = 0.
  void base_rows() const {
    Scratch scratch = layout_.scratch(0);
    for (const Chunk& chunk : chunks_.base_chunks()) {
      each_step(chunk, [&](const StepRows& rows, bool) {
        if (backward_) {
          const OutRows out{p_.dx, p_.add_dx ? p_.dx : Matrix{}, p_.hidden, {}};
          if (p_.dx.data != nullptr) copy_rows(out, rows, &scratch);
          return;
        }
        for (int s = 0; s < p_.num_slices; ++s) {
          const SliceView& slice = p_.slices[s];
          copy_rows({slice.y, slice.base, slice.width, {}}, rows, &scratch);
        }
        const NarrowRows h = h_rows(scratch);
        for (std::int64_t i = 0; i < rows.count; ++i) std::memset(h.at(rows, i), 0, h.stride);
      });
    }
  }

  /// dA and dB of every pair: the partial sums of its adapter's chunks, in order.
  void add_up() const {
    const auto& chunks = chunks_.chunks();
    std::vector<std::int64_t> first(p_.num_adapters + 1, 0);
    for (const Chunk& chunk : chunks) ++first[chunk.adapter + 1];
    for (std::int64_t l = 0; l < p_.num_adapters; ++l) first[l + 1] += first[l];
    std::int64_t ranks = 0;
    for (int s = 0; s < p_.num_slices; ++s) ranks += p_.slices[s].rank;
    for_items(p_.num_adapters * ranks, work_, [&](std::int64_t item, int) {
      const std::int64_t adapter = item / ranks;
      std::int64_t r = item % ranks, da_row = 0;
      for (int s = 0; s < p_.num_slices; r -= p_.slices[s++].rank) {
        const Pair pair = p_.pair(adapter, s);
        if (r < p_.slices[s].rank) {
          if (r >= pair.rank) return;
          const std::int64_t begin = first[adapter], end = first[adapter + 1];
          add_row(pair.da, pair.add_a, r, p_.hidden, begin, end, [&](std::int64_t chunk) {
            return layout_.da_sums(chunk) + (da_row + r) * p_.hidden;
          });
          add_row(transposed(pair.db), pair.add_b, r, p_.slices[s].width, begin, end,
                  [&](std::int64_t chunk) {
                    return layout_.db_sums(chunk, s) + r * p_.slices[s].width;
                  });
          return;
        }
        if (pair.da.data != nullptr) da_row += pair.rank;
      }
    });
  }

  template <class Sums>
  void add_row(const Matrix& out, bool add, std::int64_t r, std::int64_t width, std::int64_t begin,
               std::int64_t end, const Sums& sums) const {
    if (out.data == nullptr || (add && begin == end)) return;
    float total[kTileColumns], old[kTileColumns];
    for (std::int64_t c = 0; c < width; c += kTileColumns) {
      const std::int64_t count = std::min(kTileColumns, width - c);
      std::fill_n(total, count, 0.0f);
      for (std::int64_t chunk = begin; chunk < end; ++chunk) {
        const float* from = sums(chunk) + c;
        for (std::int64_t i = 0; i < count; ++i) total[i] += from[i];
      }
      if (add) {
        load_row(out, r, c, count, old);
        for (std::int64_t i = 0; i < count; ++i) total[i] = old[i] + total[i];
      }
      store_row(out, r, c, count, total);
    }
  }

  const Problem& p_;
  const WorkLayout layout_;
  const RowChunks chunks_;
  const bool backward_;
  const std::int32_t* sorted_ = nullptr;
  std::uint64_t seed_ = 0, offset_ = 0;
  std::int64_t work_ = 1;
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
