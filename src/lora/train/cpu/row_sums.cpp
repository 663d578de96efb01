// SPDX-License-Identifier: Apache-2.0
#include "lora/train/cpu/row_sums.h"

#include <algorithm>

#include "core/float_element.h"

namespace mortar::lora::train::cpu {

RowSums::RowSums(const Problem& p, const WideOperands& wide, const WorkLayout& layout,
                 const RowChunks& chunks, int threads)
    : p_(p), wide_(wide), layout_(layout), chunks_(chunks) {
  group_chunks_ = std::max<std::int64_t>(chunks.size(), 1);
  if (!p.wants_da && !p.wants_db) return;
  columns_ = (p.wants_da ? p.hidden : 0) + (p.wants_db ? p.total_width : 0);
  const std::int64_t share = ceil_div<std::int64_t>(columns_ * p.num_adapters, 4 * threads);
  block_columns_ = std::clamp(round_up(share, lora::cpu::kPackColumns), lora::cpu::kPackColumns,
                              most_block_columns(p.hidden_width));
  group_chunks_ = layout.group_chunks();
  if (p.wants_da) blocks_ += blocks_of(p.hidden);
  for (int s = 0; p.wants_db && s < p.num_slices; ++s) blocks_ += blocks_of(p.slices[s].width);
  first_chunk_.assign(p.num_adapters + 1, 0);
  for (const Chunk& chunk : chunks.chunks()) ++first_chunk_[chunk.adapter + 1];
  for (std::int64_t l = 0; l < p.num_adapters; ++l) first_chunk_[l + 1] += first_chunk_[l];
}

void RowSums::keep_h(std::int64_t i, const StepRows& rows, const NarrowRows& h) const {
  for (int s = 0; s < p_.num_slices; ++s) {
    const Pair pair = p_.pair(chunks_.chunks()[i].adapter, s);
    if (pair.rank == 0 || pair.db.data == nullptr) continue;
    const DType dtype = outer_entry_dtype(p_.slices[s].dy.dtype, p_.weight);
    keep(rows, h, s, pair.rank, dtype, layout_.h_entries(i, p_.slices[s].first_hidden));
  }
}

void RowSums::keep_ds(std::int64_t i, const StepRows& rows, const NarrowRows& ds) const {
  std::int64_t rank = 0;
  for (int s = 0; s < p_.num_slices; ++s) {
    const Pair pair = p_.pair(chunks_.chunks()[i].adapter, s);
    if (pair.rank == 0 || pair.da.data == nullptr) continue;
    const DType dtype = outer_entry_dtype(p_.x.dtype, p_.weight);
    keep(rows, ds, s, pair.rank, dtype,
         layout_.ds_entries(i) + rank * kStepRows * dtype_size(dtype));
    rank += pair.rank;
  }
}

void RowSums::keep(const StepRows& rows, const NarrowRows& from, int slice, std::int64_t rank,
                   DType dtype, char* to) const {
  const std::int64_t column = p_.slices[slice].first_hidden;
  if (dtype == DType::kFloat32) {
    auto* out = reinterpret_cast<float*>(to);
    for (std::int64_t i = 0; i < rows.count; ++i) {
      const char* row = from.at(rows, i);
      for (std::int64_t r = 0; r < rank; ++r) {
        out[r * kStepRows + i] = load_float(row, p_.weight, column + r);
      }
    }
    return;
  }
  auto* out = reinterpret_cast<std::uint16_t*>(to);
  for (std::int64_t i = 0; i < rows.count; ++i) {
    const auto* row = reinterpret_cast<const std::uint16_t*>(from.at(rows, i)) + column;
    for (std::int64_t r = 0; r < rank; ++r) out[r * kStepRows + i] = row[r];
  }
  for (std::int64_t r = 0; rows.count % 2 != 0 && r < rank; ++r)
    out[r * kStepRows + rows.count] = 0;
}

std::int64_t RowSums::group_end(std::int64_t begin) const {
  return std::min(begin + group_chunks_, chunks_.size());
}

std::int64_t RowSums::items(std::int64_t begin, std::int64_t end) const {
  return (adapter_of(end - 1) - adapter_of(begin) + 1) * blocks_;
}

RowSums::Block RowSums::block(std::int64_t index) const {
  Block found;
  found.adapter = index / blocks_;
  std::int64_t left = index % blocks_, before = found.adapter * columns_;
  const auto is_within = [&](std::int64_t width) {
    if (left >= blocks_of(width)) {
      left -= blocks_of(width);
      before += width;
      return false;
    }
    const std::int64_t first = left * block_columns_;
    found.columns = {first, std::min(block_columns_, width - first)};
    found.sums = layout_.sums() + (before + first) * p_.hidden_width;
    return true;
  };
  if (p_.wants_da && is_within(p_.hidden)) return found;
  do {
    ++found.slice;
  } while (!is_within(p_.slices[found.slice].width));
  return found;
}

void RowSums::add(std::int64_t begin, std::int64_t end, std::int64_t item, Scratch* scratch) const {
  const Block b = block(adapter_of(begin) * blocks_ + item);
  const std::int64_t first = first_chunk_[b.adapter], last = first_chunk_[b.adapter + 1];
  std::int64_t rank = 0;
  std::uint32_t threshold = 0;
  for (int s = 0; s < p_.num_slices; ++s) {
    const Pair pair = p_.pair(b.adapter, s);
    const bool wanted =
        b.slice < 0 ? pair.da.data != nullptr : s == b.slice && pair.db.data != nullptr;
    if (pair.rank == 0 || !wanted) continue;
    rank += pair.rank;
    threshold = pair.threshold;
  }
  if (rank == 0) return;
  const WideRows wide = b.slice < 0 ? wide_.x(threshold) : wide_.dy(threshold, b.slice);
  for (std::int64_t i = std::max(begin, first); i < std::min(end, last); ++i) {
    const char* entries =
        b.slice < 0 ? layout_.ds_entries(i) : layout_.h_entries(i, p_.slices[b.slice].first_hidden);
    outer_rows(wide, chunks_.rows(i), b.columns, entries, rank, i > first, p_.weight, b.sums,
               scratch);
  }
  if (first < last && last <= end) store(b);
}

void RowSums::clear_others() const {
  for (std::int64_t index = 0; index < p_.num_adapters * blocks_; ++index) {
    const Block b = block(index);
    if (first_chunk_[b.adapter] < first_chunk_[b.adapter + 1]) continue;
    std::fill_n(b.sums, p_.hidden_width * b.columns.count, 0.0f);
    store(b);
  }
}

void RowSums::store(const Block& block) const {
  const float* sums = block.sums;
  for (int s = 0; s < p_.num_slices; ++s) {
    const Pair pair = p_.pair(block.adapter, s);
    if (pair.rank == 0) continue;
    if (block.slice < 0 && pair.da.data != nullptr) {
      store(pair.da, pair.add_a, pair.rank, block, sums);
      sums += pair.rank * block.columns.count;
    } else if (s == block.slice && pair.db.data != nullptr) {
      store(transposed(pair.db), pair.add_b, pair.rank, block, sums);
    }
  }
}

void RowSums::store(const Matrix& out, bool add, std::int64_t rank, const Block& block,
                    const float* sums) const {
  if (add && first_chunk_[block.adapter] == first_chunk_[block.adapter + 1]) return;
  for (std::int64_t r = 0; r < rank; ++r) {
    for (std::int64_t c = 0; c < block.columns.count; c += kTileColumns) {
      const std::int64_t at = block.columns.first + c;
      const std::int64_t count = std::min(kTileColumns, block.columns.count - c);
      const float* from = sums + r * block.columns.count + c;
      if (!add) {
        store_row(out, r, at, count, from);
        continue;
      }
      float total[kTileColumns];
      load_row(out, r, at, count, total);
      for (std::int64_t i = 0; i < count; ++i) total[i] += from[i];
      store_row(out, r, at, count, total);
    }
  }
}

}  // namespace mortar::lora::train::cpu
