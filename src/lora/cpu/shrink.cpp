// SPDX-License-Identifier: Apache-2.0
// The shrink pass: h[s, t] = scale * scale_a * (x[t] A^T).
//
// An item is a block of tokens of one adapter with all its ranks, so that the rows of x come from
// memory once; when there are too few blocks for the threads, it is 8 ranks of one slice.
#include <algorithm>

#include "core/float16.h"
#include "lora/cpu/config.h"
#include "lora/cpu/passes.h"

namespace mortar::lora::cpu {
namespace {

/// Tokens of a block in batches that are small for the number of threads.
constexpr std::int64_t kLeastTokens = 48;

}  // namespace

/// The tokens of a block, without those whose index names no row of the batch.
struct ShrinkPass::Tokens {
  const void* x[kMaxShrinkTokens];
  std::int64_t token[kMaxShrinkTokens];
  std::int64_t row[kMaxShrinkTokens];
  std::int64_t count = 0;
};

ShrinkPass::ShrinkPass(const RowsView& x, const WeightsView& weights, const GroupList& groups,
                       const HiddenRows& h, std::optional<float> scale, bool fill, RowRange rows,
                       int num_threads)
    : kernels_(kernels()),
      x_(x),
      weights_(weights),
      groups_(groups),
      h_(h),
      scale_(scale),
      fill_(fill),
      rows_(rows) {
  std::int64_t blocks = 0, tokens = 0;
  for (std::int64_t g = 0; g < groups.size(); ++g) {
    const std::int64_t count = groups.get(g).count;
    blocks += ceil_div(count, kLeastTokens);
    tokens += count;
  }
  split_ranks_ = num_threads > 1 && blocks < 2 * num_threads;
  // Each block reads A once more, but every thread should have some four of them.
  tokens = std::min(tokens, rows.last - rows.first);
  const std::int64_t share = tokens / (4 * num_threads) / 16 * 16;
  most_tokens_ = std::clamp(share, kLeastTokens, kMaxShrinkTokens);
}

void ShrinkPass::run() {
  drain(
      groups_, rows_, next_,
      [this](const Part& part) {
        return ceil_div(part.count, block_tokens(part.count)) * rank_items(part.adapter);
      },
      [this](const Part& part, std::int64_t item) { run_item(part, item); });
}

/// Tokens of a block of a part: the part in equal blocks, of whole tiles of 16.
std::int64_t ShrinkPass::block_tokens(std::int64_t count) const {
  const std::int64_t blocks = ceil_div(count, most_tokens_);
  return std::min(most_tokens_, round_up<std::int64_t>(ceil_div(count, blocks), 16));
}

/// Items into which the ranks of an adapter are split.
std::int64_t ShrinkPass::rank_items(std::int64_t adapter) const {
  if (!split_ranks_) return 1;
  std::int64_t items = 0;
  for (int s = 0; s < weights_.num_slices; ++s) {
    items += std::max<std::int64_t>(
        1, ceil_div<std::int64_t>(weights_.get(adapter, s).rank, kSplitRanks));
  }
  return items;
}

void ShrinkPass::run_item(const Part& part, std::int64_t item) {
  const std::int64_t rank_item_count = rank_items(part.adapter);
  const std::int64_t most = block_tokens(part.count);
  const std::int64_t begin = item / rank_item_count * most;
  const std::int64_t end = std::min(part.count, begin + most);
  Tokens tokens;
  for (std::int64_t i = begin; i < end; ++i) {
    const std::int64_t token = groups_.token(part.start + i);
    if (token < 0) continue;
    tokens.x[tokens.count] =
        static_cast<const char*>(x_.data) + token * x_.row_stride * dtype_size(x_.dtype);
    tokens.token[tokens.count] = token;
    tokens.row[tokens.count++] = part.row + i;
  }
  std::int64_t rank_item = item % rank_item_count;
  for (int s = 0; s < weights_.num_slices; ++s) {
    const SliceWeights w = weights_.get(part.adapter, s);
    if (!split_ranks_) {
      run_slice(tokens, w, s, 0, w.rank);
      continue;
    }
    const std::int64_t items =
        std::max<std::int64_t>(1, ceil_div<std::int64_t>(w.rank, kSplitRanks));
    if (rank_item < items) {
      const std::int64_t first = rank_item * kSplitRanks;
      run_slice(tokens, w, s, first, std::min<std::int64_t>(kSplitRanks, w.rank - first));
      return;
    }
    rank_item -= items;
  }
}

void ShrinkPass::run_slice(const Tokens& tokens, const SliceWeights& w, int slice,
                           std::int64_t first_rank, std::int64_t num_ranks) const {
  float sums[kMaxShrinkTokens * kMaxShrinkRanks];
  const DType h_dtype = h_.view.dtype;
  const std::int64_t h_size = dtype_size(h_dtype), w_size = dtype_size(weights_.dtype);
  const std::int64_t last_rank = first_rank + num_ranks;
  const float scale = scale_.has_value() ? *scale_ * w.scale : 1.0f;
  for (std::int64_t r = first_rank; r < last_rank; r += kMaxShrinkRanks) {
    ShrinkBlock block;
    block.x_rows = tokens.x;
    block.num_tokens = tokens.count;
    block.a = static_cast<const char*>(w.a) + r * w.a_row_stride * w_size;
    block.a_row_stride = w.a_row_stride;
    block.num_ranks = std::min(kMaxShrinkRanks, last_rank - r);
    block.hidden = weights_.hidden;
    block.out = sums;
    block.out_stride = kMaxShrinkRanks;
    kernels_.shrink[float_index(x_.dtype)][float_index(weights_.dtype)](block);
    for (std::int64_t t = 0; t < tokens.count; ++t) {
      kernels_.convert(sums + t * kMaxShrinkRanks, DType::kFloat32, scale, block.num_ranks,
                       h_.at(tokens.token[t], tokens.row[t], slice) + r * h_size, h_dtype);
    }
  }
  if (!fill_ || last_rank < w.rank) return;
  for (std::int64_t t = 0; t < tokens.count; ++t) {
    char* h = h_.at(tokens.token[t], tokens.row[t], slice);
    std::fill(h + w.rank * h_size, h + h_.view.width * h_size, 0);
  }
}

}  // namespace mortar::lora::cpu
