// SPDX-License-Identifier: Apache-2.0
// Float32 weights as columns of bfloat16 parts, once a call: A as rows of ranks [copies r, K], B as
// [N, copies r], ranks in whole octets, zeros past a rank.
//
// Beside them the h that a backward is given, whose columns dB is made of, without a launch of its
// own.
//
// Bytes: (4 + 2 copies) R C; forward and backward write 3 copies of one side and 6 of the other.
// With R = 16 and K = N = 4096 that is 1.7 MB, 0.4 us at 4.28 TB/s: bound by its launch.
//
// A thread takes 16 bytes of each copy: eight neighbouring columns of a rank of A, or the eight
// ranks of an octet of B.
#include "lora/train/cuda/weight_parts.cuh"

#include <algorithm>

#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "lora/train/cuda/part_columns.cuh"

namespace mortar::lora::train::cuda {
namespace {

constexpr int kVector = 8;  ///< values of a thread

/// Copies of a matrix's columns lie in whole vectors.
std::int64_t padded(std::int64_t columns) { return round_up<std::int64_t>(columns, kVector); }
int octets_of(int rank) { return ceil_div(rank, 8); }

/// Bytes of one pair's weights.
std::int64_t part_bytes(Side side, std::int64_t columns, int rank, int copies) {
  const int ranks = 8 * octets_of(rank);
  return 2 * (side == Side::kA ? padded(columns) * ranks * copies
                               : columns * part_stride(ranks, copies));
}

/// One pair's weights of one side; by the thread blocks of a grid's row.
__device__ __forceinline__ void split_pair(const PairEntry& pair, const PairEntry& to, bool of_a,
                                           int copies, std::int64_t columns) {
  const Matrix m = pair.weight(of_a), out = to.weight(of_a);
  const int octets = (pair.rank + 7) / 8;
  // The dense dimension's vectors, and its length.
  const std::int64_t vectors = of_a ? (columns + kVector - 1) / kVector : octets;
  const std::int64_t end = of_a ? columns : pair.rank;
  const std::int64_t items = of_a ? 8 * octets * vectors : columns * octets;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < items;
       i += std::int64_t{gridDim.x} * kThreads) {
    const std::int64_t line = i / vectors, first = i % vectors * kVector;
    const bool there = !of_a || line < pair.rank;
    const float* from = static_cast<const float*>(m.data) + line * m.row_stride;
    // In L2, before the kernels before this one have ended; again, pdl_begin does nothing.
    if (there && first < end) device::prefetch_l2(from + first * m.col_stride);
    device::pdl_begin(false);
    float v[kVector];
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const bool own = there && first + j < end;
      v[j] = own ? __ldcg(from + (first + j) * m.col_stride) : 0.0f;
    }
    const PartWords two[kVector / 2] = {{v[0], v[1]}, {v[2], v[3]}, {v[4], v[5]}, {v[6], v[7]}};
    // Copies of a rank of A are lines of their own, those of an octet of B neighbours in a line.
    auto* place = static_cast<unsigned short*>(out.data) +
                  (of_a ? part_column(static_cast<int>(line), copies) * out.row_stride + first
                        : line * out.row_stride + first * copies);
    const std::int64_t step = of_a ? 8 * out.row_stride : kVector;
    const auto store = [&](int q, std::uint32_t a, std::uint32_t b, std::uint32_t c,
                           std::uint32_t d) {
      *reinterpret_cast<uint4*>(place + q * step) = make_uint4(a, b, c, d);
    };
    if (copies == kSumCopies) {
#pragma unroll
      for (int q = 0; q < kSumCopies; ++q) {
        store(q, two[0].sum[q], two[1].sum[q], two[2].sum[q], two[3].sum[q]);
      }
    } else {
#pragma unroll
      for (int q = 0; q < kPairCopies; ++q) {
        store(q, two[0].weight[q], two[1].weight[q], two[2].weight[q], two[3].weight[q]);
      }
    }
  }
}

/// The columns of h, by the thread blocks of a grid's row.
__device__ __forceinline__ void split_saved(const WeightPartsParams& p) {
  const HiddenColumns& hidden = p.saved.hidden;
  const int vectors = hidden.width / 4;
  const std::int64_t items = p.saved.rows * vectors;
  device::pdl_begin(false);
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < items;
       i += std::int64_t{gridDim.x} * kThreads) {
    const std::int64_t row = i / vectors;
    const int j = static_cast<int>(i % vectors) * 4;
    const int s = slice_of(hidden, 0, hidden.num_slices, j);
    const float4 v = __ldcg(reinterpret_cast<const float4*>(p.saved.values) + i);
    const int left = p.from.own[s].rank - (j - hidden.first[s]);
    store_forms(nullptr, p.saved.columns, nullptr, row, hidden.width, j, scaled(v, 1, left));
  }
}

__global__ void __launch_bounds__(kThreads)
    split_weights_kernel(const __grid_constant__ WeightPartsParams p) {
  if (static_cast<int>(blockIdx.y) == p.num_jobs) {
    if (blockIdx.z == 0) split_saved(p);
    return;
  }
  const int copies = p.copies[blockIdx.y], slices = p.from.num_slices;
  const bool of_a = p.sides[blockIdx.y] == Side::kA;
  const PairTable& table = copies == kSumCopies ? p.sum : p.pair;
  for (int i = blockIdx.z; i < p.num_pairs; i += static_cast<int>(gridDim.z)) {
    const int adapter = i / slices, slice = i % slices;
    split_pair(p.from.get(adapter, slice), table.get(adapter, slice), of_a, copies,
               of_a ? p.hidden : p.widths[slice]);
  }
  device::pdl_begin(false);
}

}  // namespace

WeightParts::WeightParts(const Problem& p, const PartNeeds& needs, Arena* arena) : needs_(needs) {
  if (!needs.any()) return;
  const auto take = [&](bool wanted, Side side, int copies) {
    std::int64_t bytes = 0;
    for (std::int64_t i = 0; i < p.num_adapters * p.num_slices; ++i) {
      const int s = static_cast<int>(i % p.num_slices);
      bytes += part_bytes(side, side == Side::kA ? p.hidden : p.slices[s].width,
                          p.pair(i / p.num_slices, s).rank, copies);
    }
    return wanted ? arena->take<char>(bytes) : nullptr;
  };
  sum_a_ = take(needs.sum_a, Side::kA, kSumCopies);
  sum_b_ = take(needs.sum_b, Side::kB, kSumCopies);
  pair_a_ = take(needs.pair_a, Side::kA, kPairCopies);
  pair_b_ = take(needs.pair_b, Side::kB, kPairCopies);
}

PairEntry WeightParts::next(const Problem& p, const PairEntry& from, int slice, int copies) {
  PairEntry to{};
  to.factor = from.factor;
  to.threshold = from.threshold;
  to.rank = octets_of(from.rank) * 8 * copies;
  const auto take = [&](Side side, char*& place, std::int64_t columns, std::int64_t line) {
    const Matrix m{place, line, 1, DType::kBFloat16};
    if (place != nullptr) place += part_bytes(side, columns, from.rank, copies);
    return m;
  };
  const std::int64_t width = p.slices[slice].width;
  to.a = take(Side::kA, copies == kSumCopies ? sum_a_ : pair_a_, p.hidden, padded(p.hidden));
  to.b = take(Side::kB, copies == kSumCopies ? sum_b_ : pair_b_, width,
              part_stride(8 * octets_of(from.rank), copies));
  return to;
}

void split_weights(const Problem& p, const PartNeeds& needs, const PairTable& from,
                   const PairTable& sum, const PairTable& pair, const SavedHidden& saved,
                   Stream stream) {
  WeightPartsParams params{};
  params.from = from;
  params.sum = sum;
  params.pair = pair;
  params.num_pairs = static_cast<int>(p.num_adapters) * p.num_slices;
  params.hidden = p.hidden;
  params.saved = saved;
  std::int64_t widest = 0, lines = 0;
  for (int s = 0; s < p.num_slices; ++s) {
    params.widths[s] = p.slices[s].width;
    widest = std::max(widest, p.slices[s].width);
    lines = std::max<std::int64_t>(lines, octets_of(p.slices[s].rank));
  }
  const auto add = [&](bool wanted, Side side, int copies) {
    if (!wanted) return;
    params.sides[params.num_jobs] = side;
    params.copies[params.num_jobs++] = copies;
  };
  add(needs.sum_a, Side::kA, kSumCopies);
  add(needs.sum_b, Side::kB, kSumCopies);
  add(needs.pair_a, Side::kA, kPairCopies);
  add(needs.pair_b, Side::kB, kPairCopies);
  const bool saves = saved.columns != nullptr;
  if ((params.num_jobs == 0 && !saves) || params.num_pairs == 0) return;
  const std::int64_t items = lines * std::max(padded(p.hidden), widest);
  constexpr std::int64_t kMostBlocks = 1024;
  device::Launch l;
  l.grid = dim3(static_cast<unsigned>(std::clamp<std::int64_t>(
                    ceil_div<std::int64_t>(items, kThreads), 1, kMostBlocks)),
                params.num_jobs + (saves ? 1 : 0), std::min(params.num_pairs, 65535));
  l.threads = kThreads;
  l.stream = stream;
  l.pdl = true;
  device::launch<split_weights_kernel>("lora_train", l, params);
}

}  // namespace mortar::lora::train::cuda
