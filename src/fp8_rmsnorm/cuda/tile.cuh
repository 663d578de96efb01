// SPDX-License-Identifier: Apache-2.0
// A tile of 128 x 128 as the kernels of q_t share it out: eight threads have 16 columns each
// of the same four rows.
#pragma once

#include <cstdint>

#include "device/byte_transpose.cuh"
#include "device/launch.cuh"
#include "fp8_rmsnorm/config.h"
#include "fp8_rmsnorm/cuda/elements.cuh"
#include "fp8_rmsnorm/cuda/kernels.cuh"

namespace mortar::fp8_rmsnorm::cuda {

inline constexpr int kTileRows = TilesPlan::kRows, kTileColumns = TilesPlan::kColumns;
inline constexpr int kTileThreads = TilesPlan::kThreads, kTileWarps = kTileThreads / 32;
inline constexpr int kThreadRows = 4, kThreadQuads = 4;  ///< quads of columns
static_assert(kTileRows == kTileThreads / 8 * kThreadRows, "eight threads share a row");
static_assert(kTileColumns == 8 * 4 * kThreadQuads, "a thread has 16 columns");

/// Column of a tile at which quad k of thread c of a row begins: pieces of a row lie side by side
/// over the eight threads, so that each access of a warp is whole sectors.
template <int kElements>
__device__ __forceinline__ int column_of(int c, int k) {
  constexpr int kQuads = kElements / 4;
  return k / kQuads * (8 * kElements) + c * kElements + k % kQuads * 4;
}

struct SharedTile {
  float weights[kTileColumns];              ///< quad k of thread c at 4 * (8 k + c)
  float inverse[kTileWarps][kTileColumns];  ///< likewise: of the columns, for each warp's 16 rows
  std::uint32_t scratch[32];
  unsigned char transposed[kTileColumns * kTileRows];
};

/// The grid of the plan, chained to the kernel before it.
inline device::Launch launch_of_tiles(const ForwardParams& p, Stream stream) {
  device::Launch launch;
  launch.threads = kTileThreads;
  launch.grid = dim3(static_cast<unsigned>(p.plan.tile_plan.grid));
  launch.stream = stream;
  launch.pdl = true;
  return launch;
}

}  // namespace mortar::fp8_rmsnorm::cuda
