// SPDX-License-Identifier: Apache-2.0
// Split-K reduction: adds the partials that a split shrink left, as leaf_size in
// problem.h says, and writes h.
//
// h[s, t, r] = scale * sum_leaf partial[leaf, t, s, r]     (scale 1 for the h of lora_apply)
// bytes  = 4 Z M R (partials, from L2) + M R (h), Z leaves
// 1024 tokens, qkv r16, K=4096: 3.1 MB -> 0.6 us at L2 speed
// limit  : latency, so a thread has one 16-byte column of all partials in flight at once
#include "device/any_float.cuh"
#include "device/convert.cuh"
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "device/split_k.cuh"
#include "device/vector.cuh"
#include "lora/cuda/backend.cuh"
#include "lora/cuda/rank_rows.cuh"

namespace mortar::lora::cuda {
namespace {

constexpr int kFewThreads = 64, kMostThreads = 256;
constexpr unsigned kFewCtas = 256;  ///< all of which run at once

struct FinishParams {
  ShrinkParams to;
  HView from;
  int log_owners;  ///< as SplitKSum has it
};

__global__ void __launch_bounds__(kMostThreads, 2)
    finish_kernel(const __grid_constant__ FinishParams p) {
  device::pdl_begin(p.to.early);
  const int index = p.to.tiles.first + static_cast<int>(blockIdx.z);
  Tile tile;
  const bool live = static_cast<int>(blockIdx.z) < p.to.tiles.num &&
                    find_cta_tile(p.to.groups, p.to.tiles, p.to.weights.num_adapters, index, &tile);
  if (!live) return zero_base_rows(p.to);
  const HView& from = p.from;
  const HView& h = p.to.h;
  const int pieces = from.width / 4;  // of one slice
  const int row_pieces = pieces * p.to.weights.num_slices;
  device::SplitKSum<2> partials(from.slab_stride, p.log_owners);
  const int thread = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const int piece = thread >> (1 + p.log_owners);
  const int place = piece / row_pieces, slice = piece % row_pieces / pieces, r = piece % pieces * 4;
  SliceWeights w;
  const int middle = static_cast<int>(first_leaves(from.num_slabs));
  char* out = nullptr;  // where the first lane of a piece writes all four columns; null: nowhere
  if (place < tile.count) {
    w = p.to.weights.get(tile.adapter, slice);
    const int token = h.by_position ? 0 : sorted_token(p.to.groups, p.to.tiles, tile, place);
    const int row_from = h_row(from, tile, 0, place, token);
    const int row_to = h_row(h, tile, 0, place, token);
    if (row_from >= 0 && row_to >= 0) {
      if (thread % partials.lanes() == 0) {
        out = static_cast<char*>(h.data) +
              (std::int64_t{row_to} * h.row_stride + slice * h.slice_stride + r) *
                  device::float_bytes<device::AnyFloat>(h.dtype);
      }
      if (r < w.rank) {
        partials.seek(static_cast<const float*>(from.data) +
                          std::int64_t{row_from} * from.row_stride + slice * from.slice_stride + r,
                      from.num_slabs, middle);
      }
    }
  }
  const float scale = h.own ? 1.0f : p.to.scale * w.scale;
  const int count = (p.to.pad ? h.width : w.rank) - r;
  device::pdl_wait();
  partials.load_all();
  const float4 sum = partials.sum(middle);
  if (out != nullptr) {
    // What lies past the rank was never written.
    const float v[4] = {sum.x, sum.y, sum.z, sum.w};
    float scaled[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) scaled[c] = r + c < w.rank ? v[c] * scale : 0.0f;
    device::visit_checked_dtype(FloatDTypes(), h.dtype, [&](auto tag) {
      using H = typename decltype(tag)::type;
      device::store_some(reinterpret_cast<H*>(out), device::round_to<H>(scaled), count);
    });
  }
  if (!p.to.pad || blockIdx.x > 0) return;
  // A public h may be wider than the partials.
  for (int i = threadIdx.x; i < tile.count * p.to.weights.num_slices;
       i += static_cast<int>(blockDim.x)) {
    const int own = i / p.to.weights.num_slices, own_slice = i % p.to.weights.num_slices;
    const int token = sorted_token(p.to.groups, p.to.tiles, tile, own);
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
  device::check_dtype<FloatDTypes>(to.h.dtype, "lora_shrink");
  const int middle = static_cast<int>(first_leaves(from.num_slabs));
  const FinishParams p{to, from, device::SplitKSum<2>::log_owners_of(middle)};
  device::Launch l;
  const int pieces = to.tiles.tile_tokens * to.weights.num_slices * from.width / 4;
  const int lanes = pieces * (2 << p.log_owners);
  // Small CTAs spread evenly over the SMs; but each looks its tile up, and small tiles may be many.
  const unsigned depth = shrink_depth(to);
  const bool few = depth * static_cast<unsigned>(ceil_div(lanes, kFewThreads)) <= kFewCtas;
  l.threads = to.tiles.tile_tokens == 64 || few ? kFewThreads : kMostThreads;
  l.grid = dim3(static_cast<unsigned>(ceil_div(lanes, static_cast<int>(l.threads))), 1, depth);
  l.stream = stream;
  l.pdl = true;
  device::launch<finish_kernel>("lora_shrink", l, p);
}

}  // namespace mortar::lora::cuda
