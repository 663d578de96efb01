// SPDX-License-Identifier: Apache-2.0
// The operands of shrink_parts.cu: how x and rank rows reach shared memory and registers, how they
// are split into bfloat16 values, and a warp's product of them.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "device/any_float.cuh"
#include "device/async_copy.cuh"
#include "device/convert.cuh"
#include "device/parts.cuh"
#include "device/vector.cuh"
#include "lora/cuda/params.cuh"
#include "lora/cuda/part_planes.cuh"
#include "lora/cuda/rank_rows.cuh"

namespace mortar::lora::cuda::parts_shrink {

constexpr int kThreads = kPartsThreads, kWarps = kThreads / 32;
constexpr int kStages = 2;               ///< three would fit one CTA less per SM
constexpr int kStageRows = 16;           ///< rank rows of a stage: two MMA columns of 8
constexpr int kMaxRows = kPartsMaxRows;  ///< rank rows of a CTA
constexpr int kPairK = 32;               ///< elements of two MMA steps
static_assert(leaf_size(1) % (kWarps * kPairK) == 0 && leaf_size(1 << 20) % (kWarps * kPairK) == 0);

template <class TX_, class TW_, int kFrags_, int kKeptSteps_>
struct Traits {
  using TX = TX_;
  using TW = TW_;
  static constexpr int kPartsX = device::kParts<TX>, kPartsW = device::kParts<TW>;  ///< at most
  static constexpr int kFrags = kFrags_;  ///< MMA tiles of 16 tokens
  /// MMA steps of a warp's quarter of a leaf whose x stays in registers; 0: x lies in planes.
  static constexpr int kKeptSteps = kKeptSteps_;
  static constexpr bool kKeepX = kKeptSteps > 0;
  static_assert(!kKeepX || !(device::kIsAny<TX> || device::kIsAny<TW>));
  static_assert(!kKeepX || kFrags == 1, "registers hold x of 16 tokens at most");
  /// CTAs that an SM must hold, which caps the registers.
  static constexpr int kMinCtas = kFrags == 4 || kKeptSteps * kPartsX > 16  ? 2
                                  : kFrags == 2 || kKeptSteps* kPartsX > 12 ? 3
                                                                            : 4;
  static constexpr int kTokens = 16 * kFrags;
  static constexpr int kSumPairs = kFrags * kThreads;  ///< pairs of sums of a stage

  /// Bytes of a row of one plane of x: eight of them start in different banks, for ldmatrix.
  MORTAR_HOST_DEVICE static constexpr int x_pitch(int leaf) { return leaf * 2 + 16; }
  /// Of a row of A: the steps of two rows (float32) or four lie in different banks.
  MORTAR_HOST_DEVICE static constexpr int a_pitch(int leaf, DType weights) {
    return (leaf + 16) * device::float_bytes<TW>(weights);
  }
  MORTAR_HOST_DEVICE static constexpr int x_bytes(int leaf, DType x) {
    return kKeepX ? 0 : device::num_parts<TX>(x) * kTokens * x_pitch(leaf);
  }
  static constexpr int kSumBytes = kWarps * kSumPairs * 8;
  /// Both halves' totals of all rank rows, where a CTA walks over leaves.
  MORTAR_HOST_DEVICE static constexpr int total_bytes(int row_stages) {
    return 2 * row_stages * kSumPairs * 8;
  }
};

/// A leaf of x from element `k` on, into planes. Rows without a token stay as they are: each row of
/// the product depends on its own row of x alone.
template <class Tr, class TX>
__device__ __forceinline__ void load_x(const ShrinkParams& p, const int* tokens, std::int64_t k,
                                       int leaf, unsigned char* planes) {
  constexpr int kBatch = Tr::kFrags == 4 ? 16 : 8;  // pieces whose loads are in flight together
  const int pieces = leaf / 8, pitch = Tr::x_pitch(leaf), plane_bytes = Tr::kTokens * pitch;
  const int piece = static_cast<int>(threadIdx.x) % pieces;
  const int row0 = static_cast<int>(threadIdx.x) / pieces, row_step = kThreads / pieces;
  const std::int64_t at = k + piece * 8;
  const int left =
      static_cast<int>(max(std::int64_t{0}, min(p.weights.hidden - at, std::int64_t{8})));
  const TX* x = static_cast<const TX*>(p.x.data) + (left > 0 ? at : 0);
  if (!p.vector) {
#pragma unroll 1
    for (int i = row0; i < Tr::kTokens; i += row_step) {
      if (tokens[i] < 0) continue;
      XPiece<TX> v;
      v.load_elements(x + tokens[i] * p.x.row_stride, left);
      v.store(planes + i * pitch, piece, plane_bytes);
    }
    return;
  }
#pragma unroll 1
  for (int base = row0; base < Tr::kTokens; base += kBatch * row_step) {
    XPiece<TX> v[kBatch];
    int token[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int i = base + j * row_step;
      token[j] = i < Tr::kTokens ? tokens[i] : -1;
      v[j].load(token[j] >= 0 && left > 0, x + token[j] * p.x.row_stride);
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (token[j] >= 0) v[j].store(planes + (base + j * row_step) * pitch, piece, plane_bytes);
    }
  }
}

/// A lane's x of a warp's quarter of a leaf, as the products take it: elements 4q to 4q + 3 of
/// every step of 16 (parts.cuh), of two tokens.
template <class Tr>
struct KeptX {
  using TX = typename Tr::TX;
  static constexpr int kSteps = Tr::kKeepX ? Tr::kKeptSteps : 1;
  std::uint32_t x[kSteps][Tr::kPartsX][4];

  /// tokens: those of the lane's rows; k: its first element.
  __device__ __forceinline__ void load(const ShrinkParams& p, const int (&tokens)[2],
                                       std::int64_t k) {
    using Raw = device::Word<4 * sizeof(TX)>;
    Raw raw[kSteps][2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const TX* row = static_cast<const TX*>(p.x.data) + tokens[half] * p.x.row_stride + k;
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const std::int64_t left = tokens[half] < 0 ? 0 : p.weights.hidden - k - i * 16;
        raw[i][half] = {};
        if (p.vector) {
          device::load_if(left > 0, raw[i][half], row + i * 16);
        } else {
          TX element[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            element[j] = j < left ? row[i * 16 + j] : device::from_float<TX>(0.0f);
          }
          memcpy(&raw[i][half], element, sizeof(element));
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        std::uint32_t words[sizeof(Raw) / 4], part[Tr::kPartsX][2];
        memcpy(words, &raw[i][half], sizeof(Raw));
        device::split4<TX>(words, part);
#pragma unroll
        for (int j = 0; j < Tr::kPartsX; ++j) {
          x[i][j][half] = part[j][0];
          x[i][j][half + 2] = part[j][1];
        }
      }
    }
  }
};

/// A thread's copies of rank rows into the ring, stage by stage and leaf by leaf.
template <class Tr>
struct RowCopy {
  using TW = typename Tr::TW;
  const ShrinkParams& p;
  const RankRows<kMaxRows>& rows;
  unsigned char* ring;
  int leaf, size, piece, row0, row_step, pitch;  ///< size: bytes of an element
  std::int64_t k;  ///< this thread's first element of the leaf to be copied next
  int left, row_stages, row_stage = 0, stage = 0;

  __device__ __forceinline__ RowCopy(const ShrinkParams& params, const RankRows<kMaxRows>& own_rows,
                                     unsigned char* at, int leaf_elts, std::int64_t k_begin,
                                     int num_items, int stages)
      : p(params),
        rows(own_rows),
        ring(at),
        leaf(leaf_elts),
        size(device::float_bytes<TW>(params.weights.dtype)),
        left(num_items),
        row_stages(stages) {
    const int pieces = leaf * size / 16;
    piece = static_cast<int>(threadIdx.x) % pieces;
    row0 = static_cast<int>(threadIdx.x) / pieces;
    row_step = kThreads / pieces;
    pitch = Tr::a_pitch(leaf, p.weights.dtype);
    k = k_begin + piece * (16 / size);
  }
  /// The next stage, if there is one.
  __device__ __forceinline__ void next() {
    if (left > 0) {
      --left;
      unsigned char* at = ring + stage * kStageRows * pitch + piece * 16;
      const int first = row_stage * kStageRows;
      const int last = min(kStageRows, rows.count - first);
      const int elts = static_cast<int>(
          max(std::int64_t{0}, min(p.weights.hidden - k, std::int64_t{16 / size})));
      const std::int64_t from = elts > 0 ? k * size : 0;  // bytes
      if (p.vector) {
        const std::uint32_t dst = device::smem_address(at);
#pragma unroll 8
        for (int i = row0; i < last; i += row_step) {
          const char* a = static_cast<const char*>(rows.weights[first + i]);
          if (a != nullptr) device::cp_async_16(dst + i * pitch, a + from, elts > 0 ? 16 : 0);
        }
      } else {
#pragma unroll 1
        for (int i = row0; i < last; i += row_step) {
          const char* a = static_cast<const char*>(rows.weights[first + i]);
          if (a == nullptr) continue;
          *reinterpret_cast<uint4*>(at + i * pitch) = device::load_piece(a + from, size, elts);
        }
      }
      stage = stage + 1 == kStages ? 0 : stage + 1;
      if (++row_stage == row_stages) {
        row_stage = 0;
        k += leaf;
      }
    }
    device::cp_async_commit();
  }
};

/// A lane's elements of a step of 16 of rank rows n * 8 + lane / 4, in parts.
template <class TW>
__device__ __forceinline__ void load_rows(std::uint32_t (&w)[2][device::kParts<TW>][2],
                                          const unsigned char* a_lane, int a_pitch) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    device::split4<TW>(device::load_shared<TW, 4>(a_lane + n * 8 * a_pitch).word, w[n]);
  }
}

/// One warp's quarter of a leaf: its tokens by 16 rank rows. a_lane: the lane's first elements of
/// its first row.
template <class Tr>
__device__ __forceinline__ void multiply(device::SumsBy<typename Tr::TW> (&sums)[1][2],
                                         const KeptX<Tr>& kept, const unsigned char* a_lane,
                                         int a_pitch) {
  using TW = typename Tr::TW;
#pragma unroll
  for (int i = 0; i < KeptX<Tr>::kSteps; ++i) {
    std::uint32_t w[2][Tr::kPartsW][2];
    load_rows<TW>(w, a_lane + i * 16 * sizeof(TW), a_pitch);
#pragma unroll
    for (int n = 0; n < 2; ++n) sums[0][n].add(kept.x[i], w[n]);
  }
}

/// The same with x in planes, of the types that x and A have. x_lane: the lane's row of ldmatrix.
template <class TX, class TW, class Tr>
__device__ __forceinline__ void multiply(device::SumsBy<TW> (&sums)[Tr::kFrags][2],
                                         std::uint32_t x_lane, const unsigned char* a_lane,
                                         int a_pitch, int leaf) {
  const int x_pitch = Tr::x_pitch(leaf), plane_bytes = Tr::kTokens * x_pitch;
#pragma unroll 1
  for (int pair = 0; pair < leaf / (kWarps * kPairK); ++pair) {
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      std::uint32_t w[2][device::kParts<TW>][2];
      load_rows<TW>(w, a_lane, a_pitch);
#pragma unroll
      for (int m = 0; m < Tr::kFrags; ++m) {
        std::uint32_t x[device::kParts<TX>][4];
#pragma unroll
        for (int i = 0; i < device::kParts<TX>; ++i) {
          device::ldmatrix_x4(x[i], x_lane + i * plane_bytes + m * 16 * x_pitch);
        }
#pragma unroll
        for (int n = 0; n < 2; ++n) sums[m][n].add(x, w[n]);
      }
      x_lane += 32;
      a_lane += 16 * sizeof(TW);
    }
  }
}

}  // namespace mortar::lora::cuda::parts_shrink
