// SPDX-License-Identifier: Apache-2.0
// y (+)= h B^T for few tokens per adapter, on tensor cores, B and y of one 16-bit type.
//
// y[t, n] (+)= sum_r h[s, t, r] B_{a(t), s}[n, r]        N hidden out, r rank
// bytes  = 2 sum_a sum_s r N_s (B of adapters in use) + 4 M sum_s N_s (y read and written) + h
// FLOP   = 2 M N r: never the limit
// 32 tokens of 32 adapters, qkv, r16: 7.1 MB -> 1.7 us; r64: 25.9 MB -> 6.1 us
// limit  : DRAM (B), and for few tokens the chain of dependent loads
//
// A CTA takes a run of columns of one slice and one tile of 16 tokens. B streams through a ring of
// cp.async stages, filled before the predecessor has ended; h is made once per CTA, from the
// split-K partials of shrink or from finished rows; y of the next block is in registers. The
// permutation of columns is that of the prefill kernel.
#include <algorithm>
#include <type_traits>

#include "device/convert.cuh"
#include "device/launch.cuh"
#include "device/mma.cuh"
#include "device/pdl.cuh"
#include "device/split_k.cuh"
#include "device/vector.cuh"
#include "lora/cuda/backend.cuh"
#include "lora/cuda/expand_tile.cuh"

namespace mortar::lora::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kTokens = 16;  ///< of a tile

template <class T_, bool kVectorY_, int kLogPieces_, bool kBy8_ = false, bool kDense_ = false>
struct Traits {
  using T = T_;
  using Ranks = RankTile<kLogPieces_>;
  static constexpr bool kVectorY = kVectorY_;  ///< y moves as whole, aligned 16-byte packs
  static constexpr bool kBy8 = kBy8_;          ///< rows of B start at multiples of 8 bytes
  /// Groups of 32 columns of a warp, 128 apart: blocks of low ranks are wider.
  static constexpr int kGroups = kLogPieces_ == 1 ? 2 : 1;
  /// CTAs of an SM, whose registers they share. Four run long rows of CTAs faster, and single ones
  /// slower.
  static constexpr int kPerSm = kDense_ ? kDenseExpandPerSm : 3;
  /// Blocks of B in the ring. Of the largest ranks fewer, and two where the device has no room for
  /// three (ExpandParams::stages).
  static constexpr bool kLargest = kLogPieces_ == 6;
  static constexpr int kStages = kLargest ? 3 : 5;
};

/// A thread's share of copying columns of B of up to 16 ranks that start at multiples of 8 bytes.
/// What lies past the rank is zeroed once, and no copy writes there: rank 4 takes a quarter of the
/// instructions.
template <class T>
struct NarrowCopy {
  using Ranks = RankTile<1>;
  const T* src;  ///< this thread's piece of its first row
  std::int64_t stride;
  int pieces, row0, bytes;
  int place;  ///< of that piece in a stage

  __device__ __forceinline__ NarrowCopy(const T* b, std::int64_t b_stride, int rank)
      : stride(b_stride), pieces(rank > 8 ? 2 : 1) {
    const int piece = static_cast<int>(threadIdx.x) % pieces;
    row0 = static_cast<int>(threadIdx.x) / pieces;
    bytes = piece_bytes(rank - piece * 8);
    src = b + row0 * stride + piece * 8;
    place = Ranks::place(permuted(row0), piece);
  }
  /// Zeros in all rows of the ring where no copy will write.
  __device__ __forceinline__ void clear(T* ring, int rows, int rank) const {
    const int last = pieces - 1;
    const bool half = rank - 8 * last <= 4;
    if (pieces == 2 && !half) return;
    for (int row = static_cast<int>(threadIdx.x); row < rows; row += kThreads) {
      if (half) *reinterpret_cast<uint2*>(ring + Ranks::place(row, last) + 4) = uint2{};
      if (pieces == 1) *reinterpret_cast<uint4*>(ring + Ranks::place(row, 1)) = uint4{};
    }
  }
  /// Rows [first, first + cols).
  __device__ __forceinline__ void block(T* b_tile, std::int64_t first, int cols) const {
    const T* at = src + first * stride;
    std::uint32_t dst = device::smem_address(b_tile + place);
    const int step = kThreads / pieces, lower = min(bytes, 8);
    const bool upper = bytes > 8;
#pragma unroll 2
    for (int c = row0; c < cols; c += step) {
      device::cp_async_8(dst, at, lower);
      if (upper) device::cp_async_8(dst + 8, at + 4, bytes - 8);
      at += step * stride;
      dst += step * Ranks::kPitch * 2;
    }
  }
};

/// h from the split-K partials of shrink, rounded: two lanes make four ranks of a token.
template <class Tr>
struct HSum {
  using T = typename Tr::T;
  using Ranks = typename Tr::Ranks;
  static constexpr int kLogQuads = Ranks::kLogPieces + 1;
  const ExpandParams& p;
  const Tile& tile;
  const int* tokens;
  int first_row, slice, rank;
  device::SplitKSum<2> partials;

  __device__ __forceinline__ HSum(const ExpandParams& params, const Tile& t, const int* own_tokens,
                                  int own_slice, const SliceWeights& w)
      : p(params),
        tile(t),
        tokens(own_tokens),
        first_row(p.h.by_position ? first_position(p.groups, p.tiles) : 0),
        slice(own_slice),
        rank(w.rank),
        partials(p.h.slab_stride) {
    seek(threadIdx.x / 2);
  }
  __device__ __forceinline__ static int place(int i) { return i >> kLogQuads; }
  __device__ __forceinline__ static int column(int i) { return (i & ((1 << kLogQuads) - 1)) * 4; }
  /// Finds the partials of piece i.
  __device__ __forceinline__ void seek(int i) {
    partials.num = 0;
    if (place(i) >= tile.count || column(i) >= rank) return;
    const int row = h_row(p.h, tile, first_row, place(i), tokens[place(i)]);
    if (row < 0) return;
    partials.seek(static_cast<const float*>(p.h.data) + slice * p.h.slice_stride +
                      row * p.h.row_stride + column(i),
                  p.h.num_slabs, static_cast<int>(first_leaves(p.h.num_slabs)));
  }
  /// After partials.load(). Called by whole warps.
  __device__ __forceinline__ void store(T* h_tile) {
    for (int base = 0; place(base) < tile.count; base += kThreads / 2) {
      const int i = base + static_cast<int>(threadIdx.x) / 2;
      if (base > 0) {
        seek(i);
        partials.load();
      }
      const float4 v = partials.sum();
      const int r = column(i);
      if (threadIdx.x % 2 != 0 || place(i) >= tile.count || r >= round_up(rank, 16)) continue;
      // What lies past the rank was never written.
      const uint2 words =
          make_uint2(device::pack2<T>(r < rank ? v.x : 0.0f, r + 1 < rank ? v.y : 0.0f),
                     device::pack2<T>(r + 2 < rank ? v.z : 0.0f, r + 3 < rank ? v.w : 0.0f));
      *reinterpret_cast<uint2*>(h_tile + Ranks::place(place(i), r / 8) + r % 8) = words;
    }
  }
};

/// A lane's part of y: 8 columns of each [group][row 8 apart].
template <class Tr>
struct YPart {
  using T = typename Tr::T;
  uint4 v[Tr::kGroups][2];

  /// at: its columns of the first group, of both rows; there: which rows exist; left: columns of
  /// the CTA from its own on.
  __device__ __forceinline__ void load(T* const (&at)[2], const bool (&there)[2], int left) {
#pragma unroll
    for (int g = 0; g < Tr::kGroups; ++g) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const T* from = at[half] + g * kThreads;
        const int count = there[half] ? left - g * kThreads : 0;
        if constexpr (Tr::kVectorY) {
          device::load_if(count > 0, v[g][half], from);
        } else {
          v[g][half] = device::load_some<T, 8>(from, count).piece(0);
        }
      }
    }
  }
};

template <class Tr>
__global__ void __launch_bounds__(kThreads, Tr::kPerSm)
    expand_decode_kernel(const __grid_constant__ ExpandParams p) {
  using T = typename Tr::T;
  extern __shared__ __align__(128) unsigned char smem[];
  __shared__ int tokens[kTokens];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  device::pdl_begin(p.early);

  // Coordinates
  // Tiles of 64 tokens come in quarters.
  const int quarters = p.tiles.tile_tokens / kTokens;
  const int tile_row = static_cast<int>(blockIdx.z * gridDim.y + blockIdx.y);
  const int index = p.tiles.first + tile_row / quarters;
  const int first_place = tile_row % quarters * kTokens;
  const int early = early_token(p.groups, p.tiles, index, first_place + lane % kTokens);
  Tile tile;
  bool live = find_cta_tile(p.groups, p.tiles, p.weights.num_adapters, index, &tile);
  tile.start += first_place;
  tile.count = min(tile.count - first_place, kTokens);
  live = live && tile.count > 0;
  const int token = tile_token(p.groups, p.tiles, tile, lane % kTokens, early);
  const Block block = find_block(p, static_cast<int>(blockIdx.x));
  const SliceWeights w = weights_of(p, tile, block, live);
  if (w.rank == 0) return device::pdl_wait();

  // Load: B does not depend on the predecessor.
  using Ranks = typename Tr::Ranks;
  T* h_tile = reinterpret_cast<T*>(smem);
  T* ring = h_tile + kTokens * Ranks::kPitch;
  const int stage_elts = p.block_cols * Ranks::kPitch;
  const int blocks = ceil_div(block.cols, p.block_cols);
  using Copy = std::conditional_t<Tr::kBy8, NarrowCopy<T>, BCopy<T, Ranks, kThreads>>;
  const Copy copy(static_cast<const T*>(w.b) + block.first * w.b_row_stride, w.b_row_stride,
                  w.rank);
  const int stages = Tr::kLargest ? p.stages : Tr::kStages;
  if constexpr (Tr::kBy8) copy.clear(ring, min(stages, blocks) * p.block_cols, w.rank);
  int copied = 0, copy_stage = 0;
  const auto copy_next = [&] {
    const int first = copied * p.block_cols;
    if (copied < blocks) {
      copy.block(ring + copy_stage * stage_elts, first, min(p.block_cols, block.cols - first));
    }
    ++copied;
    copy_stage = copy_stage + 1 == stages ? 0 : copy_stage + 1;
    device::cp_async_commit();
  };
#pragma unroll 1
  for (int i = 0; i < stages - 1; ++i) copy_next();
  if (threadIdx.x < kTokens) tokens[threadIdx.x] = token;
  // All addresses before the wait: after it a warp has its scheduler to itself, and every
  // instruction is a delay.
  const int lane_col = warp * 32 + lane % 4 * 8;
  T* y_at[2];  // this lane's columns of the first block
  bool there[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int t = __shfl_sync(0xffffffffu, token, lane / 4 + 8 * half);
    there[half] = t >= 0;
    y_at[half] = static_cast<T*>(p.y.data) + t * p.y.row_stride + block.y_col + lane_col;
  }
  __syncthreads();
  HSum<Tr> sum(p, tile, tokens, block.slice, w);
  const std::uint32_t h_at = a_fragment_row<Ranks>(h_tile, 0);
  const std::uint32_t b_at = b_fragment_row<Ranks>(ring, warp * 32);
  const int num_steps = ceil_div(w.rank, 16);
  if (p.early && p.add_inputs) {
    // The first 512 columns of y to L2, whatever the predecessor may still write there.
    const int t = __shfl_sync(0xffffffffu, token, lane % kTokens);
    const int col = (warp * 2 + lane / kTokens) * 64;
    if (t >= 0 && col < block.cols) {
      device::prefetch_l2(static_cast<T*>(p.y.data) + t * p.y.row_stride + block.y_col + col);
    }
  }
  device::pdl_wait();
  if (p.h.raw) sum.partials.load();
  YPart<Tr> even = {}, odd = {};
  if (p.add_inputs) even.load(y_at, there, block.cols - lane_col);
  if (p.h.raw) {
    sum.store(h_tile);
  } else {
    copy_h<T, Ranks, kThreads>(p.h, tile, tokens, sum.first_row, block.slice * p.h.slice_stride,
                               w.rank, h_tile);
    device::cp_async_commit();
    device::cp_async_wait<0>();
  }

  // Compute and store
  const bool both = tile.count > 8;  // rows of the MMA's second half
  int stage = 0;
  const auto step = [&](int i, const YPart<Tr>& y, YPart<Tr>& next) {
    stages == 2 ? device::cp_async_wait<0>() : device::cp_async_wait<Tr::kStages - 2>();
    __syncthreads();
    copy_next();
    const int left = block.cols - i * p.block_cols - lane_col;  // columns from this lane's on
    T* const at[2] = {y_at[0], y_at[1]};
    y_at[0] += p.block_cols;
    y_at[1] += p.block_cols;
    if (p.add_inputs && i + 1 < blocks) next.load(y_at, there, left - p.block_cols);
#pragma unroll
    for (int g = 0; g < Tr::kGroups; ++g) {
      const int c = g * kThreads;
      if (c + warp * 32 >= p.block_cols) break;
      float acc[1][4][4] = {};
      multiply<T, Ranks, 1>(acc, h_at, b_at + (stage * stage_elts + c * Ranks::kPitch) * 2,
                            num_steps);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (half == 1 && !both) break;
        if (!there[half] || left <= c) continue;
        const uint4 out = add_products<T>(y.v[g][half], acc[0], half, w.scale, p.add_inputs);
        if constexpr (Tr::kVectorY) {
          *reinterpret_cast<uint4*>(at[half] + c) = out;
        } else {
          device::Vector<T, 8> some;
          some.set_piece(0, out);
          device::store_some(at[half] + c, some, left - c);
        }
      }
    }
    stage = stage + 1 == stages ? 0 : stage + 1;
  };
#pragma unroll 1
  for (int i = 0; i < blocks; i += 2) {
    step(i, even, odd);
    if (i + 1 < blocks) step(i + 1, odd, even);
  }
}

// ---- host ---------------------------------------------------------------------------------------

template <class T, bool kVectorY, int kLogPieces, bool kBy8 = false, bool kDense = false>
void launch_ranks(ExpandParams p, Stream stream) {
  if constexpr (kVectorY && kLogPieces <= 2 && !kDense) {
    if (p.per_sm == kDenseExpandPerSm) {
      return launch_ranks<T, kVectorY, kLogPieces, kBy8, true>(p, stream);
    }
  }
  using Tr = Traits<T, kVectorY, kLogPieces, kBy8, kDense>;
  check(p.block_cols % 32 == 0 && p.block_cols <= Tr::kGroups * kThreads && p.stages >= 2 &&
            p.stages <= Tr::kStages,
        "lora_expand: no decode kernel for ", p.stages, " stages of ", p.block_cols, " columns");
  device::Launch l;
  const TileRowGrid rows = tile_row_grid(p.tiles.num, p.tiles.tile_tokens);
  l.grid = dim3(static_cast<unsigned>(p.block_start[p.weights.num_slices]), rows.y, rows.z);
  l.threads = kThreads;
  const auto smem = [&](int stages) {
    const int blocks = std::min(stages, ceil_div(p.cols, p.block_cols));
    return static_cast<std::size_t>(kTokens + blocks * p.block_cols) * Tr::Ranks::kPitch * 2;
  };
  l.smem = smem(Tr::kLargest ? p.stages : Tr::kStages);
  l.per_sm = p.per_sm;
  l.stream = stream;
  l.pdl = true;
  device::launch<expand_decode_kernel<Tr>>("lora_expand", l, p);
}

template <class T, bool kVectorY>
void launch_typed(ExpandParams p, Stream stream) {
  // Unaligned y has two kernels for all ranks: that saves more megabytes than anyone's
  // microseconds.
  if constexpr (kVectorY) {
    if (p.h.width <= 16 && p.b_by_8) return launch_ranks<T, kVectorY, 1, true>(p, stream);
    if (p.h.width <= 16) return launch_ranks<T, kVectorY, 1>(p, stream);
    if (p.h.width <= 32) return launch_ranks<T, kVectorY, 2>(p, stream);
    if (p.h.width <= 64) return launch_ranks<T, kVectorY, 3>(p, stream);
  }
  if (p.h.width <= 128) return launch_ranks<T, kVectorY, 4>(p, stream);
  launch_ranks<T, kVectorY, 6>(p, stream);
}

}  // namespace

void expand_decode(const ExpandParams& p, Stream stream) {
  check(p.groups.plan != nullptr || !p.h.by_position,
        "lora_apply: groups must be a plan, got segments");
  device::visit_dtype<Float16DTypes>(p.y.dtype, "lora_expand", [&](auto tag) {
    using T = typename decltype(tag)::type;
    p.vector_y ? launch_typed<T, true>(p, stream) : launch_typed<T, false>(p, stream);
  });
}

}  // namespace mortar::lora::cuda
