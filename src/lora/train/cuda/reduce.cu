// SPDX-License-Identifier: Apache-2.0
// The ends of split sums: h and ds from the parts of their columns, added as a tree; with float32
// weights also as columns of bfloat16 parts (part_columns.cuh). And the table of pairs, which comes
// with the launch.
//
// Bytes: 4 parts M R, mostly from L2, where the kernel before left them. Columns of bfloat16 parts
// are 12 parts M R, and leave 6 or 12 M R more.
#include "core/check.h"
#include "device/launch.cuh"
#include "device/leaf_sums.cuh"
#include "device/pdl.cuh"
#include "lora/train/cuda/kernels.cuh"
#include "lora/train/cuda/part_columns.cuh"
#include "lora/train/cuda/stream.cuh"

namespace mortar::lora::train::cuda {
namespace {

constexpr int kVector = 4;  ///< neighbouring sums of a thread

/// The sum of a thread's columns of partials, which lie `plane` floats apart.
__device__ __forceinline__ float4 sum_of_planes(const float* from, std::int64_t plane, int parts) {
  float4 part[kLeaves];
#pragma unroll
  for (int n = 0; n < kLeaves; ++n) {
    if (n < parts) part[n] = __ldcg(reinterpret_cast<const float4*>(from + n * plane));
  }
  return device::sum_of_parts(part, parts);
}

/// Four neighbouring values of a row from column j on, of which the pair has `left`: from partials,
/// or from h as the forward has saved it.
template <bool kFloat32>
__device__ __forceinline__ float4 hidden_values(const HiddenParams& p, std::int64_t position,
                                                std::int64_t row, int j, float factor, int left) {
  if constexpr (kFloat32) {
    if (p.given != nullptr) {
      const auto* from = p.given + row * p.hidden.width + j;
      return scaled(__ldcg(reinterpret_cast<const float4*>(from)), 1, left);
    }
    const std::int64_t width = std::int64_t{p.hidden.width} * p.copies;
    const std::int64_t plane = p.rows.num_rows * width;
    const float* from = p.partials + position * width + part_column(j, p.copies);
    float4 v = sum_of_planes(from, plane, p.parts);
    if (p.copies == kSumCopies) {
      v = sum_of_columns(v, sum_of_planes(from + 8, plane, p.parts),
                         sum_of_planes(from + 16, plane, p.parts));
    }
    return scaled(v, factor, left);
  } else {
    const float* from = p.partials + position * p.hidden.width + j;
    return scaled(sum_of_planes(from, p.rows.num_rows * p.hidden.width, p.parts), factor, left);
  }
}

/// kFloat32: of the weights; the others' values are rounded to their type.
template <bool kFloat32>
__global__ void __launch_bounds__(kThreads) hidden_kernel(const __grid_constant__ HiddenParams p) {
  if (p.early) device::pdl_trigger();
  const RowTile rows = row_tile(p.rows, static_cast<int>(blockIdx.x), p.rows_of_block, true);
  const int vectors = p.width / kVector;
  for (int i = threadIdx.x; i < rows.count * vectors; i += kThreads) {
    const std::int64_t position = rows.start + i / vectors;
    const std::int64_t row = row_at(p.rows, position);
    if (row < 0) continue;
    const int j = p.first_hidden + i % vectors * kVector;
    float4 v = make_float4(0, 0, 0, 0);
    int left = 0;
    float factor = 0;
    if (rows.adapter >= 0) {
      const int s = slice_of(p.hidden, p.first_slice, p.num_slices, j);
      const PairEntry pair = p.pairs.get(rows.adapter, s);
      left = pair.rank - (j - p.hidden.first[s]);
      factor = pair.factor;
    }
    device::pdl_begin(false);  // what comes with the launch has been read; again, it does nothing
    if (left > 0) v = hidden_values<kFloat32>(p, position, row, j, factor, left);
    if constexpr (kFloat32) {
      store_forms(p.h, p.sum_columns, p.pair_columns, row, p.hidden.width, j, v);
    } else {
      const std::int64_t to = row * p.hidden.width + j;
      *reinterpret_cast<uint2*>(static_cast<unsigned short*>(p.h) + to) =
          p.dtype == DType::kFloat16
              ? make_uint2(device::pack2<__half>(v.x, v.y), device::pack2<__half>(v.z, v.w))
              : make_uint2(device::pack2<__nv_bfloat16>(v.x, v.y),
                           device::pack2<__nv_bfloat16>(v.z, v.w));
    }
  }
  device::pdl_begin(false);
}

__global__ void upload_kernel(const __grid_constant__ UploadParams p) {
  device::pdl_wait();  // those who read the table start when this has ended
  constexpr int kWords = sizeof(PairEntry) / 8;
  static_assert(sizeof(PairEntry) % 8 == 0, "Entries are copied in words of 8 bytes.");
  const auto* from = reinterpret_cast<const std::uint64_t*>(p.entries);
  auto* to = reinterpret_cast<std::uint64_t*>(p.to);
  for (int i = threadIdx.x; i < p.count * kWords; i += static_cast<int>(blockDim.x))
    to[i] = from[i];
}

}  // namespace

void reduce_hidden(const HiddenParams& p, Stream stream) {
  if (p.width == 0) return;
  device::Launch l;
  l.grid = dim3(static_cast<unsigned>(p.max_tiles));
  l.threads = kThreads;
  l.stream = stream;
  l.pdl = true;
  if (p.dtype == DType::kFloat32) return device::launch<hidden_kernel<true>>("lora_train", l, p);
  device::launch<hidden_kernel<false>>("lora_train", l, p);
}

void upload(const UploadParams& p, Stream stream) {
  device::Launch l;
  l.grid = dim3(1);
  l.threads = kThreads;
  l.stream = stream;
  l.pdl = true;
  device::launch<upload_kernel>("lora_train", l, p);
}

}  // namespace mortar::lora::train::cuda
