// SPDX-License-Identifier: Apache-2.0
// Sums over rows by the copy engine and warpgroup MMAs of sm_90a, in one pass with another product
// of the same rows: dB with ds (panel_boxes.cu), and dA with dx (input_boxes.cu).
#pragma once

#include <algorithm>
#include <cstdint>

#include "device/barrier.cuh"
#include "device/pdl.cuh"
#include "device/swizzle.cuh"
#include "device/thread_anew.cuh"
#include "lora/train/cuda/panel.cuh"

namespace mortar::lora::train::cuda {

/// Rows of a step, in boxes of 64 columns.
inline constexpr int kBlockRows = 64;
inline constexpr int kBlockBytes = kBlockRows * device::kSwizzleBytes;

/// Whether the chunk ends within the step from place `first` on, and rows of another adapter
/// follow, which the copy engine has brought, too.
__device__ __forceinline__ bool ends_in_box(const PanelPart<>& part, int first) {
  return part.rows.count - first < kBlockRows &&
         part.rows.start + part.rows.count < part.p.rows.num_rows;
}

/// The end of a barrier that is to begin anew.
__device__ __forceinline__ void forget(device::Mbarrier& barrier) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(device::smem_address(&barrier.word))
               : "memory");
}

using device::thread_anew;

/// Zeros for rows `begin` to `end` - 1 of kBlocks blocks; by a warpgroup.
template <int kBlocks>
__device__ __forceinline__ void clear_rows(std::uint32_t blocks, int begin, int end) {
  const std::uint32_t last = blocks + end * device::kSwizzleBytes;
#pragma unroll 1
  for (std::uint32_t at = blocks + begin * device::kSwizzleBytes + thread_anew() % 128 * 16;
       at < last; at += 128 * 16) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at + block * kBlockBytes),
                   "r"(0)
                   : "memory");
    }
  }
}

/// Places of panel_grid(), which thread blocks take one after another.
struct Places {
  int panels, all;
};

/// As many thread blocks as run at once: of several adapters there are more places than chunks, by
/// how many only the device knows, and blocks without a chunk would wait for room on an SM (eight
/// ragged adapters on an H200: 65.1 us a backward, and 60.4).
inline dim3 segment_grid(const PanelParams& p, Places* places) {
  const dim3 all = panel_grid(p);
  *places = {static_cast<int>(all.x), static_cast<int>(all.x * all.y)};
  const int sms = device::current_device().num_sms;
  return dim3(p.rows.offsets == nullptr ? places->all : std::min(places->all, sms));
}

/// Calls run(panel, tile, round) for the places of a thread block, until it gives false, which
/// all of its threads see. `shared`: in shared memory.
template <class Run>
__device__ __forceinline__ void walk_places(const PanelParams& p, const Places& places, int* shared,
                                            const Run& run) {
  const auto count_places = [&] {
    int tiles = 0;
    const RowTile first = lane_group(p.rows);
    find_group(p.rows, rows_of(p.rows, p.chunk, false, first), first, &tiles,
               [](const RowTile&, int, int) { return false; });
    *shared = tiles * places.panels;
  };
#pragma unroll 1
  for (int place = static_cast<int>(blockIdx.x), round = 0;; place += gridDim.x, ++round) {
    if (!run(place % places.panels, place / places.panels, round)) break;
    const int next = place + static_cast<int>(gridDim.x);
    // By the warp that copies, which has nothing left to do before the others have.
    if (round == 0 && next < places.all && threadIdx.x >= blockDim.x - 32) count_places();
    __syncthreads();  // after the last place as well: no thread ends while others still meet
    if (next >= places.all || next >= *shared) break;
  }
  device::pdl_leave();
}

/// Whether boxes of neighbouring rows are worth copying: a box at the end of an adapter's brings
/// half of its rows for nothing, on average.
inline bool fills_boxes(const RowGroups& rows) {
  if (rows.groups != nullptr) return false;
  return rows.offsets == nullptr ||
         rows.num_rows >= std::int64_t{2} * kBlockRows * rows.num_adapters;
}

/// The sums of panel.cu where it makes ds too, of neighbouring rows; false for any other.
bool panel_boxes(const PanelParams& p, Policy policy, Stream stream);
/// The sums of x in panels of kInputPanels, kInputPanels32 or kChainPanels, and dx, all of
/// neighbouring rows that the copy engine takes.
void input_boxes(const PanelParams& p, const Matrix& dx, DxPanels panels, Policy policy,
                 Stream stream);

}  // namespace mortar::lora::train::cuda
