// SPDX-License-Identifier: Apache-2.0
// h = x A^T for every pair of dtypes on float32 units: float32 adapters under 16-bit models, and
// float32 models.
//
// h[s, t, r] = sum_k x[t, k] A_{a(t), s}[r, k]
// bytes  = e_x M K + e_A K sum_a R_a + h         e: bytes of an element
// FLOP   = 2 M K R, all on FMA units: 60 TFLOP/s at most, so prefill is bound by arithmetic from
//          R = 28 (bf16 x); decode by DRAM
// limit  : decode DRAM; prefill shared memory reads (one 4-byte read per FMA of a lane)
//
// A warp owns one rank row at a time; its lanes stride over a leaf of K, and a fixed butterfly adds
// the lanes. Leaves are added as on tensor cores (leaf_size in problem.h).
#include "device/convert.cuh"
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "lora/cuda/backend.cuh"
#include "lora/cuda/rank_rows.cuh"

namespace mortar::lora::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kTokens = 16;
constexpr int kRows = 32;
constexpr int kRowsPerWarp = kRows / kWarps;
constexpr int kMaxLeaf = 512;

template <class TX, class TW>
__global__ void __launch_bounds__(kThreads, 1)
    shrink_simt_kernel(const __grid_constant__ ShrinkParams p) {
  __shared__ float x_tile[kTokens][kMaxLeaf];
  __shared__ RankRows<kRows> rows;
  __shared__ int tokens[kTokens];

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int split = blockIdx.y;
  device::pdl_begin(false);
  const int tile_index = p.tiles.first + static_cast<int>(blockIdx.z);
  Tile tile;
  const bool live = static_cast<int>(blockIdx.z) < p.tiles.num &&
                    find_any_tile(p.groups, p.tiles, p.weights.num_adapters, tile_index, &tile);
  if (!live) {
    zero_base_rows(p);
    return;
  }
  const int first = p.h.by_position ? first_position(p.groups, p.tiles) : 0;
  rows.fill(p, tile.adapter, blockIdx.x * kRows);
  if (threadIdx.x < kTokens) {
    tokens[threadIdx.x] = any_token(p.groups, p.tiles, tile, threadIdx.x);
  }
  __syncthreads();
  if (rows.count == 0) return;

  const std::int64_t leaf = leaf_size(p.weights.hidden);
  const bool whole = p.h.num_slabs == 1;
  const std::int64_t k_begin = whole ? 0 : split * leaf;
  const std::int64_t k_end = whole ? p.weights.hidden : min(k_begin + leaf, p.weights.hidden);

  // Lane t of the total of a row holds token t's sum.
  float total[kRowsPerWarp] = {}, first_half[kRowsPerWarp] = {};
  const std::int64_t middle = whole ? leaf * first_leaves(num_leaves(k_end)) : k_end;
  for (std::int64_t k0 = k_begin; k0 < k_end; k0 += leaf) {
    const int n = static_cast<int>(min(leaf, k_end - k0));
    __syncthreads();
    for (int t = warp; t < tile.count; t += kWarps) {
      if (tokens[t] < 0) continue;
      const TX* x = static_cast<const TX*>(p.x.data) + tokens[t] * p.x.row_stride + k0;
      for (int k = lane; k < n; k += 32) x_tile[t][k] = device::to_float(x[k]);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kRowsPerWarp; ++i) {
      const int row = warp + i * kWarps;
      if (row >= rows.count || rows.weights[row] == nullptr) continue;
      const TW* a = static_cast<const TW*>(rows.weights[row]) + k0;
      float sum[kTokens] = {};
#pragma unroll 4
      for (int k = lane; k < n; k += 32) {
        const float w = device::to_float(a[k]);
#pragma unroll
        for (int t = 0; t < kTokens; ++t) {
          if (t < tile.count) sum[t] = fmaf(w, x_tile[t][k], sum[t]);
        }
      }
      float own = 0;
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        if (t >= tile.count) break;
#pragma unroll
        for (int d = 16; d > 0; d /= 2) sum[t] += __shfl_xor_sync(0xffffffffu, sum[t], d);
        if (lane == t) own = sum[t];
      }
      if (k0 == middle) {
        first_half[i] = total[i];
        total[i] = 0;
      }
      total[i] += own;
    }
  }

  if (lane >= tile.count) return;
  const int h_at = h_row(p.h, tile, first, lane, tokens[lane]);
  if (h_at < 0) return;
#pragma unroll
  for (int i = 0; i < kRowsPerWarp; ++i) {
    const int row = warp + i * kWarps;
    if (row >= rows.count) break;
    const float sum = first_half[i] + total[i];
    const float v = p.h.raw ? sum : sum * rows.scale[row];
    device::store_from_float(
        p.h.data, p.h.dtype,
        split * p.h.slab_stride + std::int64_t{h_at} * p.h.row_stride + rows.place[row],
        rows.weights[row] == nullptr ? 0.0f : v);
  }
}

// ---- host ---------------------------------------------------------------------------------------

template <class TX, class TW>
void launch_typed(const ShrinkParams& p, const ShrinkConfig& c, Stream stream) {
  check(c.tile_tokens == kTokens && c.tile_rows == kRows,
        "lora_shrink: the float32 kernel has tiles of 16 tokens and 32 rows only");
  device::Launch l;
  l.grid = shrink_grid(p, c);
  l.threads = kThreads;
  l.stream = stream;
  l.pdl = true;
  device::launch<shrink_simt_kernel<TX, TW>>("lora_shrink", l, p);
}

}  // namespace

void shrink_simt(const ShrinkParams& p, const ShrinkConfig& c, Stream stream) {
  device::visit_dtype(p.x.dtype, [&](auto x) {
    device::visit_dtype(p.weights.dtype, [&](auto w) {
      launch_typed<typename decltype(x)::type, typename decltype(w)::type>(p, c, stream);
    });
  });
}

}  // namespace mortar::lora::cuda
