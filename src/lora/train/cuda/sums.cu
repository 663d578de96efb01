// SPDX-License-Identifier: Apache-2.0
// The ends of what panel.cu and outer.cu leave: ds from the partials of panels of columns, dA and
// dB from those of chunks of rows, each added in order.
//
// Bytes: 4 panels M R + 2 M R, and 4 chunks R C + 2 R C, mostly from L2. With 8192 rows, 28 panels
// and rank 16 that is 15 MB, 3.4 us at 4.28 TB/s; dA of 8 chunks of 4096 columns is 2 MB, 0.5 us.
// Bound by memory, and by its latency where there are few sums: a thread has several loads in
// flight, and has read all that comes with the launch before it waits for the kernel before it.
#include <algorithm>

#include "core/check.h"
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "lora/train/cuda/grad_sum.cuh"
#include "lora/train/cuda/kernels.cuh"

namespace mortar::lora::train::cuda {
namespace {

constexpr int kVector = kGradVector;  ///< sums of a thread
/// Partials that a thread has in flight; where there are few, fewer registers let more threads run.
/// (us, a backward, 4 and 8: 8192 x 4096 x 4096, rank 256, 4 partials, 153 and 163; 4096 x 4096 x
/// 4096, rank 16, 16 partials, 49.3 and 48.0, and with 16 in flight 48.2.)
inline constexpr int kFewLoads = 4, kMostLoads = 8;
/// The same of more partials than twice as many, of one adapter, where thread blocks with an SM
/// each have all sums. (us, a backward on an H200, rank 16, 8 and 16: 16384 x 2048 x 2048 72.2 and
/// 69.1, 8192 x 1024 x 1024 29.0 and 27.1; but 4096 x 1024 x 28672, whose dB is wide, 91.0 and
/// 94.6.)
inline constexpr int kManyLoads = 16;

/// ds of a row's vector from its panels, which kParts threads share where they are many: each adds
/// neighbours, and the first one the others' sums. Of so few registers thread blocks fit an SM
/// beside one of panel_boxes.cu.
template <int kParts>
__global__ void __launch_bounds__(kThreads, 4) ds_kernel(const __grid_constant__ DsParams p) {
  // What follows is launched at once: the panels before this have waited for all before them, and
  // a kernel this short would not hide the launch. Backward, 4096 x 4096 x 4096 and rank 16 on an
  // H100, 57.1 to 56.0 us; q/k/v 65.8 to 63.8.
  device::pdl_begin(true);
  constexpr int kAtOnce = kThreads / kParts;
  __shared__ float4 sums[kParts][kAtOnce];
  const int part = static_cast<int>(threadIdx.x) / kAtOnce;
  const int own = static_cast<int>(threadIdx.x) % kAtOnce;
  const RowTile rows = row_tile(p.rows, static_cast<int>(blockIdx.x), p.rows_of_block, true);
  const std::int64_t plane = p.rows.num_rows * p.hidden.width;
  const int vectors = p.hidden.width / kVector, all = rows.count * vectors;
  for (int base = 0; base < all; base += kAtOnce) {
    const int i = base + own;
    const std::int64_t position = rows.start + i / vectors;
    const std::int64_t row = i < all ? row_at(p.rows, position) : -1;
    const int j = i % vectors * kVector;
    const int s = slice_of(p.hidden, 0, p.hidden.num_slices, j);
    const int panels = row < 0 ? 0 : p.panels[s];
    int rank = 0;
    float factor = 0;
    if (rows.adapter >= 0) {
      const PairEntry pair = p.pairs.get(rows.adapter, s);
      rank = pair.rank - (j - p.hidden.first[s]);
      factor = pair.factor;
    }
    const int each = panels > p.few_panels ? ceil_div(panels, kParts) : panels;
    const int first = min(part * each, panels);
    device::pdl_wait();  // what comes with the launch has been read; again, it does nothing
    float4 v = make_float4(0, 0, 0, 0);
    if (rank > 0) {
      v = sum_in_order<kMostLoads>(p.partials + first * plane + position * p.hidden.width + j,
                                   plane, min(each, panels - first));
    }
    if constexpr (kParts > 1) {
      sums[part][own] = v;
      __syncthreads();
      for (int k = 1; k < kParts && k * each < panels && part == 0; ++k) {
        const float4 next = sums[k][own];
        v = make_float4(v.x + next.x, v.y + next.y, v.z + next.z, v.w + next.w);
      }
      __syncthreads();
    }
    if (part > 0 || panels == 0) continue;
    v = make_float4(v.x * factor, v.y * factor, v.z * factor, v.w * factor);
    v = make_float4(rank > 0 ? v.x : 0, rank > 1 ? v.y : 0, rank > 2 ? v.z : 0, rank > 3 ? v.w : 0);
    const uint2 words =
        p.dtype == DType::kFloat16
            ? make_uint2(device::pack2<__half>(v.x, v.y), device::pack2<__half>(v.z, v.w))
            : make_uint2(device::pack2<__nv_bfloat16>(v.x, v.y),
                         device::pack2<__nv_bfloat16>(v.z, v.w));
    *reinterpret_cast<uint2*>(static_cast<unsigned short*>(p.ds) + row * p.hidden.width + j) =
        words;
  }
  device::pdl_wait();
}

/// kPlaces: of a thread; where there are several, their loads are in flight together.
template <int kLoads, int kPlaces>
__global__ void __launch_bounds__(kThreads)
    weight_grad_kernel(const __grid_constant__ WeightGradParams p) {
  int which = 0;
  while (which + 1 < p.num_sums && blockIdx.x >= p.first_block[which + 1]) ++which;
  const GradSums& g = p.sums[which];
  const int adapter = blockIdx.y;
  const bool of_a = g.side == Side::kA;
  const std::int64_t inner = of_a ? grad_stride(g.columns) : g.width;
  const std::int64_t all = inner * (of_a ? g.width : g.columns);
  const std::int64_t begin =
      (std::int64_t{blockIdx.x - p.first_block[which]} * kPlaces * kThreads + threadIdx.x) *
      kVector;
  // A division of 64 bits would be a third of a thread's instructions.
  const bool small = all <= std::int64_t{1} << 31;
  struct Place {
    std::int64_t first, along, across;
    Matrix out;
    int rank, ranks;
    bool adds, wanted;
  };
  const auto place_of = [&](int i) {
    Place o;
    const std::int64_t place = begin + std::int64_t{i} * kThreads * kVector;
    o.first = min(place, all - kVector);
    o.along = small ? static_cast<std::uint32_t>(o.first) / static_cast<std::uint32_t>(inner)
                    : o.first / inner;
    o.across = o.first - o.along * inner;
    const int j = g.first_hidden + static_cast<int>(of_a ? o.along : o.across);
    const int slice = slice_of(p.hidden, g.first_slice, g.num_slices, j);
    const PairEntry pair = p.pairs.get(adapter, slice);
    o.out = pair.grad(of_a);
    o.rank = j - p.hidden.first[slice];
    o.ranks = pair.rank;
    o.adds = (pair.adds >> (of_a ? 0 : 1) & 1) != 0;
    o.wanted = place < all && o.rank < o.ranks && o.out.data != nullptr;
    return o;
  };
  bool any = false;
#pragma unroll
  for (int i = 0; i < kPlaces; ++i) any |= place_of(i).wanted;
  // Most adapters have fewer ranks than the largest: their warps look for no rows.
  if (!__any_sync(0xffffffffu, any)) return device::pdl_leave();
  const RowTile first = lane_group(p.rows);
  const int chunk_rows = rows_of(p.rows, g.chunk, false, first);
  int first_slot = 0;
  const RowTile group =
      p.rows.groups == nullptr && p.rows.offsets == nullptr
          ? group_at(p.rows, 0)
          : find_group(p.rows, chunk_rows, first, &first_slot,
                       [&](const RowTile& own, int, int) { return own.adapter == adapter; });
  const int slots = (group.count + chunk_rows - 1) / chunk_rows;
  device::pdl_begin(false);
  if constexpr (kPlaces == 1) {
    const Place own = place_of(0);
    if (!own.wanted || (own.adds && slots == 0)) return;
    const float4 v = sum_in_order<kLoads>(g.partials + first_slot * all + own.first, all, slots);
    store_grad(own.out, of_a, own.rank, own.ranks, of_a ? own.across : own.along, g.columns,
               own.adds, v);
  } else {
    float4 sum[kPlaces] = {};
    bool wanted[kPlaces];
#pragma unroll
    for (int i = 0; i < kPlaces; ++i) wanted[i] = place_of(i).wanted;
    const float* from = g.partials + first_slot * all + begin;
#pragma unroll 1
    for (int slot = 0; slot < slots; ++slot, from += all) {
      float4 v[kPlaces];
#pragma unroll
      for (int i = 0; i < kPlaces; ++i) {
        v[i] = make_float4(0, 0, 0, 0);
        if (wanted[i]) v[i] = __ldcg(reinterpret_cast<const float4*>(from) + i * kThreads);
      }
#pragma unroll
      for (int i = 0; i < kPlaces; ++i) {
        sum[i] =
            make_float4(sum[i].x + v[i].x, sum[i].y + v[i].y, sum[i].z + v[i].z, sum[i].w + v[i].w);
      }
    }
#pragma unroll
    for (int i = 0; i < kPlaces; ++i) {
      const Place own = place_of(i);
      if (!wanted[i] || (own.adds && slots == 0)) continue;
      store_grad(own.out, of_a, own.rank, own.ranks, of_a ? own.across : own.along, g.columns,
                 own.adds, sum[i]);
    }
  }
}

/// Gradients of pairs that come with the launch, and the thread blocks that each has.
struct FewPairsParams {
  RowGroups rows;
  RowCut chunks[2];  ///< of dB and of dA, of several adapters' rows
  GradSum sums[2 * kOwnPairs];
  int adapter[2 * kOwnPairs];
  unsigned first_block[2 * kOwnPairs + 1];
  int num_sums;
};

/// The same of few pairs' gradients of whole vectors and few partials, by threads of so few
/// registers that all of them fit an SM at once, some beside the pass over x. (us, a backward on an
/// H200, without / with: rank 64, 1024 x 7168 x 2048 23.1 / 21.9, 4096 x 2560 x 9728 63.7 / 62.3;
/// but of 8 and 16 partials, rank 32 and 16, 4096 x 4096 x 4096, 43.0 / 43.9 and 38.8 / 39.7.)
__global__ void __launch_bounds__(kThreads, 8)
    few_pairs_kernel(const __grid_constant__ FewPairsParams p) {
  int which = 0;
  while (which + 1 < p.num_sums && blockIdx.x >= p.first_block[which + 1]) ++which;
  const GradSum& g = p.sums[which];
  int chunks = g.chunks, first = 0;
  if (p.rows.offsets != nullptr) {
    // By one warp, as a lookup is some 300 instructions.
    __shared__ int found[2];
    if (threadIdx.x < 32) {
      const int adapter = p.adapter[which], lane = static_cast<int>(threadIdx.x);
      const RowTile own = lane_group(p.rows);
      const int rows = rows_of(p.rows, p.chunks[g.of_a ? 1 : 0], false, own);
      const int tiles = (own.count + rows - 1) / rows;
      const int before = __reduce_add_sync(0xffffffffu, lane < adapter ? tiles : 0);
      if (lane == adapter) found[0] = tiles, found[1] = before;
    }
    __syncthreads();
    chunks = found[0], first = found[1];
  }
  const auto vectors = static_cast<unsigned>((g.of_a ? g.dense : g.ranks) / kVector);  // of a line
  const unsigned i = (blockIdx.x - p.first_block[which]) * kThreads + threadIdx.x;
  const unsigned line = i / vectors, at = (i - line * vectors) * kVector;
  const bool there = line < static_cast<unsigned>(g.of_a ? g.ranks : g.columns);
  const float* from = g.partials + std::int64_t{line} * g.dense + at;
  const std::int64_t to = line * g.out.row_stride + at;
  if (first > 0) from += first * g.stride;
  device::pdl_begin(false);
  if (!there || (g.adds && chunks == 0)) return;
  store_vector(g.out, to, g.adds, sum_in_order<kFewLoads>(from, g.stride, chunks));
}

/// False, and nothing done, for gradients that are not whole vectors, or of many partials.
bool sum_of_few_pairs(const WeightGradParams& p, Stream stream) {
  FewPairsParams few{};
  few.rows = p.rows;
  for (int i = 0; i < p.num_sums; ++i) {
    const GradSums& g = p.sums[i];
    RowCut& chunk = few.chunks[g.side == Side::kA ? 1 : 0];
    if (chunk.rows > 0 && chunk != g.chunk) return false;
    chunk = g.chunk;
    const auto chunks = static_cast<int>(ceil_div<std::int64_t>(p.rows.num_rows, g.chunk.rows));
    if (chunks > kFewLoads * p.num_adapters) return false;
    for (int pair = 0; pair < p.num_adapters * p.pairs.num_slices; ++pair) {
      const int slice = pair % p.pairs.num_slices;
      if (slice < g.first_slice || slice >= g.first_slice + g.num_slices) continue;
      const GradSum sum =
          grad_sum_of(p.pairs.own[pair], g, 0, chunks, p.hidden.first[slice] - g.first_hidden);
      if (sum.partials == nullptr) continue;
      if (!adds_vectors(sum.out, sum.of_a ? sum.columns : sum.ranks)) return false;
      const std::int64_t vectors = sum.columns * sum.ranks / kVector;
      few.first_block[few.num_sums + 1] =
          few.first_block[few.num_sums] +
          static_cast<unsigned>(ceil_div<std::int64_t>(vectors, kThreads));
      few.adapter[few.num_sums] = pair / p.pairs.num_slices;
      few.sums[few.num_sums++] = sum;
    }
  }
  device::Launch l;
  l.grid = dim3(few.first_block[few.num_sums]);
  l.threads = kThreads;
  l.stream = stream;
  l.pdl = true;
  device::launch<few_pairs_kernel>("lora_train", l, few);
  return true;
}

}  // namespace

void sum_ds(const DsParams& p, Stream stream) {
  device::Launch l;
  l.grid = dim3(static_cast<unsigned>(p.max_tiles));
  l.threads = kThreads;
  l.stream = stream;
  l.pdl = true;
  if (p.parts > 1) return device::launch<ds_kernel<kDsParts>>("lora_train", l, p);
  device::launch<ds_kernel<1>>("lora_train", l, p);
}

void sum_weight_grads(WeightGradParams* p, Stream stream) {
  const bool few = p->pairs.entries == nullptr && p->rows.groups == nullptr && p->rows.num_rows > 0;
  if (few && sum_of_few_pairs(*p, stream)) return;
  std::int64_t most = 0;  // partials of a sum
  // Thread blocks of several adapters look up rows before they add anything: not in several waves.
  constexpr int kManyPlaces = 4;
  const std::int64_t one_wave = std::int64_t{4} * device::current_device().num_sms;
  std::int64_t all = 0;
  for (int i = 0; i < p->num_sums; ++i) all += p->sums[i].width * p->sums[i].columns;
  const bool waves = all * p->num_adapters > one_wave * kThreads * kVector;
  const int places = p->num_adapters > 1 && waves ? kManyPlaces : 1;
  p->first_block[0] = 0;
  for (int i = 0; i < p->num_sums; ++i) {
    const GradSums& g = p->sums[i];
    most = std::max(most, ceil_div<std::int64_t>(p->rows.num_rows, g.chunk.rows));
    const std::int64_t sums =
        g.side == Side::kA ? g.width * grad_stride(g.columns) : g.columns * g.width;
    p->first_block[i + 1] = p->first_block[i] + static_cast<unsigned>(ceil_div<std::int64_t>(
                                                    sums, kThreads * kVector * places));
  }
  device::Launch l;
  l.grid = dim3(p->first_block[p->num_sums], p->num_adapters);
  l.threads = kThreads;
  l.stream = stream;
  l.pdl = true;
  if (places > 1) {
    return device::launch<weight_grad_kernel<kFewLoads, kManyPlaces>>("lora_train", l, *p);
  }
  if (most <= kFewLoads) {
    return device::launch<weight_grad_kernel<kFewLoads, 1>>("lora_train", l, *p);
  }
  if (p->num_adapters == 1 && most > 2 * kMostLoads && 4 * l.grid.x <= one_wave) {
    return device::launch<weight_grad_kernel<kManyLoads, 1>>("lora_train", l, *p);
  }
  device::launch<weight_grad_kernel<kMostLoads, 1>>("lora_train", l, *p);
}

}  // namespace mortar::lora::train::cuda
