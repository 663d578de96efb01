// SPDX-License-Identifier: Apache-2.0
// dA = ds^T x and dB = dy^T h: sums over the rows of an adapter.
//
// Threads draw blocks of columns of x and dy. A block's sums stay in the second-level cache while
// chunks of rows pass by in order: no bit depends on the blocks or the threads. So dy is read a
// second time, while the third-level cache holds it: chunks pass in groups of some megabytes.
#pragma once

#include <cstdint>
#include <vector>

#include "lora/train/cpu/layout.h"

namespace mortar::lora::train::cpu {

class RowSums {
 public:
  /// Cuts blocks for so many threads.
  RowSums(const Problem& p, const WideOperands& wide, const WorkLayout& layout,
          const RowChunks& chunks, int threads);

  /// Keep h, or ds, of the rows of chunk i as the sums take them: rank after rank.
  void keep_h(std::int64_t i, const StepRows& rows, const NarrowRows& h) const;
  void keep_ds(std::int64_t i, const StepRows& rows, const NarrowRows& ds) const;

  /// The end of the group of chunks that begins with chunk `begin`.
  std::int64_t group_end(std::int64_t begin) const;
  /// Adds a group whose chunks are all kept: blocks of its adapters, to be run in any order.
  std::int64_t items(std::int64_t begin, std::int64_t end) const;
  void add(std::int64_t begin, std::int64_t end, std::int64_t item, Scratch* scratch) const;
  /// What dA and dB of adapters without rows become.
  void clear_others() const;

 private:
  std::int64_t blocks_of(std::int64_t columns) const { return ceil_div(columns, block_columns_); }
  void keep(const StepRows& rows, const NarrowRows& from, int slice, std::int64_t rank, DType dtype,
            char* to) const;
  struct Block {
    std::int64_t adapter = 0;
    int slice = -1;  ///< of dy; -1: columns of x
    Columns columns;
    float* sums = nullptr;  ///< [ranks, columns]
  };
  Block block(std::int64_t index) const;
  std::int64_t adapter_of(std::int64_t chunk) const { return chunks_.chunks()[chunk].adapter; }
  void store(const Block& block) const;
  void store(const Matrix& out, bool add, std::int64_t rank, const Block& block,
             const float* sums) const;

  const Problem& p_;
  const WideOperands& wide_;
  const WorkLayout& layout_;
  const RowChunks& chunks_;
  std::int64_t columns_ = 0, block_columns_ = 1, blocks_ = 0, group_chunks_ = 1;
  std::vector<std::int64_t> first_chunk_;  ///< of every adapter, and the end
};

}  // namespace mortar::lora::train::cpu
