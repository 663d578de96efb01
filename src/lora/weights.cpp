// SPDX-License-Identifier: Apache-2.0
// The two forms of adapter weights and of token groups, checked where they are made.
#include <algorithm>

#include "core/check.h"
#include "core/check_view.h"
#include "lora/checks.h"
#include "mortar/lora.h"

namespace mortar {
namespace {

using lora::kANames;
using lora::kBNames;

constexpr ArgCheck kArg("lora_weights");

void check_num_adapters(std::int64_t n) {
  check(n >= 1 && n <= kLoraMaxAdapters, kArg.op(), ": number of adapters must be 1 to ",
        kLoraMaxAdapters, ", got ", n);
}

/// No memory holds more, and widths of all slices add up in 64 bits.
constexpr std::int64_t kMostColumns = std::int64_t{1} << 48;

bool is_rank(std::int64_t rank) { return rank >= 1 && rank <= kLoraMaxRank; }

void check_rank(const Tensor& t, const char* name, int dimension) {
  check(is_rank(t.shape[dimension]), kArg.op(), ": ", name, " must have a rank of 1 to ",
        kLoraMaxRank, " in dimension ", dimension, ", got shape ", shape_string(t));
}

/// A stacked matrix: [L, ., .], dtype and device of the first one, rows dense.
void check_matrix(const Tensor& t, const char* name, const Tensor& first, const char* first_name) {
  kArg.ndim(t, name, 3);
  check_extents(kArg, t, name);
  kArg.dtype(t, name, {DType::kFloat32, DType::kFloat16, DType::kBFloat16});
  check_type(t.dtype == first.dtype, kArg.op(), ": ", name, " must have dtype ",
             dtype_name(first.dtype), " as ", first_name, " has, got ", dtype_name(t.dtype));
  kArg.device(t, name, first.device);
  kArg.last_dim_dense(t, name);
  check(t.shape[0] == first.shape[0], kArg.op(), ": ", name, " must hold ", first.shape[0],
        " adapters as ", first_name, " does, got shape ", shape_string(t));
}

}  // namespace

LoraWeights LoraWeights::stacked(std::span<const Tensor> a, std::span<const Tensor> b,
                                 const Tensor& ranks, const Tensor& scales) {
  const std::size_t slices = std::max(a.size(), b.size());
  check(slices >= 1 && slices <= kLoraMaxSlices, kArg.op(), ": number of slices must be 1 to ",
        kLoraMaxSlices, ", got ", slices);
  check(a.empty() || b.empty() || a.size() == b.size(), kArg.op(),
        ": a and b must have one tensor per slice each, got ", a.size(), " and ", b.size());
  const Tensor& first = a.empty() ? b[0] : a[0];
  const char* first_name = a.empty() ? kBNames[0] : kANames[0];
  kArg.ndim(first, first_name, 3);
  check_num_adapters(first.shape[0]);

  LoraWeights w;
  w.num_slices = static_cast<int>(slices);
  w.dtype = first.dtype;
  w.num_adapters = first.shape[0];
  for (std::size_t s = 0; s < a.size(); ++s) {
    check_matrix(a[s], kANames[s], first, first_name);
    check(a[s].shape[2] == first.shape[2], kArg.op(), ": ", kANames[s],
          " must have width K = ", first.shape[2], " as ", first_name, " has, got shape ",
          shape_string(a[s]));
    check_rank(a[s], kANames[s], 1);
    w.a[s] = a[s];
    w.hidden = a[s].shape[2];
    w.max_rank = std::max(w.max_rank, static_cast<int>(a[s].shape[1]));
  }
  for (std::size_t s = 0; s < b.size(); ++s) {
    check_matrix(b[s], kBNames[s], first, first_name);
    check_rank(b[s], kBNames[s], 2);
    check(a.empty() || b[s].shape[2] == a[s].shape[1], kArg.op(), ": ", kBNames[s],
          " must have rank ", a.empty() ? 0 : a[s].shape[1], " in its last dimension as ",
          kANames[s], " has, got shape ", shape_string(b[s]));
    check(b[s].shape[1] <= kMostColumns, kArg.op(), ": ", kBNames[s], " must have at most ",
          kMostColumns, " rows, got shape ", shape_string(b[s]));
    w.b[s] = b[s];
    w.widths[s] = b[s].shape[1];
    w.max_rank = std::max(w.max_rank, static_cast<int>(b[s].shape[2]));
  }
  if (ranks.defined()) {
    kArg.shape(ranks, "ranks", {w.num_adapters});
    kArg.dtype(ranks, "ranks", {DType::kInt32});
    kArg.device(ranks, "ranks", first.device);
    kArg.contiguous(ranks, "ranks");
    w.ranks = ranks;
  }
  if (scales.defined()) {
    kArg.shape(scales, "scales", {w.num_adapters});
    kArg.dtype(scales, "scales", {DType::kFloat32});
    kArg.device(scales, "scales", first.device);
    kArg.contiguous(scales, "scales");
    w.scales = scales;
  }
  return w;
}

LoraWeights LoraWeights::from_table(const Tensor& table, DType dtype, int max_rank,
                                    std::int64_t hidden, std::span<const std::int64_t> widths) {
  kArg.ndim(table, "table", 3);
  kArg.dtype(table, "table", {DType::kInt64});
  check(widths.size() >= 1 && widths.size() <= kLoraMaxSlices, kArg.op(),
        ": number of slices must be 1 to ", kLoraMaxSlices, ", got ", widths.size(), " widths");
  kArg.shape(table, "table", {-1, static_cast<std::int64_t>(widths.size()), 4});
  kArg.contiguous(table, "table");
  kArg.aligned(table, "table", kMemoryAlignment);
  check_num_adapters(table.shape[0]);
  check_type(dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBFloat16,
             kArg.op(), ": dtype must be float32 or float16 or bfloat16, got ", dtype_name(dtype));
  check(is_rank(max_rank), kArg.op(), ": max_rank must be 1 to ", kLoraMaxRank, ", got ", max_rank);
  check(hidden >= 0, kArg.op(), ": hidden must be at least 0, got ", hidden);

  LoraWeights w;
  w.num_slices = static_cast<int>(widths.size());
  w.table = table;
  w.dtype = dtype;
  w.max_rank = max_rank;
  w.num_adapters = table.shape[0];
  w.hidden = hidden;
  for (std::size_t s = 0; s < widths.size(); ++s) {
    check(widths[s] >= 0, kArg.op(), ": widths must be at least 0, got ", widths[s]);
    check(widths[s] <= kMostColumns, kArg.op(), ": widths must be at most ", kMostColumns, ", got ",
          widths[s]);
    w.widths[s] = widths[s];
  }
  return w;
}

LoraGroups LoraGroups::from_plan(const Tensor& plan, std::int64_t num_tokens,
                                 std::int64_t num_adapters) {
  LoraGroups groups;
  groups.plan = plan;
  groups.num_tokens = num_tokens;
  groups.num_adapters = num_adapters;
  return groups;
}

LoraGroups LoraGroups::from_segments(const Tensor& sorted_tokens, const Tensor& ids,
                                     const Tensor& counts, const Tensor& starts) {
  LoraGroups groups;
  groups.sorted_tokens = sorted_tokens;
  groups.ids = ids;
  groups.counts = counts;
  groups.starts = starts;
  return groups;
}

}  // namespace mortar
