// SPDX-License-Identifier: Apache-2.0
// y = h B^T and dx = ds A of float32 weights and bfloat16 y or dx, up to 64 ranks, as the six
// products of bfloat16 parts of part_columns.cuh: its columns in its order, so the bits of weights
// that were written out, without writing them, nor h's columns.
//
// y[m, n] = sum_j h[m, j] W[j, n]
// bytes  = 2 M N + 4 R N + 4 M R, of which the last two come from L2
// FLOP   = 12 M N R
// 4096 rows, N = 4096, R = 64: 34 MB, 11 us at 3.03 TB/s; 12.9 GFLOP, 16 us at 800 T
// limit  : wgmma from 48 ranks on, else DRAM
// wrong  : more than 64 ranks (the parts of 256 columns' weights no longer fit shared memory), and
//          few rows, for which splitting weights takes longer than their products
//
// A thread block splits the weights of 256 columns, four pieces of 16 bytes for an octet of ranks
// of a column, and walks over the rows, 64 at a time for each of its two warpgroups. These share
// the weights, and take turns with the tensor cores: one splits and stores while the other
// multiplies. h comes from L2 in float32, and a thread splits what it has of the MMA's first
// operand, two octets at a time. All tiles of a launch are shared out evenly, panel by panel, so
// that a thread block may have the ends of two panels.
#include "core/check.h"
#include "device/bulk_copy.cuh"
#include "device/convert.cuh"
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "device/stmatrix.cuh"
#include "device/swizzle.cuh"
#include "device/wgmma.cuh"
#include "lora/train/cuda/expand_store.cuh"
#include "lora/train/cuda/kernels.cuh"
#include "lora/train/cuda/part_columns.cuh"
#include "lora/train/cuda/part_planes.cuh"
#include "lora/train/cuda/stream.cuh"

namespace mortar::lora::train::cuda {
namespace {

constexpr int kWarpRows = 16;
constexpr int kHalf = 128;  ///< columns of an MMA
constexpr int kHalves = kPartsColumns / kHalf;
constexpr int kSteps = kPartSteps;
constexpr int kPlaneBytes = part_plane_bytes(kPartsColumns);

template <int kRanks_>
struct Shape {
  static constexpr int kRanks = kRanks_, kOctets = kRanks / 8;
  static constexpr int kGroup = kOctets < 4 ? kOctets : 4;  ///< octets that are split at a time
  /// Planes of an octet, and so much more that threads side by side write to all banks.
  static constexpr int kOctetBytes = kPartPlanes * kPlaneBytes + 128 / kGroup;
  static constexpr int kWeightBytes = round_up(kOctets * kOctetBytes, 1024);
  static constexpr int kWarpBytes = kWarpRows * kRanks * 4;  ///< of a warp's rows of h
  static constexpr int kStoreBytes = kWarpRows * kHalf * 2;  ///< of rows that leave
  static constexpr int kStoreAt = kThreads / 32 * kWarpBytes;
  static constexpr int kSmem = kWeightBytes + kThreads / 32 * (kWarpBytes + kStoreBytes);
};

/// Splits the weights of a panel's columns where a column's ranks are neighbours, whole octets of
/// one pair: four lanes read a line of a column, and eight write to all banks.
template <class S>
__device__ __forceinline__ void split_columns(const ExpandParams& p, int panel, unsigned char* to) {
  constexpr int kLanes = S::kGroup, kStep = kThreads / kLanes;
  const int own = static_cast<int>(threadIdx.x) / kLanes;
  const Matrix m = p.pairs.own[p.first_slice].weight(false);
#pragma unroll 1
  for (int octet = static_cast<int>(threadIdx.x) % kLanes; octet < S::kOctets; octet += kLanes) {
    float v[kLanes][8];
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      const std::int64_t column = std::int64_t{panel} * kPartsColumns + own + i * kStep;
      const bool there = 8 * octet < p.width && column < p.columns;
      const float* from = static_cast<const float*>(m.data) + column * m.row_stride + 8 * octet;
#pragma unroll
      for (int k = 0; k < 8; k += 4) {
        const float4 four =
            there ? __ldcg(reinterpret_cast<const float4*>(from + k)) : make_float4(0, 0, 0, 0);
        v[i][k] = four.x, v[i][k + 1] = four.y, v[i][k + 2] = four.z, v[i][k + 3] = four.w;
      }
    }
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      store_planes<kPlaneBytes>(to + octet * S::kOctetBytes + (own + i * kStep) * 16, v[i]);
    }
  }
}

/// Splits the weights of a panel's columns into shared memory; a thread has a column.
template <class S>
__device__ __forceinline__ void split_panel(const ExpandParams& p, int panel, unsigned char* to) {
  const int n = static_cast<int>(threadIdx.x);
  const std::int64_t column = std::int64_t{panel} * kPartsColumns + n;
  const bool of_a = p.side == Side::kA;
#pragma unroll 1
  for (int first = 0; 8 * first < p.width; first += S::kGroup) {
    float v[S::kGroup][8];
#pragma unroll
    for (int i = 0; i < S::kGroup; ++i) {
      const int j = p.first_hidden + 8 * (first + i);
      const int s = slice_of(p.hidden, p.first_slice, p.num_slices, j);
      const Matrix m = p.pairs.own[s].weight(of_a);
      const std::int64_t step = of_a ? m.row_stride : m.col_stride;
      const auto* from = static_cast<const float*>(m.data) + (j - p.hidden.first[s]) * step +
                         column * (of_a ? m.col_stride : m.row_stride);
      const bool there = 8 * (first + i) < p.width && column < p.columns;
      const int ranks = there ? p.pairs.own[s].rank - (j - p.hidden.first[s]) : 0;
      if (p.weights.vectors && !p.weights.rows_are_ranks && ranks >= 8) {
#pragma unroll
        for (int k = 0; k < 8; k += 4) {
          const float4 four = __ldcg(reinterpret_cast<const float4*>(from + k));
          v[i][k] = four.x, v[i][k + 1] = four.y, v[i][k + 2] = four.z, v[i][k + 3] = four.w;
        }
        continue;
      }
#pragma unroll
      for (int k = 0; k < 8; ++k) v[i][k] = k < ranks ? __ldcg(from + k * step) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < S::kGroup; ++i) {
      store_planes<kPlaneBytes>(to + (first + i) * S::kOctetBytes + n * 16, v[i]);
    }
  }
}

/// Where piece `piece` of 16 bytes of a row of h lies in its warp's part of shared memory: a lane's
/// reads of two neighbouring ranks hit all banks.
template <class S>
__device__ __forceinline__ std::uint32_t hidden_at(int row, int piece) {
  const int swizzle = S::kRanks == 16 ? row / 2 % 2 * 2 : row % 4 * 2;
  return row * S::kRanks * 4 + (piece ^ swizzle) * 16;
}

/// Copies a warp's 16 rows of h from row `row` on.
template <class S>
__device__ __forceinline__ void copy_hidden(const ExpandParams& p, int row, std::uint32_t to) {
  constexpr int kPieces = S::kRanks / 4;
  const auto* h = static_cast<const float*>(p.h.m.data) + p.first_hidden;
#pragma unroll 1
  for (int at = static_cast<int>(threadIdx.x) % 32; at < kWarpRows * kPieces; at += 32) {
    const int own = at / kPieces, piece = at % kPieces;
    const bool there = row + own < p.rows.num_rows && 4 * piece < p.width;
    const float* from = there ? h + std::int64_t{row + own} * p.h.m.row_stride + 4 * piece : h;
    device::cp_async_16(to + hidden_at<S>(own, piece), from, there ? 16 : 0);
  }
  device::cp_async_commit();
}

/// The two warpgroups take turns with the tensor cores, tile by tile, at two named barriers: in
/// step with each other, both would split and store while no tensor core works.
__device__ __forceinline__ void await_turn() {
  const int own = 1 + static_cast<int>(threadIdx.x) / (kThreads / 2);
  asm volatile("bar.sync %0, %1;" ::"r"(own), "n"(kThreads) : "memory");
}
__device__ __forceinline__ void pass_turn() {
  const int other = 2 - static_cast<int>(threadIdx.x) / (kThreads / 2);
  asm volatile("bar.arrive %0, %1;" ::"r"(other), "n"(kThreads) : "memory");
}

/// Sums of 64 rows and all columns of the panel. `hidden`: the warp's rows of h, which have been
/// read when this returns. `follows`, `leads`: a tile of the other warpgroup comes before, after.
template <class S>
__device__ __forceinline__ void multiply(const ExpandParams& p, const unsigned char* hidden,
                                         std::uint32_t weights, bool follows, bool leads,
                                         float (&sum)[kHalves][kHalf / 2]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, row = lane / 4;
  std::uint32_t fragments[2][2][kSteps][4];
#pragma unroll 1
  for (int first = 0; 8 * first < p.width; first += S::kGroup) {
#pragma unroll
    for (int pair = 0; pair < S::kGroup; pair += 2) {
      auto& a = fragments[pair / 2 % 2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const auto at = [&](int own) {
          const int piece = 2 * (first + pair + i) + lane % 4 / 2;
          return *reinterpret_cast<const float2*>(hidden + hidden_at<S>(own, piece) + lane % 2 * 8);
        };
        split_hidden(at(row), at(row + 8), a[i]);
      }
      if (pair == 0 && first == 0 && follows) await_turn();
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (8 * (first + pair + i) >= p.width) break;
        device::wgmma_fence();
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          const std::uint32_t place = weights + (pair + i) * S::kOctetBytes + step * kPlaneBytes;
#pragma unroll
          for (int half = 0; half < kHalves; ++half) {
            device::wgmma<kHalf>(
                sum[half], a[i][step],
                planes_descriptor<kPlaneBytes>(place + part_plane_bytes(half * kHalf)),
                first + pair + i + step > 0);
          }
        }
        device::wgmma_commit();
      }
      device::wgmma_wait<1>();  // the next pair is split while the products of this one run
    }
    weights += S::kGroup * S::kOctetBytes;
  }
  if (leads) pass_turn();
  device::wgmma_wait<0>();
#pragma unroll
  for (int half = 0; half < kHalves; ++half) device::wgmma_keep(sum[half]);
  __syncwarp();
}

/// Rounds a warp's 16 rows of half of the columns into its 4 KB of shared memory, from where whole
/// lines of rows leave. (Straight from registers, by shuffles, y took some 700 instructions a tile,
/// which bound ranks up to 32.)
template <bool kDrops>
__device__ __forceinline__ void store(const ExpandParams& p, const Draws& draws,
                                      std::uint32_t threshold, std::uint32_t stage, int row,
                                      std::int64_t column, const float (&sum)[kHalf / 2]) {
  int lane = static_cast<int>(threadIdx.x) % 32;
  asm volatile("" : "+r"(lane));  // what follows from it is made anew: registers are short
  // Piece of 16 bytes `piece` of a row lies at (piece XOR row % 8), so that whole numbers of pieces
  // and pairs of rows change only bits of what is there for the first.
  const auto at = [&](int own_row, int piece) {
    return stage + own_row * kHalf * 2 + (piece ^ own_row % 8) * 16;
  };
  const std::uint32_t put = at(lane / 8 % 2 * 8 + lane % 8, lane / 16);
  const std::uint32_t get = at(lane / 16, lane % 16);
  __syncwarp();
#pragma unroll
  for (int j = 0; j < kHalf / 8; j += 2) {
    device::store_rounded<__nv_bfloat16>(put ^ j * 16, sum + 4 * j);
  }
  __syncwarp();
  row += lane / 16;
  column += lane % 16 * 8;
  auto* to = static_cast<unsigned short*>(p.out.data) + row * p.out.row_stride + column;
  const int left = column < p.columns ? static_cast<int>(p.rows.num_rows) - row : 0;
#pragma unroll
  for (int i = 0; i < kWarpRows; i += 4, to += 4 * p.out.row_stride) {
    [[maybe_unused]] OctetDraw draw[2];
    if constexpr (kDrops) {
      // Neighbouring lanes share the Philox blocks of two rows.
      const int own = row + i + lane % 2 * 2;
      draw_shared(draws, octet_of(p.mask, own, column) / 2, lane % 2 != 0, draw);
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int pair = i / 2 + k;
      uint4 eight = *static_cast<const uint4*>(
          __cvta_shared_to_generic((get ^ pair % 4 * 32) + pair * kHalf * 4));
      if constexpr (kDrops) eight = masked(eight, keep_words(draw[k], threshold));
      if (i + 2 * k < left) {
        __stcs(reinterpret_cast<uint4*>(to + 2 * k * p.out.row_stride), eight);
      }
    }
  }
}

template <class S, bool kDrops>
__global__ void __launch_bounds__(kThreads, 1)
    expand_parts_kernel(const __grid_constant__ ExpandParams p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) unsigned char smem[];
  const std::uint32_t weights = device::smem_address(smem);

  // Coordinates
  constexpr int kWarpgroup = 128, kWarpgroups = kThreads / kWarpgroup;
  const int warpgroup = static_cast<int>(threadIdx.x) / kWarpgroup;
  const int warp_row = static_cast<int>(threadIdx.x) % kWarpgroup / 32 * kWarpRows;
  unsigned char* const hidden = smem + S::kWeightBytes + threadIdx.x / 32 * S::kWarpBytes;
  const std::uint32_t stored =
      weights + S::kWeightBytes + S::kStoreAt + threadIdx.x / 32 * S::kStoreBytes;
  const int row_tiles = static_cast<int>((p.rows.num_rows + kPartsRows - 1) / kPartsRows);
  const std::int64_t tiles = std::int64_t{row_tiles} * p.plan.panels;
  const int end = static_cast<int>(tiles * (blockIdx.x + 1) / gridDim.x);

  const bool by_columns = p.side == Side::kB && p.weights.vectors && !p.weights.rows_are_ranks &&
                          p.pairs.own[p.first_slice].rank == p.width;
  bool first = true;
  __shared__ Draws draws;
  [[maybe_unused]] std::uint32_t threshold = 0;
  if constexpr (kDrops) {
    for (int s = p.first_slice; s < p.first_slice + p.num_slices; ++s) {
      if (p.pairs.own[s].rank > 0) threshold = p.pairs.own[s].threshold;
    }
  }
  for (int tile = static_cast<int>(tiles * blockIdx.x / gridDim.x); tile < end;) {
    const int panel = tile / row_tiles, panel_tile = panel * row_tiles;
    const int stop = min(end, panel_tile + row_tiles);
    if (!first) __syncthreads();
    by_columns ? split_columns<S>(p, panel, smem) : split_panel<S>(p, panel, smem);
    device::fence_async_proxy();
    __syncthreads();
    if (first) {
      device::pdl_begin(false);  // weights are of no kernel in this call
      if constexpr (kDrops) {
        if (threadIdx.x == 0 && p.mask.rng != nullptr) draws.read(p.mask.rng);  // none of p = 1
        __syncthreads();
      }
    }
    first = false;

    const int begin = tile;
    tile += warpgroup;
    const auto row_of = [&](int t) { return (t - panel_tile) * kPartsRows + warp_row; };
    const auto copy = [&](int t) {
      if (t < stop) copy_hidden<S>(p, row_of(t), device::smem_address(hidden));
    };
    copy(tile);
    for (; tile < stop; tile += kWarpgroups) {
      device::cp_async_wait<0>();
      __syncwarp();
      float sum[kHalves][kHalf / 2] = {};  // else they would be live while weights are split
      multiply<S>(p, hidden, weights, tile > begin, tile + 1 < stop, sum);
      copy(tile + kWarpgroups);  // on its way while rows are stored
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        store<kDrops>(p, draws, threshold, stored, row_of(tile),
                      std::int64_t{panel} * kPartsColumns + half * kHalf, sum[half]);
      }
    }
    tile = stop;
  }
  if (first) device::pdl_begin(false);
#endif
}

template <int kRanks, bool kDrops>
void launch_shape(const ExpandParams& p, Stream stream) {
  using S = Shape<kRanks>;
  device::Launch l;
  l.grid = dim3(static_cast<unsigned>(p.plan.blocks));
  l.threads = kThreads;
  l.smem = S::kSmem;
  l.stream = stream;
  l.pdl = true;
  device::launch<expand_parts_kernel<S, kDrops>>("lora_train", l, p);
}
template <int kRanks>
void launch_ranks(const ExpandParams& p, Stream stream) {
  p.masked ? launch_shape<kRanks, true>(p, stream) : launch_shape<kRanks, false>(p, stream);
}

}  // namespace

void expand_parts(const ExpandParams& p, Stream stream) {
  check(p.vectors && p.base.data == nullptr && p.columns % kPiece == 0 && p.ahead &&
            p.rows.num_rows <= kMostPartsRows && p.width <= p.plan.ranks,
        "lora_train: operands that the kernel of split weights does not take");
  if (p.plan.ranks <= 16) return launch_ranks<16>(p, stream);
  if (p.plan.ranks <= 32) return launch_ranks<32>(p, stream);
  launch_ranks<64>(p, stream);
}

}  // namespace mortar::lora::train::cuda
