// SPDX-License-Identifier: Apache-2.0
// Adds the slabs that a split shrink left, as leaf_size in problem.h says, and writes h.
//
// h[s, t, r] = scale * sum_leaf slab[leaf, t, s, r]
// bytes  = 4 Z M R (slabs, from L2) + M R (h), Z leaves
// 1024 tokens, qkv r16, K=4096: 3.1 MB -> 0.6 us at L2 speed
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
constexpr int kPieces = kThreads / 2;  ///< four columns of a token each, two lanes for each

struct FinishParams {
  ShrinkParams to;
  HView from;
};

__global__ void __launch_bounds__(kThreads, 4)
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
  const int pieces = from.width / 4;  // of one slice
  const int row_pieces = pieces * p.to.weights.num_slices;
  const int piece = static_cast<int>(blockIdx.x) * kPieces + static_cast<int>(threadIdx.x) / 2;
  const int place = piece / row_pieces, slice = piece % row_pieces / pieces, r = piece % pieces * 4;
  SliceWeights w;
  int row_from = -1, row_to = -1;
  SlabSum<1> slabs(from.slab_stride);
  if (place < tile.count) {
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
  // Each lane of a pair writes two of the four columns.
  const int c0 = static_cast<int>(threadIdx.x) % 2 * 2;
  const float scale = p.to.scale * w.scale;
  const std::int64_t at = std::int64_t{row_to} * h.row_stride + slice * h.slice_stride + r + c0;
  const int end = p.to.pad ? h.width : w.rank;
  device::pdl_wait();
  slabs.load();
  const float4 v = slabs.sum();
  if (row_from >= 0 && row_to >= 0) {
    const float out[2] = {(c0 == 0 ? v.x : v.z) * scale, (c0 == 0 ? v.y : v.w) * scale};
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      if (r + c0 + c < end) {
        device::store_from_float(h.data, h.dtype, at + c, r + c0 + c < w.rank ? out[c] : 0.0f);
      }
    }
  }
  if (!p.to.pad || blockIdx.x > 0) return;
  // A public h may be wider than the slabs.
  for (int i = threadIdx.x; i < tile.count * p.to.weights.num_slices; i += kThreads) {
    const int own = i / p.to.weights.num_slices, own_slice = i % p.to.weights.num_slices;
    const int token = any_token(p.to.groups, p.to.tiles, tile, own);
    const int row = h_row(h, tile, 0, own, token);
    if (row < 0) continue;
    for (int c = from.width; c < h.width; ++c) {
      device::store_from_float(
          h.data, h.dtype, std::int64_t{row} * h.row_stride + own_slice * h.slice_stride + c, 0.0f);
    }
  }
}

}  // namespace

// ---- host ---------------------------------------------------------------------------------------

void shrink_finish(const ShrinkParams& to, const HView& from, Stream stream) {
  FinishParams p{to, from};
  device::Launch l;
  const int pieces = to.tiles.tile_tokens * to.weights.num_slices * from.width / 4;
  l.grid = dim3(static_cast<unsigned>(ceil_div(pieces, kPieces)), 1, shrink_depth(to));
  l.threads = kThreads;
  l.stream = stream;
  l.pdl = true;
  device::launch<finish_kernel>("lora_shrink", l, p);
}

}  // namespace mortar::lora::cuda
