// SPDX-License-Identifier: Apache-2.0
// Adds the slabs that a split shrink left, as leaf_size in problem.h says, and writes h.
//
// h[s, t, r] = scale * sum_leaf slab[leaf, t, s, r]
// bytes  = 4 Z M R (slabs, from L2) + M R (h), Z leaves
// 1024 tokens, qkv r16, K=4096: 1.6 MB -> 0.3 us at L2 speed
// limit  : latency, so a thread has one 16-byte column of all slabs in flight at once
#include "device/convert.cuh"
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "lora/cuda/backend.cuh"
#include "lora/cuda/rank_rows.cuh"
#include "lora/cuda/slabs.cuh"

namespace mortar::lora::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kPlaces = 16;  ///< tokens of a tile per CTA

struct FinishParams {
  ShrinkParams to;
  HView from;
};

__global__ void __launch_bounds__(kThreads, 1)
    finish_kernel(const __grid_constant__ FinishParams p) {
  device::pdl_begin(p.to.early);
  const int tile_index = p.to.tiles.first + static_cast<int>(blockIdx.z);
  Tile tile;
  const bool live =
      static_cast<int>(blockIdx.z) < p.to.tiles.num &&
      find_any_tile(p.to.groups, p.to.tiles, p.to.weights.num_adapters, tile_index, &tile);
  if (!live) {
    zero_base_rows(p.to);
    return;
  }
  const HView& from = p.from;
  const HView& h = p.to.h;
  const int first_place = static_cast<int>(blockIdx.x) * kPlaces;
  const int pieces = from.width / 4;  // of one slice
  const int row_pieces = pieces * p.to.weights.num_slices;
  bool waited = false;
  // Two lanes share a piece of four columns; whole warps go round together.
  const int num_pieces = min(tile.count - first_place, kPlaces) * row_pieces;
  for (int base = 0; base < num_pieces; base += kThreads / 2) {
    const int i = base + static_cast<int>(threadIdx.x) / 2;
    const int place = first_place + i / row_pieces;
    const int slice = i % row_pieces / pieces;
    const int r = i % pieces * 4;
    int row_from = -1, row_to = -1;
    SliceWeights w;
    SlabSum slabs(from.slab_stride);
    if (i < num_pieces) {
      w = p.to.weights.get(tile.adapter, slice);
      const int token = h.by_position ? 0 : any_token(p.to.groups, p.to.tiles, tile, place);
      row_from = h_row(from, tile, 0, place, token);
      row_to = h_row(h, tile, 0, place, token);
      if (row_from >= 0 && row_to >= 0 && r < w.rank) {
        slabs.seek(static_cast<const float*>(from.data) + std::int64_t{row_from} * from.row_stride +
                       slice * from.slice_stride + r,
                   from.num_slabs);
      }
    }
    if (!waited) device::pdl_wait();
    waited = true;
    slabs.load();
    const float4 v = slabs.sum();
    if (row_from < 0 || row_to < 0) continue;
    const float scale = p.to.scale * w.scale;
    // Each lane of a pair writes two of the four columns.
    const int c0 = static_cast<int>(threadIdx.x) % 2 * 2;
    const float out[2] = {(c0 == 0 ? v.x : v.z) * scale, (c0 == 0 ? v.y : v.w) * scale};
    const std::int64_t at = std::int64_t{row_to} * h.row_stride + slice * h.slice_stride + r + c0;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      if (r + c0 + c < (p.to.pad ? h.width : w.rank)) {
        device::store_from_float(h.data, h.dtype, at + c, r + c0 + c < w.rank ? out[c] : 0.0f);
      }
    }
  }
  if (!waited) device::pdl_wait();
  if (!p.to.pad) return;
  // A public h may be wider than the slabs.
  for (int i = threadIdx.x; i < kPlaces * p.to.weights.num_slices; i += kThreads) {
    const int place = first_place + i / p.to.weights.num_slices;
    const int slice = i % p.to.weights.num_slices;
    const int token = any_token(p.to.groups, p.to.tiles, tile, place);
    const int row = h_row(h, tile, 0, place, token);
    if (row < 0) continue;
    for (int r = from.width; r < h.width; ++r) {
      device::store_from_float(h.data, h.dtype,
                               std::int64_t{row} * h.row_stride + slice * h.slice_stride + r, 0.0f);
    }
  }
}

}  // namespace

// ---- host ---------------------------------------------------------------------------------------

void shrink_finish(const ShrinkParams& to, const HView& from, Stream stream) {
  FinishParams p{to, from};
  device::Launch l;
  l.grid =
      dim3(static_cast<unsigned>(ceil_div(to.tiles.tile_tokens, kPlaces)), 1, shrink_depth(to));
  l.threads = kThreads;
  l.stream = stream;
  l.pdl = true;
  device::launch<finish_kernel>("lora_shrink", l, p);
}

}  // namespace mortar::lora::cuda
