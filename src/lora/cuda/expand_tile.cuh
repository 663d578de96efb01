// SPDX-License-Identifier: Apache-2.0
// What expand kernels share: column blocks, and those for one 16-bit type operands in shared memory
// and the product of a warp.
//
// h [tokens][ranks] and B [columns][ranks] lie in shared memory in rows of a power of two of
// 16-byte pieces, swizzled so that ldmatrix has no bank conflicts; what lies past an adapter's rank
// is zero up to a whole MMA step of 16. In blocks eight rows lie together, their first 64 ranks one
// after another, then the next 64: each a block as wgmma reads it.
#pragma once

#include "device/convert.cuh"
#include "device/mma.cuh"
#include "device/swizzle.cuh"
#include "device/vector.cuh"
#include "lora/cuda/params.cuh"

namespace mortar::lora::cuda {

/// Rows of ranks in shared memory, up to a largest rank, swizzled (device/swizzle.cuh); in blocks
/// for wgmma.
template <int kLogPieces_, bool kInBlocks_ = false>
struct RankTile {
  static constexpr int kLogPieces = kLogPieces_;  ///< of the 16-byte pieces of a row
  static constexpr int kPitch = 8 << kLogPieces;  ///< elements: the largest rank
  static constexpr bool kInBlocks = kInBlocks_;
  static constexpr int kBlockRanks = 64, kBlockElts = 8 * kBlockRanks;
  static constexpr int kBlockSteps = kBlockRanks / 16;  ///< MMA steps of a block

#if defined(__CUDACC__)
  /// Element at which a row begins, but for the swizzle.
  __device__ __forceinline__ static int row_start(int row) {
    return kInBlocks ? (row & ~7) * kPitch + (row & 7) * kBlockRanks : row * kPitch;
  }
  /// Element of a piece of 8 ranks of a row.
  __device__ __forceinline__ static int place(int row, int piece) {
    const int block = kInBlocks ? piece / (kBlockRanks / 8) : 0;
    const int own = piece - block * (kBlockRanks / 8);
    return row_start(row) + block * kBlockElts + (own ^ device::swizzle<kLogPieces>(row)) * 8;
  }
  /// Bytes from the start of a row to a lane's piece of MMA step `step`: `own` is its piece of the
  /// first step, whose bits and the step's do not carry.
  __device__ __forceinline__ static std::uint32_t step_bytes(std::uint32_t own, int step) {
    if (!kInBlocks) return own ^ (32 * step);
    return step / kBlockSteps * kBlockElts * 2 + (own ^ (32 * (step % kBlockSteps)));
  }
  /// The row of h of a place in a tile of tokens. In blocks, of four warps that multiply 64 rows,
  /// warp w has places 8 w to 8 w + 7 and those 32 beyond: of a half-full tile all have as much to
  /// store. (Of places whose bits do not overlap, the row of their sum is the sum of their rows.)
  __device__ __forceinline__ static constexpr int row_of(int place) {
    return kInBlocks ? (place & 24) * 2 + (place & 32) / 4 + (place & 7) : place;
  }
  /// The piece and the first row that a thread copies; every kThreads >> kLogPieces-th row is its.
  __device__ __forceinline__ static int own_piece() {
    return static_cast<int>(threadIdx.x) & ((1 << kLogPieces) - 1);
  }
  __device__ __forceinline__ static int own_row() {
    return static_cast<int>(threadIdx.x) >> kLogPieces;
  }
#endif
};

/// Where real column c lies in shared memory: column 8a + 2j + b of a group of 32 goes to row
/// 8j + 2a + b, so that MMA fragment j's eight rows are neighbours.
__device__ __forceinline__ int permuted(int c) {
  return (c & ~31) | ((c & 6) << 2) | ((c >> 2) & 6) | (c & 1);
}

/// A run of columns of one slice.
struct Block {
  int slice = 0;
  std::int64_t first = 0;  ///< column within the slice
  std::int64_t y_col = 0;  ///< column of y
  int cols = 0;
};

/// Block `index` of all slices, each cut into blocks of `cols` columns.
__device__ __forceinline__ Block find_block(const ExpandParams& p, int index, int cols) {
  Block b;
  b.y_col = p.offset;
  int blocks = ceil_div(static_cast<int>(p.weights.widths[0]), cols);
  while (b.slice + 1 < p.weights.num_slices && index >= blocks) {
    index -= blocks;
    b.y_col += p.weights.widths[b.slice++];
    blocks = ceil_div(static_cast<int>(p.weights.widths[b.slice]), cols);
  }
  b.first = std::int64_t{index} * cols;
  b.y_col += b.first;
  b.cols =
      static_cast<int>(min(static_cast<std::int64_t>(cols), p.weights.widths[b.slice] - b.first));
  return b;
}

__device__ __forceinline__ Block find_block(const ExpandParams& p, int index) {
  Block b;
  b.y_col = p.offset;
  while (b.slice + 1 < p.weights.num_slices && index >= p.block_start[b.slice + 1]) {
    b.y_col += p.weights.widths[b.slice++];
  }
  b.first = static_cast<std::int64_t>(index - p.block_start[b.slice]) * p.cols;
  b.y_col += b.first;
  b.cols =
      static_cast<int>(min(static_cast<std::int64_t>(p.cols), p.weights.widths[b.slice] - b.first));
  return b;
}

/// A cut of all slices into blocks.
struct Cut {
  int cols = 0, blocks = 0;
  int wider = 0;  ///< columns from which on there are fewer blocks, if there are any

  __device__ __forceinline__ void set(const ExpandParams& p, int own_cols) {
    cols = own_cols;
    blocks = 0;
    wider = 1 << 30;
#pragma unroll 1
    for (int s = 0; s < p.weights.num_slices; ++s) {
      const auto width = static_cast<int>(p.weights.widths[s]);
      const int own = ceil_div(width, cols);
      blocks += own;
      if (own > 1) wider = min(wider, ceil_div(width, own - 1));
    }
  }
};

/// How columns are cut, now that there are `tiles` tiles and not as many as there might have been:
/// such that the CTAs of all tiles fill a round, if they leave much of it empty or need a little
/// more than one; as the host has them otherwise. Uniform over the grid.
__device__ __forceinline__ Cut cut_for_round(const ExpandParams& p, int tiles) {
  constexpr int kLeast = 512, kStep = 128;  // shorter CTAs only start more often
  const int blocks = static_cast<int>(gridDim.x), most = min(p.round, blocks * p.tiles.num);
  Cut cut{p.cols, blocks};
  const int ctas = blocks * tiles, wanted = tiles > 0 ? most / tiles : 0;
  const bool more = 10 * ctas <= 7 * p.round && wanted > blocks && p.cols > kLeast;
  const bool fewer = ctas > p.round && 2 * ctas <= 3 * p.round &&
                     p.cols >= p.stages * p.block_cols;  // the ring has all of its stages
  if (wanted < p.weights.num_slices || !(more || fewer)) return cut;
  int all = 0;
  for (int s = 0; s < p.weights.num_slices; ++s) all += static_cast<int>(p.weights.widths[s]);
  int cols = max(kLeast, round_up(ceil_div(all, wanted), kStep));
  for (cut.set(p, cols); cut.blocks * tiles > most; cut.set(p, cols)) {
    cols = round_up(cut.wider, kStep);
  }
  // Slices of unlike widths would leave most of the round to a few CTAs.
  return 2 * cols > 3 * p.cols ? Cut{p.cols, blocks} : cut;
}

/// What a CTA takes: 16 tokens, one tile or a quarter of one of 64, and a block of columns.
struct CtaWork {
  Tile tile;
  bool live = false;
  int token = -1;  ///< in place lane % 16
  Block block;

  __device__ __forceinline__ CtaWork(const ExpandParams& p)
      : block(find_block(p, static_cast<int>(blockIdx.x))) {
    constexpr int kTokens = 16;
    const int place = static_cast<int>(threadIdx.x) % kTokens;
    const int quarters = p.tiles.tile_tokens / kTokens;
    const int row = static_cast<int>(blockIdx.z * gridDim.y + blockIdx.y);
    const int index = p.tiles.first + row / quarters, first = row % quarters * kTokens;
    const int early = early_token(p.groups, p.tiles, index, first + place);
    live = find_cta_tile(p.groups, p.tiles, p.weights.num_adapters, index, &tile);
    tile.start += first;
    tile.count = min(tile.count - first, kTokens);
    live = live && tile.count > 0;
    token = tile_token(p.groups, p.tiles, tile, place, early);
  }

  /// Where the device cuts columns: another tile and other columns, unless those are as they are to
  /// be. Of tiles of 16 tokens of a plan.
  __device__ __forceinline__ void cut(const ExpandParams& p) {
    const int tiles = min(__ldcg(p.groups.plan + kPlanNumTiles16), p.tiles.num);
    const Cut own = cut_for_round(p, tiles);
    if (own.cols == p.cols) return;
    const int row = static_cast<int>(blockIdx.z * gridDim.y + blockIdx.y);
    const int cta = row * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x);
    const int index = cta / own.blocks;
    live = index < tiles;
    if (!live) return;
    block = find_block(p, cta - index * own.blocks, own.cols);
    token = early_token(p.groups, p.tiles, index, static_cast<int>(threadIdx.x) % 16);
    live = find_tile(p.groups, p.tiles, p.weights.num_adapters, index, &tile);
  }
};

/// B of a tile's adapter and a block's slice, of rank 0 where there is nothing to do; its scale is
/// what multiplies the finished sums (lora_shrink has put the scales into a caller's h).
__device__ __forceinline__ SliceWeights weights_of(const ExpandParams& p, const Tile& tile,
                                                   const Block& block, bool live) {
  SliceWeights w;
  if (live) w = p.weights.get(tile.adapter, block.slice);
  w.rank = min(w.rank, p.h.width);
  w.scale = p.h.own ? p.scale * w.scale : 1.0f;
  return w;
}

/// Bytes of a 16-byte piece of which `left` elements exist.
__device__ __forceinline__ int piece_bytes(int left) { return 2 * max(0, min(left, 8)); }

/// A thread's share of copying columns of B: always the same piece of every kStep-th row. kBy8: B's
/// rows start at multiples of 8 bytes.
template <class T, class Ranks, int kThreads, bool kBy8 = false>
struct BCopy {
  static constexpr int kStep = kThreads >> Ranks::kLogPieces;
  const T* src;         ///< this thread's piece of its first row
  std::int64_t stride;  ///< elements between rows
  int row0, left;
  bool vector;  ///< rows start at multiples of 16 bytes

  __device__ __forceinline__ BCopy(const T* b, std::int64_t b_stride, int rank)
      : stride(b_stride), row0(Ranks::own_row()) {
    const int column = Ranks::own_piece() * 8;
    left = rank - column;
    vector = device::is_aligned<T, 8>(b) && stride % 8 == 0;
    src = b + row0 * stride + (left > 0 ? column : 0);
    if (column >= round_up(rank, 16)) row0 = 1 << 20;  // no MMA step reads this piece
  }

  /// Rows [first, first + cols). Asynchronous if `vector` or kBy8.
  __device__ __forceinline__ void block(T* b_tile, std::int64_t first, int cols) const {
    const T* at = src + first * stride;
    if constexpr (kBy8) {
      const int bytes = piece_bytes(left), lower = min(bytes, 8);
      for (int c = row0; c < cols; c += kStep, at += kStep * stride) {
        const std::uint32_t dst =
            device::smem_address(b_tile + Ranks::place(permuted(c), Ranks::own_piece()));
        device::cp_async_8(dst, at, lower);
        device::cp_async_8(dst + 8, at + (bytes > 8 ? 4 : 0), bytes - lower);
      }
      return;
    }
    if (!vector) {
      for (int c = row0; c < cols; c += kStep, at += kStep * stride) {
        *reinterpret_cast<uint4*>(b_tile + Ranks::place(permuted(c), Ranks::own_piece())) =
            device::load_some<T, 8>(at, left).piece(0);
      }
      return;
    }
    // Columns 32 apart lie 32 rows apart.
    constexpr int kInner = kStep < 32 ? 32 / kStep : 1, kOuter = kStep < 32 ? 32 : kStep;
    const int bytes = piece_bytes(left);
    const std::uint32_t tile = device::smem_address(b_tile);
    std::uint32_t dst[kInner];
#pragma unroll
    for (int k = 0; k < kInner; ++k) {
      dst[k] = tile + 2 * Ranks::place(permuted(Ranks::own_row() + k * kStep), Ranks::own_piece());
    }
    const std::int64_t step = kStep * stride;
    std::uint32_t shift = 0;
    for (int c = row0; c < cols; c += kOuter, shift += kOuter * Ranks::kPitch * 2) {
#pragma unroll
      for (int k = 0; k < kInner; ++k, at += step) {
        if (c + k * kStep < cols) device::cp_async_16(dst[k] + shift, at, bytes);
      }
    }
  }
};

/// Rows of h of a tile's tokens, from element `slice_at` on, rounded to T. Rows without a token
/// stay as they are: each row of the product depends on its own row of h alone. Asynchronous where
/// h holds aligned rows of T.
template <class T, class Ranks, int kThreads>
__device__ __forceinline__ void copy_h(const HView& h, const Tile& tile, const int* tokens,
                                       int first_row, std::int64_t slice_at, int rank, T* h_tile) {
  const int piece = Ranks::own_piece(), left = rank - piece * 8;
  if (piece * 8 >= round_up(rank, 16)) return;
  for (int i = Ranks::own_row(); i < tile.count; i += kThreads >> Ranks::kLogPieces) {
    T* dst = h_tile + Ranks::place(Ranks::row_of(i), piece);
    const int row = h_row(h, tile, first_row, i, h.by_position ? 0 : tokens[i]);
    if (row < 0) continue;
    const std::int64_t at = slice_at + row * h.row_stride + (left > 0 ? piece * 8 : 0);
    if (h.vector) {
      device::cp_async_16(device::smem_address(dst), static_cast<const T*>(h.data) + at,
                          piece_bytes(left));
      continue;
    }
    std::uint32_t words[4];
    if (h.dtype == DType::kFloat32) {
      const auto lower = device::load_some<float, 4>(static_cast<const float*>(h.data) + at, left);
      const auto upper = device::load_some<float, 4>(
          static_cast<const float*>(h.data) + at + (left > 4 ? 4 : 0), left - 4);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        words[k] = device::pack2<T>(lower.get(2 * k), lower.get(2 * k + 1));
        words[2 + k] = device::pack2<T>(upper.get(2 * k), upper.get(2 * k + 1));
      }
    } else {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float low = 2 * k < left ? device::load_as_float(h.data, h.dtype, at + 2 * k) : 0.0f;
        const float high =
            2 * k + 1 < left ? device::load_as_float(h.data, h.dtype, at + 2 * k + 1) : 0.0f;
        words[k] = device::pack2<T>(low, high);
      }
    }
    *reinterpret_cast<uint4*>(dst) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

/// Where a lane's ldmatrix rows begin, for 16 rows of h (the A operand of the MMA) and for two
/// fragments of 8 columns of B.
template <class Ranks, class T>
__device__ __forceinline__ std::uint32_t a_fragment_row(const T* h_tile, int row) {
  return device::smem_address(h_tile + Ranks::row_start(row + threadIdx.x % 16));
}
template <class Ranks, class T>
__device__ __forceinline__ std::uint32_t b_fragment_row(const T* b_tile, int row) {
  const int lane = threadIdx.x % 32;
  return device::smem_address(b_tile + Ranks::row_start(row + lane / 16 * 8 + lane % 8));
}

/// acc += h B^T for 16 tokens and kGroups * 32 columns.
template <class T, class Ranks, int kGroups>
__device__ __forceinline__ void multiply(float (&acc)[kGroups][4][4], std::uint32_t h_row,
                                         std::uint32_t b_row, int num_steps) {
  constexpr int kPairBytes = 32 * Ranks::kPitch, kMaxSteps = Ranks::kPitch / 16;
  const int lane = threadIdx.x % 32;
  const std::uint32_t swizzle = device::swizzle<Ranks::kLogPieces>(lane % 8) * 16;
  const std::uint32_t h_own = (lane / 16 * 16) ^ swizzle, b_own = (lane / 8 % 2 * 16) ^ swizzle;
  const auto step = [&](int i) {
    std::uint32_t h[4], b[kGroups][2][4];
    device::ldmatrix_x4(h, h_row + Ranks::step_bytes(h_own, i));
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        device::ldmatrix_x4(b[g][j],
                            b_row + Ranks::step_bytes(b_own, i) + (2 * g + j) * kPairBytes);
      }
    }
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const std::uint32_t* at = &b[g][j / 2][j % 2 * 2];
        device::mma_16816<T>(acc[g][j], h, at[0], at[1]);
      }
    }
  };
  if (kMaxSteps <= 4 && num_steps == kMaxSteps) {  // without a loop
#pragma unroll
    for (int i = 0; i < kMaxSteps; ++i) step(i);
  } else {
#pragma unroll 1
    for (int i = 0; i < num_steps; ++i) step(i);
  }
}

/// Two 16-bit values to which a sum is added where there is no y: x + -0 is x, also for x = -0.
inline constexpr std::uint32_t kMinusZeros = 0x80008000;

/// A lane's products, 8 columns of one group and one row, times `scale` and plus y: in float32,
/// rounded once.
template <class T>
__device__ __forceinline__ uint4 add_products(const uint4& y, const float (&acc)[4][4], int half,
                                              float scale) {
  const auto sum2 = [&](std::uint32_t old, const float(&delta)[4]) {
    const float2 v = device::unpack2<T>(old);
    return device::pack2<T>(fmaf(delta[half * 2], scale, v.x),
                            fmaf(delta[half * 2 + 1], scale, v.y));
  };
  return make_uint4(sum2(y.x, acc[0]), sum2(y.y, acc[1]), sum2(y.z, acc[2]), sum2(y.w, acc[3]));
}

/// The same, where y counts only if `add_inputs`.
template <class T>
__device__ __forceinline__ uint4 add_products(const uint4& y, const float (&acc)[4][4], int half,
                                              float scale, bool add_inputs) {
  const std::uint32_t keep = add_inputs ? 0xffffffffu : 0u, none = kMinusZeros & ~keep;
  const uint4 old = make_uint4((y.x & keep) | none, (y.y & keep) | none, (y.z & keep) | none,
                               (y.w & keep) | none);
  return add_products<T>(old, acc, half, scale);
}

}  // namespace mortar::lora::cuda
