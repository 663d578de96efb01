// SPDX-License-Identifier: Apache-2.0
// y = base + h B^T and dx = ds A of one slice of up to 32 ranks, all float32 and dense, for one
// adapter and without dropout: [M, R] by [R, C], by split-bf16.
//
// Bytes: 4 M C (twice with a base) + 4 R C (per 128 rows, from L2) + 4 M R (per 128 columns, from
// L2). With M = 4096, C = 4096, R = 16 that is 67 MB, 15.7 us at 4.28
// TB/s. Bound by memory: 6 MMAs and some 30 other instructions for 16 rows by 8 columns.
//
// A thread block has 128 rows by 128 columns. The parts of its weights lie in shared memory before
// h is there; a warp has 16 rows, whose h it reads and splits as fragments of the MMA. The sums are
// those of expand.cu, in its order, and so its bits.
#include "core/check.h"
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "lora/train/cuda/float_plan.h"
#include "lora/train/cuda/float_ring.cuh"
#include "lora/train/cuda/kernels.cuh"

namespace mortar::lora::train::cuda {
namespace {

constexpr int kWarpColumns = 16;  ///< of a warp at a time

/// Where column c of a group of 16 lies among the rows of its planes: so a lane's sums of the MMA's
/// two tiles are those of four neighbouring columns.
__device__ __forceinline__ int place_of(int c) {
  return c / kWarpColumns * kWarpColumns + c % 4 / 2 * 8 + c % kWarpColumns / 4 * 2 + c % 2;
}

/// Splits the weights of 128 columns from `column` on into planes whose rows are columns.
template <int kRanks>
__device__ __forceinline__ void fetch_planes(const ExpandParams& p, const PairEntry& pair,
                                             std::int64_t column, char* planes) {
  constexpr int kOctets = kRanks / 8;
  const Matrix m = pair.weight(p.side == Side::kA);
  const std::int64_t rank_stride = p.side == Side::kA ? m.row_stride : m.col_stride;
  const std::int64_t column_stride = p.side == Side::kA ? m.col_stride : m.row_stride;
  // Neighbouring lanes read what lies side by side.
  const bool by_ranks = p.weights.rows_are_ranks;
  const bool vectors = !by_ranks && p.weights.vectors;
#pragma unroll
  for (int i = threadIdx.x; i < kTileColumns * kOctets; i += kThreads) {
    const int at = by_ranks ? i % kTileColumns : i / kOctets;
    const int octet = by_ranks ? i / kTileColumns : i % kOctets;
    const std::int64_t c = column + at;
    const float* from =
        static_cast<const float*>(m.data) + c * column_stride + octet * 8 * rank_stride;
    float v[8];
    if (vectors && c < p.columns && octet * 8 + 8 <= pair.rank) {
      const float4 low = reinterpret_cast<const float4*>(from)[0];
      const float4 high = reinterpret_cast<const float4*>(from)[1];
      v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w;
      v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        v[j] = c < p.columns && octet * 8 + j < pair.rank ? from[j * rank_stride] : 0.0f;
      }
    }
    split_eight(make_float4(v[0], v[1], v[2], v[3]), make_float4(v[4], v[5], v[6], v[7]),
                planes + rank_piece_at<kRanks>(place_of(at), octet), kTileColumns * 2 * kRanks);
  }
}

template <int kRanks>
__global__ void __launch_bounds__(kThreads, float_expand_blocks(kRanks))
    expand_float_kernel(const __grid_constant__ ExpandParams p) {
  constexpr int kSteps = kRanks / 16, kPlaneBytes = kTileColumns * 2 * kRanks;
  __shared__ __align__(128) char planes[kFloatPlanes * kPlaneBytes];

  // Coordinates
  const std::int64_t column = std::int64_t{blockIdx.x} * kTileColumns;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const PairEntry pair = p.pairs.get(0, p.first_slice);
  const int steps = ceil_div(pair.rank, 16);
  const std::int64_t row =
      std::int64_t{blockIdx.y} * kTileRows + static_cast<int>(threadIdx.x) / 32 * 16 + lane / 4;
  fetch_planes<kRanks>(p, pair, column, planes);
  __syncthreads();
  device::pdl_begin(false);

  // Load. Pairs of neighbouring ranks of rows g and g + 8, then of ranks 8 on; past the last row
  // that row's.
  std::uint32_t a[kSteps][kFloatPlanes][4];
  {
    const auto* hidden = static_cast<const float*>(p.h.m.data) + p.first_hidden + lane % 4 * 2;
    float2 v[kSteps][4];
#pragma unroll
    for (int i = 0; i < 4 * kSteps; ++i) {
      const std::int64_t from = min(row + i % 2 * 8, p.rows.num_rows - 1);
      const int j = i / 2 * 8, left = pair.rank - j - lane % 4 * 2;
      float2& own = v[i / 4][i % 4];
      own = make_float2(0, 0);
      if (left > 0) {
        own = __ldcg(reinterpret_cast<const float2*>(hidden + from * p.h.m.row_stride + j));
      }
      if (left == 1) own.y = 0;
    }
#pragma unroll
    for (int k = 0; k < kSteps; ++k) split_fragment(v[k], a[k]);
  }

  // Compute
  const int matrix = lane / 8;
  const int own = lane % 8 + matrix / 2 * 8;  // row of the planes
  std::int64_t c = column + lane % 4 * 4;
  float* out = static_cast<float*>(p.out.data) + row * p.out.row_stride + c;
  const float* base = static_cast<const float*>(p.base.data) + row * p.base.row_stride + c;
#pragma unroll 1
  for (int pass = 0; pass < kTileColumns / kWarpColumns; ++pass) {
    Sums<__nv_bfloat16, true> sums[2];
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      if (k > 0 && k >= steps) continue;
      add_step(sums[0], sums[1], a[k], kFloatPlanes, [&](std::uint32_t(&b)[4], int plane) {
        device::ldmatrix_x4(b, device::smem_address(planes) + plane * kPlaneBytes +
                                   pass * (kWarpColumns * 2 * kRanks) +
                                   rank_piece_at<kRanks>(own, 2 * k + matrix % 2));
      });
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row + 8 * half >= p.rows.num_rows || c >= p.columns) continue;
      float4 v = make_float4(sums[0].total(2 * half), sums[0].total(2 * half + 1),
                             sums[1].total(2 * half), sums[1].total(2 * half + 1));
      if (p.base.data != nullptr) {
        const float4 b = *reinterpret_cast<const float4*>(base + 8 * half * p.base.row_stride);
        v = make_float4(b.x + v.x, b.y + v.y, b.z + v.z, b.w + v.w);
      }
      *reinterpret_cast<float4*>(out + 8 * half * p.out.row_stride) = v;
    }
    c += kWarpColumns;
    out += kWarpColumns;
    base += kWarpColumns;
  }
}

template <int kRanks>
void launch_expand(const ExpandParams& p, Stream stream) {
  device::Launch l;
  l.grid = dim3(p.plan.panels, static_cast<unsigned>(p.max_tiles));
  l.threads = kThreads;
  l.stream = stream;
  l.pdl = true;
  device::launch<expand_float_kernel<kRanks>>("lora_train", l, p);
}

bool moves_in_fours(const Matrix& m) { return m.dtype == DType::kFloat32 && loads_vectors(m); }

}  // namespace

bool expand_float(const ExpandParams& p, Stream stream) {
  const int rank = p.pairs.own[p.first_slice].rank;
  constexpr std::int64_t kMostTiles = 65535;  // of a grid
  if (!p.ahead || p.max_tiles > kMostTiles || p.masked || !p.h.vectors || p.num_slices != 1 ||
      rank == 0 || rank > 32 || p.weights.parts != kFloatPlanes || !moves_in_fours(p.out) ||
      p.columns % 4 != 0 || (p.base.data != nullptr && !moves_in_fours(p.base))) {
    return false;
  }
  rank <= 16 ? launch_expand<16>(p, stream) : launch_expand<32>(p, stream);
  return true;
}

}  // namespace mortar::lora::train::cuda
