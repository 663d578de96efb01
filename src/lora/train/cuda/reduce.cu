// SPDX-License-Identifier: Apache-2.0
// The ends of split sums: h and ds from the splits of their columns, dA and dB from the chunks of
// their rows, each added in order. And the table of pairs, which comes with the launch.
//
// Bytes: 4 splits M R, or 4 chunks R C, mostly from L2, where the kernel before left them.
#include "core/check.h"
#include "device/launch.cuh"
#include "lora/train/cuda/kernels.cuh"

namespace mortar::lora::train::cuda {
namespace {

inline constexpr int kTile = 32;  ///< of reduce_outer: ranks by columns

/// The slice that has column j of h; all have whole granules.
__device__ inline int slice_of(const HiddenColumns& hidden, int first_slice, int num_slices,
                               int j) {
  int s = first_slice;
  while (s + 1 < first_slice + num_slices && j >= hidden.first[s + 1]) ++s;
  return s;
}

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
        for (int split = 0; split < p.splits; ++split) v += from[split * plane];
        v *= pair.factor;
      }
    }
    device::store_from_float(p.h, p.dtype, row * p.hidden.width + j, v);
  }
}

__global__ void __launch_bounds__(kThreads)
    weight_grad_kernel(const __grid_constant__ WeightGradParams p) {
  __shared__ float tile[kTile][kTile + 1];
  const int adapter = blockIdx.z, first_rank = static_cast<int>(blockIdx.y) * kTile;
  const std::int64_t first_column = std::int64_t{blockIdx.x} * kTile;
  const int x = static_cast<int>(threadIdx.x) % kTile, y = static_cast<int>(threadIdx.x) / kTile;
  int first_slot = 0;
  const RowTile group =
      find_group(p.rows, p.chunk_rows, &first_slot,
                 [&](const RowTile& own, int, int) { return own.adapter == adapter; });
  const int slots = (group.count + p.chunk_rows - 1) / p.chunk_rows;
  const std::int64_t slot_size = p.width * p.columns;
  for (int r = y; r < kTile; r += kThreads / kTile) {
    const int j = first_rank + r;
    const std::int64_t c = first_column + x;
    float sum = 0;
    if (j < p.width && c < p.columns) {
      const float* from = p.partials + first_slot * slot_size + j * p.columns + c;
      for (int slot = 0; slot < slots; ++slot) sum += from[slot * slot_size];
    }
    tile[r][x] = sum;
  }
  __syncthreads();
  for (int i = y; i < kTile; i += kThreads / kTile) {
    // Neighbouring threads write along the rows of dA, or of dB.
    const int r = p.side == Side::kA ? i : x;
    const std::int64_t c = first_column + (p.side == Side::kA ? x : i);
    const int j = p.first_hidden + first_rank + r;
    if (first_rank + r >= p.width || c >= p.columns) continue;
    const int s = slice_of(p.hidden, p.first_slice, p.num_slices, j);
    const PairEntry& pair = p.pairs.get(adapter, s);
    const int rank = j - p.hidden.first[s];
    const Matrix& out = p.side == Side::kA ? pair.da : pair.db;
    if (rank >= pair.rank || out.data == nullptr) continue;
    const std::int64_t at = p.side == Side::kA ? rank * out.row_stride + c * out.col_stride
                                               : c * out.row_stride + rank * out.col_stride;
    const bool adds = (pair.adds >> (p.side == Side::kA ? 0 : 1) & 1) != 0;
    if (adds && slots == 0) continue;
    float v = tile[r][p.side == Side::kA ? x : i];
    if (adds) v = device::load_as_float(out.data, out.dtype, at) + v;
    device::store_from_float(out.data, out.dtype, at, v);
  }
}

__global__ void upload_kernel(const __grid_constant__ UploadParams p) {
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

void reduce_outer(const WeightGradParams& p, Stream stream) {
  device::Launch l;
  l.grid = dim3(static_cast<unsigned>(ceil_div<std::int64_t>(p.columns, kTile)),
                ceil_div(p.width, kTile), p.num_adapters);
  l.threads = kThreads;
  l.stream = stream;
  device::launch<weight_grad_kernel>("lora_train", l, p);
}

void upload(const UploadParams& p, Stream stream) {
  device::Launch l;
  l.grid = dim3(1);
  l.threads = kThreads;
  l.stream = stream;
  device::launch<upload_kernel>("lora_train", l, p);
}

}  // namespace mortar::lora::train::cuda
