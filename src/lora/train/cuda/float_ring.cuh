// SPDX-License-Identifier: Apache-2.0
// Warps that copy their own pieces of a dense float32 matrix to shared memory, several steps ahead,
// and split them into bfloat16 parts in registers: no warp waits for another's copies. The small
// operand of all warps lies beside them as planes of parts, a chunk of elements at a time.
#pragma once

#include <cstdint>

#include "device/async_copy.cuh"
#include "device/mma.cuh"
#include "device/parts.cuh"
#include "lora/train/cuda/stream.cuh"
#include "lora/train/cuda/tiles.cuh"

namespace mortar::lora::train::cuda {

inline constexpr int kFloatPlanes = 3;  ///< of bfloat16 parts
inline constexpr int kFloatStep = 32;   ///< elements of the sums in a step, two MMA steps
inline constexpr int kSlotBytes = kFloatStep * 16 * 4;  ///< of a warp and step: 16 rows or columns

/// Shared memory of a thread block with so many ranks: as many stages as let two of eight warps
/// share an SM, with kFloatChunk elements of the small operand. Its next chunk arrives as it is, in
/// float32, while this one is multiplied by; so a chunk has as many steps as a warp has copies in
/// flight.
template <int kRanks>
struct FloatRing {
  static constexpr int kStages = kRanks == 16 ? 5 : 4;
  static constexpr int kWarpBytes = kStages * kSlotBytes;
  static constexpr int plane_bytes(int chunk) { return chunk * kRanks * 2; }
  static constexpr int raw_at(int chunk) { return kFloatPlanes * plane_bytes(chunk); }
  static constexpr int ring_at(int chunk) { return raw_at(chunk) + chunk * kRanks * 4; }
  static constexpr int smem(int chunk, int warps) { return ring_at(chunk) + warps * kWarpBytes; }
  static_assert(kStages <= kFloatChunk / kFloatStep + 1,
                "the copies of a chunk have landed when it begins");
};

/// Thread blocks of an SM. Before sm_90 it has memory for one.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
inline constexpr int kFloatBlocks = 1;
#else
inline constexpr int kFloatBlocks = 2;
#endif

/// Whether a matrix is copied so: rows of float32 in aligned 16-byte words, of which none is
/// dropped.
inline bool fits_float_ring(const Fetch& wide, std::int64_t columns, bool masked) {
  return wide.m.dtype == DType::kFloat32 && wide.vectors && !masked &&
         columns <= std::int64_t{1} << 30;
}

/// What of a 16-byte word is there, in bytes, if `left` elements are.
__device__ __forceinline__ int word_bytes(int left) { return 4 * max(0, min(left, 4)); }

__device__ __forceinline__ float read_float(std::uint32_t at) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(at) : "memory");
  return v;
}
__device__ __forceinline__ float2 read_float2(std::uint32_t at) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(at) : "memory");
  return v;
}

__device__ __forceinline__ float4 read_float4(std::uint32_t at) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(at)
               : "memory");
  return v;
}

/// The parts of the four pairs of an MMA's operand a.
__device__ __forceinline__ void split_fragment(const float2 (&pairs)[4],
                                               std::uint32_t (&a)[kFloatPlanes][4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    std::uint32_t part[kFloatPlanes];
    device::split2(pairs[i].x, pairs[i].y, part);
#pragma unroll
    for (int plane = 0; plane < kFloatPlanes; ++plane) a[plane][i] = part[plane];
  }
}

/// Puts eight neighbours of the small operand into the planes of parts.
__device__ __forceinline__ void split_eight(const float4& low, const float4& high, char* to,
                                            int plane_bytes) {
  std::uint32_t word[4][kFloatPlanes];
  device::split2(low.x, low.y, word[0]);
  device::split2(low.z, low.w, word[1]);
  device::split2(high.x, high.y, word[2]);
  device::split2(high.z, high.w, word[3]);
#pragma unroll
  for (int plane = 0; plane < kFloatPlanes; ++plane) {
    *reinterpret_cast<uint4*>(to + plane * plane_bytes) =
        make_uint4(word[0][plane], word[1][plane], word[2][plane], word[3][plane]);
  }
}

/// Fragments of b, two tiles of 8 ranks from `rank` on, from rows of kRanks ranks that are the
/// MMA's k.
template <int kRanks>
__device__ __forceinline__ void load_rank_rows(std::uint32_t (&b)[4], std::uint32_t plane, int row,
                                               int rank) {
  const int lane = static_cast<int>(threadIdx.x) % 32, matrix = lane / 8;
  device::ldmatrix_x4_transposed(
      b, plane + rank_piece_at<kRanks>(row + lane % 8 + matrix % 2 * 8, rank / 8 + matrix / 2));
}

/// Adds an MMA step to the sums of 16 ranks; load(b, plane): their fragments.
template <class Load>
__device__ __forceinline__ void add_step(Sums<__nv_bfloat16, true>& first,
                                         Sums<__nv_bfloat16, true>& second,
                                         const std::uint32_t (&a)[kFloatPlanes][4], int parts,
                                         const Load& load) {
  std::uint32_t low[kFloatPlanes][2], high[kFloatPlanes][2];
#pragma unroll
  for (int plane = 0; plane < kFloatPlanes; ++plane) {
    std::uint32_t b[4];
    load(b, plane);
    low[plane][0] = b[0];
    low[plane][1] = b[1];
    high[plane][0] = b[2];
    high[plane][1] = b[3];
  }
  first.add(a, low, kFloatPlanes, parts);
  second.add(a, high, kFloatPlanes, parts);
}

}  // namespace mortar::lora::train::cuda
