// SPDX-License-Identifier: Apache-2.0
// Shapes of panel_boxes.cu, its barriers, and how operands come to shared memory.
#pragma once

#include <cstdint>

#include "device/barrier.cuh"
#include "device/ring.cuh"
#include "device/swizzle.cuh"
#include "device/tensor_copy.cuh"
#include "lora/train/cuda/panel.cuh"
#include "lora/train/cuda/panel_boxes.cuh"

namespace mortar::lora::train::cuda::panel_pass {

inline constexpr int kWarpgroup = 128;
inline constexpr int kHalves = 2;                                    ///< of a panel
inline constexpr int kBoxThreads = (kHalves + 1) * kWarpgroup + 32;  ///< dB, ds, and the copies
inline constexpr int kBoxRows = 32;
inline constexpr int kMostBoxOperands = 4;

template <int kShape>
struct Boxes {
  static constexpr PanelShape kAll = kPanelShapes[kShape];
  static constexpr int kRanks = kAll.ranks, kColumns = kAll.columns;
  /// With so few ds_kernel fits an SM beside a thread block, and has looked up what it needs when
  /// the last one ends.
  static constexpr int kThreads = kBoxThreads, kRegisters = 104;
  /// Chains of dB: of every other 16 rows, or of all.
  static constexpr int kChains = kAll.groups;
  static constexpr int kBlocks = kColumns / kHalves / kBlockColumns;  ///< of a stage
  static constexpr int kStageBytes = kBlocks * kBlockBytes, kStages = 5, kNarrowStages = 3;
  static constexpr int kNarrowAt = kStages * kStageBytes;
  static constexpr int kWeightsAt = kNarrowAt + kNarrowStages * kBlockBytes;
  static constexpr int kWeightBytes = kRanks * device::kSwizzleBytes;  ///< of 64 columns
  static constexpr int kSmem = kWeightsAt + kColumns / kBlockColumns * kWeightBytes;
  static constexpr int kAtOnce = 64 / kRanks;  ///< chains of ds that fit the registers
  static_assert(kAll.makes_ds && kColumns == kPanelWarps * kBlockColumns && kBlocks % kAtOnce == 0);
  static_assert(kChains == 1 || (kChains == 2 && kAll.rows == 16));
};

struct PanelBoxParams {
  PanelParams panel;
  CUtensorMap wide[kMostBoxOperands], narrow;
  Places places;  ///< of several adapters
};

template <class B>
struct Barriers {
  device::Mbarrier full[B::kStages], empty[B::kStages];
  device::Mbarrier narrow_full[B::kNarrowStages], narrow_empty[B::kNarrowStages];
  device::Mbarrier cleared;  ///< rows of other adapters, in the chunk's last box

  /// By one thread; a barrier must follow. `again`: they have been used.
  __device__ __forceinline__ void init(bool again) {
    if (again) {
      for (device::Mbarrier* b = full; b <= &cleared; ++b) forget(*b);
    }
    for (device::Mbarrier& b : full) b.init(1);
    for (device::Mbarrier& b : narrow_full) b.init(1);
    for (device::Mbarrier& b : empty) b.init(2 * kWarpgroup / 32);
    for (device::Mbarrier& b : narrow_empty) b.init(kHalves * kWarpgroup / 32);
    cleared.init(kHalves * kWarpgroup);
    device::Mbarrier::fence_init();
  }
};

/// B of the panel's columns as the second operand of ds: rows of 64 columns for each rank, zeros
/// past the rank and the columns. All loads are in flight together. kFours: rows that are no whole
/// pieces may be whole halves of them.
template <class B, int kLoaders, bool kFours>
__device__ __forceinline__ void load_weights(const PanelPart<>& part, char* to) {
  const PanelOperand& own = *part.own;
  const PairEntry pair = part.p.pairs.get(part.rows.adapter, own.slice);
  const auto* from = static_cast<const unsigned short*>(pair.b.data);
  const int thread = thread_anew();
  const bool vectors = pair.b.col_stride == 1 && pair.b.row_stride % kPiece == 0 &&
                       reinterpret_cast<std::uintptr_t>(from) % 16 == 0;
  const bool fours = kFours && pair.b.col_stride == 1 && pair.b.row_stride % 4 == 0 &&
                     pair.rank % 4 == 0 && reinterpret_cast<std::uintptr_t>(from) % 8 == 0;
  constexpr int kOctets = B::kRanks / 8, kItems = B::kColumns * kOctets;
  constexpr int kRounds = (kItems + kLoaders - 1) / kLoaders;
  union Eight {
    uint4 words;
    uint2 fours[2];
    unsigned short values[8];
  } v[kRounds];
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const int item = i * kLoaders + thread;
    const int octet = item % kOctets;
    const std::int64_t c = part.column + item / kOctets;
    const int ranks = item < kItems && c < own.columns ? pair.rank - 8 * octet : 0;
    v[i].words = make_uint4(0, 0, 0, 0);
    const auto* at = from + c * pair.b.row_stride + 8 * octet * pair.b.col_stride;
    if (vectors && ranks >= 8) {
      v[i].words = __ldcg(reinterpret_cast<const uint4*>(at));
    } else if (fours) {
      const auto* four = reinterpret_cast<const uint2*>(at);
      if (ranks > 0) v[i].fours[0] = __ldcg(four);
      if (ranks > 4) v[i].fours[1] = __ldcg(four + 1);
    } else {
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        if (k < ranks) v[i].values[k] = __ldcg(at + k * pair.b.col_stride);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    const int item = i * kLoaders + thread;
    if (item >= kItems) break;
    const int octet = item % kOctets, c = item / kOctets;
    char* block = to + c / kBlockColumns * B::kWeightBytes + c % 8 * 2;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      *reinterpret_cast<unsigned short*>(
          block + device::swizzled(8 * octet + k, c % kBlockColumns / 8)) = v[i].values[k];
    }
  }
}

/// Copies all stages; by one thread.
template <class B>
__device__ __forceinline__ void copy_stages(const PanelBoxParams& p, const PanelPart<>& part,
                                            std::uint32_t smem, Barriers<B>& barriers) {
  const CUtensorMap& wide = p.wide[part.own - p.panel.operands];
  device::RingCursor<B::kStages> at;
  device::RingCursor<B::kNarrowStages> narrow;
  for (int first = 0; first < part.rows.count; first += kBlockRows, narrow.next()) {
    const int row = static_cast<int>(part.rows.start) + first;
    const int boxes = part.rows.count - first > kBoxRows ? 2 : 1;
#pragma unroll 1
    for (int half = 0; half < kHalves; ++half, at.next()) {
      device::Mbarrier* full = barriers.full + at.stage;
      barriers.empty[at.stage].wait((at.round & 1) ^ 1);
      full->arrive_and_expect(boxes * (B::kStageBytes / 2));
#pragma unroll
      for (int block = 0; block < B::kBlocks; ++block) {
        const std::uint32_t to = smem + at.stage * B::kStageBytes + block * kBlockBytes;
        const int column =
            static_cast<int>(part.column) + (half * B::kBlocks + block) * kBlockColumns;
        // dy for the last time, so that partial sums stay in L2 until they are added.
        for (int box = 0; box < boxes; ++box) {
          device::copy_box_once(to + box * (kBlockBytes / 2), wide, column, row + box * kBoxRows,
                                full);
        }
      }
      if (half > 0) continue;
      barriers.narrow_empty[narrow.stage].wait((narrow.round & 1) ^ 1);
      barriers.narrow_full[narrow.stage].arrive_and_expect(boxes * (kBlockBytes / 2));
      const std::uint32_t to = smem + B::kNarrowAt + narrow.stage * kBlockBytes;
      for (int box = 0; box < boxes; ++box) {
        device::copy_box(to + box * (kBlockBytes / 2), p.narrow, part.own->first_hidden,
                         row + box * kBoxRows, barriers.narrow_full + narrow.stage);
      }
    }
  }
}

/// Asks in L2 for what chunks may begin with, as if all were of one size: how they are cut may be
/// in the making yet.
template <class B>
__device__ __forceinline__ void ask_ahead(const PanelBoxParams& p) {
  const PanelParams& all = p.panel;
  const int at_once = max(static_cast<int>(gridDim.x) / p.places.panels, 1);
  int panel = static_cast<int>(blockIdx.x) % p.places.panels, o = 0;
  const int part = static_cast<int>(blockIdx.x) / p.places.panels;
  while (o + 1 < all.num_operands && panel >= all.operands[o + 1].first_panel) ++o;
  const PanelOperand& own = all.operands[o];
  const std::int64_t column = std::int64_t{panel - own.first_panel} * B::kColumns;
  const std::int64_t first = part * all.rows.num_rows / at_once;
  constexpr int kLines = B::kColumns / kBlockColumns, kRows = 2 * kBlockRows;
  const int rows = static_cast<int>(min(std::int64_t{kRows}, all.rows.num_rows - first));
  const auto* from =
      static_cast<const unsigned short*>(own.wide.data) + first * own.wide.row_stride + column;
  if (threadIdx.x == 0) device::prefetch_l2(all.rows.offsets);
  for (int i = static_cast<int>(threadIdx.x); i < rows * kLines; i += kBoxThreads) {
    const int c = i % kLines * kBlockColumns;
    if (column + c < own.columns) {
      device::prefetch_l2(from + i / kLines * own.wide.row_stride + c);
    }
  }
  if (all.pairs.entries != nullptr) return;
  const PairEntry pair = all.pairs.get(part % all.rows.num_adapters, own.slice);
  for (int c = static_cast<int>(threadIdx.x); c < B::kColumns; c += kBoxThreads) {
    if (pair.rank == 0 || column + c >= own.columns) break;
    device::prefetch_l2(static_cast<const unsigned short*>(pair.b.data) +
                        (column + c) * pair.b.row_stride);
  }
}

/// Whether rows of another adapter are among the last 16 that are multiplied: zeros then, for which
/// all three warpgroups wait.
__device__ __forceinline__ bool clears_rows(const PanelPart<>& part, int first) {
  return (part.rows.count - first) % 16 != 0 && ends_in_box(part, first);
}

}  // namespace mortar::lora::train::cuda::panel_pass
