// SPDX-License-Identifier: Apache-2.0
// h = drop(x) A^T and ds = dy B for operands of one 16-bit type with dense, aligned rows: a stream
// of columns.
//
// h[m, j] = f sum_c x[m, c] W[j, c]        j ranks of all slices
// bytes  = 2 M C + 2 R C (once per 128 rows, from L2) + 2 M R
// FLOP   = 2 M C R: never the limit up to R = 128
// 8192 rows, C = 4096, R = 16: 67 MB, 15.7 us at 4.28 TB/s
// limit  : DRAM, and L2 beside it from R = 64 on; above 128 ranks x is read again for every 128
// wrong  : other strides and mixtures of dtypes (shrink.cu)
//
// A cluster has one tile of rows, and each of its thread blocks some of the leaves of C
// (config.h), which pass in steps of 64 columns through a ring filled by cp.async. Each leaf is
// one chain of MMA steps from zero, and leaves are added by the tree of LeafSums, within a thread
// and then, through the shared memory of the cluster, between thread blocks: h is written once, and
// its bits do not depend on how many thread blocks share a tile. Where there are no clusters the
// thread blocks leave split-K partials for reduce.cu, which adds them by the same tree.
//
// Where the launch itself says which rows and weights a thread block has, it looks them up and asks
// for its first steps in L2 before it waits for the kernel before it: 1.0 to 1.5 us of a forward.
#include <algorithm>

#include "core/check.h"
#include "device/cluster.cuh"
#include "device/convert.cuh"
#include "device/dtype_visitor.cuh"
#include "device/launch.cuh"
#include "device/leaf_sums.cuh"
#include "device/mma.cuh"
#include "device/pdl.cuh"
#include "lora/train/cuda/kernels.cuh"
#include "lora/train/cuda/shrink_stream_operands.cuh"

namespace mortar::lora::train::cuda {
namespace {

using namespace shrink_operands;

/// The seed of dropout is read after rows and weights have been looked up, just before the first
/// steps are copied. Before sm_90 32 ranks would spill.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool kLateDraws = false;
#else
constexpr bool kLateDraws = true;
#endif

/// Zeros for rows of h without an adapter.
template <class S>
__device__ __forceinline__ void store_zeros(const ShrinkParams& p, const RowTile& rows,
                                            int first_rank) {
  const int octets = min(S::kRanks, p.width - first_rank) / 8;
  for (int i = threadIdx.x; i < rows.count * octets; i += S::kThreads) {
    const std::int64_t row = row_at(p.rows, rows.start + i / octets);
    if (row < 0) continue;
    auto* to = static_cast<unsigned short*>(p.h) + row * p.hidden.width + p.first_hidden +
               first_rank + i % octets * 8;
    *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
  }
}

/// The sums of the thread block's leaves.
template <class S, bool kRowsAreRanks>
__device__ __forceinline__ void add_leaves(const ShrinkParams& p, const Table<S>& table, char* smem,
                                           int first_rank, int live_ranks, std::uint32_t threshold,
                                           float (&sum)[S::kSums]) {
  const int leaves = p.part_leaves;
  const std::int64_t begin = static_cast<int>(blockIdx.y) * leaves * p.plan.leaf;
  const int columns =
      static_cast<int>(max(std::int64_t{0}, min(leaves * p.plan.leaf, p.columns - begin)));
  const int steps = (columns + kStepColumns - 1) / kStepColumns;
  const int leaf_steps = static_cast<int>(p.plan.leaf / kStepColumns);

  // Load
  const std::uint32_t ring = device::smem_address(smem);
  Copies<S, kRowsAreRanks> copies(p, table, first_rank, begin);
  int left = columns;
  std::uint32_t next_stage = ring;
  const auto issue = [&] {
    if (left > 0) copies.issue(next_stage, left);
    device::cp_async_commit();
    left -= kStepColumns;
    next_stage += S::kStageBytes;
    if (next_stage == ring + S::kStages * S::kStageBytes) next_stage = ring;
  };
#pragma unroll 1
  for (int i = 0; i < S::kStages - 1; ++i) issue();

  // Dropout
  const bool drops = threshold != 0 && threshold < kDropAll;
  if (kLateDraws && drops) __syncthreads();
  const int thread = static_cast<int>(threadIdx.x);
  // Of two rows a thread draws while their copies are on their way.
  constexpr bool kDrawsFirst = S::kRanks == 16 && S::kWideCopies == 2;
  [[maybe_unused]] OctetDraw draws_of_step[2];
  const auto draw_first = [&](int step) {
    const std::int64_t row =
        table.row[thread / kRowPieces + thread % 2 * (S::kThreads / kRowPieces)];
    const std::int64_t c = begin + step * kStepColumns + thread % kRowPieces * kPiece;
    const auto index = static_cast<std::uint64_t>(row * p.mask.columns + p.mask.first + c);
    draw_shared(table.draws, index / kMaskGroup, thread % 2 != 0, draws_of_step);
  };
  const auto drop = [&](std::uint32_t stage, int step) {
    constexpr int kCopies = S::kWideCopies, kRowStep = S::kThreads / kRowPieces;
    char* own = smem + (stage - ring) + copies.wide_at;
    const std::int64_t c = begin + step * kStepColumns + thread % kRowPieces * kPiece;
    const auto index = [&](int i) {
      const std::int64_t row = table.row[thread / kRowPieces + i * kRowStep];
      return static_cast<std::uint64_t>(row * p.mask.columns + p.mask.first + c);
    };
    const auto apply = [&](int i, const OctetDraw& draw) {
      auto* at = reinterpret_cast<uint4*>(own + i * kRowStep * kBlockRowBytes);
      *at = masked(*at, keep_words(draw, threshold));
    };
    if constexpr (kDrawsFirst) {
      apply(0, draws_of_step[0]);
      apply(1, draws_of_step[1]);
      return;
    }
    if constexpr (kCopies == 1) {
      apply(0, draw_octet(table.draws, index(0) / kPiece));
    } else {
#pragma unroll 1
      for (int i = 0; i < kCopies; i += 2) {
        OctetDraw draw[2];
        draw_shared(table.draws, index(i + thread % 2) / kMaskGroup, thread % 2 != 0, draw);
        apply(i, draw[0]);
        apply(i + 1, draw[1]);
      }
    }
  };

  // Compute
  const int warp = thread / 32;
  const int warp_rank = warp / S::kWarpsM * S::kWarpRanks;
  const Fragments<S, kRowsAreRanks> fragments(warp % S::kWarpsM * S::kWarpRows, warp_rank);
  device::LeafSums<S::kSums, S::kLevels> tree;
  std::uint32_t stage = ring;
  int step = 0;
#pragma unroll 1
  for (int leaf = 0; leaf < leaves; ++leaf) {
#pragma unroll
    for (int i = 0; i < S::kSums; ++i) sum[i] = 0;
    auto& tiles = reinterpret_cast<float(&)[S::kFragsM][S::kFragsN][4]>(sum);
    const int leaf_end = min(steps, (leaf + 1) * leaf_steps);
#pragma unroll 1
    for (; step < leaf_end; ++step) {
      if (kDrawsFirst && drops) draw_first(step);
      device::cp_async_wait<S::kStages - 2>();
      if (drops) drop(stage, step);
      __syncthreads();
      issue();
      if (warp_rank < live_ranks) {
        device::visit_checked_dtype(Float16DTypes(), p.wide.m.dtype, [&](auto type) {
          using T = typename decltype(type)::type;
#pragma unroll
          for (int k = 0; k < kStepColumns / 16; ++k) {
            std::uint32_t a[S::kFragsM][4], b[S::kFragsN / 2][4];
#pragma unroll
            for (int m = 0; m < S::kFragsM; ++m) fragments.load_wide(a[m], stage, m, k);
#pragma unroll
            for (int n = 0; n < S::kFragsN; n += 2) fragments.load_weight(b[n / 2], stage, n, k);
#pragma unroll
            for (int n = 0; n < S::kFragsN; ++n) {
#pragma unroll
              for (int m = 0; m < S::kFragsM; ++m) {
                device::mma_16816<T>(tiles[m][n], a[m], b[n / 2][n % 2 * 2],
                                     b[n / 2][n % 2 * 2 + 1]);
              }
            }
          }
        });
      }
      stage += S::kStageBytes;
      if (stage == ring + S::kStages * S::kStageBytes) stage = ring;
    }
    tree.add(leaf, sum);
  }
  device::cp_async_wait<0>();
}

template <class S>
__global__ void __launch_bounds__(S::kThreads, S::kMinBlocks)
    shrink_stream_kernel(const __grid_constant__ ShrinkParams p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  if constexpr (S::kRanks > kMostUnfusedRanks) return;  // there are no clusters
#endif
  extern __shared__ __align__(1024) char smem[];
  __shared__ Table<S> table;
  if (!p.ahead) device::pdl_begin(false);

  // Guard
  const int part = blockIdx.y, parts = p.plan.parts;
  const int first_rank = static_cast<int>(blockIdx.z) * S::kRanks;
  const RowTile rows = row_tile(p.rows, static_cast<int>(blockIdx.x), S::kRows, p.plan.fused);
  if (rows.count == 0) return device::pdl_leave();
  if (rows.adapter < 0) {
    if (part == 0) store_zeros<S>(p, rows, first_rank);
    return;
  }

  // Pointers
  const auto read_draws = [&] {
    if (p.masked && threadIdx.x == 0 && p.mask.rng != nullptr) table.draws.read(p.mask.rng);
  };
  if (!kLateDraws) read_draws();
  table.pairs.fill(p.pairs, rows.adapter, p.first_slice, p.num_slices);
  const std::int64_t begin = part * p.part_leaves * p.plan.leaf;
  for (int i = threadIdx.x; i < S::kRows; i += S::kThreads) {
    const std::int64_t row = i < rows.count ? row_at(p.rows, rows.start + i) : -1;
    const std::int64_t from = row < 0 ? 0 : row;
    table.row[i] = static_cast<int>(row);
    table.wide[i] = static_cast<const char*>(p.wide.m.data) +
                    2 * (from * p.wide.m.row_stride + min(begin, p.columns - 1));
  }
  __syncthreads();
  if (p.ahead) ask<S>(p, table, first_rank, begin);
  for (int o = threadIdx.x; o < S::kRanks / 8; o += S::kThreads) {
    Octet octet{0, 0};
    if (first_rank + 8 * o < p.width) {
      const int j = p.first_hidden + first_rank + 8 * o;
      const int s = slice_of(p.hidden, p.first_slice, p.num_slices, j);
      const PairEntry& pair = table.pairs.slice(s);
      octet = Octet{pair.factor, pair.rank - (j - p.hidden.first[s])};
    }
    table.octets[o] = octet;
  }
  __syncthreads();
  int live_ranks = 0;
  for (int o = 0; o < S::kRanks / 8; ++o) {
    if (table.octets[o].ranks > 0) live_ranks = 8 * o + 8;
  }
  if (p.ahead) device::pdl_begin(false);
  if (kLateDraws) read_draws();
  const std::uint32_t threshold = p.masked ? table.pairs.threshold(p.first_slice, p.num_slices) : 0;

  float sum[S::kSums];
  if (threshold >= kDropAll || live_ranks == 0) {
#pragma unroll
    for (int i = 0; i < S::kSums; ++i) sum[i] = 0;
  } else if (p.weights.rows_are_ranks) {
    add_leaves<S, true>(p, table, smem, first_rank, live_ranks, threshold, sum);
  } else {
    add_leaves<S, false>(p, table, smem, first_rank, live_ranks, threshold, sum);
  }

  // Reduce and store
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int warp_row = warp % S::kWarpsM * S::kWarpRows;
  const int warp_rank = warp / S::kWarpsM * S::kWarpRanks;
  const auto each_two = [&](const auto& use) {
    if (S::kSpareWarps && warp_rank >= S::kRanks) return;
#pragma unroll
    for (int m = 0; m < S::kFragsM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int n = 0; n < S::kFragsN; ++n) {
          const int at = (m * S::kFragsN + n) * 4 + 2 * half;
          use(warp_row + 16 * m + 8 * half + lane / 4, warp_rank + 8 * n + lane % 4 * 2,
              make_float2(sum[at], sum[at + 1]));
        }
      }
    }
  };
  if (!p.plan.fused) {
    float* to = p.partials + part * p.rows.num_rows * p.hidden.width;
    each_two([&](int row, int rank, float2 v) {
      if (row >= rows.count || first_rank + rank >= p.width) return;
      const std::int64_t at =
          (rows.start + row) * p.hidden.width + p.first_hidden + first_rank + rank;
      *reinterpret_cast<float2*>(to + at) = v;
    });
    return;
  }
  auto* partial = reinterpret_cast<float*>(smem);
  __syncthreads();
  each_two([&](int row, int rank, float2 v) {
    *reinterpret_cast<float2*>(partial + row * S::kPitch + rank) = v;
  });
  device::cluster_arrive();
  device::cluster_wait();
  const int own_rows = S::kRows / parts;
  for (int i = threadIdx.x; i < own_rows * (S::kRanks / 8); i += S::kThreads) {
    const int row = part * own_rows + i / (S::kRanks / 8), o = i % (S::kRanks / 8);
    if (row >= rows.count || first_rank + 8 * o >= p.width) continue;
    const Octet octet = table.octets[o];
    std::uint32_t word[4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4 all =
          device::sum_in_cluster<kLeaves>(partial + row * S::kPitch + 8 * o + 4 * half, parts);
      const auto scaled = [&](float sum_, int j) {
        return 4 * half + j < octet.ranks ? octet.factor * sum_ : 0.0f;
      };
      device::visit_checked_dtype(Float16DTypes(), p.wide.m.dtype, [&](auto type) {
        using T = typename decltype(type)::type;
        word[2 * half] = device::pack2<T>(scaled(all.x, 0), scaled(all.y, 1));
        word[2 * half + 1] = device::pack2<T>(scaled(all.z, 2), scaled(all.w, 3));
      });
    }
    const int to = table.row[row];
    if (to < 0) continue;
    *reinterpret_cast<uint4*>(static_cast<unsigned short*>(p.h) +
                              std::int64_t{to} * p.hidden.width + p.first_hidden + first_rank +
                              8 * o) = make_uint4(word[0], word[1], word[2], word[3]);
  }
  // Nobody ends while others may still read its shared memory.
  device::cluster_arrive_relaxed();
  device::cluster_wait();
}

template <class S>
void launch_shape(const ShrinkParams& p, Stream stream) {
  device::Launch l;
  l.grid = dim3(static_cast<unsigned>(p.max_tiles), p.plan.parts, ceil_div(p.width, S::kRanks));
  l.cluster_y = p.plan.fused ? p.plan.parts : 1;
  l.threads = S::kThreads;
  // So much that no further block fits an SM beside those of the plan; expand's may.
  l.smem = S::kSmem;
  if (p.plan.per_sm > 0) {
    l.smem = std::max<std::size_t>(
        l.smem, device::current_device().sm_smem / static_cast<std::size_t>(p.plan.per_sm + 1));
  }
  l.stream = stream;
  l.pdl = true;
  prefer_shared<shrink_stream_kernel<S>>();
  device::launch<shrink_stream_kernel<S>>("lora_train", l, p);
}

template <int kRanks>
void launch_rows(const ShrinkParams& p, Stream stream) {
  if constexpr (stream_has(kRanks, 64)) {
    if (p.plan.rows == 64) return launch_shape<Shape<kRanks, 64>>(p, stream);
  }
  if constexpr (stream_has(kRanks, 128)) {
    if (p.plan.rows == 128) return launch_shape<Shape<kRanks, 128>>(p, stream);
  }
  launch_shape<Shape<kRanks, 32>>(p, stream);
}

}  // namespace

void shrink_stream(const ShrinkParams& p, Policy policy, Stream stream) {
  check(policy != Policy::kSplit && p.wide.async && p.weights.async &&
            (!p.masked || (p.mask.columns | p.mask.first) % kMaskGroup == 0) &&
            stream_has(p.plan.ranks, p.plan.rows) &&
            p.part_leaves <= 1 << stream_levels(p.plan.ranks, p.plan.rows) &&
            (p.plan.fused || p.plan.ranks <= kMostUnfusedRanks ||
             device::current_device().arch >= 90),
        "lora_train: no stream of columns for these operands");
  switch (p.plan.ranks) {
    case 16:
      return launch_rows<16>(p, stream);
    case 32:
      return launch_rows<32>(p, stream);
    case 64:
      return launch_rows<64>(p, stream);
    default:
      return launch_rows<128>(p, stream);
  }
}

}  // namespace mortar::lora::train::cuda
