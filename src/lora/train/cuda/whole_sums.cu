// SPDX-License-Identifier: Apache-2.0
// dA = ds^T drop(x) and dB = dy^T h of few rows of one adapter, both in one launch, for operands of
// one 16-bit type in any strides:
//
//   gradient[j, c] = sum over all rows of s[row, j] wide[row, c]
//
// Bytes: 2 M C + 2 M R for every 64 columns (from L2) + 2 R C; dy is in L2 already, where ds has
// read it. With M = 512, C = 2 x 4096 and R = 16 that is 8 MB, 2.8 us at 3.03 TB/s. Bound by the
// latency of a launch and of a few rounds of copies. Wrong for many rows: a thread block has all of
// them, and few columns make few thread blocks.
//
// A thread block has 64 columns and up to 32 ranks. Its warps take steps of 16 rows in turn,
// each through a ring of its own, and need no barrier before the end. There each warp leaves one
// chain over its rows, and the eight are added in order. No partials go through memory, and no
// kernel follows that adds them.
//
// It starts beside the expand before it, which writes none of its operands, and waits for that one
// before it stores; or (PanelParams::beside_ds) beside ds, for which thread blocks of x wait.
#include <algorithm>

#include "device/dtype_visitor.cuh"
#include "device/launch.cuh"
#include "device/mma.cuh"
#include "device/pdl.cuh"
#include "lora/train/cuda/grad_store.cuh"
#include "lora/train/cuda/panel.cuh"

namespace mortar::lora::train::cuda {
namespace {

constexpr int kWarps = kThreads / 32;
constexpr int kRows = 16;  ///< of a warp's step
constexpr int kRing = 4;   ///< steps of a warp on their way

template <int kRanks, bool kDrops>
struct Whole {
  /// Thread blocks of an SM. (us of a backward of 512 x 4096 x 4096, rank 32 with dropout, on an
  /// H200, by one / two: 20.8 / 20.1.)
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  static constexpr int kBlocks = 1;
#else
  static constexpr int kBlocks = kRanks == 8 && !kDrops ? 3 : 2;
#endif
  static constexpr int kWideBytes = block_bytes(kRows);
  static constexpr int kStageBytes = kWideBytes + kRows * 2 * kRanks;
  static constexpr int kWarpBytes = kRing * kStageBytes;
  /// Floats of a rank's sums of 64 columns, and of a column's sums: lanes meet no bank twice.
  static constexpr int kRankPitch = kBlockColumns + 4, kColumnPitch = kRanks + 8;
  static constexpr int kSums = std::max(kRanks * kRankPitch, kBlockColumns* kColumnPitch);
  static constexpr int kSmem =
      kWarps * std::max<int>(kWarpBytes, kSums* static_cast<int>(sizeof(float)));
};

/// kDrops: elements of an operand may be dropped.
template <int kRanks, bool kDrops>
__global__ void __launch_bounds__(kThreads, Whole<kRanks, kDrops>::kBlocks)
    whole_sums_kernel(const __grid_constant__ PanelParams p) {
  using W = Whole<kRanks, kDrops>;
  constexpr int kRowStep = 32 / kRowPieces, kPieces = kRows / kRowStep;
  constexpr int kTiles = kBlockColumns / 16, kRankTiles = kRanks / 8;
  extern __shared__ __align__(128) char smem[];
  device::pdl_begin(p.early);

  const PanelPart<true> part(p, kBlockColumns, kRanks);
  if (part.rows.count == 0) return device::pdl_leave();
  __shared__ Draws draws;
  if (kDrops && part.threshold != 0) {
    if (threadIdx.x == 0 && part.own->rng != nullptr) draws.read(part.own->rng);
    __syncthreads();
  }
  const PanelOperand& own = *part.own;

  // Load
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int all_steps = (part.rows.count + kRows - 1) / kRows;
  const int steps = (all_steps - warp + kWarps - 1) / kWarps;
  char* ring = smem + warp * W::kWarpBytes;
  const auto stage_of = [&](int step) { return ring + step % kRing * W::kStageBytes; };
  const auto place_of = [&](int step) { return (step * kWarps + warp) * kRows; };
  const int piece = lane % kRowPieces, first_row = lane / kRowPieces;
  const std::int64_t c = part.column + piece * kPiece;
  const auto wide_at = [&](int step, int i) {
    return stage_of(step) + piece_at(first_row + i * kRowStep, piece);
  };
  const auto fetch_rows = [&](int step) {
    part.fetch_wide<kPieces, kRowStep>([&](int i) { return wide_at(step, i); },
                                       place_of(step) + first_row, c);
  };
  // What the end needs of the parameters is in the constant cache then.
  const auto read_end = [&] {
    const PairEntry first = p.pairs.get(0, own.slice);
    const Matrix first_out = first.grad(own.side == Side::kA);
    asm volatile("" ::"r"(first.rank), "r"(first.adds), "l"(first_out.data));
  };
  const bool waits = p.beside_ds && own.side == Side::kA;
  if (waits) {
#pragma unroll 1
    for (int step = 0; step < min(kRing, steps); ++step) fetch_rows(step);
    read_end();
    device::pdl_wait();
  }
  const auto fetch = [&](int step) {
    if (!waits || step >= kRing) fetch_rows(step);
    part.fetch_ranks<kRows, kRanks>(stage_of(step) + W::kWideBytes, place_of(step));
  };
#pragma unroll 1
  for (int step = 0; step < kRing; ++step) {
    if (step < steps) fetch(step);
    device::cp_async_commit();
  }
  if (!waits) read_end();

  // Compute
  float sums[kTiles][kRankTiles][4] = {};
  const int matrix = lane / 8;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    device::cp_async_wait<kRing - 1>();
    if (kDrops && part.threshold != 0) {
      part.drop<kPieces, kRowStep, true>([&](int i) { return wide_at(step, i); }, draws,
                                         place_of(step) + first_row, c);
    }
    __syncwarp();
    const std::uint32_t tile = device::smem_address(stage_of(step));
    device::visit_checked_dtype(Float16DTypes(), own.wide.dtype, [&](auto type) {
      using T = typename decltype(type)::type;
#pragma unroll
      for (int n = 0; n < kRankTiles; n += 2) {
        std::uint32_t b[4];
        device::ldmatrix_x4_transposed(
            b,
            tile + W::kWideBytes +
                rank_piece_at<kRanks>(lane % 8 + matrix % 2 * 8, kRanks == 8 ? 0 : n + matrix / 2));
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          std::uint32_t a[4];
          load_a_transposed(a, tile, 16 * t, 0);
          device::mma_16816<T>(sums[t][n], a, b[0], b[1]);
          if constexpr (kRanks > 8) device::mma_16816<T>(sums[t][n + 1], a, b[2], b[3]);
        }
      }
    });
    __syncwarp();
    if (step + kRing < steps) fetch(step + kRing);
    device::cp_async_commit();
  }
  device::cp_async_wait<0>();

  // Reduce: neighbours in the gradient's rows lie side by side.
  const bool of_a = own.side == Side::kA;
  auto* all = reinterpret_cast<float*>(smem);
  __syncthreads();
  const auto leave = [&]<int kColumnPitch, int kRankPitch>() {
    float* to = all + warp * W::kSums + lane / 4 * kColumnPitch + lane % 4 * 2 * kRankPitch;
#pragma unroll
    for (int i = 0; i < kTiles * kRankTiles * 4; ++i) {
      const int t = i / 4 / kRankTiles, n = i / 4 % kRankTiles;
      const int column = 16 * t + i % 4 / 2 * 8, rank = 8 * n + i % 2;
      to[column * kColumnPitch + rank * kRankPitch] = sums[t][n][i % 4];
    }
  };
  if (of_a) {
    leave.template operator()<1, W::kRankPitch>();
  } else {
    leave.template operator()<W::kColumnPitch, 1>();
  }
  __syncthreads();

  // Store
  constexpr int kItems = kBlockColumns * kRanks / kGradVector;
#pragma unroll 1
  for (int i = threadIdx.x; i < kItems; i += kThreads) {
    const int column =
        of_a ? i % (kBlockColumns / kGradVector) * kGradVector : i / (kRanks / kGradVector);
    const int rank =
        of_a ? i / (kBlockColumns / kGradVector) : i % (kRanks / kGradVector) * kGradVector;
    const int j = own.first_hidden + part.first_rank + rank;
    const int slice = slice_of(p.hidden, own.slice, own.num_slices, j);
    const PairEntry pair = p.pairs.get(0, slice);
    const Matrix out = pair.grad(of_a);
    const float* from =
        all + (of_a ? rank * W::kRankPitch + column : column * W::kColumnPitch + rank);
    float4 v = *reinterpret_cast<const float4*>(from);
#pragma unroll
    for (int other = 1; other < kWarps; ++other) {
      const float4 add = *reinterpret_cast<const float4*>(from + other * W::kSums);
      v = make_float4(v.x + add.x, v.y + add.y, v.z + add.z, v.w + add.w);
    }
    if (p.early) device::pdl_wait();
    const int own_rank = j - p.hidden.first[slice];
    if (own_rank >= pair.rank || part.column + column >= own.columns || out.data == nullptr) {
      continue;
    }
    store_grad(out, of_a, own_rank, pair.rank, part.column + column, own.columns,
               (pair.adds >> (of_a ? 0 : 1) & 1) != 0, v);
  }
}

template <int kRanks, bool kDrops>
void launch_shape(const PanelParams& p, Stream stream) {
  device::Launch l;
  l.grid = panel_grid(p);
  l.threads = kThreads;
  l.smem = Whole<kRanks, kDrops>::kSmem;
  l.stream = stream;
  l.pdl = true;
  constexpr auto kKernel = whole_sums_kernel<kRanks, kDrops>;
  prefer_shared<kKernel>();
  device::launch<kKernel>("lora_train", l, p);
}

template <int kRanks>
void launch_ranks(const PanelParams& p, bool drops, Stream stream) {
  drops ? launch_shape<kRanks, true>(p, stream) : launch_shape<kRanks, false>(p, stream);
}

}  // namespace

void whole_sums(const PanelParams& p, int ranks, bool drops, Stream stream) {
  if (ranks == 8) return launch_ranks<8>(p, drops, stream);
  if (ranks == 16) return launch_ranks<16>(p, drops, stream);
  launch_ranks<32>(p, drops, stream);
}

}  // namespace mortar::lora::train::cuda
