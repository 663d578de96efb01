// SPDX-License-Identifier: Apache-2.0
// dA = ds^T x and dB^T = h^T dy of dense float32 x and dy without dropout, as partial sums over
// chunks of rows, by split-bf16.
//
// Bytes: 4 M C + 4 M R (per 128 columns, from L2) + 4 (M / chunk) R C. With M = 4096, C = 4096,
// R = 16 that is 67 MB, 15.7 us at 4.28 TB/s. Bound by instructions where memory is not: 13 to
// split a pair of elements.
//
// The tiles and the order of outer.cu, and so its bits. A warp has 16 columns, of which it copies
// 32 rows at a time itself, through a ring of its own; ds or h pass as planes of parts, 128 rows at
// a time, for the whole thread block.
#include "core/check.h"
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "lora/train/cuda/float_ring.cuh"
#include "lora/train/cuda/kernels.cuh"
#include "lora/train/cuda/outer_store.cuh"

namespace mortar::lora::train::cuda {
namespace {

constexpr int kChunk = kFloatChunk, kChunkSteps = kChunk / kFloatStep;
constexpr int kCopies = 4;  ///< of a lane in a step: rows 8 apart

template <int kRanks>
__global__ void __launch_bounds__(kThreads, kFloatBlocks)
    outer_float_kernel(const __grid_constant__ OuterParams p) {
  using Ring = FloatRing<kRanks>;
  extern __shared__ __align__(128) char smem[];
  device::pdl_begin(p.early);

  // Coordinates
  const int slot_of_chunk = blockIdx.y;
  const RowTile rows = row_tile(p.rows, slot_of_chunk, p.chunk_rows, false);
  if (rows.count == 0) return device::pdl_leave();
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t column = std::int64_t{blockIdx.x} * kTileColumns + warp * 16;
  const int first_rank = static_cast<int>(blockIdx.z) * kRanks;
  const int steps = ceil_div(rows.count, kFloatStep);

  // Load. A row of a step is 4 words of 16 bytes. Even rows come first, and every other two swap
  // their words, so that a fragment's reads meet no bank twice.
  const std::int64_t own_column = column + lane % 4 * 4;
  const int bytes = word_bytes(
      static_cast<int>(max(min(p.columns - own_column, std::int64_t{4}), std::int64_t{0})));
  const auto* wide = static_cast<const float*>(p.wide.m.data);
  const std::uint32_t planes = device::smem_address(smem);
  const std::uint32_t raw = planes + Ring::raw_at(kChunk);
  const std::uint32_t ring = planes + Ring::ring_at(kChunk) + warp * Ring::kWarpBytes;
  const std::uint32_t own_word =
      (lane / 8 + lane / 4 % 2 * 16) * 64 + ((lane % 4 ^ lane / 16 << 1) << 4);
  // Rows that lie side by side need no look at the plan.
  const std::int64_t stride = p.wide.m.row_stride;
  const float* next = wide + (rows.start + lane / 4) * stride + own_column;
  const auto copy = [&](int step, std::uint32_t to) {
    to += ring + own_word;
    const int left = rows.count - step * kFloatStep - lane / 4;
    if (p.rows.sorted == nullptr) {
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const bool there = left > 8 * i && bytes > 0;
        device::cp_async_16(to + i * 256, there ? next + 8 * i * stride : wide, there ? bytes : 0);
      }
      next += kFloatStep * stride;
    } else {
#pragma unroll 1
      for (int i = 0; i < kCopies; ++i) {
        const std::int64_t position = rows.start + step * kFloatStep + lane / 4 + 8 * i;
        const std::int64_t row = left > 8 * i ? row_at(p.rows, position) : -1;
        const bool there = row >= 0 && bytes > 0;
        device::cp_async_16(to + i * 256, there ? wide + row * stride + own_column : wide,
                            there ? bytes : 0);
      }
    }
    device::cp_async_commit();
  };
  // ds or h of a chunk: float32 lands as it is while the chunk before it is multiplied.
  const bool copies = p.s.vectors && p.s.parts == kFloatPlanes;
  const auto ask_chunk = [&](int step) {
    constexpr int kWords = kRanks / 4;
    const int first = step * kFloatStep;
    const auto* narrow = static_cast<const float*>(p.s.m.data);
    for (int i = threadIdx.x; copies && step < steps && i < kChunk * kWords; i += kThreads) {
      const int at = first + i / kWords, j = first_rank + i % kWords * 4;
      const std::int64_t row = at < rows.count ? row_at(p.rows, rows.start + at) : -1;
      const bool there = row >= 0 && j < p.width;
      device::cp_async_16(raw + i * 16,
                          there ? narrow + row * p.s.m.row_stride + p.first_hidden + j : narrow,
                          there ? 16 : 0);
    }
    device::cp_async_commit();
  };
  ask_chunk(0);
#pragma unroll 1
  for (int i = 0; i < Ring::kStages; ++i) copy(i, i * kSlotBytes);
  const auto next_chunk = [&](int step) {
    constexpr int kPieces = kRanks / kPiece;
    const auto place = [&](int i) {
      return smem + rank_piece_at<kRanks>(i / kPieces, i % kPieces);
    };
    device::cp_async_wait<Ring::kStages - 1>();  // what was asked for before the steps in flight
    __syncthreads();
    if (copies) {
      for (int i = threadIdx.x; i < kChunk * kPieces; i += kThreads) {
        const auto* from = reinterpret_cast<const float4*>(smem + Ring::raw_at(kChunk)) + 2 * i;
        split_eight(from[0], from[1], place(i), Ring::plane_bytes(kChunk));
      }
    } else {
      for (int i = threadIdx.x; i < kChunk * kPieces; i += kThreads) {
        const int at = step * kFloatStep + i / kPieces;
        const std::int64_t row = at < rows.count ? row_at(p.rows, rows.start + at) : -1;
        fetch_piece<true>(p.s, row, p.first_hidden + first_rank + i % kPieces * kPiece,
                          p.first_hidden + p.width, 0xffu, place(i), Ring::plane_bytes(kChunk));
      }
    }
    __syncthreads();
    ask_chunk(step + kChunkSteps);
  };

  // Compute. What an MMA step multiplies is read and split while the one before it runs.
  Sums<__nv_bfloat16, true> sums[kRanks / 8];
  const std::uint32_t own_pair =
      ring + lane % 4 * 64 + ((lane / 16 ^ lane / 2 % 2 << 1) << 4) + lane / 4 % 4 * 4;
  std::uint32_t slot = Ring::kWarpBytes - kSlotBytes;
  float2 pair[4];
  std::uint32_t a[2][kFloatPlanes][4];
  const auto read = [&](int k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // Pairs of rows 2 t and 2 t + 1 of column g, or of column g + 8, then of rows 8 on.
      const std::uint32_t at = (own_pair + slot + (8 * k + i / 2 * 4) * 64) ^ i % 2 * 32;
      pair[i] = make_float2(read_float(at), read_float(at + 16 * 64));
    }
  };
  const auto next_slot = [&] {
    slot = slot + kSlotBytes == Ring::kWarpBytes ? 0 : slot + kSlotBytes;
    device::cp_async_wait<Ring::kStages - 1>();
    __syncwarp();
    read(0);
  };
  next_slot();
  split_fragment(pair, a[0]);
  read(1);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    if (step % kChunkSteps == 0) next_chunk(step);
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
      const int at = step % kChunkSteps * kFloatStep + 16 * k;  // row of the chunk
#pragma unroll
      for (int n = 0; n < kRanks; n += 16) {
        add_step(sums[n / 8], sums[n / 8 + 1], a[k], p.s.parts,
                 [&](std::uint32_t(&b)[4], int plane) {
                   load_rank_rows<kRanks>(b, planes + plane * Ring::plane_bytes(kChunk), at, n);
                 });
      }
    }
  }
  if (p.early) device::pdl_wait();
  store_outer<kRanks>(p, slot_of_chunk, column, first_rank, sums);
}

template <int kRanks>
bool launch_outer(const OuterParams& p, Stream stream) {
  device::Launch l;
  l.grid = dim3(static_cast<unsigned>(ceil_div<std::int64_t>(p.columns, kTileColumns)),
                static_cast<unsigned>(p.max_tiles), ceil_div(p.width, kRanks));
  l.threads = kThreads;
  l.smem = FloatRing<kRanks>::smem(kChunk, kThreads / 32);
  l.stream = stream;
  l.pdl = true;
  if (!device::fits<outer_float_kernel<kRanks>>("lora_train", l.smem)) return false;
  device::launch<outer_float_kernel<kRanks>>("lora_train", l, p);
  return true;
}

}  // namespace

bool outer_float(const OuterParams& p, Stream stream) {
  if (!fits_float_ring(p.wide, p.columns, p.masked)) return false;
  if (outer_boxes(p, stream)) return true;
  return p.ranks == 16 ? launch_outer<16>(p, stream) : launch_outer<32>(p, stream);
}

}  // namespace mortar::lora::train::cuda
