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

#include "device/cluster.cuh"
#include "device/convert.cuh"
#include "device/launch.cuh"
#include "device/mma.cuh"
#include "device/pdl.cuh"
#include "device/vector.cuh"
#include "lora/cuda/backend.cuh"
#include "lora/cuda/expand_tile.cuh"
#include "lora/cuda/h_sum.cuh"

namespace mortar::lora::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kTokens = 16;  ///< of a tile
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool kCuts = false;  // kernels in fewer registers would spill
#else
/// Whether columns are cut by the tiles that there are, where the plan says so.
constexpr bool kCuts = true;
#endif

template <class T_, bool kVectorY_, int kLogPieces_, bool kDense_ = false, bool kShared_ = false>
struct Traits {
  using T = T_;
  using Ranks = RankTile<kLogPieces_>;
  static constexpr bool kVectorY = kVectorY_;  ///< y moves as whole, aligned 16-byte packs
  static constexpr bool kShared = kShared_;    ///< the CTAs of a cluster make h together
  /// Groups of 32 columns of a warp, 128 apart: blocks of low ranks are wider.
  static constexpr int kGroups = kLogPieces_ == 1 ? 2 : 1;
  /// CTAs of an SM, whose registers they share. Four run long rows of CTAs faster, and single ones
  /// slower.
  static constexpr int kPerSm = kDense_ ? kDenseExpandPerSm : 3;
  /// Blocks of B in the ring. Of the largest ranks fewer, and two where the device has no room for
  /// three (ExpandParams::stages); of ranks 33 to 128 fewer where four CTAs are to fit an SM.
  static constexpr bool kLargest = kLogPieces_ == 6;
  static constexpr int kStages = kLargest                     ? 3
                                 : kDense_ && kLogPieces_ > 2 ? kDenseExpandStages
                                                              : kDecodeExpandStages;
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
  CtaWork work(p);
  if (kCuts && !Tr::kShared && p.round > 0) work.cut(p);
  const Tile& tile = work.tile;
  const Block& block = work.block;
  const int token = work.token;
  const SliceWeights w = weights_of(p, tile, block, work.live);
  if (w.rank == 0) return device::pdl_wait();

  // Load: B does not depend on the predecessor.
  using Ranks = typename Tr::Ranks;
  T* h_tile = reinterpret_cast<T*>(smem);
  T* ring = h_tile + kTokens * Ranks::kPitch;
  const int stage_elts = p.block_cols * Ranks::kPitch;
  const int blocks = ceil_div(block.cols, p.block_cols);
  const BCopy<T, Ranks, kThreads> copy(static_cast<const T*>(w.b) + block.first * w.b_row_stride,
                                       w.b_row_stride, w.rank);
  const int stages = Tr::kLargest ? p.stages : Tr::kStages;
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
  HSum<T, Ranks, kThreads, Tr::kShared> sum(p, tile, tokens, block.slice, w, h_tile);
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
  if constexpr (Tr::kShared) device::cluster_arrive_relaxed();
  device::pdl_wait();
  if (p.h.raw) sum.partials.load();
  YPart<Tr> even = {}, odd = {};
  if (p.add_inputs) even.load(y_at, there, block.cols - lane_col);
  if constexpr (Tr::kShared) device::cluster_wait();  // all CTAs run, so their memory is there
  if (p.h.raw) {
    sum.store(h_tile);
    if constexpr (Tr::kShared) {
      device::cluster_arrive();
      device::cluster_wait();
    }
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

template <class T, bool kVectorY, int kLogPieces, bool kDense = false, bool kShared = false>
void launch_ranks(ExpandParams p, Stream stream) {
  if constexpr (kVectorY && kLogPieces >= 3 && !kDense && !kShared) {
    if (p.cluster > 1) return launch_ranks<T, kVectorY, kLogPieces, kDense, true>(p, stream);
  }
  if constexpr (kVectorY && kLogPieces <= 4 && !kDense && !kShared) {
    if (p.per_sm == kDenseExpandPerSm) {
      return launch_ranks<T, kVectorY, kLogPieces, true>(p, stream);
    }
  }
  using Tr = Traits<T, kVectorY, kLogPieces, kDense, kShared>;
  check(p.block_cols % 32 == 0 && p.block_cols <= Tr::kGroups * kThreads && p.stages >= 2 &&
            p.stages <= Tr::kStages && (kShared ? p.h.raw : p.cluster == 1),
        "lora_expand: no decode kernel for ", p.stages, " stages of ", p.block_cols,
        " columns in clusters of ", p.cluster);
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
  l.cluster_x = static_cast<unsigned>(p.cluster);
  l.stream = stream;
  l.pdl = true;
  device::launch<expand_decode_kernel<Tr>>("lora_expand", l, p);
}

template <class T, bool kVectorY>
void launch_typed(ExpandParams p, Stream stream) {
  // Unaligned y has two kernels for all ranks: that saves more megabytes than anyone's
  // microseconds.
  if constexpr (kVectorY) {
    if (p.h.width <= 16) return launch_ranks<T, kVectorY, 1>(p, stream);
    if (p.h.width <= 32) return launch_ranks<T, kVectorY, 2>(p, stream);
    if (p.h.width <= 64) return launch_ranks<T, kVectorY, 3>(p, stream);
  }
  if (p.h.width <= 128) return launch_ranks<T, kVectorY, 4>(p, stream);
  launch_ranks<T, kVectorY, 6>(p, stream);
}

}  // namespace

void expand_decode(const ExpandParams& p, Stream stream) {
  device::visit_dtype<Float16DTypes>(p.y.dtype, "lora_expand", [&](auto tag) {
    using T = typename decltype(tag)::type;
    p.vector_y ? launch_typed<T, true>(p, stream) : launch_typed<T, false>(p, stream);
  });
}

}  // namespace mortar::lora::cuda
