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

__global__ void __launch_bounds__(kThreads) hidden_kernel(const __grid_constant__ HiddenParams p) {
  const RowTile rows = row_tile(p.rows, static_cast<int>(blockIdx.x), kReduceRows, true);
  const std::int64_t plane = p.rows.num_rows * p.hidden.width;
  for (int i = threadIdx.x; i < rows.count * p.width; i += kThreads) {
    const std::int64_t position = rows.start + i / p.width;
    const std::int64_t row = row_at(p.rows, position);
    if (row < 0) continue;
    const int j = p.first_hidden + i % p.width;
    float v = 0;
    if (rows.adapter >= 0) {
      const int s = slice_of(p.hidden, p.first_slice, p.num_slices, j);
      const PairEntry& pair = p.pairs.get(rows.adapter, s);
      if (j - p.hidden.first[s] < pair.rank) {
        const float* from = p.partials + position * p.hidden.width + j;
        float part[kLeaves];
#pragma unroll
        for (int i = 0; i < kLeaves; ++i) part[i] = i < p.parts ? from[i * plane] : 0.0f;
        v = pair.factor * sum_of_parts(part, p.parts, [](float a, float b) { return a + b; });
      }
    }
    device::store_from_float(p.h, p.dtype, row * p.hidden.width + j, v);
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
