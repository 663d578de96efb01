// SPDX-License-Identifier: Apache-2.0
// What products share whose clusters have one tile of rows and share the depth (product_split.cu,
// product_forward.cu): how stages come, and how sums pass from thread block to thread block.
#pragma once

#include "device/bulk_copy.cuh"
#include "device/cluster.cuh"
#include "device/convert.cuh"
#include "device/leaf_sums.cuh"
#include "device/pdl.cuh"
#include "device/tensor_copy.cuh"
#include "device/wgmma.cuh"
#include "lora/cuda/product_shape.cuh"

namespace mortar::lora::cuda::product {

/// Copies the stages of a unit; by one thread. kOnce: nobody reads a again. kBoxes: of a's rows,
/// for 64 rows of MMAs each, or one for all. `ahead`: the kernel before writes b alone, and has
/// waited for all before it, so that a's boxes of all stages are asked for before it has ended.
template <class S, bool kOnce = false, int kBoxes = 1>
__device__ __forceinline__ void produce(const Params& p, Ring<S>& ring, const Unit<S>& unit,
                                        bool ahead = false) {
  const CUtensorMap& b = p.b[unit.first_b];
  const auto copy_rows = [&](int i, std::uint32_t stage, device::Mbarrier* full) {
    full->arrive_and_expect(p.tile_rows * device::kSwizzleBytes +
                            S::kColumns / S::kMmaColumns * S::kMmaBytes);
    const int depth = (unit.first_step + i) * kProductStep;
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      const std::uint32_t at = stage + box * kBlockBytes;
      const int row = unit.row + box * (p.tile_rows / kBoxes);
      kOnce ? device::copy_box_once(at, p.a[0], depth, row, full)
            : device::copy_box(at, p.a[0], depth, row, full);
    }
  };
  if (ahead) {
    for (int i = 0; i < min(S::kStages, unit.steps); ++i) {
      copy_rows(i, ring.stages + i * S::kStageBytes, ring.full + i);
    }
    device::pdl_wait();
  }
  for (int i = 0; i < unit.steps; ++i, ring.at.next()) {
    device::Mbarrier* full = ring.full + ring.at.stage;
    if (!ahead || i >= S::kStages) {
      ring.empty[ring.at.stage].wait((ring.at.round & 1) ^ 1);
      copy_rows(i, ring.stage(), full);
    }
    const int depth = (unit.first_step + i) * kProductStep;
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

/// Copies `bytes` bytes of this thread block's shared memory to where thread block `rank` of the
/// cluster has what this one has at `to`, by the copy engine, and counts them at its barrier: a few
/// packets in place of one for every 16 bytes that threads send. All are multiples of 16. One
/// thread asks, after those that wrote have passed a fence_async_proxy() and a barrier.
__device__ __forceinline__ void copy_to_cluster(float* to, const float* from, int bytes,
                                                device::Mbarrier* barrier, int rank) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .b32 there, bar;\n"
      "mapa.shared::cluster.u32 there, %0, %4;\n"
      "mapa.shared::cluster.u32 bar, %2, %4;\n"
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [there], [%1], %3, "
      "[bar];\n"
      "}\n" ::"r"(device::smem_address(to)),
      "r"(device::smem_address(from)), "r"(device::smem_address(&barrier->word)), "r"(bytes),
      "r"(rank)
      : "memory");
#endif
}

/// Waits for all threads that multiply.
__device__ __forceinline__ void meet_consumers() { device::named_barrier<3, kConsumers>(); }

/// Of an MMA tile of 8 columns a thread has pairs of a row and of one eight rows further: four
/// neighbours of the second (`upper`: odd lanes) or of the first, half of which its neighbour had.
__device__ __forceinline__ float4 trade_pairs(const float* sum, bool upper) {
  float v[4] = {sum[0], sum[1], sum[2], sum[3]};
  device::wgmma_keep(v);  // else all sums are words from the start, copied beside MMAs in flight
  const float own0 = upper ? v[2] : v[0], own1 = upper ? v[3] : v[1];
  const float other0 = __shfl_xor_sync(0xffffffffu, upper ? v[0] : v[2], 1);
  const float other1 = __shfl_xor_sync(0xffffffffu, upper ? v[1] : v[3], 1);
  return make_float4(upper ? other0 : own0, upper ? other1 : own1, upper ? own0 : other0,
                     upper ? own1 : other1);
}

/// A thread's sums, to the thread blocks whose rows they are of, [part][own row] there: two
/// neighbouring lanes make 16 bytes of either half of an MMA's rows. `rows`: of a tile, which the
/// thread blocks share; each 64 rows of an MMA have as many of them. `octets`: of columns that
/// somebody reads; a packet takes some 1.8 clocks.
template <class S>
__device__ __forceinline__ void send_sums(int part, int parts, float* sums,
                                          const float (&sum)[S::kSums], device::Mbarrier* received,
                                          int rows = S::kRows, int octets = S::kColumns / 8) {
  constexpr int kWarps = S::kRows / 16, kHalves = S::kRows / 64;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const bool upper = lane % 2 == 1;
  const int warp = thread / 32 % kWarps, column = thread / 32 / kWarps;
  const int own_rows = rows / parts, most = rows / kHalves;
  const int half_row = warp % 4 * 16 + lane / 4 + (upper ? 8 : 0);
  const int row = warp / 4 * most + half_row, owner = row / own_rows;
  float* to = sums + (part * own_rows + row % own_rows) * S::kSumsPitch + column * S::kMmaColumns +
              lane % 4 / 2 * 4;
#pragma unroll
  for (int j = 0; j < S::kSums / 4; ++j) {
    if (column * (S::kMmaColumns / 8) + j >= octets) break;
    const float4 four = trade_pairs(sum + 4 * j, upper);
    if (rows == S::kRows || half_row < most) {
      device::send_to_cluster(to + 8 * j, four, received, owner);
    }
  }
}

/// The same of more than 64 rows, whose sums pass `staged`, where nobody reads any more. (2048 x
/// 5120 x 13824 and rank 32 on an H200: 27.3 to 25.5 us. Of 40 rows and 32 columns a barrier and
/// the engine's latency take longer than packets of 16 bytes.)
template <class S>
__device__ __forceinline__ void copy_sums(int part, int parts, float* sums, float* staged,
                                          const float (&sum)[S::kSums], device::Mbarrier* received,
                                          int rows) {
  constexpr int kWarps = S::kRows / 16, kHalves = S::kRows / 64;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int warp = thread / 32 % kWarps, column = thread / 32 / kWarps;
  const int most = rows / kHalves, first = warp % 4 * 16 + lane / 4;
  const int octet = column * S::kMmaColumns / 8;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first + 8 * half;
    if (row >= most) break;
    float* to = staged + (warp / 4 * most + row) * S::kSumsPitch + 8 * octet + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < S::kSums / 4; ++j) {
      *reinterpret_cast<float2*>(to + 8 * j) =
          make_float2(sum[4 * j + 2 * half], sum[4 * j + 2 * half + 1]);
    }
  }
  device::fence_async_proxy();
  meet_consumers();
  const int own = rows / parts * S::kSumsPitch;
  if (thread < parts) {
    copy_to_cluster(sums + part * own, staged + thread * own, own * 4, received, thread);
  }
}

/// Four neighbours of what all thread blocks have sent of an own row, added.
template <class S>
__device__ __forceinline__ float4 sum_received(const float* sums, int parts, int own_rows,
                                               int own_row, int column) {
  const int plane = own_rows * S::kSumsPitch;
  const float* from = sums + own_row * S::kSumsPitch + column;
  float4 v[kMostProductParts];
#pragma unroll
  for (int part = 0; part < kMostProductParts; ++part) {
    if (part < parts) v[part] = *reinterpret_cast<const float4*>(from + part * plane);
  }
  return device::sum_of_parts(v, parts);
}

/// Eight of these, times `factor` and rounded; zeros from the `live`-th column on, where zeros of
/// the copies may have met Inf or NaN.
template <class T, class S>
__device__ __forceinline__ uint4 round_received(const float* sums, int parts, int own_rows,
                                                int own_row, int column, float factor, int live) {
  std::uint32_t words[4];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float4 all = sum_received<S>(sums, parts, own_rows, own_row, column + 4 * half);
    const auto scaled = [&](float one, int k) {
      return column + 4 * half + k < live ? factor * one : 0.0f;
    };
    words[2 * half] = device::pack2<T>(scaled(all.x, 0), scaled(all.y, 1));
    words[2 * half + 1] = device::pack2<T>(scaled(all.z, 2), scaled(all.w, 3));
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}
/// 16 bytes as they are sent to other thread blocks.
__device__ __forceinline__ float4 as_floats(const uint4& words) {
  return make_float4(__uint_as_float(words.x), __uint_as_float(words.y), __uint_as_float(words.z),
                     __uint_as_float(words.w));
}

/// Adds 64 columns of a base, a swizzled block of shared memory, to a thread's sums of `row` and of
/// eight rows further. `base`: where its first pair lies in a piece of row 0.
template <class T>
__device__ __forceinline__ void add_base(const unsigned char* base, int row, float (&sum)[32]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float2 v = device::unpack2<T>(
        *reinterpret_cast<const std::uint32_t*>(base + device::swizzled(row + i % 2 * 8, i / 2)));
    sum[2 * i] = v.x + sum[2 * i];
    sum[2 * i + 1] = v.y + sum[2 * i + 1];
  }
}

}  // namespace mortar::lora::cuda::product
