// SPDX-License-Identifier: Apache-2.0
// What the streaming products (shrink_stream.cu, expand_stream.cu) share: matrices of one 16-bit
// type that pass through shared memory in swizzled rows.
#pragma once

#include <cstdint>

#include "device/async_copy.cuh"
#include "device/convert.cuh"
#include "device/swizzle.cuh"
#include "lora/train/cuda/kernels.cuh"
#include "lora/train/cuda/tiles.cuh"
#include "lora/train/dropout.h"

namespace mortar::lora::train::cuda {

/// log2 of the 16-byte pieces in a row of so many 16-bit ranks: 16, 32, 64 or 128.
template <int kRanks>
inline constexpr int kLogPieces = kRanks == 16   ? 1
                                  : kRanks == 32 ? 2
                                  : kRanks == 64 ? 3
                                                 : 4;

/// Byte offset of a piece in a block whose rows are kRanks 16-bit values.
template <int kRanks>
__device__ __forceinline__ int rank_piece_at(int row, int piece) {
  return row * 2 * kRanks + ((piece ^ device::swizzle<kLogPieces<kRanks>>(row)) << 4);
}

/// The pairs of an adapter, in shared memory.
struct Pairs {
  alignas(16) unsigned char memory[kLoraMaxSlices * sizeof(PairEntry)];

  __device__ __forceinline__ const PairEntry& slice(int s) const {
    return reinterpret_cast<const PairEntry*>(memory)[s];
  }
  /// By all threads of the block; a barrier must follow. Reads past L1: the kernel that wrote the
  /// table may have ended after this one began.
  __device__ __forceinline__ void fill(const PairTable& table, int adapter, int first, int num) {
    constexpr int kWords = sizeof(PairEntry) / 16;
    static_assert(sizeof(PairEntry) % 16 == 0, "entries are copied in vectors of 16 bytes");
    for (int i = threadIdx.x; i < num * kWords; i += static_cast<int>(blockDim.x)) {
      const int s = first + i / kWords, word = i % kWords;
      auto* to = reinterpret_cast<uint4*>(memory) + s * kWords + word;
      *to = table.entries == nullptr
                ? reinterpret_cast<const uint4*>(table.own + s)[word]
                : __ldcg(reinterpret_cast<const uint4*>(
                             table.entries + std::int64_t{adapter} * table.num_slices + s) +
                         word);
    }
  }
  /// Dropout has one threshold for an adapter; it lies with each of its pairs.
  __device__ __forceinline__ std::uint32_t threshold(int first, int num) const {
    std::uint32_t threshold = 0;
    for (int s = first; s < first + num; ++s) {
      if (slice(s).rank > 0) threshold = slice(s).threshold;
    }
    return threshold;
  }
};

/// Seed and offset of dropout, read once.
struct Draws {
  std::uint64_t seed, offset;
  __device__ __forceinline__ void read(const std::int64_t* rng) {
    seed = static_cast<std::uint64_t>(__ldcg(rng));
    offset = static_cast<std::uint64_t>(__ldcg(rng + 1));
  }
};

/// 16-bit words of eight elements with zeros in place of the dropped ones; `group` is their index
/// divided by 8: all eight share one Philox call. The threshold is below kDropAll.
__device__ __forceinline__ uint4 dropped(uint4 v, const Draws& draws, std::uint64_t group,
                                         std::uint32_t threshold) {
  const PhiloxWords random = philox_quad(draws.seed, draws.offset, group);
  const std::uint32_t least = threshold << 16;  // of a draw in the high half
  const auto keep = [&](std::uint32_t word, std::uint32_t two) {
    return word & ((two << 16 >= least ? 0xffffu : 0u) | (two >= least ? 0xffff0000u : 0u));
  };
  return make_uint4(keep(v.x, random.word[0]), keep(v.y, random.word[1]), keep(v.z, random.word[2]),
                    keep(v.w, random.word[3]));
}

}  // namespace mortar::lora::train::cuda
