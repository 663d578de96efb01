// SPDX-License-Identifier: Apache-2.0
// Adds the slabs that a split shrink left, in order, and writes h.
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
  device::pdl_trigger();
  device::pdl_wait();
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
  for (int i = threadIdx.x; i < kPlaces * row_pieces; i += kThreads) {
    const int place = first_place + i / row_pieces;
    const int slice = i % row_pieces / pieces;
    const int r = i % pieces * 4;
    if (place >= tile.count) break;
    const SliceWeights w = p.to.weights.get(tile.adapter, slice);
    const int token = h.by_position ? 0 : any_token(p.to.groups, p.to.tiles, tile, place);
    const int row_from = h_row(from, tile, 0, place, token);
    const int row_to = h_row(h, tile, 0, place, token);
    if (row_from < 0 || row_to < 0) continue;
    float4 v = make_float4(0, 0, 0, 0);
    if (r < w.rank) {
      const float* slab = static_cast<const float*>(from.data) +
                          std::int64_t{row_from} * from.row_stride + slice * from.slice_stride + r;
      SlabSum slabs(slab, from.slab_stride, from.num_slabs);
      slabs.load();
      v = slabs.sum();
    }
    const float scale = p.to.scale * w.scale;
    const float out[4] = {v.x * scale, v.y * scale, v.z * scale, v.w * scale};
    const std::int64_t at = std::int64_t{row_to} * h.row_stride + slice * h.slice_stride + r;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if (r + c < (p.to.pad ? h.width : w.rank)) {
        device::store_from_float(h.data, h.dtype, at + c, r + c < w.rank ? out[c] : 0.0f);
      }
    }
  }
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
