// SPDX-License-Identifier: Apache-2.0
// The expand pass: y[t, columns of s] (+)= h[s, t] B^T.
//
// An item is a block of columns of one slice and up to 512 tokens of one adapter: its part of B is
// packed once into a buffer on the stack, then every row of y is read and written once.
#include <algorithm>

#include "lora/cpu/config.h"
#include "lora/cpu/passes.h"

namespace mortar::lora::cpu {
namespace {

constexpr std::int64_t kWordBytes = sizeof(std::uint32_t);

/// 32-bit words of a row of B.
std::int64_t num_units(std::int64_t rank, DType dtype) {
  return ceil_div<std::int64_t>(rank * dtype_size(dtype), kWordBytes);
}

}  // namespace

ExpandPass::ExpandPass(const HiddenRows& h, const WeightsView& weights, const GroupList& groups,
                       const RowsView& y, std::int64_t offset, std::optional<float> scale, bool add,
                       RowRange rows, int num_threads)
    : kernels_(kernels()),
      h_(h),
      weights_(weights),
      groups_(groups),
      y_(y),
      offset_(offset),
      scale_(scale),
      add_(add),
      rows_(rows),
      rounds_(weights.dtype != DType::kFloat32 && y.dtype == weights.dtype),
      pairs_(rounds_ && y.dtype == DType::kBFloat16 && kernels_.expand_pairs[1] != nullptr),
      column_cap_(kMaxColumns) {
  // About four items per thread, as long as a block is one column tile or more.
  std::int64_t width = 0, blocks = 0;
  for (int s = 0; s < weights.num_slices; ++s) width += weights.widths[s];
  for (std::int64_t g = 0; g < groups.size() && blocks < 64 * num_threads; ++g) {
    blocks += ceil_div(groups.get(g).count, kExpandTokens);
  }
  if (num_threads > 1) {
    const std::int64_t share = ceil_div<std::int64_t>(blocks * width, 4 * num_threads);
    column_cap_ = std::clamp(round_up(share, kPackColumns), kPackColumns, kMaxColumns);
  }
}

void ExpandPass::run() {
  drain(
      groups_, rows_, next_, [this](const Part& part) { return items_of(part); },
      [this](const Part& part, std::int64_t item) { run_item(part, item); });
}

std::int64_t ExpandPass::column_block(const SliceWeights& w) const {
  const std::int64_t column_bytes =
      round_up<std::int64_t>(num_units(w.rank, weights_.dtype), 4) * kWordBytes;
  const std::int64_t columns = kPackBytes / column_bytes / kPackColumns * kPackColumns;
  return std::clamp(columns, kPackColumns, column_cap_);
}

std::int64_t ExpandPass::items_of(const Part& part) const {
  std::int64_t blocks = 0;
  for (int s = 0; s < weights_.num_slices; ++s) {
    const SliceWeights w = weights_.get(part.adapter, s);
    if (w.rank > 0) blocks += ceil_div(weights_.widths[s], column_block(w));
  }
  return blocks * ceil_div(part.count, kExpandTokens);
}

void ExpandPass::run_item(const Part& part, std::int64_t item) const {
  const std::int64_t token_blocks = ceil_div(part.count, kExpandTokens);
  const std::int64_t begin = item % token_blocks * kExpandTokens;
  Part block = part;
  block.start += begin;
  block.row += begin;
  block.count = std::min(kExpandTokens, part.count - begin);
  std::int64_t column_item = item / token_blocks;
  std::int64_t slice_column = offset_;
  for (int s = 0; s < weights_.num_slices; slice_column += weights_.widths[s++]) {
    const SliceWeights w = weights_.get(part.adapter, s);
    if (w.rank == 0) continue;
    const std::int64_t columns = column_block(w);
    const std::int64_t items = ceil_div(weights_.widths[s], columns);
    if (column_item < items) {
      const std::int64_t column = column_item * columns;
      run_block(block, w, s, slice_column, column, std::min(columns, weights_.widths[s] - column));
      return;
    }
    column_item -= items;
  }
}

/// Converts one row of h to the entries that the kernel takes: bfloat16, or float32 that has been
/// rounded to the dtype of B where the op says so.
void ExpandPass::load_hidden(const char* from, std::int64_t rank, char* to) const {
  const DType h_dtype = h_.view.dtype;
  if (pairs_) {
    kernels_.convert(from, h_dtype, 1.0f, rank, to, DType::kBFloat16);
  } else if (rounds_ && h_dtype != weights_.dtype) {
    std::uint16_t rounded[kLoraMaxRank];
    kernels_.convert(from, h_dtype, 1.0f, rank, rounded, weights_.dtype);
    kernels_.convert(rounded, weights_.dtype, 1.0f, rank, to, DType::kFloat32);
  } else {
    kernels_.convert(from, h_dtype, 1.0f, rank, to, DType::kFloat32);
  }
}

void ExpandPass::run_block(const Part& part, const SliceWeights& w, int slice,
                           std::int64_t y_column, std::int64_t column,
                           std::int64_t num_columns) const {
  alignas(64) std::uint32_t packed[kPackBytes / kWordBytes];
  alignas(64) char hidden[kExpandStep * kLoraMaxRank * sizeof(float)];
  void* y_rows[kExpandTokens];

  const std::int64_t w_size = dtype_size(weights_.dtype);
  PackBlock pack;
  pack.rows = static_cast<const char*>(w.b) + column * w.b_row_stride * w_size;
  pack.row_bytes = w.rank * w_size;
  pack.stride_bytes = w.b_row_stride * w_size;
  pack.num_rows = num_columns;
  pack.rows_after = weights_.widths[slice] - column - num_columns;
  pack.out = packed;
  const std::int64_t units = num_units(w.rank, weights_.dtype);
  pack.panel_stride = round_up<std::int64_t>(units, 4) * kPackColumns;
  kernels_.pack(pack);

  const std::int64_t entries = units * kWordBytes / w_size;
  const std::int64_t entry_size = pairs_ ? sizeof(std::uint16_t) : sizeof(float);
  ExpandBlock block;
  block.h = hidden;
  block.h_stride = pairs_ ? units : entries;
  block.b = packed;
  block.panel_stride = pack.panel_stride;
  block.units = units;
  block.num_columns = num_columns;
  block.scale = scale_.has_value() ? *scale_ * w.scale : 1.0f;
  const ExpandKernel kernel =
      pairs_ ? kernels_.expand_pairs[1]
             : kernels_.expand[float_index(weights_.dtype)][float_index(y_.dtype)];
  std::int64_t tokens[kExpandTokens], rows[kExpandTokens], count = 0;
  for (std::int64_t i = 0; i < part.count; ++i) {
    const std::int64_t token = groups_.token(part.start + i);
    if (token < 0) continue;
    tokens[count] = token;
    rows[count] = part.row + i;
    y_rows[count++] = static_cast<char*>(y_.data) +
                      (token * y_.row_stride + y_column + column) * dtype_size(y_.dtype);
  }
  for (std::int64_t i = 0; i < count; i += kExpandStep) {
    block.num_tokens = std::min(kExpandStep, count - i);
    block.y_rows = y_rows + i;
    block.base_rows = add_ ? block.y_rows : nullptr;
    block.num_rows = count - i;
    for (std::int64_t j = 0; j < block.num_tokens; ++j) {
      char* to = hidden + j * entries * entry_size;
      std::fill(to + w.rank * entry_size, to + entries * entry_size, 0);
      load_hidden(h_.at(tokens[i + j], rows[i + j], slice), w.rank, to);
    }
    kernel(block);
  }
}

}  // namespace mortar::lora::cpu
