// SPDX-License-Identifier: Apache-2.0
// dA = ds^T x and dB^T = h^T dy of dense float32 x and dy without dropout, as partial sums over
// chunks of rows, by split-bf16.
//
// Bytes: 4 M C + 4 M R (per 128 columns, from L2) + 4 (M / chunk) R C. With M = 4096, C = 4096,
// R = 16 that is 67 MB, 15.7 us at 4.28 TB/s. Bound by instructions where memory is not: 13 to
// split a pair of elements.
//
// The tiles and the order of outer.cu, and so its bits. A warp has 16 columns, of which it copies
// 32 rows at a time itself, through a ring of its own; ds or h pass as planes of parts, 256 rows at
// a time, for the whole thread block.
#include "core/check.h"
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "lora/train/cuda/float_ring.cuh"
#include "lora/train/cuda/kernels.cuh"
#include "lora/train/cuda/outer_store.cuh"

namespace mortar::lora::train::cuda {
namespace {

constexpr int kCopies = 4;  ///< of a lane in a step: rows 8 apart

template <int kRanks>
__global__ void __launch_bounds__(kThreads, kFloatBlocks)
    outer_float_kernel(const __grid_constant__ OuterParams p) {
  using Ring = FloatRing<kRanks>;
  extern __shared__ __align__(128) char smem[];
  device::pdl_begin(false);

  // Coordinates
  const int slot_of_chunk = blockIdx.y;
  const RowTile rows = row_tile(p.rows, slot_of_chunk, p.chunk_rows, false);
  if (rows.count == 0) return;
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
  const std::uint32_t ring = planes + kFloatPlanes * Ring::kPlaneBytes + warp * Ring::kWarpBytes;
  const std::uint32_t own_word =
      (lane / 8 + lane / 4 % 2 * 16) * 64 + ((lane % 4 ^ lane / 16 << 1) << 4);
  int copied = 0, copy_slot = 0;
  const auto copy_next = [&] {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int at = copied * kFloatStep + lane / 4 + 8 * i;
      const std::int64_t row = at < rows.count ? row_at(p.rows, rows.start + at) : -1;
      const bool there = row >= 0 && bytes > 0;
      device::cp_async_16(ring + copy_slot * kSlotBytes + own_word + i * 256,
                          there ? wide + row * p.wide.m.row_stride + own_column : wide,
                          there ? bytes : 0);
    }
    device::cp_async_commit();
    ++copied;
    copy_slot = copy_slot + 1 == Ring::kStages ? 0 : copy_slot + 1;
  };
#pragma unroll 1
  for (int i = 0; i < Ring::kStages; ++i) copy_next();
  const auto fetch_chunk = [&](int first) {
    constexpr int kPieces = kRanks / kPiece;
    for (int i = threadIdx.x; i < kChunk * kPieces; i += kThreads) {
      const int at = i / kPieces, own = i % kPieces;
      const std::int64_t row =
          first + at < rows.count ? row_at(p.rows, rows.start + first + at) : std::int64_t{-1};
      fetch_piece<true>(p.s, row, p.first_hidden + first_rank + own * kPiece,
                        p.first_hidden + p.width, 0xffu, smem + rank_piece_at<kRanks>(at, own),
                        Ring::kPlaneBytes);
    }
  };

  // Compute
  Sums<__nv_bfloat16, true> sums[kRanks / 8];
  const std::uint32_t own_pair =
      ring + lane % 4 * 64 + ((lane / 16 ^ lane / 2 % 2 << 1) << 4) + lane / 4 % 4 * 4;
  int slot = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    if (step % kChunkSteps == 0) {
      __syncthreads();
      fetch_chunk(step * kFloatStep);
      __syncthreads();
    }
    device::cp_async_wait<Ring::kStages - 1>();
    __syncwarp();
#pragma unroll
    for (int k = 0; k < kFloatStep / 16; ++k) {
      float2 pair[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // Pairs of rows 2 t and 2 t + 1 of column g, or of column g + 8, then of rows 8 on.
        const std::uint32_t at =
            (own_pair + slot * kSlotBytes + (8 * k + i / 2 * 4) * 64) ^ i % 2 * 32;
        pair[i] = make_float2(read_float(at), read_float(at + 16 * 64));
      }
      if (16 * k + 16 == kFloatStep) {
        __syncwarp();  // all lanes have read the slot
        copy_next();
      }
      std::uint32_t a[kFloatPlanes][4];
      split_fragment(pair, a);
      const int at = step % kChunkSteps * kFloatStep + 16 * k;  // row of the chunk
#pragma unroll
      for (int n = 0; n < kRanks; n += 16) {
        add_step(sums[n / 8], sums[n / 8 + 1], a, p.s.parts, [&](std::uint32_t(&b)[4], int plane) {
          load_rank_rows<kRanks>(b, planes + plane * Ring::kPlaneBytes, at, n);
        });
      }
    }
    slot = slot + 1 == Ring::kStages ? 0 : slot + 1;
  }
  store_outer<kRanks>(p, slot_of_chunk, column, first_rank, sums);
}

template <int kRanks>
bool launch_outer(const OuterParams& p, Stream stream) {
  device::Launch l;
  l.grid = dim3(static_cast<unsigned>(ceil_div<std::int64_t>(p.columns, kTileColumns)),
                static_cast<unsigned>(p.max_tiles), ceil_div(p.width, kRanks));
  l.threads = kThreads;
  l.smem = FloatRing<kRanks>::kSmem;
  l.stream = stream;
  l.pdl = true;
  if (!device::fits<outer_float_kernel<kRanks>>("lora_train", l.smem)) return false;
  device::launch<outer_float_kernel<kRanks>>("lora_train", l, p);
  return true;
}

}  // namespace

bool outer_float(const OuterParams& p, Stream stream) {
  if (!fits_float_ring(p.wide, p.columns, p.masked)) return false;
  return p.ranks == 16 ? launch_outer<16>(p, stream) : launch_outer<32>(p, stream);
}

}  // namespace mortar::lora::train::cuda
