// SPDX-License-Identifier: Apache-2.0
// y (+)= h B^T for every pair of dtypes on float32 units.
//
// y[t, n] (+)= sum_r h[s, t, r] B_{a(t), s}[n, r]
// bytes  = 2 e_y M sum_s N_s (y read and written) + e_B sum_a sum_s r N_s + h
// FLOP   = 2 M N r on FMA units: prefill is bound by arithmetic from r = 40 (float32 y)
// limit  : DRAM, then FMA
//
// A thread owns one column and the 16 tokens of a tile. B passes through shared memory in pieces of
// 32 ranks, so that its rows are read coalesced; sums run over ranks in order.
#include <type_traits>

#include "device/convert.cuh"
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "lora/cuda/backend.cuh"
#include "lora/cuda/slabs.cuh"

namespace mortar::lora::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kTokens = 16;
constexpr int kRanks = 32;

template <class TW, class TY>
__global__ void __launch_bounds__(kThreads, 1)
    expand_simt_kernel(const __grid_constant__ ExpandParams p) {
  __shared__ float sB[kThreads][kRanks + 1];
  __shared__ float sH[kTokens][kRanks];
  __shared__ int tokens[kTokens];

  const int block = blockIdx.x;
  int slice = 0;
  while (slice + 1 < p.weights.num_slices && block >= p.block_start[slice + 1]) ++slice;
  const std::int64_t first_col = static_cast<std::int64_t>(block - p.block_start[slice]) * kThreads;
  std::int64_t y_col = p.offset + first_col + threadIdx.x;
  for (int s = 0; s < slice; ++s) y_col += p.weights.widths[s];
  const int cols = static_cast<int>(
      min(static_cast<std::int64_t>(kThreads), p.weights.widths[slice] - first_col));

  device::pdl_begin(false);
  const int local = static_cast<int>(blockIdx.y);
  Tile tile;
  const bool live = local < p.tiles.num && find_any_tile(p.groups, p.tiles, p.weights.num_adapters,
                                                         p.tiles.first + local, &tile);
  if (!live) return;
  SliceWeights w = p.weights.get(tile.adapter, slice);
  if (w.rank > p.h.width) w.rank = p.h.width;
  if (w.rank == 0) return;
  const int first = p.h.by_position ? first_position(p.groups, p.tiles) : 0;
  if (threadIdx.x < kTokens) {
    tokens[threadIdx.x] = any_token(p.groups, p.tiles, tile, threadIdx.x);
  }

  float acc[kTokens] = {};
  for (int r0 = 0; r0 < w.rank; r0 += kRanks) {
    const int n = min(kRanks, w.rank - r0);
    __syncthreads();
    for (int i = threadIdx.x; i < cols * kRanks; i += kThreads) {
      const int c = i / kRanks, r = i % kRanks;
      if (r < n) {
        sB[c][r] = device::to_float(
            static_cast<const TW*>(w.b)[(first_col + c) * w.b_row_stride + r0 + r]);
      }
    }
    for (int i = threadIdx.x; i < tile.count * kRanks; i += kThreads) {
      const int t = i / kRanks, r = i % kRanks;
      const int row = h_row(p.h, tile, first, t, tokens[t]);
      float v = 0;
      if (r < n && row >= 0) {
        const std::int64_t at =
            slice * p.h.slice_stride + std::int64_t{row} * p.h.row_stride + r0 + r;
        if (p.h.raw) {
          v = p.scale * w.scale *
              sum_slabs_scalar(static_cast<const float*>(p.h.data) + at, p.h.slab_stride,
                               p.h.num_slabs);
        } else {
          v = device::load_as_float(p.h.data, p.h.dtype, at);
        }
      }
      // As on tensor cores: h takes the dtype of B where y has it too.
      if constexpr (std::is_same_v<TW, TY>) v = device::to_float(device::from_float<TW>(v));
      sH[t][r] = v;
    }
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < cols) {
      for (int r = 0; r < n; ++r) {
        const float b = sB[threadIdx.x][r];
#pragma unroll
        for (int t = 0; t < kTokens; ++t) {
          if (t < tile.count) acc[t] = fmaf(sH[t][r], b, acc[t]);
        }
      }
    }
  }

  if (static_cast<int>(threadIdx.x) >= cols) return;
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    if (t >= tile.count || tokens[t] < 0) continue;
    TY* y = static_cast<TY*>(p.y.data) + tokens[t] * p.y.row_stride + y_col;
    *y = device::from_float<TY>(p.add_inputs ? device::to_float(*y) + acc[t] : acc[t]);
  }
}

// ---- host ---------------------------------------------------------------------------------------

template <class TW, class TY>
void launch_typed(const ExpandParams& p, Stream stream) {
  check(p.tiles.tile_tokens == kTokens && p.cols == kThreads,
        "lora_expand: the float32 kernel takes a tile of 16 tokens and 128 columns only");
  device::Launch l;
  l.grid = expand_grid(p);
  l.threads = kThreads;
  l.stream = stream;
  l.pdl = true;
  device::launch<expand_simt_kernel<TW, TY>>("lora_expand", l, p);
}

}  // namespace

void expand_simt(const ExpandParams& p, Stream stream) {
  device::visit_dtype(p.weights.dtype, [&](auto w) {
    device::visit_dtype(p.y.dtype, [&](auto y) {
      launch_typed<typename decltype(w)::type, typename decltype(y)::type>(p, stream);
    });
  });
}

}  // namespace mortar::lora::cuda
