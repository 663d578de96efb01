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
#include "lora/train/cuda/kernels.cuh"
#include "lora/train/cuda/part_columns.cuh"

namespace mortar::lora::train::cuda {
namespace {

inline constexpr int kVector = 4;  ///< sums of a thread
/// Partials that a thread has in flight; where there are few, fewer registers let more threads run.
/// (us, a backward, 4 and 8: 8192 x 4096 x 4096, rank 256, 4 partials, 153 and 163; 4096 x 4096 x
/// 4096, rank 16, 16 partials, 49.3 and 48.0, and with 16 in flight 48.2.)
inline constexpr int kFewLoads = 4, kMostLoads = 8;

/// The sum of four neighbours over `count` partials that are `stride` floats apart, in order, of
/// which kLoads are in flight together.
template <int kLoads>
__device__ __forceinline__ float4 sum_in_order(const float* from, std::int64_t stride, int count) {
  float4 sum = make_float4(0, 0, 0, 0);
  for (int base = 0; base < count; base += kLoads) {
    float4 v[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      v[i] = make_float4(0, 0, 0, 0);
      if (base + i < count) {
        v[i] = __ldcg(reinterpret_cast<const float4*>(from + (base + i) * stride));
      }
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (base + i >= count) break;
      sum = make_float4(sum.x + v[i].x, sum.y + v[i].y, sum.z + v[i].z, sum.w + v[i].w);
    }
  }
  return sum;
}

__global__ void __launch_bounds__(kThreads) ds_kernel(const __grid_constant__ DsParams p) {
  const RowTile rows = row_tile(p.rows, static_cast<int>(blockIdx.x), p.rows_of_block, true);
  const std::int64_t plane = p.rows.num_rows * p.hidden.width;
  const int vectors = p.hidden.width / kVector;
  for (int i = threadIdx.x; i < rows.count * vectors; i += kThreads) {
    const std::int64_t position = rows.start + i / vectors;
    const std::int64_t row = row_at(p.rows, position);
    const int j = i % vectors * kVector;
    const int s = slice_of(p.hidden, 0, p.hidden.num_slices, j);
    if (row < 0 || p.panels[s] == 0) continue;
    float4 v = make_float4(0, 0, 0, 0);
    int rank = 0;
    float factor = 0;
    if (rows.adapter >= 0) {
      const PairEntry pair = p.pairs.get(rows.adapter, s);
      rank = pair.rank - (j - p.hidden.first[s]);
      factor = pair.factor;
    }
    device::pdl_begin(false);  // what comes with the launch has been read; again, it does nothing
    if (rank > 0) {
      v = sum_in_order<kMostLoads>(p.partials + position * p.hidden.width + j, plane, p.panels[s]);
      v = make_float4(v.x * factor, v.y * factor, v.z * factor, v.w * factor);
    }
    v = make_float4(rank > 0 ? v.x : 0, rank > 1 ? v.y : 0, rank > 2 ? v.z : 0, rank > 3 ? v.w : 0);
    const uint2 words =
        p.dtype == DType::kFloat16
            ? make_uint2(device::pack2<__half>(v.x, v.y), device::pack2<__half>(v.z, v.w))
            : make_uint2(device::pack2<__nv_bfloat16>(v.x, v.y),
                         device::pack2<__nv_bfloat16>(v.z, v.w));
    *reinterpret_cast<uint2*>(static_cast<unsigned short*>(p.ds) + row * p.hidden.width + j) =
        words;
  }
  device::pdl_begin(false);
}

/// Four neighbours of a gradient as one access, where they lie dense and aligned.
__device__ inline bool moves_as_vector(const Matrix& m, std::int64_t at, std::int64_t step) {
  return step == 1 &&
         (reinterpret_cast<std::uintptr_t>(m.data) + at * (m.dtype == DType::kFloat32 ? 4 : 2)) %
                 (kVector * (m.dtype == DType::kFloat32 ? 4 : 2)) ==
             0;
}

__device__ inline void store_vector(const Matrix& m, std::int64_t at, bool adds, float4 v) {
  if (m.dtype == DType::kFloat32) {
    auto* to = reinterpret_cast<float4*>(static_cast<float*>(m.data) + at);
    if (adds) {
      const float4 old = __ldcg(to);
      v = make_float4(old.x + v.x, old.y + v.y, old.z + v.z, old.w + v.w);
    }
    *to = v;
    return;
  }
  auto* to = reinterpret_cast<uint2*>(static_cast<unsigned short*>(m.data) + at);
  const bool half = m.dtype == DType::kFloat16;
  if (adds) {
    const uint2 old = __ldcg(to);
    const auto two = [&](std::uint32_t word) {
      return half ? device::unpack2<__half>(word) : device::unpack2<__nv_bfloat16>(word);
    };
    const float2 low = two(old.x), high = two(old.y);
    v = make_float4(low.x + v.x, low.y + v.y, high.x + v.z, high.y + v.w);
  }
  *to = half ? make_uint2(device::pack2<__half>(v.x, v.y), device::pack2<__half>(v.z, v.w))
             : make_uint2(device::pack2<__nv_bfloat16>(v.x, v.y),
                          device::pack2<__nv_bfloat16>(v.z, v.w));
}

__device__ inline float load_one(const Matrix& m, std::int64_t at) {
  if (m.dtype == DType::kFloat32) return __ldcg(static_cast<const float*>(m.data) + at);
  const unsigned short raw = __ldcg(static_cast<const unsigned short*>(m.data) + at);
  return m.dtype == DType::kFloat16 ? __half2float(__ushort_as_half(raw))
                                    : __uint_as_float(static_cast<unsigned>(raw) << 16);
}

/// The sum of four neighbours whose ranks have kSumCopies columns each.
__device__ inline float4 sum_in_copies(const GradSums& g, std::int64_t first_slot, int slots,
                                       std::int64_t along, std::int64_t across) {
  const bool of_a = g.side == Side::kA;
  const std::int64_t width = g.width * kSumCopies, stride = grad_stride(g.columns);
  const std::int64_t slot_size = width * (of_a ? stride : g.columns);
  const int column = part_column(static_cast<int>(of_a ? along : across), kSumCopies);
  const float* from = g.partials + first_slot * slot_size +
                      (of_a ? column * stride + across : along * width + column);
  const std::int64_t step = of_a ? 8 * stride : 8;
  return sum_of_columns(sum_in_order<kFewLoads>(from, slot_size, slots),
                        sum_in_order<kFewLoads>(from + step, slot_size, slots),
                        sum_in_order<kFewLoads>(from + 2 * step, slot_size, slots));
}

/// kCopies: whether some sums come as columns of bfloat16 parts.
template <bool kCopies, int kLoads>
__global__ void __launch_bounds__(kThreads)
    weight_grad_kernel(const __grid_constant__ WeightGradParams p) {
  int which = 0;
  while (which + 1 < p.num_sums && blockIdx.x >= p.first_block[which + 1]) ++which;
  const GradSums& g = p.sums[which];
  const int adapter = blockIdx.y;
  const bool of_a = g.side == Side::kA;
  const std::int64_t inner = of_a ? grad_stride(g.columns) : g.width;
  const std::int64_t all = inner * (of_a ? g.width : g.columns);
  const std::int64_t place =
      (std::int64_t{blockIdx.x - p.first_block[which]} * kThreads + threadIdx.x) * kVector;
  const std::int64_t first = min(place, all - kVector);
  // A division of 64 bits would be a third of a thread's instructions.
  const bool small = all <= std::int64_t{1} << 31;
  const std::int64_t along =
      small ? static_cast<std::uint32_t>(first) / static_cast<std::uint32_t>(inner) : first / inner;
  const std::int64_t across = first - along * inner;
  const int j = g.first_hidden + static_cast<int>(of_a ? along : across);
  const std::int64_t c = of_a ? across : along;
  const int s = slice_of(p.hidden, g.first_slice, g.num_slices, j);
  const PairEntry pair = p.pairs.get(adapter, s);
  const int rank = j - p.hidden.first[s];
  const Matrix out = pair.grad(of_a);
  const bool adds = (pair.adds >> (of_a ? 0 : 1) & 1) != 0;
  const bool wanted = place < all && rank < pair.rank && out.data != nullptr;
  // Most adapters have fewer ranks than the largest: their warps look for no rows.
  if (!__any_sync(0xffffffffu, wanted)) return device::pdl_leave();
  const int chunk_rows = rows_of(p.rows, g.chunk, false);
  int first_slot = 0;
  const RowTile group =
      p.rows.groups == nullptr && p.rows.offsets == nullptr
          ? group_at(p.rows, 0)
          : find_group(p.rows, chunk_rows, &first_slot,
                       [&](const RowTile& own, int, int) { return own.adapter == adapter; });
  const int slots = (group.count + chunk_rows - 1) / chunk_rows;
  device::pdl_begin(false);
  if (!wanted || (adds && slots == 0)) return;

  const float4 v = kCopies && g.copies > 1
                       ? sum_in_copies(g, first_slot, slots, along, across)
                       : sum_in_order<kLoads>(g.partials + first_slot * all + first, all, slots);
  const std::int64_t step = out.col_stride;  // both ways the four neighbour along out's rows
  const std::int64_t at = (of_a ? rank : c) * out.row_stride + (of_a ? c : rank) * step;
  const std::int64_t left = of_a ? g.columns - c : pair.rank - rank;
  if (left >= kVector && moves_as_vector(out, at, step)) {
    store_vector(out, at, adds, v);
    return;
  }
  const float values[kVector] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    if (i >= left) break;
    const float old = adds ? load_one(out, at + i * step) : 0.0f;
    device::store_from_float(out.data, out.dtype, at + i * step,
                             adds ? old + values[i] : values[i]);
  }
}

}  // namespace

void sum_ds(const DsParams& p, Stream stream) {
  device::Launch l;
  l.grid = dim3(static_cast<unsigned>(p.max_tiles));
  l.threads = kThreads;
  l.stream = stream;
  l.pdl = true;
  device::launch<ds_kernel>("lora_train", l, p);
}

void sum_weight_grads(WeightGradParams* p, Stream stream) {
  p->first_block[0] = 0;
  bool copies = false;
  std::int64_t most = 0;  // partials of a sum
  for (int i = 0; i < p->num_sums; ++i) {
    const GradSums& g = p->sums[i];
    copies |= g.copies > 1;
    most = std::max(most, ceil_div<std::int64_t>(p->rows.num_rows, g.chunk.rows));
    const std::int64_t sums =
        g.side == Side::kA ? g.width * grad_stride(g.columns) : g.columns * g.width;
    p->first_block[i + 1] =
        p->first_block[i] + static_cast<unsigned>(ceil_div<std::int64_t>(sums, kThreads * kVector));
  }
  device::Launch l;
  l.grid = dim3(p->first_block[p->num_sums], p->num_adapters);
  l.threads = kThreads;
  l.stream = stream;
  l.pdl = true;
  if (copies) return device::launch<weight_grad_kernel<true, kFewLoads>>("lora_train", l, *p);
  if (most <= kFewLoads) {
    return device::launch<weight_grad_kernel<false, kFewLoads>>("lora_train", l, *p);
  }
  device::launch<weight_grad_kernel<false, kMostLoads>>("lora_train", l, *p);
}

}  // namespace mortar::lora::train::cuda
