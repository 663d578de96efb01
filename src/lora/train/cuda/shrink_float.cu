// SPDX-License-Identifier: Apache-2.0
// h = x A^T and ds = dy B of dense float32 x and dy without dropout, as split-K partials: [M, C] by
// [C, R] for small R, by split-bf16.
//
// Bytes: 4 M C + 4 R C (per 128 rows, from L2) + 4 parts M R. With M = 4096, C = 4096, R = 16 that
// is 67 MB and partials, 15.7 us at 4.28 TB/s. Above 32 rank columns x is read again for every 32,
// mostly from L2. Bound by instructions where memory is not: 13 to split a pair of elements.
//
// The tiles, the tree and the order of shrink.cu, and so its bits. A warp has 16 rows, which it
// copies itself, 32 columns at a time, through a ring of its own; weights pass as planes of parts,
// 256 columns at a time, for the whole thread block.
#include "core/check.h"
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "lora/train/cuda/float_ring.cuh"
#include "lora/train/cuda/kernels.cuh"
#include "lora/train/cuda/leaf_sums.cuh"
#include "lora/train/cuda/shrink_tile.cuh"

namespace mortar::lora::train::cuda {
namespace {

constexpr int kLevels = 2;  ///< of the tree of leaves: a thread block has half of them at most
constexpr int kCopies = 4;  ///< of a lane in a step: rows 4 apart

template <int kRanks>
__global__ void __launch_bounds__(kThreads, kFloatBlocks)
    shrink_float_kernel(const __grid_constant__ ShrinkParams p) {
  using Ring = FloatRing<kRanks>;
  extern __shared__ __align__(128) char smem[];
  __shared__ Pairs pairs;
  __shared__ const float* from[kTileRows];
  device::pdl_begin(false);

  // Coordinates
  const RowTile rows = row_tile(p.rows, static_cast<int>(blockIdx.x), kTileRows, false);
  if (rows.count == 0) return;
  pairs.fill(p.pairs, rows.adapter, p.first_slice, p.num_slices);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int warp_row = warp * 16;
  const int part = blockIdx.y, first_rank = static_cast<int>(blockIdx.z) * kRanks;
  const int leaves = kLeaves / p.plan.parts;
  const std::int64_t begin = part * leaves * p.plan.leaf;
  const std::int64_t end = max(begin, min(begin + leaves * p.plan.leaf, p.columns));
  const int count = static_cast<int>(end - begin), steps = ceil_div(count, kFloatStep);

  // Load. A row of a step is 8 words of 16 bytes, which rows swap so that a fragment's reads meet
  // no bank twice.
  if (threadIdx.x < kTileRows) {
    const int at = static_cast<int>(threadIdx.x);
    const std::int64_t row = at < rows.count ? row_at(p.rows, rows.start + at) : -1;
    from[at] = row < 0
                   ? nullptr
                   : static_cast<const float*>(p.wide.m.data) + row * p.wide.m.row_stride + begin;
  }
  __syncthreads();
  const std::uint32_t planes = device::smem_address(smem);
  const std::uint32_t ring = planes + kFloatPlanes * Ring::kPlaneBytes + warp * Ring::kWarpBytes;
  const std::uint32_t own_word = lane / 8 * 128 + ((lane % 8 ^ lane / 8 << 1) << 4);
  int copied = 0, copy_slot = 0;
  const auto copy_next = [&] {
    const int bytes = word_bytes(count - copied * kFloatStep - lane % 8 * 4);
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const float* row = from[warp_row + lane / 8 + 4 * i];
      const bool there = row != nullptr && bytes > 0;
      const void* word = there ? row + copied * kFloatStep + lane % 8 * 4 : p.wide.m.data;
      device::cp_async_16(ring + copy_slot * kSlotBytes + own_word + i * 512, word,
                          there ? bytes : 0);
    }
    device::cp_async_commit();
    ++copied;
    copy_slot = copy_slot + 1 == Ring::kStages ? 0 : copy_slot + 1;
  };
#pragma unroll 1
  for (int i = 0; i < Ring::kStages; ++i) copy_next();
  // Rank columns that no pair has hold zeros throughout.
  for (int i = threadIdx.x; i < kFloatPlanes * Ring::kPlaneBytes / 16; i += kThreads) {
    reinterpret_cast<uint4*>(smem)[i] = make_uint4(0, 0, 0, 0);
  }
  const auto place = [&](int at, int own) {
    if (!p.weights.rows_are_ranks) return smem + rank_piece_at<kRanks>(at, own);
    return smem + own / kRowPieces * block_bytes(kRanks) + piece_at(at, own % kRowPieces);
  };

  // Compute
  LeafSums<kRanks / 2, kLevels> tree;
  float sum[kRanks / 2];
  const int row = lane / 4, word = lane % 4 / 2;  // of a fragment's first pair
  const std::uint32_t own_row = ring + row * 128 + lane % 2 * 8;
  const int leaf_steps = static_cast<int>(p.plan.leaf / kFloatStep);
  int step = 0, slot = 0;
#pragma unroll 1
  for (int leaf = 0; leaf < leaves; ++leaf) {
    Sums<__nv_bfloat16, true> sums[kRanks / 8];
    const int leaf_end = min(steps, (leaf + 1) * leaf_steps);
#pragma unroll 1
    for (; step < leaf_end; ++step) {
      if (step % kChunkSteps == 0) {
        __syncthreads();
        fetch_weights<true, kRanks, kChunk>(p, pairs, first_rank,
                                            begin + std::int64_t{step} * kFloatStep, end,
                                            Ring::kPlaneBytes, place);
        __syncthreads();
      }
      device::cp_async_wait<Ring::kStages - 1>();
      __syncwarp();
#pragma unroll
      for (int k = 0; k < kFloatStep / 16; ++k) {
        float2 pair[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int own = (4 * k + i / 2 * 2 + word) ^ (row % 4 << 1);
          pair[i] = read_float2(own_row + slot * kSlotBytes + i % 2 * 1024 + own * 16);
        }
        if (16 * k + 16 == kFloatStep) {
          __syncwarp();  // all lanes have read the slot
          copy_next();
        }
        std::uint32_t a[kFloatPlanes][4];
        split_fragment(pair, a);
        const int at = step % kChunkSteps * kFloatStep + 16 * k;  // column of the chunk
#pragma unroll
        for (int n = 0; n < kRanks; n += 16) {
          add_step(sums[n / 8], sums[n / 8 + 1], a, p.weights.parts,
                   [&](std::uint32_t(&b)[4], int plane) {
                     const std::uint32_t from_plane = planes + plane * Ring::kPlaneBytes;
                     if (p.weights.rows_are_ranks) {
                       load_b(b, from_plane + at / kBlockColumns * block_bytes(kRanks), n,
                              at % kBlockColumns / 16, true);
                     } else {
                       load_rank_rows<kRanks>(b, from_plane, at, n);
                     }
                   });
        }
      }
      slot = slot + 1 == Ring::kStages ? 0 : slot + 1;
    }
#pragma unroll
    for (int i = 0; i < kRanks / 2; ++i) sum[i] = sums[i / 4].total(i % 4);
    tree.add(leaf, sum);
  }
  store_partials<kRanks>(p, rows, part, first_rank, warp_row, sum);
}

template <int kRanks>
bool launch_shrink(const ShrinkParams& p, Stream stream) {
  device::Launch l;
  l.grid = dim3(static_cast<unsigned>(p.max_tiles), p.plan.parts, ceil_div(p.width, kRanks));
  l.threads = kThreads;
  l.smem = FloatRing<kRanks>::kSmem;
  l.stream = stream;
  l.pdl = true;
  if (!device::fits<shrink_float_kernel<kRanks>>("lora_train", l.smem)) return false;
  device::launch<shrink_float_kernel<kRanks>>("lora_train", l, p);
  return true;
}

}  // namespace

bool shrink_float(const ShrinkParams& p, Stream stream) {
  if (!fits_float_ring(p.wide, p.columns, p.masked)) return false;
  return p.plan.ranks == 16 ? launch_shrink<16>(p, stream) : launch_shrink<32>(p, stream);
}

}  // namespace mortar::lora::train::cuda
