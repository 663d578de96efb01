// SPDX-License-Identifier: Apache-2.0
// dA = ds^T drop(x), dB = dy^T h, and ds = dy B in the same pass over dy, for operands of one
// 16-bit type in any strides:
//
//   sums[j, c] = sum over the rows of a chunk of s[row, j] wide[row, c]
//   ds[row, j] = sum over the columns of a panel of wide[row, c] B[c, j]      (where it is wanted)
//
// Bytes: 2 M C + 2 M R per panel (from L2) + 4 R C per chunk + 4 M R per panel that makes ds. With
// M = 8192, C = 14336, R = 16 and 28 panels of 4 chunks that is 235 + 7 + 4 + 15 MB, 61 us at
// 4.28 TB/s (75 measured), where two passes over dy take 110. Bound by memory. The partials of ds
// are 2 R / P of dy's bytes, written and read again: a wide R is better served by two passes.
//
// A thread block has a panel of P columns, up to 64 ranks and one chunk of one adapter's rows. One
// or two groups of eight warps share the rows; a group's pass through its own ring of stages. A
// warp has P / 8 columns: their sums stay in its registers over the whole chunk, one chain over the
// group's rows in order, and so do its rows of B. Its part of ds goes to shared memory, where one
// step later the parts of the group's warps are added in order.
//
// Without ds it starts beside the kernel before it, which writes none of its operands, and waits
// for that one before its sums leave. Up to 16 ranks it has so few registers and stages that it
// fits an SM beside a last thread block of the expand of dx, and reads x while that one writes.
// With ds it asks for its first rows in L2 before it waits.
#include "core/check.h"
#include "device/dtype_visitor.cuh"
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "lora/train/cuda/panel.cuh"

namespace mortar::lora::train::cuda {
namespace {

/// A shape as constants.
template <int kShape>
struct Panel {
  static constexpr PanelShape kAll = kPanelShapes[kShape];
  static constexpr int kWarps = kPanelWarps, kGroups = kAll.groups;
  static constexpr int kRanks = kAll.ranks, kColumns = kAll.columns;
  static constexpr bool kMakesDs = kAll.makes_ds;
  static constexpr int kRows = kAll.rows, kStages = kAll.stages;
  static constexpr int kBlockBytes = block_bytes(kAll), kStageBytes = stage_bytes(kAll);
  static constexpr int kWideBytes = kStageBytes - kBlockBytes;
  /// Draws of dropout are made while their copies are on their way. Before sm_90 they would spill.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  static constexpr bool kDrawsFirst = false;
#else
  static constexpr bool kDrawsFirst = kRanks == 16 && !kMakesDs;
#endif
  static constexpr int kDsStride = ds_stride(kAll), kDsFloats = ds_floats(kAll);
};

template <int kShape>
__global__ void __launch_bounds__(panel_threads(kPanelShapes[kShape]))
    __maxnreg__(panel_registers(kPanelShapes[kShape]))
        panel_kernel(const __grid_constant__ PanelParams p) {
  using P = Panel<kShape>;
  constexpr int kRowPiecesWide = P::kColumns / kPiece, kRowStep = kThreads / kRowPiecesWide;
  constexpr int kPieces = P::kRows / kRowStep;  // of a stage, per thread
  constexpr int kWarpColumns = P::kColumns / P::kWarps;
  constexpr int kTiles = kWarpColumns / 16, kRankTiles = P::kRanks / 8;
  constexpr int kStepRows = P::kRows * P::kGroups;
  constexpr int kRingBytes = P::kStages * P::kStageBytes;
  static_assert(P::kRows % kRowStep == 0 && P::kRows % 16 == 0 && kWarpColumns % 16 == 0 &&
                    kThreads == 32 * P::kWarps && P::kGroups <= 2,
                "Threads share a stage's pieces, and warps its columns, evenly.");
  extern __shared__ __align__(128) char block_smem[];
  if (!p.ahead) device::pdl_begin(p.early);

  __shared__ int live[P::kGroups];
  // Columns of parts are at least 24 wide, and make no ds.
  constexpr bool kCopies = !P::kMakesDs && P::kRanks >= 8 * kSumCopies;
  const int group_columns = kCopies ? p.group_columns : P::kRanks;
  const PanelPart<> part(p, P::kColumns, group_columns, P::kMakesDs, live);
  if (part.rows.count == 0) return device::pdl_leave();
  __shared__ Draws draws;
  if (part.threshold != 0) {
    if (threadIdx.x == 0 && p.mask.rng != nullptr) draws.read(p.mask.rng);
    __syncthreads();
  }
  const PanelOperand& own = *part.own;
  if (p.ahead) {
    part.ask<P::kColumns>(kStepRows * (P::kStages - 1));
    device::pdl_begin(false);
  }
  const int steps = (part.rows.count + kStepRows - 1) / kStepRows;

  // A group's threads see what they have fetched themselves, so groups run apart until the end.
  const int group = static_cast<int>(threadIdx.x) / kThreads;
  const int thread = static_cast<int>(threadIdx.x) % kThreads;
  char* smem = block_smem + group * kRingBytes;
  const auto group_barrier = [&] {
    asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(kThreads) : "memory");
  };
  const auto place_of = [&](int step) { return step * kStepRows + group * P::kRows; };
  const int piece = thread % kRowPiecesWide, first_row = thread / kRowPiecesWide;
  const std::int64_t c = part.column + piece * kPiece;
  const auto wide_at = [&](int step, int i) {
    return smem + step % P::kStages * P::kStageBytes + piece / kRowPieces * P::kBlockBytes +
           piece_at(first_row + i * kRowStep, piece % kRowPieces);
  };
  const auto fetch = [&](int step) {
    part.fetch_wide<kPieces, kRowStep>([&](int i) { return wide_at(step, i); },
                                       place_of(step) + first_row, c);
    part.fetch_narrow<P::kRows, P::kRanks>(
        smem + step % P::kStages * P::kStageBytes + P::kWideBytes, place_of(step), thread);
  };
#pragma unroll
  for (int step = 0; step < P::kStages - 1; ++step) {
    if (step < steps) fetch(step);
    device::cp_async_commit();
  }

  const int warp = thread / 32, lane = thread % 32;
  const int warp_column = warp * kWarpColumns;
  // The warp's rows of B as fragments, zeros past the columns and the rank. No load depends on a
  // branch: so they are in flight together.
  std::uint32_t weights[P::kMakesDs ? kTiles : 1][kRankTiles][2];
  if constexpr (P::kMakesDs) {
    const PairEntry pair = p.pairs.get(part.rows.adapter, own.slice);
    const auto* from = static_cast<const unsigned short*>(pair.b.data);
    const int last_rank = max(pair.rank - 1, 0);
    const auto element = [&](std::int64_t at, int r) -> std::uint32_t {
      const std::int64_t c = min(at, own.columns - 1);
      const std::uint32_t v =
          __ldcg(from + c * pair.b.row_stride + min(r, last_rank) * pair.b.col_stride);
      return at < own.columns && r < pair.rank ? v : 0;
    };
    if (pair.rank == 0) {
#pragma unroll
      for (int i = 0; i < kTiles * kRankTiles * 2; ++i) {
        weights[i / 2 / kRankTiles][i / 2 % kRankTiles][i % 2] = 0;
      }
    } else {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int n = 0; n < kRankTiles; ++n) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const std::int64_t at = part.column + warp_column + 16 * t + 8 * half + lane % 4 * 2;
            const int r = 8 * n + lane / 4;
            weights[t][n][half] = element(at, r) | element(at + 1, r) << 16;
          }
        }
      }
    }
  }

  // One step's parts of ds, while those of the step before are added.
  auto* parts =
      reinterpret_cast<float*>(block_smem + P::kGroups * kRingBytes) + group * 2 * P::kDsFloats;
  const auto store_ds = [&](int step) {
    part.store_ds<P::kRows, P::kRanks, P::kWarps, P::kDsStride>(parts + step % 2 * P::kDsFloats,
                                                                place_of(step), thread);
  };

  float sums[kTiles][kRankTiles][4] = {};
  for (int step = 0; step < steps; ++step) {
    constexpr bool kDrawsFirst = P::kDrawsFirst;
    [[maybe_unused]] OctetDraw drawn[kPieces];
    bool draws_first = false;
    if constexpr (kDrawsFirst) {
      draws_first = part.draws_first();
      if (draws_first) {
        part.template draw<kPieces, kRowStep>(draws, place_of(step) + first_row, c, drawn);
      }
    }
    device::cp_async_wait<P::kStages - 2>();
    if constexpr (kDrawsFirst) {
      if (draws_first) part.drop_drawn([&](int i) { return wide_at(step, i); }, drawn);
    }
    if (part.threshold != 0 && !draws_first) {
      part.drop<kPieces, kRowStep, P::kRanks <= 32>([&](int i) { return wide_at(step, i); }, draws,
                                                    place_of(step) + first_row, c);
    }
    group_barrier();
    if (step + P::kStages - 1 < steps) fetch(step + P::kStages - 1);
    device::cp_async_commit();
    if constexpr (P::kMakesDs) {
      if (step > 0) store_ds(step - 1);
    }
    const std::uint32_t tile = device::smem_address(smem + step % P::kStages * P::kStageBytes);
    const std::uint32_t narrow = tile + P::kWideBytes;
    device::visit_checked_dtype(Float16DTypes(), own.wide.dtype, [&](auto type) {
      using T = typename decltype(type)::type;
#pragma unroll
      for (int k = 0; k < P::kRows / 16; ++k) {
        std::uint32_t s[kRankTiles][2];
#pragma unroll
        for (int n = 0; n < kRankTiles; n += 2) {
          std::uint32_t b[4];
          load_b(b, narrow, 8 * n, k, false);
          s[n][0] = b[0], s[n][1] = b[1];
          s[n + 1][0] = b[2], s[n + 1][1] = b[3];
        }
        float ds[P::kMakesDs ? kRankTiles : 1][4] = {};
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          const int at = warp_column + 16 * t;
          const std::uint32_t block = tile + at / kBlockColumns * P::kBlockBytes;
          std::uint32_t a[4];
          load_a_transposed(a, block, at % kBlockColumns, k);
#pragma unroll
          for (int n = 0; n < kRankTiles; ++n) {
            device::mma_16816<T>(sums[t][n], a, s[n][0], s[n][1]);
          }
          if constexpr (P::kMakesDs) {
            load_a(a, block, 16 * k, at % kBlockColumns / 16);
#pragma unroll
            for (int n = 0; n < kRankTiles; ++n) {
              device::mma_16816<T>(ds[n], a, weights[t][n][0], weights[t][n][1]);
            }
          }
        }
        if constexpr (P::kMakesDs) {
          float* to = parts + step % 2 * P::kDsFloats +
                      (warp * P::kRows + 16 * k + lane / 4) * P::kDsStride + lane % 4 * 2;
#pragma unroll
          for (int n = 0; n < kRankTiles; ++n) {
            *reinterpret_cast<float2*>(to + 8 * n) = make_float2(ds[n][0], ds[n][1]);
            *reinterpret_cast<float2*>(to + 8 * P::kDsStride + 8 * n) =
                make_float2(ds[n][2], ds[n][3]);
          }
        }
      }
    });
  }
  if constexpr (P::kMakesDs) {
    group_barrier();
    store_ds(steps - 1);
  }

  if constexpr (P::kGroups == 2) {
    // The second group's sums, by way of the rings, are added to the first's.
    auto* other = reinterpret_cast<float4*>(block_smem) + warp * kTiles * kRankTiles * 32 + lane;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kTiles * kRankTiles; ++i) {
      const float(&v)[4] = sums[i / kRankTiles][i % kRankTiles];
      if (group == 1) other[32 * i] = make_float4(v[0], v[1], v[2], v[3]);
    }
    __syncthreads();
    if (group == 1) return;
#pragma unroll
    for (int i = 0; i < kTiles * kRankTiles; ++i) {
      float(&v)[4] = sums[i / kRankTiles][i % kRankTiles];
      const float4 add = other[32 * i];
      v[0] += add.x, v[1] += add.y, v[2] += add.z, v[3] += add.w;
    }
  }
  if (p.early) device::pdl_wait();
  const int ranks = own.sums == nullptr ? 0 : *part.live - part.first_rank;
  if constexpr (kCopies) {
    if (p.copies > 1) {
      // The three columns of a rank are added before they leave.
#pragma unroll
      for (int n = 0; n < kRankTiles / kSumCopies; ++n) {
        if (8 * kSumCopies * n >= ranks) break;
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const std::int64_t at = part.column + warp_column + 16 * t + 8 * half + lane / 4;
            const auto sum = [&](int i) {
              const int own_column = 2 * half + i;
              return sum_of_columns(sums[t][kSumCopies * n][own_column],
                                    sums[t][kSumCopies * n + 1][own_column],
                                    sums[t][kSumCopies * n + 2][own_column]);
            };
            part.store_added(at, 8 * n + lane % 4 * 2, sum(0), sum(1));
          }
        }
      }
      return;
    }
  }
#pragma unroll
  for (int n = 0; n < kRankTiles; ++n) {
    if (8 * n >= ranks) break;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const std::int64_t at = part.column + warp_column + 16 * t + 8 * half + lane / 4;
        part.store_sums(at, 8 * n + lane % 4 * 2, sums[t][n][2 * half], sums[t][n][2 * half + 1]);
      }
    }
  }
}

template <int kShape>
void launch_panels(const PanelParams& p, Stream stream) {
  device::Launch l;
  l.grid = panel_grid(p);
  l.threads = kThreads * Panel<kShape>::kGroups;
  l.smem = panel_smem(kPanelShapes[kShape]);
  l.stream = stream;
  l.pdl = true;
  device::launch<panel_kernel<kShape>>("lora_train", l, p);
}

template <int kShape = 0>
void launch_shape(const PanelParams& p, Stream stream) {
  if constexpr (kShape < static_cast<int>(kPanelShapes.size())) {
    if (p.shape == kShape) return launch_panels<kShape>(p, stream);
    launch_shape<kShape + 1>(p, stream);
  }
}

}  // namespace

void panels(const PanelParams& p, Stream stream) { launch_shape(p, stream); }

}  // namespace mortar::lora::train::cuda
