// SPDX-License-Identifier: Apache-2.0
// Shapes of input_boxes.cu, its barriers, and how operands come to shared memory.
#pragma once

#include <algorithm>
#include <cstdint>

#include "device/barrier.cuh"
#include "device/launch.cuh"
#include "device/pdl.cuh"
#include "device/ring.cuh"
#include "device/swizzle.cuh"
#include "device/tensor_copy.cuh"
#include "lora/train/cuda/panel.cuh"
#include "lora/train/cuda/panel_boxes.cuh"

namespace mortar::lora::train::cuda::input_pass {

inline constexpr int kWarpgroup = 128;

/// A panel of 256 columns, of whose dx two warpgroups have a half each, or with dropout one all,
/// and of whose dA one all or two a half; of 128, of whose dA one has all; or of 64, of whose dx
/// two take boxes of rows in turns: by a thread block with an SM of its own or (k64Pairs) two of
/// them. kChains: of dA, of every other 32 rows, or one. kDroppers: warpgroups that draw; more than
/// five in all would leave each too few registers. kSegments: rows may be of several adapters.
template <int kRanks_, int kPlan, DxPanels kPanels, int kDroppers_ = 0, bool kSegments_ = false>
struct Shape {
  static constexpr bool kSegments = kSegments_;
  static constexpr int kRanks = kRanks_;
  static constexpr bool kDrops = kDroppers_ > 0, kPairs = kPanels == DxPanels::k64Pairs;
  static constexpr int kColumns = dx_columns(kPanels), kBlocks = kColumns / kBlockColumns;
  static constexpr bool kTurns = kBlocks == 1, kWhole = kPanels == DxPanels::k256;
  static constexpr PanelShape kSums = kPanelShapes[kPlan];
  static constexpr int kChains = kSums.groups;
  static constexpr int kSummers = kWhole && kRanks > 16 ? 2 : 1;  ///< warpgroups for dA
  static constexpr int kSumBlocks = kBlocks / kSummers;
  static constexpr int kStorers = kDrops ? 1 : 2;               ///< warpgroups for dx
  static constexpr int kOwn = kTurns ? 1 : kBlocks / kStorers;  ///< blocks of a warpgroup's dx
  static constexpr int kAtOnce = kDrops ? 1 : kOwn;             ///< that fit its registers
  static constexpr int kBuffers = kWhole || kTurns ? 1 : 2;     ///< of these on their way out
  static constexpr int kDroppers = kDroppers_;
  static constexpr int kThreads = (kSummers + kStorers + kDroppers) * kWarpgroup + 32;
  static constexpr int kRegisters = kTurns && !kSegments ? 64 : 96;
  static constexpr int kStageBytes = kBlocks * kBlockBytes;
  /// ds of a step takes some 3 us to come from L2 while DRAM is busy: where a step is short, as
  /// many stages as x has.
  static constexpr int kStages =
      kWhole ? (kDrops || kSummers > 1 ? 4 : 5) : (kPairs ? 6 : (kTurns ? 12 : 7));
  static constexpr int kNarrowStages = kWhole ? 3 : (kPairs ? 4 : kStages);
  static constexpr int kReaders = (kTurns ? 2 : kSummers + kStorers) * kWarpgroup / 32;  ///< of ds
  static constexpr int kWeightBytes = kRanks * device::kSwizzleBytes;  ///< of 64 columns
  static constexpr int kMaskBytes = kBlockRows * kColumns / 8;
  static constexpr int kNarrowAt = kStages * kStageBytes, kNarrowBytes = kBlockBytes;
  static constexpr int kStoreAt = kNarrowAt + kNarrowStages * kNarrowBytes;
  static constexpr int kWeightsAt = kStoreAt + kStorers * kBuffers * kOwn * kBlockBytes;
  static constexpr int kMasksAt = kWeightsAt + kBlocks * kWeightBytes;
  static constexpr int kSmem = kMasksAt + (kDrops ? kStages * kMaskBytes : 0);
  static_assert(kChains == 1 || (kChains == 2 && kSums.rows == kBlockRows / 2));
  static_assert(kRanks <= kSums.ranks && (kWhole || !kDrops));
};

struct InputBoxParams {
  PanelParams panel;
  CUtensorMap wide, narrow, out;
  Matrix dx;
  Places places;  ///< of several adapters

  /// Copies ds of a step.
  template <class S>
  __device__ __forceinline__ void copy_narrow(std::uint32_t to, int first, int row,
                                              device::Mbarrier* full) const {
    device::copy_box(to, narrow, first, row, full);
  }
};

template <class S>
struct Barriers {
  device::Mbarrier full[S::kStages], empty[S::kStages], dropped[S::kStages];
  device::Mbarrier narrow_full[S::kNarrowStages], narrow_empty[S::kNarrowStages];
  device::Mbarrier cleared;  ///< rows of other adapters, in the chunk's last box

  /// By one thread; a barrier must follow. `again`: they have been used.
  __device__ __forceinline__ void init(bool again) {
    if (again) {
      for (device::Mbarrier* b = full; b <= &cleared; ++b) forget(*b);
    }
    for (device::Mbarrier& b : full) b.init(1);
    for (device::Mbarrier& b : dropped) b.init(std::max(S::kDroppers, 1) * kWarpgroup);
    for (device::Mbarrier& b : narrow_full) b.init(1);
    for (device::Mbarrier& b : empty)
      b.init(S::kSummers * kWarpgroup / 32 + (S::kDrops ? S::kStorers * kWarpgroup : 0));
    for (device::Mbarrier& b : narrow_empty) b.init(S::kReaders);
    cleared.init(S::kSummers * kWarpgroup);
    device::Mbarrier::fence_init();
  }
};

/// A's columns of the panel as the second operand of dx: rows of 64 columns for each rank, zeros
/// past the rank and the columns.
template <class S, int kLoaders>
__device__ __forceinline__ void load_weights(const PanelPart<>& part, char* to) {
  constexpr int kPieces = S::kColumns / kPiece, kItems = S::kRanks * kPieces;
#pragma unroll
  for (int i = 0; i < (kItems + kLoaders - 1) / kLoaders; ++i) {
    const int item = i * kLoaders + thread_anew();
    if (item >= kItems) break;
    const int at_rank = item / kPieces, piece = item % kPieces;
    const std::int64_t c = part.column + piece * kPiece;
    const HiddenColumns& hidden = part.p.hidden;
    const int slice = slice_of(hidden, 0, hidden.num_slices, min(at_rank, hidden.width - 1));
    const PairEntry pair = part.p.pairs.get(part.rows.adapter, slice);
    const int rank = at_rank - hidden.first[slice];
    const int left = rank < pair.rank ? static_cast<int>(part.own->columns - c) : 0;
    const auto* from = static_cast<const unsigned short*>(pair.a.data);
    const bool vectors = pair.a.col_stride == 1 && pair.a.row_stride % kPiece == 0 &&
                         reinterpret_cast<std::uintptr_t>(from) % 16 == 0;
    union Eight {
      uint4 words;
      unsigned short values[kPiece];
    } v{};
    const auto* at = from + rank * pair.a.row_stride + c * pair.a.col_stride;
    if (vectors && left >= kPiece) {
      v.words = __ldcg(reinterpret_cast<const uint4*>(at));
    } else {
#pragma unroll
      for (int k = 0; k < kPiece; ++k) {
        if (k < left) v.values[k] = __ldcg(at + k * pair.a.col_stride);
      }
    }
    *reinterpret_cast<uint4*>(to + piece / kRowPieces * S::kWeightBytes +
                              device::swizzled(at_rank, piece % kRowPieces)) = v.words;
  }
}

/// Copies all stages; by one thread. x is of no kernel of this call.
template <class S, class P>
__device__ __forceinline__ void copy_stages(const P& p, const PanelPart<>& part, std::uint32_t smem,
                                            Barriers<S>& barriers) {
  const int blocks = (part.rows.count + kBlockRows - 1) / kBlockRows;
  const int first_row = static_cast<int>(part.rows.start);
  device::RingCursor<S::kStages> at;
  device::RingCursor<S::kNarrowStages> narrow;
  const auto copy_rows = [&](int i) {
    if (i >= blocks) return;
    device::Mbarrier* full = barriers.full + at.stage;
    barriers.empty[at.stage].wait((at.round & 1) ^ 1);
    full->arrive_and_expect(S::kStageBytes);
#pragma unroll
    for (int block = 0; block < S::kBlocks; ++block) {
      device::copy_box_once(smem + at.stage * S::kStageBytes + block * kBlockBytes, p.wide,
                            static_cast<int>(part.column) + block * kBlockColumns,
                            first_row + i * kBlockRows, full);
    }
    at.next();
  };
  const auto copy_ranks = [&](int i) {
    if (i >= blocks) return;
    device::Mbarrier* full = barriers.narrow_full + narrow.stage;
    barriers.narrow_empty[narrow.stage].wait((narrow.round & 1) ^ 1);
    full->arrive_and_expect(S::kNarrowBytes);
    p.template copy_narrow<S>(smem + S::kNarrowAt + narrow.stage * S::kNarrowBytes,
                              part.own->first_hidden, first_row + i * kBlockRows, full);
    narrow.next();
  };
#pragma unroll 1
  for (int i = 0; i < S::kStages; ++i) copy_rows(i);
  device::pdl_begin(false);
  // ds of the next steps is on its way before a stage of x is waited for: it takes some 3 us.
#pragma unroll 1
  for (int i = 0; i < S::kNarrowStages; ++i) copy_ranks(i);
#pragma unroll 1
  for (int i = 0; i < blocks; ++i) {
    copy_rows(i + S::kStages);
    copy_ranks(i + S::kNarrowStages);
  }
}

/// Sets what every kernel of this pass has of its parameters: the panels of p, x and dx.
template <class S, class P>
void set_params(P* params, PanelParams p, const Matrix& dx, DType dtype) {
  static_assert(sizeof(P) <= 4096, "parameters of a launch");
  PanelOperand& own = p.operands[0];
  const std::int64_t rows = p.rows.num_rows, columns = own.columns;
  own.panels = static_cast<int>(ceil_div<std::int64_t>(columns, S::kColumns));
  p.groups = 1;
  params->panel = p;
  device::set_tensor_map(params->wide, dtype, own.wide.data, columns, rows, own.wide.row_stride,
                         kBlockRows);
  device::set_tensor_map(params->out, dtype, dx.data, columns, rows, dx.row_stride, kBlockRows);
}

/// The launch of a thread block for each panel and chunk of rows.
template <class S>
device::Launch launch_of(const PanelParams& p, Stream stream) {
  device::Launch l;
  l.grid = panel_grid(p);
  l.threads = S::kThreads;
  l.smem = S::kSmem;
  l.stream = stream;
  l.pdl = true;
  return l;
}

}  // namespace mortar::lora::train::cuda::input_pass
