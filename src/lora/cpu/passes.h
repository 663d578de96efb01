// SPDX-License-Identifier: Apache-2.0
// The two passes of the ops, as things that several threads run together.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>

#include "lora/cpu/kernels.h"
#include "lora/cpu/work.h"

namespace mortar::lora::cpu {

/// h of the tokens of a range of rows. h rows are found by token, or by row number when h is the
/// op's own (`h_first_row` is then the row that lies first in it).
struct HiddenRows {
  RowsView view;
  bool by_token = true;
  std::int64_t first_row = 0;

  char* at(std::int64_t token, std::int64_t row, int slice) const {
    const std::int64_t index = by_token ? token : row - first_row;
    return static_cast<char*>(view.data) +
           (slice * view.slice_stride + index * view.row_stride) * dtype_size(view.dtype);
  }
};

class ShrinkPass {
 public:
  /// `scale`: multiplies h, as the adapters' own scales then do; nothing: h is left unscaled.
  /// `fill`: write zeros to the columns of h past each rank.
  ShrinkPass(const RowsView& x, const WeightsView& weights, const GroupList& groups,
             const HiddenRows& h, std::optional<float> scale, bool fill, RowRange rows,
             int num_threads);
  /// Called by every thread of a parallel region.
  void run();

 private:
  struct Tokens;
  std::int64_t rank_items(std::int64_t adapter) const;
  std::int64_t block_tokens(std::int64_t count) const;
  void run_item(const Part& part, std::int64_t item);
  void run_slice(const Tokens& tokens, const SliceWeights& w, int slice, std::int64_t first_rank,
                 std::int64_t num_ranks) const;

  const Kernels& kernels_;
  const RowsView& x_;
  const WeightsView& weights_;
  const GroupList& groups_;
  HiddenRows h_;
  std::optional<float> scale_;
  bool fill_;
  RowRange rows_;
  bool split_ranks_;
  std::int64_t most_tokens_;  ///< of a block
  std::atomic<std::int64_t> next_{0};
};

class ExpandPass {
 public:
  /// `scale`: multiplies the finished sums, as the adapters' own scales then do; nothing: the
  /// scales are in h.
  ExpandPass(const HiddenRows& h, const WeightsView& weights, const GroupList& groups,
             const RowsView& y, std::int64_t offset, std::optional<float> scale, bool add,
             RowRange rows, int num_threads);
  /// Called by every thread of a parallel region.
  void run();

 private:
  std::int64_t column_block(const SliceWeights& w) const;
  std::int64_t items_of(const Part& part) const;
  void run_item(const Part& part, std::int64_t item) const;
  void run_block(const Part& part, const SliceWeights& w, int slice, std::int64_t y_column,
                 std::int64_t column, std::int64_t num_columns) const;
  void load_hidden(const char* from, std::int64_t rank, char* to) const;

  const Kernels& kernels_;
  HiddenRows h_;
  const WeightsView& weights_;
  const GroupList& groups_;
  const RowsView& y_;
  std::int64_t offset_;
  std::optional<float> scale_;
  bool add_;
  RowRange rows_;
  bool rounds_;  ///< h is rounded to the dtype of B first
  bool pairs_;   ///< the kernel of bfloat16 pairs serves
  std::int64_t column_cap_;
  std::atomic<std::int64_t> next_{0};
};

}  // namespace mortar::lora::cpu
