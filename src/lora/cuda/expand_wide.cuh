// SPDX-License-Identifier: Apache-2.0
// The kernel of expand_wide.cu, expand_wide_rounded.cu and expand_wide_parts.cu. (The compiler
// makes other code of the first where it is in one file with another.)
#pragma once

#include <cstdint>
#include <type_traits>

#include "device/async_copy.cuh"
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "device/ring.cuh"
#include "device/swizzle.cuh"
#include "device/vector.cuh"
#include "device/wgmma.cuh"
#include "lora/cuda/backend.cuh"
#include "lora/cuda/expand_boxes.cuh"
#include "lora/cuda/expand_tile.cuh"
#include "lora/cuda/expand_wide_parts.cuh"
#include "lora/cuda/expand_wide_traits.cuh"
#include "lora/cuda/row_pieces.cuh"
#include "lora/cuda/split_rows.cuh"

namespace mortar::lora::cuda::wide_expand {

/// 64 ranks from `first` on of kRows rows, 16 bytes at a time; zeros past `rank`. Rows of any
/// address wait for their loads.
template <class T, int kRows, int kThreads>
__device__ __forceinline__ void copy_ranks(const void* const* rows, unsigned char* to, int first,
                                           int rank, bool vector) {
  const int thread = static_cast<int>(threadIdx.x) % kThreads;
  const int piece = thread % 8, row0 = thread / 8, left = rank - first - piece * 8;
  const int at = left > 0 ? first + piece * 8 : 0;
  unsigned char* dst = to + device::swizzled(row0, piece);
  constexpr int kStep = kThreads / 8;
#pragma unroll
  for (int i = 0; i < kRows / kStep; ++i) {
    const auto* row = static_cast<const T*>(rows[row0 + i * kStep]);
    if (row == nullptr) continue;
    unsigned char* place = dst + i * kStep * device::kSwizzleBytes;
    if (vector) {
      device::cp_async_16(device::smem_address(place), row + at, piece_bytes(left));
    } else {
      *reinterpret_cast<uint4*>(place) = device::load_some<T, 8>(row + at, left).piece(0);
    }
  }
}

/// Fills the ring with h of float32, 64 ranks at a time, and B of 16 bits, of which the first
/// stages are asked for before the predecessor's end is awaited. A thread arrives at a stage twice,
/// for either.
template <class Tr>
__device__ __forceinline__ void produce_rounded(Shared<Tr>& shared, unsigned char* ring, int rank,
                                                bool vector) {
  using T = typename Tr::T;
  const int num_steps = ceil_div(rank, kStepRanks), ahead = min(num_steps, Tr::kStages);
  const auto copy_b = [&](int stage, int step) {
    copy_ranks<T, Tr::kCols, Tr::kProducers>(shared.rows + Tr::kTokens,
                                             ring + stage * Tr::kStageBytes + Tr::kTokenBytes,
                                             step * kStepRanks, rank, vector);
  };
#pragma unroll 1
  for (int step = 0; step < ahead; ++step) copy_b(step, step);
  SplitRows<Tr::kTokens, Tr::kProducers, T> rows(static_cast<int>(threadIdx.x) - Tr::kConsumers,
                                                 true);
  device::pdl_wait();
  rows.load(shared.rows, 0, rank);
  device::RingCursor<Tr::kStages> at;
#pragma unroll 1
  for (int step = 0; step < num_steps; ++step, at.next()) {
    if (step >= ahead) {
      shared.empty[at.stage].wait((at.round - 1) & 1);
      copy_b(at.stage, step);
    }
    shared.full[at.stage].arrive_after_copies();
    rows.store_and_load(ring + at.stage * Tr::kStageBytes, 0, shared.rows, (step + 1) * kStepRanks,
                        rank);
    device::fence_async_proxy();
    shared.full[at.stage].arrive();
  }
}

/// Brings rows to their place in each stage of the ring, by half of the producers.
template <class Tr, int kRows>
__device__ __forceinline__ void stream(Shared<Tr>& shared, const void* const* rows,
                                       unsigned char* to, int rank, int thread) {
  const int piece = thread % 8, row0 = thread / 8, num_steps = ceil_div(rank, kStepRanks);
  const RowPieces<typename Tr::T, kRows, Tr::kProducers / 2> pieces(rows, row0);
  const std::uint32_t place = device::smem_address(to) + device::swizzled(row0, piece);
  int at_rank = piece * 8;
  device::RingCursor<Tr::kStages> at;
#pragma unroll 1
  for (int step = 0; step < num_steps; ++step, at_rank += kStepRanks, at.next()) {
    if (step >= Tr::kStages) shared.empty[at.stage].wait((at.round - 1) & 1);
    pieces.copy(place + at.stage * Tr::kStageBytes, at_rank, piece_bytes(rank - at_rank));
    shared.full[at.stage].arrive_after_copies();
  }
}

/// Fills the ring: half of the producers with B, whatever the predecessor does, and half with h
/// when it has ended.
template <class Tr>
__device__ __forceinline__ void produce(Shared<Tr>& shared, unsigned char* ring, int rank,
                                        bool vector) {
  using T = typename Tr::T;
  constexpr int kHalf = Tr::kProducers / 2;
  const int thread = static_cast<int>(threadIdx.x) - Tr::kConsumers;
  const void* const* const rows_of_b = shared.rows + Tr::kTokens;
  if (thread >= kHalf) {
    device::pdl_wait();
    stream<Tr, Tr::kTokens>(shared, shared.rows, ring, rank, thread - kHalf);
  } else if (vector) {
    stream<Tr, Tr::kCols>(shared, rows_of_b, ring + Tr::kTokenBytes, rank, thread);
  } else {
    device::RingCursor<Tr::kStages> at;
#pragma unroll 1
    for (int first = 0, step = 0; first < rank; first += kStepRanks, ++step, at.next()) {
      if (step >= Tr::kStages) shared.empty[at.stage].wait((at.round - 1) & 1);
      unsigned char* to = ring + at.stage * Tr::kStageBytes + Tr::kTokenBytes;
      copy_ranks<T, Tr::kCols, kHalf>(rows_of_b, to, first, rank, false);
      shared.full[at.stage].arrive();
    }
  }
}

/// The same of boxes, by one thread: what is needed is known sooner than the address of each row.
template <class Tr>
__device__ __forceinline__ void produce_boxes(const BoxParams& p, Shared<Tr>& shared,
                                              std::uint32_t ring, const Block& block, int rank) {
  const int num_steps = ceil_div(rank, kStepRanks), ahead = min(num_steps, Tr::kStages);
  const Tile tile = shared.run.tile;
  const int column = block.slice * static_cast<int>(p.h.slice_stride);
  const int group =
      tile.adapter * p.adapter_groups[block.slice] + static_cast<int>(block.first) / kGroupCols;
  const auto copy_b = [&](int stage, int step) {
    device::Mbarrier* const full = shared.full + stage;
    full->arrive_and_expect(Tr::kStageBytes);
    const std::uint32_t to = ring + stage * Tr::kStageBytes + Tr::kTokenBytes;
#pragma unroll
    for (int i = 0; i < Tr::kCols / kBoxCols; ++i) {
      device::copy_box5(to + i * kBoxCols * device::kSwizzleBytes, p.b_map[block.slice],
                        step * kStepRanks, group + i * kBoxGroups, full);
    }
  };
#pragma unroll 1
  for (int step = 0; step < ahead; ++step) copy_b(step, step);
  device::pdl_wait();
  device::RingCursor<Tr::kStages> at;
#pragma unroll 1
  for (int step = 0; step < num_steps; ++step, at.next()) {
    if (step >= ahead) {
      shared.empty[at.stage].wait((at.round - 1) & 1);
      copy_b(at.stage, step);
    }
    device::copy_box(ring + at.stage * Tr::kStageBytes, p.h_map, column + step * kStepRanks,
                     tile.start, shared.full + at.stage);
  }
}

/// acc = h B^T of a consumer warpgroup: its 64 tokens and all columns.
template <class Tr>
__device__ __forceinline__ void consume(Shared<Tr>& shared, std::uint32_t ring, int rank,
                                        bool boxes, float (&acc)[Tr::kCols / 2]) {
  using T = typename Tr::T;
  const int warpgroup = static_cast<int>(threadIdx.x) / 128;
  const int num_steps = ceil_div(rank, kStepRanks);
  const bool signals = threadIdx.x % 32 == 0;
#pragma unroll
  for (float& v : acc) v = 0;
  device::RingCursor<Tr::kStages> at;
  int last = -1;  // stage of the MMAs in flight
#pragma unroll 1
  for (int step = 0; step < num_steps; ++step, at.next()) {
    shared.full[at.stage].wait(at.round & 1);
    if (!boxes) device::fence_async_proxy();  // cp.async wrote through the generic proxy
    device::wgmma_keep(acc);
    device::wgmma_fence();
    const std::uint32_t stage = ring + at.stage * Tr::kStageBytes;
    const auto h = device::wgmma_descriptor(stage + warpgroup * 64 * device::kSwizzleBytes);
#pragma unroll
    for (int i = 0; i < kStepRanks / 16; ++i) {
#pragma unroll
      for (int c = 0; c < Tr::kCols; c += Tr::kMmaCols) {
        const auto b =
            device::wgmma_descriptor(stage + Tr::kTokenBytes + c * device::kSwizzleBytes);
        device::wgmma<T, Tr::kMmaCols>(acc + c / 2, h + i * device::kDescriptorStep,
                                       b + i * device::kDescriptorStep, 1);
      }
    }
    device::wgmma_commit();
    device::wgmma_wait<1>();
    if (last >= 0 && signals) shared.empty[last].arrive();
    last = at.stage;
  }
  device::wgmma_wait<0>();
  device::wgmma_keep(acc);
}

template <class Tr>
__global__ void __launch_bounds__(Tr::kThreads, Tr::kMinCtas)
    expand_wide_kernel(const __grid_constant__ typename Tr::Params p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using T = typename Tr::T;
  using TW = typename Tr::TW;
  extern __shared__ __align__(1024) unsigned char smem[];
  auto& shared = *reinterpret_cast<Shared<Tr>*>(smem + Tr::kRing);
  const int thread = static_cast<int>(threadIdx.x);
  const bool boxes = Tr::kBoxes && p.b_boxes;

  // Guard
  device::pdl_begin(p.early);
  int token = -1;
  Block block;
  const auto meanwhile = [&] {
    if (thread == Tr::kThreads - 1) shared.begin(boxes);
    block = find_block(p, static_cast<int>(blockIdx.x));
  };
  if (!shared.run.find(p.groups, p.tiles, p.weights.num_adapters, &token, meanwhile)) {
    return device::pdl_leave();
  }
  const Tile tile = shared.run.tile;
  const SliceWeights w = weights_of(p, tile, block, true);
  if (w.rank == 0) return device::pdl_leave();
  if constexpr (Tr::kBoxes) {
    if (boxes && thread >= Tr::kConsumers) {
      device::fewer_registers<Tr::kProducerRegisters>();
      if (thread == Tr::kConsumers) {
        produce_boxes(p, shared, device::smem_address(smem), block, w.rank);
      }
      return;
    }
  }

  // Pointers
  const bool vector = device::is_aligned<TW, 16 / int{sizeof(TW)}>(static_cast<const TW*>(w.b)) &&
                      w.b_row_stride % (16 / int{sizeof(TW)}) == 0;
  if (thread < Tr::kTokens) {
    if (thread >= tile.count) token = -1;
    shared.y[thread] = token < 0 ? -1 : token * p.y.row_stride + block.y_col;
  }
  if (!boxes && thread < Tr::kTokens) {
    const int row = h_row(p.h, tile, first_position(p.groups, p.tiles), thread, token);
    const auto* h = static_cast<const typename Tr::TH*>(p.h.data) + block.slice * p.h.slice_stride;
    shared.rows[thread] = row < 0 ? nullptr : h + row * p.h.row_stride;
  }
  if (!boxes && thread < Tr::kCols) {
    const auto* b = static_cast<const TW*>(w.b) + (block.first + thread) * w.b_row_stride;
    shared.rows[Tr::kTokens + permuted(thread)] = thread < block.cols ? b : nullptr;
  }
  if (boxes) {
    device::named_barrier<1, Tr::kConsumers>();
  } else {
    __syncthreads();
  }

  // Load
  if (thread >= Tr::kConsumers) {
    device::fewer_registers<Tr::kProducerRegisters>();
    if constexpr (Tr::kRawH) {
      vector ? produce_raw_h<Tr, true>(shared, smem, w.rank)
             : produce_raw_h<Tr, false>(shared, smem, w.rank);
    } else if constexpr (Tr::kFloatWeights) {
      vector ? produce_parts<Tr, true>(shared, smem, w.rank)
             : produce_parts<Tr, false>(shared, smem, w.rank);
    } else if constexpr (Tr::kFloatH) {
      produce_rounded<Tr>(shared, smem, w.rank, vector);
    } else {
      produce<Tr>(shared, smem, w.rank, vector);
    }
    return;
  }

  // Compute
  device::more_registers<Tr::kConsumerRegisters>();
  T* const y = static_cast<T*>(p.y.data);
  if (p.add_inputs && p.early) {
    // y to L2, whatever the predecessor may still write there: two lines a row and two threads.
    const std::int64_t row = shared.y[thread / 2];
    const int col = thread % 2 * 64;
    if (row >= 0 && col < block.cols) device::prefetch_l2(y + row + col);
  }
  const int row0 = thread / 32 * 16 + thread % 32 / 4, col0 = thread % 4 * 8;
  constexpr int kGroups = Tr::kCols / kGroupCols;
  const auto load_y = [&](int half, uint4(&to)[kGroups]) {
    const std::int64_t at = shared.y[row0 + 8 * half];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int left = at < 0 || !p.add_inputs ? 0 : block.cols - g * kGroupCols - col0;
      const T* from = y + at + g * kGroupCols + col0;
      if constexpr (Tr::kVectorY) {
        device::load_if(left > 0, to[g], from);
      } else {
        to[g] = device::load_some<T, 8>(from, left).piece(0);
      }
    }
  };
  device::pdl_wait();
  uint4 early[2][kGroups] = {};
  if constexpr (Tr::kEarlyY) {
    load_y(0, early[0]);
    load_y(1, early[1]);
  }
  float acc[Tr::kCols / 2];
  if constexpr (Tr::kRawH) {
    consume_raw_h<Tr>(shared, smem, w.rank, acc);
  } else if constexpr (Tr::kFloatWeights) {
    consume_parts<Tr>(shared, device::smem_address(smem), w.rank, acc);
  } else {
    consume<Tr>(shared, device::smem_address(smem), w.rank, boxes, acc);
  }

  // Store
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::int64_t at = shared.y[row0 + 8 * half];
    if (at < 0) continue;
    uint4 late[kGroups] = {};
    if constexpr (!Tr::kEarlyY) load_y(half, late);
    uint4(&old)[kGroups] = Tr::kEarlyY ? early[half] : late;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int left = block.cols - g * kGroupCols - col0;
      if (left <= 0) continue;
      const auto& products = reinterpret_cast<const float(&)[4][4]>(acc[g * 16]);
      const uint4 out = add_products<T>(old[g], products, half, w.scale, p.add_inputs);
      T* to = y + at + g * kGroupCols + col0;
      if constexpr (Tr::kVectorY) {
        *reinterpret_cast<uint4*>(to) = out;
      } else {
        device::Vector<T, 8> some;
        some.set_piece(0, out);
        device::store_some(to, some, left);
      }
    }
  }
#endif
}

// ---- host ---------------------------------------------------------------------------------------

template <class Tr>
void launch_traits(const ExpandParams& p, Stream stream) {
  static_assert((kSmem<Tr> + 1024) * Tr::kMinCtas <= 228 * 1024, "the CTAs fit an SM");
  using Run = TileRun<Tr::kTiles, Tr::kThreads>;
  check(p.cols == Tr::kCols, "lora_expand: no wide kernel for ", p.cols, " columns");
  device::Launch l;
  l.grid = dim3(static_cast<unsigned>(p.block_start[p.weights.num_slices]), 1,
                static_cast<unsigned>(Run::most(p.tiles, p.weights.num_adapters)));
  l.threads = Tr::kThreads;
  l.smem = kSmem<Tr>;
  l.stream = stream;
  l.pdl = true;
  typename Tr::Params params{};
  static_cast<ExpandParams&>(params) = p;
  if constexpr (Tr::kBoxes) {
    params.b_boxes = p.b_boxes && p.h.by_position && p.tiles.first == 0;
    if (params.b_boxes) set_maps(params, Tr::kTokens);
  }
  device::launch<expand_wide_kernel<Tr>>("lora_expand", l, params);
}

}  // namespace mortar::lora::cuda::wide_expand
