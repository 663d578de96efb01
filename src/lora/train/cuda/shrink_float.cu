// SPDX-License-Identifier: Apache-2.0
// h = x A^T and ds = dy B of dense float32 x and dy without dropout: [M, C] by [C, R] for small R,
// by split-bf16.
//
// Bytes: 4 M C + 4 R C (per 128 rows, from L2) + 4 parts M R. With M = 4096, C = 4096, R = 16 that
// is 67 MB and partials, 15.7 us at 4.28 TB/s. Above 32 rank columns x is read again for every 32,
// mostly from L2. Bound by instructions where memory is not: 13 to split a pair of elements.
//
// The tree and the order of shrink.cu, and so its bits. A warp has 16 rows, which it copies itself,
// 32 columns at a time, through a ring of its own; it reads and splits a step of them while the
// MMAs of the one before run, whose chain is the least that a leaf takes. Weights pass for the
// whole thread block, 128 or 512 columns at a time: as they are, while the chunk before is
// multiplied, and then as planes of parts. Sums leave as split-K partials; of few rows
// (float_plan.h) a cluster adds them and stores h, with the weights of most leaves in one chunk.
#include <algorithm>

#include "core/check.h"
#include "device/cluster.cuh"
#include "device/launch.cuh"
#include "device/leaf_sums.cuh"
#include "device/pdl.cuh"
#include "lora/train/cuda/float_plan.h"
#include "lora/train/cuda/float_ring.cuh"
#include "lora/train/cuda/kernels.cuh"
#include "lora/train/cuda/shrink_store.cuh"
#include "lora/train/cuda/shrink_tile.cuh"

namespace mortar::lora::train::cuda {
namespace {

constexpr int kCopies = 4;  ///< of a lane in a step: rows 4 apart

/// Asks for columns [c, c + chunk) of the weights in float32, as rows of ranks or of columns,
/// whichever lie dense; zeros from `end` on and past a rank. Places of slices without a pair stay
/// as they are. Weights of other types or that lie apart are read one by one. `in_l2`: asks for
/// their lines in L2 alone.
template <int kRanks>
__device__ __forceinline__ void ask_weights(const ShrinkParams& p, const Pairs& pairs,
                                            int first_rank, int c, int end, bool in_l2,
                                            float* raw) {
  const int chunk = p.plan.chunk;
  const bool by_ranks = p.weights.rows_are_ranks;
  const bool copies = p.weights.vectors && p.weights.parts == kFloatPlanes;
  const int width = copies ? 4 : 1;  // elements at a time
  const int words = (by_ranks ? chunk : kRanks) / width;
  const int log_words = 31 - __clz(words);
  for (int s = p.first_slice; s < p.first_slice + p.num_slices; ++s) {
    const int slice_begin = p.hidden.first[s] - p.first_hidden - first_rank;
    const int slice_ranks = (p.hidden.rank[s] + 7) / 8 * 8;
    const PairEntry& pair = pairs.slice(s);
    if (slice_begin >= kRanks || slice_begin + slice_ranks <= 0 || pair.rank == 0) continue;
    const Matrix m = pair.weight(p.side == Side::kA);
    const std::int64_t rank_stride = p.side == Side::kA ? m.row_stride : m.col_stride;
    const std::int64_t column_stride = p.side == Side::kA ? m.col_stride : m.row_stride;
    if (!copies) {
#pragma unroll 1
      for (int i = threadIdx.x; i < kRanks * chunk && !in_l2; i += static_cast<int>(blockDim.x)) {
        const int r = (by_ranks ? i >> log_words : i & (words - 1)) - slice_begin;
        const int column = c + (by_ranks ? i & (words - 1) : i >> log_words);
        if (r < 0 || r >= slice_ranks) continue;
        const bool there = r < pair.rank && column < end;
        const std::int64_t at = r * rank_stride + column * column_stride;
        raw[i] = there ? element(Matrix{m.data, 1, 0, m.dtype}, at, 0) : 0.0f;
      }
      continue;
    }
    // A thread's words lie as many rows apart as all threads have words for.
    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    const int word = (thread & (words - 1)) * width, row_step = threads >> log_words;
    int r = (by_ranks ? thread >> log_words : word) - slice_begin;
    int column = c + (by_ranks ? word : thread >> log_words);
    const auto* from = static_cast<const float*>(m.data) + r * rank_stride + column * column_stride;
    const std::int64_t from_step = row_step * (by_ranks ? rank_stride : column_stride);
#pragma unroll 1
    for (int i = thread; i < kRanks * chunk / width; i += threads, from += from_step) {
      const int left = r < pair.rank && column < end ? by_ranks ? end - column : pair.rank - r : 0;
      const bool own = r >= 0 && r < slice_ranks;
      (by_ranks ? r : column) += row_step;
      if (!own) continue;
      if (in_l2) {
        if (left > 0) device::prefetch_lines(from, 4);
      } else {
        device::cp_async_16(device::smem_address(raw + i * 4),
                            left > 0 ? from : static_cast<const float*>(m.data), word_bytes(left));
      }
    }
  }
}

/// Splits them into planes of parts, whose rows are ranks: three for every 64 columns.
template <int kRanks>
__device__ __forceinline__ void split_weights(bool by_ranks, int chunk, const float* raw,
                                              char* planes) {
  const int pieces = chunk / kPiece, log_pieces = 31 - __clz(pieces);
#pragma unroll 1
  for (int i = threadIdx.x; i < kRanks * pieces; i += static_cast<int>(blockDim.x)) {
    const int r = by_ranks ? i >> log_pieces : i % kRanks;
    const int own = by_ranks ? i & (pieces - 1) : i / kRanks;
    float4 low, high;
    if (by_ranks) {
      const auto* from = reinterpret_cast<const float4*>(raw + r * chunk + own * kPiece);
      low = from[0];
      high = from[1];
    } else {
      const float* from = raw + own * kPiece * kRanks + r;
      low = make_float4(from[0], from[kRanks], from[2 * kRanks], from[3 * kRanks]);
      high = make_float4(from[4 * kRanks], from[5 * kRanks], from[6 * kRanks], from[7 * kRanks]);
    }
    split_eight(low, high,
                planes + own / kRowPieces * kFloatPlanes * block_bytes(kRanks) +
                    piece_at(r, own % kRowPieces),
                block_bytes(kRanks));
  }
}

template <int kRanks>
__global__ void __launch_bounds__(kThreads, kFloatBlocks)
    shrink_float_kernel(const __grid_constant__ ShrinkParams p) {
  using Ring = FloatRing<kRanks>;
  extern __shared__ __align__(128) char smem[];
  __shared__ Pairs pairs;
  __shared__ Octet octets[kRanks / 8];
  __shared__ const float* from[kTileRows];
  if (!p.ahead) device::pdl_begin(false);

  // Coordinates
  const RowTile rows = row_tile(p.rows, static_cast<int>(blockIdx.x), p.plan.rows, p.plan.fused);
  if (rows.count == 0) return device::pdl_leave();
  const int part = blockIdx.y, first_rank = static_cast<int>(blockIdx.z) * kRanks;
  if (rows.adapter < 0) {  // base rows: h is zeros
    const int words = min(kRanks, p.width - first_rank) / 4;
    for (int i = threadIdx.x; part == 0 && i < rows.count * words;
         i += static_cast<int>(blockDim.x)) {
      const std::int64_t row = row_at(p.rows, rows.start + i / words);
      if (row < 0) continue;
      auto* to = static_cast<float*>(p.h) + row * p.hidden.width + p.first_hidden + first_rank;
      reinterpret_cast<float4*>(to)[i % words] = make_float4(0, 0, 0, 0);
    }
    return;
  }
  pairs.fill(p.pairs, rows.adapter, p.first_slice, p.num_slices);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int warp_row = warp * 16;
  const bool multiplies = warp_row < p.plan.rows;  // other warps help to split weights
  const int leaves = kLeaves / p.plan.parts;
  const int chunk = p.plan.chunk, chunk_steps = chunk / kFloatStep;
  const int columns = static_cast<int>(p.columns), leaf_width = static_cast<int>(p.plan.leaf);
  const int begin = min(part * leaves * leaf_width, columns);
  const int count = min(leaves * leaf_width, columns - begin), steps = ceil_div(count, kFloatStep);

  // Rank columns that no pair has hold zeros throughout. Rows that are not there have the values of
  // the first one, and are not stored.
  for (int i = threadIdx.x; i < Ring::ring_at(chunk) / 16; i += static_cast<int>(blockDim.x)) {
    reinterpret_cast<uint4*>(smem)[i] = make_uint4(0, 0, 0, 0);
  }
  for (int at = threadIdx.x; at < p.plan.rows; at += static_cast<int>(blockDim.x)) {
    const std::int64_t row = at < rows.count ? row_at(p.rows, rows.start + at) : -1;
    from[at] = static_cast<const float*>(p.wide.m.data) +
               max(row, std::int64_t{0}) * p.wide.m.row_stride + min(begin, columns - 1);
  }
  __syncthreads();
  const std::uint32_t planes = device::smem_address(smem);
  auto* raw = reinterpret_cast<float*>(smem + Ring::raw_at(chunk));
  const auto ask_chunk = [&](int step, bool in_l2) {
    if (step < steps) {
      ask_weights<kRanks>(p, pairs, first_rank, begin + step * kFloatStep, begin + count, in_l2,
                          raw);
    }
    device::cp_async_commit();
  };
  // The rows' first steps, too.
  const int asked = p.ahead ? p.plan.rows * Ring::kStages : 0;
  for (int i = threadIdx.x; i < asked; i += static_cast<int>(blockDim.x)) {
    const int at = i % Ring::kStages;
    if (at < steps) device::prefetch_l2(from[i / Ring::kStages] + at * kFloatStep);
  }
  fill_octets(p, pairs, first_rank, octets);
  if (p.ahead) {
    ask_chunk(0, true);
    device::pdl_begin(false);
  }

  // Load. A row of a step is 8 words of 16 bytes, which rows swap so that a fragment's reads meet
  // no bank twice.
  const std::uint32_t ring = planes + Ring::ring_at(chunk) + warp * Ring::kWarpBytes;
  const std::uint32_t own_word = lane / 8 * 128 + ((lane % 8 ^ lane / 8 << 1) << 4);
  const auto copy = [&](int step, std::uint32_t to) {
    const int bytes = word_bytes(count - step * kFloatStep - lane % 8 * 4);
    const int at = min(step, steps - 1) * kFloatStep + lane % 8 * 4;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      device::cp_async_16(ring + to + own_word + i * 512, from[warp_row + lane / 8 + 4 * i] + at,
                          bytes);
    }
    device::cp_async_commit();
  };
  // The weights first: what waits for them then waits for no more.
  ask_chunk(0, false);
#pragma unroll 1
  for (int i = 0; multiplies && i < Ring::kStages; ++i) copy(i, i * kSlotBytes);
  const auto next_chunk = [&](int step) {
    if (multiplies) {
      device::cp_async_wait<Ring::kStages - 1>();  // what was asked for before the steps in flight
    } else {
      device::cp_async_wait<0>();
    }
    __syncthreads();
    split_weights<kRanks>(p.weights.rows_are_ranks, chunk, raw, smem);
    __syncthreads();
    ask_chunk(step + chunk_steps, false);
  };

  // Compute. What an MMA step multiplies is read and split while the one before it runs.
  device::LeafSums<kRanks / 2, float_levels(kRanks)> tree;
  float sum[kRanks / 2];
  const int row = lane / 4, word = lane % 4 / 2;  // of a fragment's first pair
  const std::uint32_t own_row = ring + row * 128 + lane % 2 * 8 + ((word ^ row % 4 << 1) << 4);
  int step = 0;
  std::uint32_t slot = 0;
  float2 pair[4];
  std::uint32_t a[2][kFloatPlanes][4];
  const auto read = [&](int k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      pair[i] = read_float2(((own_row + slot) ^ (k * 64 + i / 2 * 32)) + i % 2 * 1024);
    }
  };
  const auto next_slot = [&] {
    slot = slot + kSlotBytes == Ring::kWarpBytes ? 0 : slot + kSlotBytes;
    device::cp_async_wait<Ring::kStages - 1>();
    __syncwarp();
    read(0);
  };
  if (multiplies && steps > 0) {
    slot = Ring::kWarpBytes - kSlotBytes;
    next_slot();
    split_fragment(pair, a[0]);
    read(1);
  }
#pragma unroll 1
  for (int leaf = 0; leaf < kLeaves / p.plan.parts; ++leaf) {
    Sums<__nv_bfloat16, true> sums[kRanks / 8];
    const int leaf_end = min(steps, (leaf + 1) * static_cast<int>(p.plan.leaf) / kFloatStep);
#pragma unroll 1
    for (; step < leaf_end; ++step) {
      if (step % chunk_steps == 0) next_chunk(step);
      if (!multiplies) continue;
      const int own_step = step % chunk_steps;
      const std::uint32_t block = planes + own_step / 2 * (kFloatPlanes * block_bytes(kRanks));
#pragma unroll
      for (int k = 0; k < kFloatStep / 16; ++k) {
        if (k == 0) {
          split_fragment(pair, a[1]);
          __syncwarp();  // all lanes have read the slot
          copy(step + Ring::kStages, slot);
          next_slot();
        } else {
          split_fragment(pair, a[0]);
          read(1);
        }
#pragma unroll
        for (int n = 0; n < kRanks; n += 16) {
          add_step(sums[n / 8], sums[n / 8 + 1], a[k], p.weights.parts,
                   [&](std::uint32_t(&b)[4], int plane) {
                     load_b(b, block + plane * block_bytes(kRanks), n, own_step % 2 * 2 + k, true);
                   });
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kRanks / 2; ++i) sum[i] = sums[i / 4].total(i % 4);
    tree.add(leaf, sum);
  }
  device::cp_async_wait<0>();
  if (p.plan.fused) {
    store_hidden<kRanks>(p, rows, part, first_rank, warp_row + lane / 4, multiplies, octets,
                         reinterpret_cast<float*>(smem), sum);
  } else if (multiplies) {
    store_partials<kRanks>(p, rows, part, first_rank, warp_row + lane / 4, sum);
  }
}

template <int kRanks>
bool launch_shrink(const ShrinkParams& p, Stream stream) {
  device::Launch l;
  l.grid = dim3(static_cast<unsigned>(p.max_tiles), p.plan.parts, ceil_div(p.width, kRanks));
  l.cluster_y = p.plan.fused ? p.plan.parts : 1;
  // Those that have no rows help to split weights.
  l.threads = std::max(2 * p.plan.rows, p.plan.chunk == kFloatChunk ? 128 : kThreads);
  // So much that no further block fits an SM beside those of the plan; expand's may.
  l.smem = FloatRing<kRanks>::smem(p.plan.chunk, p.plan.rows / 16);
  if (p.plan.per_sm > 0) {
    l.smem = std::max<std::size_t>(
        l.smem, device::current_device().sm_smem / static_cast<std::size_t>(p.plan.per_sm + 1));
  }
  l.stream = stream;
  l.pdl = true;
  if (!device::fits<shrink_float_kernel<kRanks>>("lora_train", l.smem)) return false;
  device::launch<shrink_float_kernel<kRanks>>("lora_train", l, p);
  return true;
}

}  // namespace

bool shrink_float(const ShrinkParams& p, Stream stream) {
  if (!p.plan.floats) return false;
  if (p.plan.boxes && shrink_boxes(p, stream)) return true;
  return p.plan.ranks == 16 ? launch_shrink<16>(p, stream) : launch_shrink<32>(p, stream);
}

}  // namespace mortar::lora::train::cuda
