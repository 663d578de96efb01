// SPDX-License-Identifier: Apache-2.0
// y (+)= h B^T for every pair of dtypes on float32 units.
//
// y[t, n] (+)= sum_r h[s, t, r] B_{a(t), s}[n, r]
// bytes  = 2 e_y M sum_s N_s (y read and written) + e_B sum_a sum_s r N_s + h
// FLOP   = 2 M N r on FMA units: prefill is bound by arithmetic from r = 40 (float32 y)
// limit  : DRAM, then FMA
//
// A thread owns one column and the 16 tokens of a tile. Its row of B comes in packs of four ranks,
// those of the first 32 before the predecessor ends; y is loaded for all tokens at once, beside h.
// Sums run over ranks in order.
#include <type_traits>

#include "device/convert.cuh"
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "lora/cuda/backend.cuh"
#include "lora/cuda/expand_tile.cuh"
#include "lora/cuda/simt.cuh"

namespace mortar::lora::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kTokens = 16;
constexpr int kRanks = 32;  ///< held at a time

template <class TW, class TY>
__global__ void __launch_bounds__(kThreads, 4)
    expand_simt_kernel(const __grid_constant__ ExpandParams p) {
  __shared__ __align__(16) float h_tile[kTokens][kRanks];
  __shared__ int tokens[kTokens];

  // Guard
  device::pdl_begin(p.early);
  const Block block = find_block(p, static_cast<int>(blockIdx.x));
  const int local = static_cast<int>(blockIdx.y);
  Tile tile;
  const bool live = local < p.tiles.num && find_any_tile(p.groups, p.tiles, p.weights.num_adapters,
                                                         p.tiles.first + local, &tile);
  const SliceWeights w = weights_of(p, tile, block, live);
  if (w.rank == 0) return device::pdl_wait();

  // Load: B does not depend on the predecessor.
  const int own_col = min(static_cast<int>(threadIdx.x), block.cols - 1);
  const bool own = static_cast<int>(threadIdx.x) < block.cols;
  const TW* b = static_cast<const TW*>(w.b) + (block.first + own_col) * w.b_row_stride;
  const bool vector =
      w.b_row_stride % kPack == 0 && device::is_aligned<TW, kPack>(static_cast<const TW*>(w.b));
  device::Bits<TW, kPack> packs[kRanks / kPack];
  const auto load_b = [&](int r0) {
#pragma unroll
    for (int i = 0; i < kRanks / kPack; ++i) {
      const int r = r0 + i * kPack;
      packs[i] = load_some(b + r, w.rank - r, vector);
    }
  };
  load_b(0);
  const int first = p.h.by_position ? first_position(p.groups, p.tiles) : 0;
  if (threadIdx.x < kTokens) {
    tokens[threadIdx.x] = any_token(p.groups, p.tiles, tile, threadIdx.x);
  }
  __syncthreads();
  device::pdl_wait();
  TY* y = static_cast<TY*>(p.y.data) + block.y_col + threadIdx.x;
  TY old[kTokens] = {};
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    if (t >= tile.count) break;
    if (p.add_inputs && own && tokens[t] >= 0) old[t] = y[tokens[t] * p.y.row_stride];
  }

  // Compute
  float sum[kTokens] = {};
  for (int r0 = 0; r0 < w.rank; r0 += kRanks) {
    if (r0 > 0) {
      load_b(r0);
      __syncthreads();
    }
    for (int t = threadIdx.x / 32; t < tile.count; t += kThreads / 32) {
      const int r = r0 + static_cast<int>(threadIdx.x) % 32;
      const int row = h_row(p.h, tile, first, t, tokens[t]);
      float v = 0;
      if (r < w.rank && row >= 0) {
        v = device::load_as_float(
            p.h.data, p.h.dtype,
            block.slice * p.h.slice_stride + std::int64_t{row} * p.h.row_stride + r);
      }
      // As on tensor cores: h takes the dtype of B where y has it too.
      if constexpr (std::is_same_v<TW, TY>) v = device::to_float(device::from_float<TW>(v));
      h_tile[t][r - r0] = v;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kRanks / kPack; ++i) {
      if (r0 + i * kPack >= w.rank) break;
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        if (t >= tile.count) break;
        const float4 h = *reinterpret_cast<const float4*>(&h_tile[t][i * kPack]);
        sum[t] = fmaf(h.x, packs[i].get(0), sum[t]);
        sum[t] = fmaf(h.y, packs[i].get(1), sum[t]);
        sum[t] = fmaf(h.z, packs[i].get(2), sum[t]);
        sum[t] = fmaf(h.w, packs[i].get(3), sum[t]);
      }
    }
  }

  // Store
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    if (t >= tile.count) break;
    if (!own || tokens[t] < 0) continue;
    y[tokens[t] * p.y.row_stride] =
        device::from_float<TY>(p.add_inputs ? device::to_float(old[t]) + sum[t] : sum[t]);
  }
}

// ---- host ---------------------------------------------------------------------------------------

template <class TW, class TY>
void launch_typed(const ExpandParams& p, Stream stream) {
  check(p.tiles.tile_tokens == kTokens && p.cols == kThreads && !p.h.raw,
        "lora_expand: the float32 kernel takes tiles of 16 tokens, 128 columns and a whole h only");
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
