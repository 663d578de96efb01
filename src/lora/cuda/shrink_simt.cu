// SPDX-License-Identifier: Apache-2.0
// h = x A^T for every pair of dtypes on float32 units: float32 adapters under 16-bit models, and
// float32 models.
//
// h[s, t, r] = sum_k x[t, k] A_{a(t), s}[r, k]
// bytes  = e_x M K + e_A K sum_a R_a + h         e: bytes of an element
// FLOP   = 2 M K R, all on FMA units: 60 TFLOP/s at most, so prefill is bound by arithmetic from
//          R = 28 (bf16 x); decode by DRAM
// 32 tokens of 32 adapters, qkv, r16, float32 A: 25 MB -> 5.9 us
// limit  : decode latency and DRAM; prefill FMA units and shared memory alike (one 16-byte read per
//          16 FMAs of a lane), of which it reaches a tenth
//
// A CTA takes a tile of 16 tokens, 32 rank rows, and all of K or (split) one leaf of it. A warp
// owns four rank rows and streams them together, four elements per lane and row, the next ones in
// flight while these are multiplied; the first are asked for before the predecessor ends. A fixed
// exchange adds the lanes. Leaves are added as on tensor cores (leaf_size in problem.h).
#include "device/convert.cuh"
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "lora/cuda/backend.cuh"
#include "lora/cuda/rank_rows.cuh"
#include "lora/cuda/simt.cuh"

namespace mortar::lora::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kTokens = 16;
constexpr int kRows = 32;
constexpr int kOwnRows = 4;  ///< rank rows of a warp
constexpr int kMaxLeaf = 512;
constexpr int kStep = 32 * kPack;  ///< elements of K that a warp takes at a time
static_assert(kRows == kWarps * kOwnRows && leaf_size(1) % kStep == 0);

/// Adds the lanes of four sums, which takes as many shuffles as six values: each lane gets the
/// total of row own_row() alone.
__device__ __forceinline__ float add_lanes(const float (&sum)[kOwnRows]) {
  const auto from = [](float v, int mask) { return __shfl_xor_sync(0xffffffffu, v, mask); };
  const bool odd = threadIdx.x % 2 == 1, second = threadIdx.x / 2 % 2 == 1;
  const float upper = (odd ? sum[2] : sum[0]) + from(odd ? sum[0] : sum[2], 1);
  const float lower = (odd ? sum[3] : sum[1]) + from(odd ? sum[1] : sum[3], 1);
  float total = (second ? lower : upper) + from(second ? upper : lower, 2);
#pragma unroll
  for (int d = 4; d < 32; d *= 2) total += from(total, d);
  return total;
}
__device__ __forceinline__ int own_row() {
  return static_cast<int>(threadIdx.x % 2 * 2 + threadIdx.x / 2 % 2);
}

template <class TX, class TW>
__global__ void __launch_bounds__(kThreads, 2)
    shrink_simt_kernel(const __grid_constant__ ShrinkParams p) {
  __shared__ __align__(16) float x_tile[kTokens][kMaxLeaf];
  __shared__ RankRows<kRows> rows;
  __shared__ int tokens[kTokens];

  // Coordinates
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int split = blockIdx.y;
  device::pdl_begin(p.early);

  // Guard
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
  if (rows.count == 0) {
    device::pdl_wait();
    return;
  }

  // Pointers
  const int hidden = static_cast<int>(p.weights.hidden);
  const int leaf = static_cast<int>(leaf_size(hidden));
  const bool whole = p.h.num_slabs == 1;
  const int k_begin = whole ? 0 : split * leaf;
  const int k_end = whole ? hidden : min(k_begin + leaf, hidden);
  const TW* weights[kOwnRows];  // null: a padding row or none
#pragma unroll
  for (int i = 0; i < kOwnRows; ++i) {
    const int row = warp * kOwnRows + i;
    weights[i] = row < rows.count ? static_cast<const TW*>(rows.weights[row]) : nullptr;
  }

  // Load: A does not depend on the predecessor.
  device::Bits<TW, kPack> next[kOwnRows];
  const auto load_weights = [&](int k) {
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) {
      next[i] = load_some(weights[i] + k, weights[i] == nullptr ? 0 : k_end - k, p.vector);
    }
  };
  load_weights(k_begin + lane * kPack);
  device::pdl_wait();

  // Totals of own_row() and of places lane / 4 and lane / 4 + 8.
  float total[2] = {}, first_half[2] = {};
  const int middle = whole ? leaf * static_cast<int>(first_leaves(num_leaves(hidden))) : k_end;
  for (int k0 = k_begin; k0 < k_end; k0 += leaf) {
    const int n = min(leaf, k_end - k0), padded = round_up(n, kStep);
    __syncthreads();
#pragma unroll
    for (int t = warp; t < kTokens; t += kWarps) {
      if (t >= tile.count || tokens[t] < 0) continue;
      const TX* x = static_cast<const TX*>(p.x.data) + tokens[t] * p.x.row_stride + k0;
      device::Bits<TX, kPack> pack[kMaxLeaf / kStep];
#pragma unroll
      for (int i = 0; i < kMaxLeaf / kStep; ++i) {
        const int k = i * kStep + lane * kPack;
        pack[i] = load_some(x + k, n - k, p.vector);
      }
#pragma unroll
      for (int i = 0; i < kMaxLeaf / kStep; ++i) {
        const int k = i * kStep + lane * kPack;
        if (k >= padded) break;
        *reinterpret_cast<float4*>(&x_tile[t][k]) =
            make_float4(pack[i].get(0), pack[i].get(1), pack[i].get(2), pack[i].get(3));
      }
    }
    __syncthreads();

    // Compute
    float sum[kTokens][kOwnRows] = {};
    for (int k = lane * kPack; k < padded; k += kStep) {
      float w[kOwnRows][kPack];
#pragma unroll
      for (int i = 0; i < kOwnRows * kPack; ++i)
        w[i / kPack][i % kPack] = next[i / kPack].get(i % kPack);
      if (k0 + k + kStep < k_end + lane * kPack) load_weights(k0 + k + kStep);
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        if (t >= tile.count) break;
        const float4 x = *reinterpret_cast<const float4*>(&x_tile[t][k]);
#pragma unroll
        for (int i = 0; i < kOwnRows; ++i) {
          sum[t][i] = fmaf(w[i][0], x.x, sum[t][i]);
          sum[t][i] = fmaf(w[i][1], x.y, sum[t][i]);
          sum[t][i] = fmaf(w[i][2], x.z, sum[t][i]);
          sum[t][i] = fmaf(w[i][3], x.w, sum[t][i]);
        }
      }
    }

    // Reduce
    if (k0 == middle) {
      first_half[0] = total[0];
      first_half[1] = total[1];
      total[0] = total[1] = 0;
    }
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      if (t >= tile.count) break;
      const float row_sum = add_lanes(sum[t]);
      if (lane / 4 == t % 8) total[t / 8] += row_sum;
    }
  }

  // Store
  const int row = warp * kOwnRows + own_row();
  if (row >= rows.count) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int place = lane / 4 + 8 * half;
    if (place >= tile.count) break;
    const int h_at = h_row(p.h, tile, first, place, tokens[place]);
    if (h_at < 0) continue;
    const float sum = first_half[half] + total[half];
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
