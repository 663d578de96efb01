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

/// log2 of the 16-byte pieces in a row of so many 16-bit ranks: 8, 16, 32, 64 or 128.
template <int kRanks>
inline constexpr int kLogPieces = kRanks == 8    ? 0
                                  : kRanks == 16 ? 1
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
      const std::int64_t at = std::int64_t{adapter} * table.num_slices + s;
      auto* to = reinterpret_cast<uint4*>(memory) + s * kWords + word;
      *to = table.entries == nullptr
                ? reinterpret_cast<const uint4*>(table.own + at)[word]
                : __ldcg(reinterpret_cast<const uint4*>(table.entries + at) + word);
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

/// The draw of an octet, which is an element's index divided by 8.
__device__ __forceinline__ OctetDraw draw_octet(const Draws& draws, std::uint64_t octet) {
  const PhiloxWords all = philox_quad<kMaskRounds>(draws.seed, draws.offset, octet / 2);
  const bool odd = octet % 2 != 0;
  return {{odd ? all.word[2] : all.word[0], odd ? all.word[3] : all.word[1]}};
}

/// The draws of a lane's octets in two rows, of whose blocks a neighbouring lane has the other
/// halves: `odd` lanes have the upper ones. Even lanes give the block of the first row, odd ones
/// that of the second, and each passes on what is not its own. By whole warps.
__device__ __forceinline__ void draw_shared(const Draws& draws, std::uint64_t block, bool odd,
                                            OctetDraw (&own)[2]) {
  const PhiloxWords all = philox_quad<kMaskRounds>(draws.seed, draws.offset, block);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const std::uint32_t low = all.word[i], high = all.word[2 + i];
    const std::uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? low : high, 1);
    own[0].word[i] = odd ? got : low;
    own[1].word[i] = odd ? high : got;
  }
}

/// Eight 16-bit masks, zeros for dropped elements. The threshold is below kDropAll.
__device__ __forceinline__ uint4 keep_words(const OctetDraw& draw, std::uint32_t threshold) {
  const std::uint32_t limit = draw.limit(threshold);
  const auto word = [&](int pair) {
    std::uint32_t mask;  // the sign of each half, in all of its bits
    asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(mask) : "r"(draw.kept(pair, limit)));
    return mask;
  };
  return make_uint4(word(0), word(1), word(2), word(3));
}
__device__ __forceinline__ uint4 masked(const uint4& v, const uint4& keep) {
  return make_uint4(v.x & keep.x, v.y & keep.y, v.z & keep.z, v.w & keep.w);
}

}  // namespace mortar::lora::train::cuda
