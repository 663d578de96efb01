// SPDX-License-Identifier: Apache-2.0
// The ends of split sums: h and ds from the parts of their columns, added as a tree. And the table
// of pairs, which comes with the launch.
//
// Bytes: 4 parts M R, mostly from L2, where the kernel before left them.
#include "core/check.h"
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "lora/train/cuda/kernels.cuh"
#include "lora/train/cuda/leaf_sums.cuh"
#include "lora/train/cuda/stream.cuh"

namespace mortar::lora::train::cuda {
namespace {

constexpr int kVector = 4;  ///< neighbouring sums of a thread

__global__ void __launch_bounds__(kThreads) hidden_kernel(const __grid_constant__ HiddenParams p) {
  device::pdl_begin(false);
  const RowTile rows = row_tile(p.rows, static_cast<int>(blockIdx.x), p.rows_of_block, true);
  const std::int64_t plane = p.rows.num_rows * p.hidden.width;
  const int vectors = p.width / kVector;
  for (int i = threadIdx.x; i < rows.count * vectors; i += kThreads) {
    const std::int64_t position = rows.start + i / vectors;
    const std::int64_t row = row_at(p.rows, position);
    if (row < 0) continue;
    const int j = p.first_hidden + i % vectors * kVector;
    float4 v = make_float4(0, 0, 0, 0);
    if (rows.adapter >= 0) {
      const int s = slice_of(p.hidden, p.first_slice, p.num_slices, j);
      const PairEntry& pair = p.pairs.get(rows.adapter, s);
      const int left = pair.rank - (j - p.hidden.first[s]);
      if (left > 0) {
        const float* from = p.partials + position * p.hidden.width + j;
        float4 part[kLeaves];
#pragma unroll
        for (int n = 0; n < kLeaves; ++n) {
          if (n < p.parts) part[n] = __ldcg(reinterpret_cast<const float4*>(from + n * plane));
        }
        v = sum_of_parts(part, p.parts, [](const float4& a, const float4& b) {
          return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
        });
        const float f = pair.factor;
        v = make_float4(f * v.x, left > 1 ? f * v.y : 0, left > 2 ? f * v.z : 0,
                        left > 3 ? f * v.w : 0);
      }
    }
    const std::int64_t to = row * p.hidden.width + j;
    if (p.dtype == DType::kFloat32) {
      *reinterpret_cast<float4*>(static_cast<float*>(p.h) + to) = v;
    } else {
      *reinterpret_cast<uint2*>(static_cast<unsigned short*>(p.h) + to) =
          p.dtype == DType::kFloat16
              ? make_uint2(device::pack2<__half>(v.x, v.y), device::pack2<__half>(v.z, v.w))
              : make_uint2(device::pack2<__nv_bfloat16>(v.x, v.y),
                           device::pack2<__nv_bfloat16>(v.z, v.w));
    }
  }
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
  device::launch<hidden_kernel>("lora_train", l, p);
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
