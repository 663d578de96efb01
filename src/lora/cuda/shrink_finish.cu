// SPDX-License-Identifier: Apache-2.0
// Adds the slabs that a split shrink left, in order, and writes h.
//
// h[s, t, r] = scale * sum_leaf slab[leaf, t, s, r]
// bytes  = 4 Z M R (slabs, from L2) + M R (h), Z leaves
// 1024 tokens, qkv r16, K=4096: 1.6 MB -> 0.3 us at L2 speed
// limit  : latency; it runs where many column blocks of expand would each add the slabs again
#include "device/convert.cuh"
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "lora/cuda/backend.cuh"
#include "lora/cuda/rank_rows.cuh"

namespace mortar::lora::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTileRows = 64;

struct FinishParams {
  ShrinkParams to;
  HView from;
  int tile_tokens;
};

__global__ void __launch_bounds__(kThreads, 1) finish_kernel(const __grid_constant__ FinishParams p) {
  __shared__ RankRows<kTileRows> rows;
  const int tile_index = p.to.tiles.first + static_cast<int>(blockIdx.z);
  Tile tile;
  const bool live = static_cast<int>(blockIdx.z) < p.to.tiles.num &&
                    find_tile(p.to.groups, p.to.tiles, p.to.weights.num_adapters, p.tile_tokens,
                              tile_index, &tile);
  if (!live) {
    device::pdl_wait();
    device::pdl_trigger();
    zero_base_rows(p.to);
    return;
  }
  const int first =
      p.to.h.by_position || p.from.by_position
          ? first_position(p.to.groups, p.to.tiles, p.to.weights.num_adapters, p.tile_tokens)
          : 0;
  rows.fill(p.to, tile.adapter, blockIdx.x * kTileRows);
  __syncthreads();
  device::pdl_wait();
  device::pdl_trigger();

  for (int i = threadIdx.x; i < tile.count * rows.count; i += kThreads) {
    const int place = i / rows.count, r = i % rows.count;
    const int token = tile_token(p.to.groups, p.to.tiles, tile, place);
    const std::int64_t row_from = h_row(p.from, tile, first, place, token);
    const std::int64_t row_to = h_row(p.to.h, tile, first, place, token);
    if (row_from < 0 || row_to < 0) continue;
    float v = 0;
    if (rows.weights[r] != nullptr) {
      const std::int64_t column = rows.slice[r] * p.from.slice_stride + rows.rank_row[r];
      const float* slab =
          static_cast<const float*>(p.from.data) + row_from * p.from.row_stride + column;
      v = slab[0];
#pragma unroll 8
      for (int z = 1; z < p.from.num_slabs; ++z) v += slab[z * p.from.slab_stride];
      v *= rows.scale[r];
    }
    device::store_from_float(p.to.h.data, p.to.h.dtype, row_to * p.to.h.row_stride + rows.place[r],
                             v);
  }
}

}  // namespace

// ---- host ---------------------------------------------------------------------------------------

void shrink_finish(const ShrinkParams& to, const HView& from, const ShrinkConfig& c,
                   Stream stream) {
  FinishParams p{to, from, c.tile_tokens};
  device::Launch l;
  l.grid = shrink_grid(to, ShrinkConfig{c.tile_tokens, kTileRows, false});
  l.threads = kThreads;
  l.stream = stream;
  l.pdl = true;
  device::launch<finish_kernel>("lora_shrink", l, p);
}

}  // namespace mortar::lora::cuda
