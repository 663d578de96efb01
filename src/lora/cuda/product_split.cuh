// SPDX-License-Identifier: Apache-2.0
// What products share whose clusters have one tile of rows and share the depth (product_split.cu,
// product_forward.cu): how stages come, and how sums pass from thread block to thread block.
#pragma once

#include "device/cluster.cuh"
#include "device/tensor_copy.cuh"
#include "device/wgmma.cuh"
#include "lora/cuda/product_shape.cuh"

namespace mortar::lora::cuda::product {

/// Copies the stages of a unit; by one thread. kOnce: nobody reads a again. `rows`: of a's box.
template <class S, bool kOnce = false>
__device__ __forceinline__ void produce(const Params& p, Ring<S>& ring, const Unit<S>& unit,
                                        int rows = S::kRows) {
  const CUtensorMap& b = p.b[unit.first_b];
  for (int i = 0; i < unit.steps; ++i, ring.at.next()) {
    device::Mbarrier* full = ring.full + ring.at.stage;
    ring.empty[ring.at.stage].wait((ring.at.round & 1) ^ 1);
    full->arrive_and_expect(rows * device::kSwizzleBytes +
                            S::kColumns / S::kMmaColumns * S::kMmaBytes);
    const int depth = (unit.first_step + i) * kProductStep;
    kOnce ? device::copy_box_once(ring.stage(), p.a[0], depth, unit.row, full)
          : device::copy_box(ring.stage(), p.a[0], depth, unit.row, full);
    const std::uint32_t to = ring.stage() + S::kRowsBytes;
    if constexpr (S::kB == Major::kDepth) {
      device::copy_box(to, b, depth, unit.column, full);
    } else {
#pragma unroll
      for (int first = 0; first < S::kColumns; first += S::kMmaColumns) {
#pragma unroll
        for (int block = 0; block < S::kMmaBytes / kBlockBytes; ++block) {
          device::copy_box(to + first / S::kMmaColumns * S::kMmaBytes + block * kBlockBytes, b,
                           unit.column + first + 64 * block, depth, full);
        }
      }
    }
  }
}

/// A thread's sums, to the thread blocks whose rows they are of: two neighbouring lanes make 16
/// bytes of either half of the MMA's rows. `rows`: of a tile, which the thread blocks share.
template <class S>
__device__ __forceinline__ void send_sums(int part, int parts, float* sums,
                                          const float (&sum)[S::kSums], device::Mbarrier* received,
                                          int rows = S::kRows) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const bool upper = lane % 2 == 1;
  const int warp = thread / 32 % (S::kRows / 16), column = thread / 32 / (S::kRows / 16);
  const int row = warp * 16 + lane / 4 + (upper ? 8 : 0), own_rows = rows / parts;
  const int owner = row / own_rows;
  float* to = sums + (part * own_rows + row % own_rows) * S::kColumns + column * S::kMmaColumns +
              lane % 4 / 2 * 4;
#pragma unroll
  for (int j = 0; j < S::kSums / 4; ++j) {
    float v[4] = {sum[4 * j], sum[4 * j + 1], sum[4 * j + 2], sum[4 * j + 3]};
    device::wgmma_keep(v);  // else all sums are words from the start, copied beside MMAs in flight
    const float own0 = upper ? v[2] : v[0], own1 = upper ? v[3] : v[1];
    const float other0 = __shfl_xor_sync(0xffffffffu, upper ? v[0] : v[2], 1);
    const float other1 = __shfl_xor_sync(0xffffffffu, upper ? v[1] : v[3], 1);
    const float4 four =
        upper ? make_float4(other0, other1, own0, own1) : make_float4(own0, own1, other0, other1);
    if (rows == S::kRows || row < rows) {
      device::send_to_cluster(to + 8 * j, four, received, owner);
    }
  }
}

}  // namespace mortar::lora::cuda::product
