// SPDX-License-Identifier: Apache-2.0
// What the warpgroups of input_boxes.cu do: the sums of dA, dx, and dropout of both.
#pragma once

#include "device/bulk_copy.cuh"
#include "device/pdl.cuh"
#include "device/stmatrix.cuh"
#include "device/wgmma.cuh"
#include "lora/train/cuda/input_boxes.cuh"

namespace mortar::lora::train::cuda::input_pass {

using device::Major;

template <class S>
__device__ __forceinline__ bool ends_in_box(const PanelPart<>& part, int first) {
  return S::kSegments && cuda::ends_in_box(part, first);
}

/// Adds the products of a box of rows, of each block of 64 columns with all ranks: the rows of a
/// block in as many chains as it has sums.
template <class T, int kRanks, int kBlocks, int kChains>
__device__ __forceinline__ void multiply_rows(float (&sum)[kBlocks][kChains][kRanks / 2],
                                              std::uint64_t rows, std::uint64_t ranks) {
  constexpr int kSteps = kBlockRows / 16, kStep = device::descriptor_step(Major::kRows);
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      device::wgmma<T, kRanks, Major::kRows, Major::kRows>(
          sum[block][k / (kSteps / kChains)], rows + block * (kBlockBytes / 16) + k * kStep,
          ranks + k * kStep, 1);
    }
  }
}

/// dA of the panel, or of half of it, by a warpgroup.
template <class T, class S>
__device__ __forceinline__ void sum_rows(const PanelPart<>& part, int half, std::uint32_t smem,
                                         Barriers<S>& barriers) {
  float sum[S::kSumBlocks][S::kChains][S::kRanks / 2] = {};
  const int thread = thread_anew(), lane = thread % 32;
  const std::uint32_t own_rows = smem + half * S::kSumBlocks * kBlockBytes;
  device::RingCursor<S::kStages> at;
  device::RingCursor<S::kNarrowStages> narrow;
#pragma unroll 1
  for (int first = 0; first < part.rows.count; first += kBlockRows, at.next(), narrow.next()) {
    barriers.narrow_full[narrow.stage].wait(narrow.round & 1);
    (S::kDrops ? barriers.dropped : barriers.full)[at.stage].wait(at.round & 1);
    const std::uint32_t stage = own_rows + at.stage * S::kStageBytes;
    const std::uint32_t narrow_stage = smem + S::kNarrowAt + narrow.stage * kBlockBytes;
    if (ends_in_box<S>(part, first)) {
      const int left = part.rows.count - first;
      clear_rows<S::kSumBlocks>(stage, left, kBlockRows);
      if (half == 0) clear_rows<1>(narrow_stage, left, kBlockRows);
      device::fence_async_proxy();
      barriers.cleared.arrive();
      barriers.cleared.wait(0);
    }
    const auto rows = device::wgmma_descriptor(stage);
    const auto ranks = device::wgmma_descriptor(narrow_stage);
    device::wgmma_fence();
    multiply_rows<T, S::kRanks>(sum, rows, ranks);
    device::wgmma_commit();
    device::wgmma_wait<0>();
    if (lane == 0) {
      barriers.empty[at.stage].arrive();
      barriers.narrow_empty[narrow.stage].arrive();
    }
  }
#pragma unroll
  for (int block = 0; block < S::kSumBlocks; ++block) {
#pragma unroll
    for (int chain = 0; chain < S::kChains; ++chain) device::wgmma_keep(sum[block][chain]);
  }
  const int ranks = *part.live;
  const int row = thread % kWarpgroup / 32 * 16 + lane / 4;
#pragma unroll
  for (int n = 0; n < S::kRanks / 8; ++n) {
    if (8 * n >= ranks) break;
#pragma unroll
    for (int block = 0; block < S::kSumBlocks; ++block) {
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        const auto value = [&](int i) {
          const int at = 4 * n + 2 * upper + i;
          return S::kChains == 1 ? sum[block][0][at]
                                 : sum[block][0][at] + sum[block][S::kChains - 1][at];
        };
        part.store_sums(
            part.column + (half * S::kSumBlocks + block) * kBlockColumns + row + 8 * upper,
            8 * n + lane % 4 * 2, value(0), value(1));
      }
    }
  }
}

/// The first `left` rows of a box of dx, whose others belong to another adapter; by a warpgroup.
template <class S>
__device__ __forceinline__ void store_rows(const InputBoxParams& p, std::int64_t row,
                                           std::int64_t column, int left, const char* from) {
  auto* out = static_cast<unsigned short*>(p.dx.data) + row * p.dx.row_stride + column;
  const std::int64_t columns = p.panel.operands[0].columns - column;
  for (int i = thread_anew() % kWarpgroup; i < left * S::kOwn * kRowPieces; i += kWarpgroup) {
    const int piece = i % (S::kOwn * kRowPieces), at = i / (S::kOwn * kRowPieces);
    const auto* v = reinterpret_cast<const uint4*>(from + piece / kRowPieces * kBlockBytes +
                                                   device::swizzled(at, piece % kRowPieces));
    auto* to = out + at * p.dx.row_stride + piece * kPiece;
    if (piece * kPiece + kPiece <= columns) {
      *reinterpret_cast<uint4*>(to) = *v;
    } else {
      const auto* values = reinterpret_cast<const unsigned short*>(v);
      for (int k = 0; piece * kPiece + k < columns && k < kPiece; ++k) to[k] = values[k];
    }
  }
}

/// dx of half of the panel's columns, by a warpgroup.
template <class T, class S>
__device__ __forceinline__ void store_products(const InputBoxParams& p, const PanelPart<>& part,
                                               int half, char* smem, Barriers<S>& barriers) {
  constexpr int kOwn = S::kOwn;
  const std::uint32_t base = device::smem_address(smem);
  const std::uint32_t buffers = base + S::kStoreAt + half * S::kBuffers * kOwn * kBlockBytes;
  std::uint32_t stored = buffers;
  const int first_column = S::kTurns ? 0 : half * kOwn;  // in blocks
  const auto weights =
      device::wgmma_descriptor(base + S::kWeightsAt + first_column * S::kWeightBytes);
  const int thread = thread_anew() % kWarpgroup, lane = thread % 32;
  const int warp_row = thread / 32 * 16;
  const bool asks = thread == 0;
  const auto meet = [&] {
    if (half == 0) {
      device::named_barrier<1, kWarpgroup>();
    } else {
      device::named_barrier<2, kWarpgroup>();
    }
  };
  device::RingCursor<S::kStages> at;
  device::RingCursor<S::kNarrowStages> narrow;
  constexpr int kStep = S::kTurns ? S::kStorers : 1;
  const auto next = [&] {
    at.next();
    narrow.next();
  };
  if (S::kTurns && half == 1) next();
#pragma unroll 1
  for (int first = S::kTurns ? half * kBlockRows : 0; first < part.rows.count;
       first += kStep * kBlockRows) {
    barriers.narrow_full[narrow.stage].wait(narrow.round & 1);
    if (ends_in_box<S>(part, first)) barriers.cleared.wait(0);
    const auto rows = device::wgmma_descriptor(base + S::kNarrowAt + narrow.stage * kBlockBytes);
#pragma unroll
    for (int first_block = 0; first_block < kOwn; first_block += S::kAtOnce) {
      float sum[S::kAtOnce][kBlockColumns / 2];
      device::wgmma_fence();
#pragma unroll
      for (int i = 0; i < S::kAtOnce; ++i) {
#pragma unroll
        for (int k = 0; k < S::kRanks / 16; ++k) {
          device::wgmma<T, kBlockColumns, Major::kDepth, Major::kRows>(
              sum[i], rows + k * device::kDescriptorStep,
              weights + (first_block + i) * (S::kWeightBytes / 16) +
                  k * device::descriptor_step(Major::kRows),
              k > 0);
        }
      }
      device::wgmma_commit();
      device::wgmma_wait<0>();
#pragma unroll
      for (int i = 0; i < S::kAtOnce; ++i) device::wgmma_keep(sum[i]);
      if (first_block + S::kAtOnce == kOwn && lane == 0) {
        barriers.narrow_empty[narrow.stage].arrive();
      }
      if (first_block == 0) {
        if constexpr (S::kDrops) barriers.dropped[at.stage].wait(at.round & 1);
        if (asks) device::store_boxes_wait_read<S::kBuffers - 1>();
        meet();
      }
#pragma unroll
      for (int i = 0; i < S::kAtOnce; ++i) {
        const int block = first_block + i;
        [[maybe_unused]] std::uint64_t kept[2];  // of the lane's rows, by columns
        if constexpr (S::kDrops) {
          const char* masks =
              smem + S::kMasksAt + at.stage * S::kMaskBytes + (first_column + block) * 8;
#pragma unroll
          for (int upper = 0; upper < 2; ++upper) {
            kept[upper] = *reinterpret_cast<const std::uint64_t*>(
                              masks + (warp_row + lane / 4 + 8 * upper) * (S::kColumns / 8)) >>
                          (lane % 4 * 2);
          }
        }
#pragma unroll
        for (int j = 0; j < kBlockColumns / 8; j += 2) {
          std::uint32_t words[4];
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            const float* v = sum[i] + 4 * j + 2 * n;
            words[n] = device::pack2<T>(v[0], v[1]);
            if constexpr (S::kDrops) {
              const auto two = static_cast<std::uint32_t>(kept[n % 2] >> (8 * (j + n / 2))) & 3u;
              words[n] &= ((two | two << 15) & 0x10001u) * 0xffffu;
            }
          }
          device::stmatrix_x4(
              stored + block * kBlockBytes +
                  device::swizzled(warp_row + lane / 8 % 2 * 8 + lane % 8, j + lane / 16),
              words);
        }
      }
    }
    if constexpr (S::kDrops) barriers.empty[at.stage].arrive();
    device::fence_async_proxy();
    meet();
    if (ends_in_box<S>(part, first)) {
      store_rows<S>(p, part.rows.start + first, part.column + first_column * kBlockColumns,
                    part.rows.count - first, smem + S::kStoreAt + half * kOwn * kBlockBytes);
    } else if (asks) {
#pragma unroll
      for (int block = 0; block < kOwn; ++block) {
        device::store_box(p.out,
                          static_cast<int>(part.column) + (first_column + block) * kBlockColumns,
                          static_cast<int>(part.rows.start) + first, stored + block * kBlockBytes);
      }
      device::store_boxes_commit();
    }
    if constexpr (S::kBuffers == 2) {
      stored = stored == buffers ? buffers + kOwn * kBlockBytes : buffers;
    }
#pragma unroll
    for (int i = 0; i < kStep; ++i) next();
  }
  if (asks) device::store_boxes_wait_read();
}

/// Draws masks, drops elements of x in its stages, and leaves bits for dx; by S::kDroppers
/// warpgroups.
template <class S>
__device__ __forceinline__ void drop_stages(const PanelPart<>& part, char* smem,
                                            Barriers<S>& barriers) {
  constexpr int kPieces = S::kColumns / kPiece, kAtOnce = 4;
  constexpr int kRowStep = S::kDroppers * kWarpgroup / kPieces;
  const int thread = thread_anew() - (S::kSummers + S::kStorers) * kWarpgroup;
  const int piece = thread % kPieces, first_row = thread / kPieces;
  const std::int64_t c = part.column + piece * kPiece;
  Draws draws;
  draws.read(part.p.mask.rng);
  device::RingCursor<S::kStages> at;
#pragma unroll 1
  for (int first = 0; first < part.rows.count; first += kBlockRows, at.next()) {
    char* rows = smem + at.stage * S::kStageBytes + piece / kRowPieces * kBlockBytes;
    char* masks = smem + S::kMasksAt + at.stage * S::kMaskBytes + piece;
#pragma unroll 1
    for (int i = 0; i < kBlockRows / kRowStep; i += kAtOnce) {
      OctetDraw drawn[kAtOnce];
      const int own = first_row + i * kRowStep;
      part.draw<kAtOnce, kRowStep>(draws, first + own, c, drawn);
      if (i == 0) barriers.full[at.stage].wait(at.round & 1);
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int row = own + k * kRowStep;
        auto* v = reinterpret_cast<uint4*>(rows + device::swizzled(row, piece % kRowPieces));
        *v = masked(*v, keep_words(drawn[k], part.threshold));
        const std::uint32_t limit = drawn[k].limit(part.threshold);
        std::uint32_t bits = 0;  // those of even columns, and 16 bits above them the others
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
          bits |= (drawn[k].kept(pair, limit) & 0x80008000u) >> (15 - 2 * pair);
        }
        masks[row * kPieces] = static_cast<char>(bits | bits >> 15);
      }
    }
    device::fence_async_proxy();
    barriers.dropped[at.stage].arrive();
  }
}

}  // namespace mortar::lora::train::cuda::input_pass
