// SPDX-License-Identifier: Apache-2.0
// The thread blocks of the kernels that sum over rows of LoRA training: their panels of columns,
// stages and shared memory.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "lora/train/cuda/config.h"

namespace mortar::lora::train::cuda {

/// A kernel of panel.cu.
struct PanelShape {
  int ranks;      ///< rank columns of a thread block
  bool makes_ds;  ///< from the same tile of dy
  int columns;    ///< of a panel
  int rows;       ///< of a stage
  int stages;
  int groups;  ///< of eight warps, each with a ring of stages of its own
  /// Its share of the DRAM's rate, and the microseconds before its first tile and after its last:
  /// measured on one H200.
  double rate, fixed_us;
};
/// Rank columns of a thread block of so many, where a rank has several: whole octets of ranks.
constexpr int whole_octets(int ranks, int copies) {
  return copies == 1 ? ranks : ranks / (8 * copies) * (8 * copies);
}
inline constexpr int kPanelWarps = 8;  ///< that share a panel's columns, in panel.cu

/// Bytes of 64 columns of a stage, and of a stage: a panel, and 64 columns for the narrow operand.
constexpr int block_bytes(const PanelShape& s) { return s.rows * 2 * kBlockColumns; }
constexpr int stage_bytes(const PanelShape& s) {
  return (s.columns / kBlockColumns + 1) * block_bytes(s);
}
/// Floats of a row of a warp's part of ds: 8 more than there are ranks, so that lanes of
/// neighbouring rows meet no bank twice.
constexpr int ds_stride(const PanelShape& s) { return s.ranks + 8; }
/// Floats of a group's parts of one step.
constexpr int ds_floats(const PanelShape& s) {
  return s.makes_ds ? kPanelWarps * s.rows * ds_stride(s) : 0;
}
/// Shared memory of a thread block of panel.cu.
constexpr int panel_smem(const PanelShape& s) {
  return s.groups *
         (s.stages * stage_bytes(s) + 2 * ds_floats(s) * static_cast<int>(sizeof(float)));
}

/// Threads of a thread block of panel.cu, and its registers. Without ds, up to 16 ranks, it fits an
/// SM beside a thread block of the expand before it.
constexpr int panel_threads(const PanelShape& s) { return s.groups * 32 * kPanelWarps; }
constexpr int panel_registers(const PanelShape& s) {
  return s.ranks == 16 && !s.makes_ds ? 80 : std::min(65536 / panel_threads(s), 255);
}

/// SMs of an H200. Plans are made for so many on every device, because summation trees follow from
/// them.
inline constexpr std::int64_t kPanelSms = 132;

/// The first of equal cost is taken.
inline constexpr std::array kPanelShapes = {
    PanelShape{16, false, 256, 32, 4, 2, 0.85, 2},
    PanelShape{32, false, 256, 32, 5, 2, 0.6, 2.5},
    PanelShape{64, false, 256, 32, 5, 2, 0.5, 3},
    PanelShape{16, true, 512, 16, 4, 2, 0.65, 7},
    PanelShape{32, true, 512, 32, 4, 1, 0.5, 10},
    // One chain over a chunk's rows, as product.cu has it: the same bits for operands that it does
    // not take.
    PanelShape{64, false, 256, 32, 4, 1, 0.5, 3},
    // The same sums on devices with less shared memory.
    PanelShape{16, false, 256, 32, 2, 2, 0.85, 2},
    PanelShape{32, false, 256, 32, 2, 2, 0.6, 2.5},
    PanelShape{64, false, 256, 32, 2, 2, 0.5, 3},
};
/// Those that input_boxes.cu and panel_boxes.cu have too, with ds.
inline constexpr int kInputPanels = 0, kInputPanels32 = 1, kDsPanels16 = 3, kDsPanels32 = 4,
                     kChainPanels = 5;

/// Panels of input_boxes.cu, by their columns; none: dx apart. Thread blocks have an SM each, but
/// k64Pairs.
enum class DxPanels { kNone, k256, k128, k64, k64Pairs };
constexpr int dx_columns(DxPanels panels) {
  return panels == DxPanels::k256 ? 256 : (panels == DxPanels::k128 ? 128 : 64);
}

}  // namespace mortar::lora::train::cuda
